// The family of policies: names, and what each of them keeps. The rule of `morphkv` itself is in
// retention_test.cc.
#include "morphkv/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "generators.h"
#include "simulated_host.h"

namespace morphkv {
namespace {

using test::HostOptions;
using test::Random;
using test::SimulatedHost;
using test::Stream;

Stream short_stream(int tokens, int heads) {
  Random random(17);
  return test::random_stream({.tokens = tokens, .heads = heads, .dim = 2}, random);
}

// Keep sets [head] after the whole stream, in calls whose sizes `sizes` gives.
template <class Sizes>
std::vector<std::vector<Position>> kept(const CacheConfig& config, const Stream& stream,
                                        const Sizes& sizes) {
  SimulatedHost host(config, stream, {.max_slots = config.budget + stream.tokens});
  host.feed_all(sizes);
  return host.all_positions();
}

int one() { return 1; }

TEST(Policy, IsKnownByItsName) {
  for (const char* name :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random", "full"}) {
    EXPECT_TRUE(is_policy_name(name)) << name;
    EXPECT_EQ(make_policy({.policy = name})->name(), name);
    EXPECT_NE(policy_names_text().find(name), std::string::npos);
  }
  EXPECT_EQ(policy_names_text(),
            "morphkv, h2o, snapkv, tova, keydiff, rkv, streaming, random, full");
  EXPECT_EQ(policy_names_text(&PolicyTraits::guided), "morphkv or rkv");
  EXPECT_EQ(policy_names_text(&PolicyTraits::beside_guides), "rkv");
  EXPECT_EQ(policy_names_text(&PolicyTraits::by_slot), "morphkv, h2o or tova");
  for (const char* name : {"", "Full", "morph", "morphkv ", "h2"}) {
    EXPECT_FALSE(is_policy_name(name)) << name;
  }
}

TEST(Policy, OfAnUnknownNameThrowsTheListOfKnownOnes) {
  try {
    make_policy({.policy = "lru"});
    FAIL() << "made a policy 'lru'";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("'lru'"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(policy_names_text()), std::string::npos);
  }
}

TEST(Policy, IsNotMadeFromIllegalNumbers) {
  for (const char* name :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random", "full"}) {
    EXPECT_THROW(make_policy({.budget = 12, .policy = name}), std::invalid_argument) << name;
    EXPECT_THROW(make_policy({.pool = 4, .policy = name}), std::invalid_argument) << name;
    const auto policy = make_policy({.policy = name});
    EXPECT_THROW(LayerRetention({.window = 0, .policy = name}, *policy, 0, 1, 600),
                 std::invalid_argument);
  }
}

TEST(Policy, SaysWhatItMustBeShown) {
  const PolicyTraits keys = make_policy({.queries = QuerySource::kKeys})->traits();
  EXPECT_TRUE(keys.evicts && keys.needs_keys && keys.evicts_per_token && keys.pools);
  EXPECT_FALSE(keys.needs_queries);
  const PolicyTraits attention = make_policy({.queries = QuerySource::kAttention})->traits();
  EXPECT_TRUE(attention.evicts && attention.needs_keys && attention.needs_queries);
  EXPECT_FALSE(attention.evicts_per_token);
  const PolicyTraits h2o =
      make_policy({.queries = QuerySource::kAttention, .policy = "h2o"})->traits();
  EXPECT_TRUE(h2o.evicts && h2o.needs_keys && h2o.needs_queries && h2o.every_query && h2o.pools);
  EXPECT_FALSE(attention.every_query || h2o.evicts_per_token);
  EXPECT_TRUE(make_policy({.policy = "h2o"})->traits().evicts_per_token);
  for (const char* name : {"tova", "rkv"}) {
    const PolicyTraits with_keys = make_policy({.policy = name})->traits();
    EXPECT_TRUE(with_keys.needs_keys && with_keys.evicts_per_token) << name;
    EXPECT_FALSE(with_keys.needs_queries || with_keys.pools) << name;
    EXPECT_EQ(with_keys.guided, std::string(name) == "rkv");
    const PolicyTraits with_queries =
        make_policy({.queries = QuerySource::kAttention, .policy = name})->traits();
    EXPECT_TRUE(with_queries.needs_keys && with_queries.needs_queries) << name;
    EXPECT_FALSE(with_queries.every_query || with_queries.evicts_per_token) << name;
  }
  const PolicyTraits snapkv =
      make_policy({.queries = QuerySource::kAttention, .policy = "snapkv"})->traits();
  EXPECT_TRUE(snapkv.needs_keys && snapkv.needs_queries);
  EXPECT_FALSE(snapkv.every_query || snapkv.evicts_per_token || snapkv.pools);
  EXPECT_FALSE(make_policy({.policy = "snapkv"})->traits().evicts_per_token);
  for (const auto source : {QuerySource::kKeys, QuerySource::kAttention}) {
    const PolicyTraits keydiff = make_policy({.queries = source, .policy = "keydiff"})->traits();
    EXPECT_TRUE(keydiff.needs_keys);
    EXPECT_FALSE(keydiff.needs_queries || keydiff.evicts_per_token || keydiff.pools);
  }
  for (const char* name : {"streaming", "random"}) {
    const PolicyTraits traits = make_policy({.policy = name})->traits();
    EXPECT_TRUE(traits.evicts) << name;
    EXPECT_FALSE(traits.needs_keys || traits.needs_queries || traits.pools) << name;
  }
  EXPECT_FALSE(make_policy({.policy = "full"})->traits().evicts);
}

TEST(StreamingPolicy, KeepsTheSinksAndTheMostRecentRows) {
  const Stream stream = short_stream(100, 2);
  const CacheConfig config{
      .budget = 10, .n_sink = 3, .window = 2, .pool = 7, .policy = "streaming"};
  const std::vector<Position> expected = {0, 1, 2, 93, 94, 95, 96, 97, 98, 99};
  for (const auto& head : kept(config, stream, one)) EXPECT_EQ(head, expected);
  for (const auto& head : kept(config, stream, [] { return 100; })) EXPECT_EQ(head, expected);
  Random random(2);
  for (const auto& head : kept(config, stream, [&] { return random.between(1, 30); })) {
    EXPECT_EQ(head, expected);
  }
}

TEST(FullPolicy, NeverEvicts) {
  const Stream stream = short_stream(60, 2);
  const CacheConfig config{.budget = 10, .n_sink = 3, .window = 2, .policy = "full"};
  SimulatedHost host(config, stream, {.max_slots = 70});
  for (int fed = 1; fed <= 60; ++fed) {
    host.feed(1);
    EXPECT_EQ(host.layer().keep(0).size(), fed);
    EXPECT_EQ(host.layer().keep(1).size(), fed);
    EXPECT_TRUE(host.layer().victims(0).empty());
  }
  host.expect_rows_in_place();
}

CacheConfig random_policy(std::uint64_t seed) {
  return {.budget = 26, .n_sink = 2, .window = 4, .policy = "random", .seed = seed};
}

TEST(RandomPolicy, RepeatsItselfWithTheSameSeedAndDiffersWithAnother) {
  const Stream stream = short_stream(200, 3);
  EXPECT_EQ(kept(random_policy(5), stream, one), kept(random_policy(5), stream, one));
  EXPECT_NE(kept(random_policy(5), stream, one), kept(random_policy(6), stream, one));
  EXPECT_NE(kept(random_policy(0), stream, one), kept(random_policy(1), stream, one));
}

TEST(RandomPolicy, TellsHeadsAndLayersApart) {
  const Stream stream = short_stream(200, 3);
  const auto heads = kept(random_policy(5), stream, one);
  EXPECT_NE(heads[0], heads[1]);
  EXPECT_NE(heads[1], heads[2]);
  SimulatedHost other(random_policy(5), stream, {.max_slots = 30, .layer = 1});
  other.feed_all(one);
  EXPECT_NE(other.all_positions(), heads);
}

TEST(RandomPolicy, KeepsTheSameRowsForEverySplitOfTheStream) {
  const Stream stream = short_stream(200, 3);
  const auto expected = kept(random_policy(8), stream, one);
  EXPECT_EQ(kept(random_policy(8), stream, [] { return 200; }), expected);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Random random(seed);
    EXPECT_EQ(kept(random_policy(8), stream, [&] { return random.between(1, 40); }), expected);
  }
}

TEST(RandomPolicy, NeverEvictsAProtectedRow) {
  const Stream stream = short_stream(120, 2);
  CacheConfig config = random_policy(9);
  config.recent = 10;
  SimulatedHost host(config, stream, {.max_slots = 60});
  Random random(4);
  host.feed_all([&] {
    EXPECT_EQ(host.broken_invariants(), std::vector<std::string>{});
    return random.between(1, 30);
  });
  EXPECT_EQ(host.broken_invariants(), std::vector<std::string>{});
}

// Of n = 194 unprotected rows seen, each of N heads keeps m = 20 drawn without replacement. With p
// = m / n the sum over positions of (count - N p)^2 / (N p (1 - p)) * (n - 1) / n then has the
// chi-square distribution with n - 1 degrees of freedom (for large N): mean 193, standard deviation
// sqrt(2 * 193). Five deviations on either side: less would mean that the heads do not draw
// independently.
TEST(RandomPolicy, KeepsAUniformSampleOfTheRowsSeen) {
  constexpr int kTokens = 200;
  constexpr int kHeads = 64;
  constexpr int kSeeds = 30;
  const Stream stream = short_stream(kTokens, kHeads);
  std::vector<int> counts(kTokens, 0);
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    for (const auto& head : kept(random_policy(seed), stream, [] { return kTokens; })) {
      for (const Position position : head) ++counts[static_cast<std::size_t>(position)];
    }
  }
  constexpr double kRows = kTokens - 6.0;
  constexpr double kSamples = kHeads * kSeeds;
  constexpr double kShare = 20.0 / kRows;
  double chi_square = 0.0;
  for (std::size_t position = 0; position < counts.size(); ++position) {
    if (position < 2 || position >= kTokens - 4) {
      EXPECT_EQ(counts[position], kSamples) << "protected position " << position;
      continue;
    }
    const double off = counts[position] - kSamples * kShare;
    chi_square += off * off / (kSamples * kShare * (1.0 - kShare)) * (kRows - 1.0) / kRows;
  }
  const double deviation = std::sqrt(2.0 * (kRows - 1.0));
  EXPECT_LT(chi_square, kRows - 1.0 + 5.0 * deviation);
  EXPECT_GT(chi_square, kRows - 1.0 - 5.0 * deviation);
}

// A policy that somebody else wrote: keeps the rows with even positions.
class EvenHead final : public HeadPolicy {
 public:
  void append(const KeepSet&, const NewRows&, int, int, Workspace&) override {}
  void score(const KeepSet& keep, std::span<float> scores, Workspace&) override {
    for (std::size_t rank = 0; rank < scores.size(); ++rank) {
      scores[rank] = keep.positions()[rank] % 2 == 0 ? 1.0f : 0.0f;
    }
  }
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<EvenHead>(*this); }
};
class EvenPolicy final : public Policy {
 public:
  std::string_view name() const override { return "even"; }
  PolicyTraits traits() const override { return {}; }
  std::unique_ptr<HeadPolicy> make_head(HeadId) const override {
    return std::make_unique<EvenHead>();
  }
};

TEST(Policy, OfTheCallersOwnIsUsedLikeTheBuiltInOnes) {
  const CacheConfig config{.budget = 8, .n_sink = 2, .window = 1};
  LayerRetention layer(config, EvenPolicy(), 0, 1, 16);
  Workspace workspace(16, 1, 1);
  for (int t = 0; t < 12; ++t) {
    const std::vector<int> slots = {t};
    layer.append({.slots = slots, .first_position = t, .keys = {}, .queries = {}}, workspace);
  }
  const auto positions = layer.keep(0).positions();
  EXPECT_EQ(std::vector<Position>(positions.begin(), positions.end()),
            (std::vector<Position>{0, 1, 2, 4, 6, 8, 10, 11}));
}

// Writes down what a head is told, and the position of every row.
class RecordingHead final : public HeadPolicy {
 public:
  explicit RecordingHead(std::vector<std::string>* events)
      : events_(events), position_(columns_.add(1, 0.0f)) {}
  void append(const KeepSet& keep, const NewRows&, int first, int count, Workspace&) override {
    for (int rank = keep.size() - count; rank < keep.size(); ++rank) {
      columns_[position_][keep.slots()[rank]] = static_cast<float>(keep.positions()[rank]);
    }
    tell("append " + std::to_string(first) + "+" + std::to_string(count) + " of " +
         std::to_string(keep.size()));
  }
  void score(const KeepSet&, std::span<float> scores, Workspace&) override {
    std::fill(scores.begin(), scores.end(), 1.0f);
  }
  void erased(int slot, const RowsView*, Workspace&) override {
    tell("erased " + std::to_string(slot) + " of position " +
         std::to_string(static_cast<int>(columns_[position_][slot])));
  }
  bool load(const KeepSet& keep, std::span<const float> saved) override {
    tell("load " + std::to_string(saved.size()));
    return HeadPolicy::load(keep, saved);
  }
  std::unique_ptr<HeadPolicy> clone() const override {
    return std::make_unique<RecordingHead>(*this);
  }

 private:
  void tell(const std::string& event) { events_->push_back(event); }
  std::vector<std::string>* events_;
  int position_;  // column
};
class RecordingPolicy final : public Policy {
 public:
  RecordingPolicy(bool per_token, std::vector<std::string>* events)
      : per_token_(per_token), events_(events) {}
  std::string_view name() const override { return "recording"; }
  PolicyTraits traits() const override { return {.evicts_per_token = per_token_}; }
  std::unique_ptr<HeadPolicy> make_head(HeadId) const override {
    return std::make_unique<RecordingHead>(events_);
  }

 private:
  bool per_token_;
  std::vector<std::string>* events_;
};

// What a head is told when five tokens come to a budget of three, one row moves, and all ends. What
// it remembers of the rows held goes where they go.
std::vector<std::string> told(bool per_token) {
  std::vector<std::string> events;
  LayerRetention layer({.budget = 3, .n_sink = 1, .window = 1}, RecordingPolicy(per_token, &events),
                       0, 1, 8);
  Workspace workspace(8, 1, 1);
  const auto expect_remembered = [&] {
    std::vector<float> memory;
    layer.save(0, memory);
    const auto positions = layer.keep(0).positions();
    EXPECT_EQ(memory, std::vector<float>(positions.begin(), positions.end()));
  };
  const int slots[] = {6, 5, 4, 3, 2};
  layer.append({slots, 0, {}, {}}, workspace);
  expect_remembered();
  layer.apply_moves(0, std::vector<RowMove>{{2, 5}});
  expect_remembered();
  layer.transfer(std::vector<RowMove>{{6, 0}}, 6);
  expect_remembered();
  layer.transfer(std::vector<RowMove>{{5, 120}}, 140);
  expect_remembered();
  LayerRetention copy = layer.copy();
  layer.clear();
  expect_remembered();
  std::vector<float> memory;
  copy.save(0, memory);
  EXPECT_EQ(memory, (std::vector<float>{0, 3, 4}));
  EXPECT_FALSE(layer.load(0, std::vector{1, 0}, std::vector<Position>{0, 3}, memory));
  EXPECT_TRUE(layer.load(0, std::vector{1, 0, 7}, std::vector<Position>{0, 3, 4}, memory));
  expect_remembered();
  return events;
}

TEST(Policy, IsToldOfEveryRowThatComesOrLeavesAndItsNumbersGoWithTheRows) {
  const std::vector<std::string> one = {"append 0+1 of 1",
                                        "append 1+1 of 2",
                                        "append 2+1 of 3",
                                        "append 3+1 of 4",
                                        "erased 5 of position 1",
                                        "append 4+1 of 4",
                                        "erased 4 of position 2",
                                        "load 0",
                                        "load 3",
                                        "load 3"};
  EXPECT_EQ(told(true), one);
  const std::vector<std::string> all = {
      "append 0+5 of 5", "erased 5 of position 1", "erased 4 of position 2", "load 0", "load 3",
      "load 3"};
  EXPECT_EQ(told(false), all);
}

// Notes the first number of every key that it is shown leaving.
class ShownHead final : public HeadPolicy {
 public:
  explicit ShownHead(std::vector<std::string>* events) : events_(events) {}
  void append(const KeepSet&, const NewRows&, int, int, Workspace&) override {}
  void score(const KeepSet&, std::span<float> scores, Workspace&) override {
    std::fill(scores.begin(), scores.end(), 1.0f);
  }
  void erased(int slot, const RowsView* keys, Workspace&) override {
    if (keys == nullptr) return events_->push_back("unseen " + std::to_string(slot));
    float first = 0.0f;
    std::memcpy(&first, keys->row(slot), sizeof first);
    events_->push_back("shown " + std::to_string(static_cast<int>(first)));
  }
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<ShownHead>(*this); }

 private:
  std::vector<std::string>* events_;
};
class ShownPolicy final : public Policy {
 public:
  explicit ShownPolicy(std::vector<std::string>* events) : events_(events) {}
  std::string_view name() const override { return "shown"; }
  PolicyTraits traits() const override { return {.needs_keys = true}; }
  std::unique_ptr<HeadPolicy> make_head(HeadId) const override {
    return std::make_unique<ShownHead>(events_);
  }

 private:
  std::vector<std::string>* events_;
};

TEST(Policy, IsShownTheKeysOfRowsThatLeaveInACallThatBringsRows) {
  std::vector<std::string> events;
  LayerRetention layer({.budget = 3, .n_sink = 1, .window = 1}, ShownPolicy(&events), 0, 1, 8);
  Workspace workspace(8, 1, 1);
  const std::vector<float> keys = {10, 11, 12, 13, 14, 15, 16, 17};
  const RowsView views[] = {
      {reinterpret_cast<const std::byte*>(keys.data()), DType::kF32, sizeof(float), 1}};
  const int first[] = {0, 1, 2, 3, 4};
  layer.append({first, 0, views, {}}, workspace);
  const int then[] = {1, 2};
  layer.extend({then, 5, views, {}}, workspace);
  layer.evict(workspace);
  EXPECT_EQ(events, (std::vector<std::string>{"shown 11", "shown 12", "unseen 3", "unseen 4"}));
}

}  // namespace
}  // namespace morphkv

// Guided prefill in the core: extend(), guide() and evict() against the rule written plainly
// (oracle.h), and what a guide may not touch. The cache class is in cache_guide_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "generators.h"
#include "morphkv/retention.h"
#include "oracle.h"
#include "simulated_host.h"

namespace morphkv {
namespace {

using test::HeadOracle;
using test::HostOptions;
using test::Random;
using test::SimulatedHost;
using test::Stream;

using Positions = std::vector<Position>;
using Vectors = std::vector<std::vector<double>>;

CacheConfig random_config(QuerySource queries, Random& random) {
  CacheConfig config{.n_sink = random.between(0, 4),
                     .window = random.pick({1, 2, 4, random.between(1, 12)}),
                     .pool = random.pick({1, 1, 3, 7}),
                     .fusion = random.coin() ? Fusion::kMean : Fusion::kMax,
                     .queries = queries};
  if (random.coin()) config.recent = config.window + random.between(0, 6);
  config.budget =
      config.n_sink + config.protected_tail() + random.pick({1, 2, random.between(3, 30)});
  return config;
}

// ---------------------------------------------------------------- the rule

// A simulated host and an oracle for each head, which follows it.
class FollowedHost {
 public:
  FollowedHost(const CacheConfig& config, const Stream& stream, const HostOptions& options)
      : config_(config),
        stream_(stream),
        options_(options),
        host_(config, stream, options),
        oracles_(static_cast<std::size_t>(stream.heads),
                 HeadOracle(config, options.scale, options.softcap)) {}

  int left() const { return stream_.tokens - host_.offset(); }
  int evictions() const { return evictions_; }
  int near_ties() const { return near_ties_; }

  void extend(int tokens) {
    tell_oracles(tokens);
    host_.extend(tokens);
    for (int h = 0; h < stream_.heads; ++h) {
      ASSERT_EQ(host_.positions(h), oracles_[static_cast<std::size_t>(h)].positions());
    }
  }
  void guide(const Stream& guide) {
    host_.guide(guide);
    for (int h = 0; h < stream_.heads; ++h) {
      Vectors keys;
      for (int t = 0; t < guide.tokens; ++t) {
        const auto key = guide.key(t, h);
        keys.emplace_back(key.begin(), key.end());
      }
      oracles_[static_cast<std::size_t>(h)].guide(keys, questions(guide, h, 0, guide.tokens));
    }
  }
  void guide_by_last(int tokens) {
    host_.guide_by_last(tokens);
    for (int h = 0; h < stream_.heads; ++h) {
      oracles_[static_cast<std::size_t>(h)].guide(
          {}, questions(stream_, h, host_.offset() - tokens, tokens));
    }
  }
  void evict() {
    host_.evict();
    compare();
  }
  void feed_one() {
    tell_oracles(1);
    host_.feed(1);
    compare();
  }

 private:
  void tell_oracles(int tokens) {
    for (int h = 0; h < stream_.heads; ++h) {
      for (int t = host_.offset(); t < host_.offset() + tokens; ++t) {
        oracles_[static_cast<std::size_t>(h)].append(stream_.key(t, h));
        oracles_[static_cast<std::size_t>(h)].ask(queries(stream_, h, t));
      }
    }
  }

  static Vectors queries(const Stream& of, int head, int token) {
    Vectors group;
    for (int g = 0; g < of.group; ++g) {
      const auto query = of.query(token, head, g);
      group.emplace_back(query.begin(), query.end());
    }
    return group;
  }

  // What the tokens [first, first + count) ask: with keys all, else those that are shown.
  std::vector<Vectors> questions(const Stream& of, int head, int first, int count) const {
    const bool keys_ask = config_.queries == QuerySource::kKeys;
    const int shown = options_.queries_per_call;
    const int asking = keys_ask || shown < 0 ? count : std::min(count, shown);
    std::vector<Vectors> all;
    for (int t = first + count - asking; t < first + count; ++t) {
      const auto key = of.key(t, head);
      all.push_back(keys_ask ? Vectors{{key.begin(), key.end()}} : queries(of, head, t));
    }
    return all;
  }

  void compare() {
    host_.expect_rows_in_place();
    for (int h = 0; h < stream_.heads; ++h) {
      HeadOracle& oracle = oracles_[static_cast<std::size_t>(h)];
      const Positions kept = host_.positions(h);
      Positions left;
      std::set_difference(oracle.positions().begin(), oracle.positions().end(), kept.begin(),
                          kept.end(), std::back_inserter(left));
      const Positions rule = oracle.victims();
      evictions_ += static_cast<int>(rule.size());
      if (left != rule) {
        ASSERT_TRUE(oracle.is_near_tie_with(left))
            << "offset " << host_.offset() << ", head " << h << ": "
            << ::testing::PrintToString(left) << " left, the rule says "
            << ::testing::PrintToString(rule);
        ++near_ties_;
      }
      oracle.evict(left);
      ASSERT_EQ(oracle.positions(), kept);
    }
  }

  CacheConfig config_;
  const Stream& stream_;
  HostOptions options_;
  SimulatedHost host_;
  std::vector<HeadOracle> oracles_;
  int evictions_ = 0;
  int near_ties_ = 0;
};

void follow_the_rule(QuerySource source, std::uint64_t seed) {
  Random random(seed);
  constexpr int kRuns = 200;
  int evictions = 0;
  int near_ties = 0;
  for (int run = 0; run < kRuns; ++run) {
    const CacheConfig config = random_config(source, random);
    test::StreamShape shape{.tokens = config.budget + random.between(1, 80),
                            .heads = random.between(1, 3),
                            .group = source == QuerySource::kKeys ? 0 : random.between(1, 5),
                            .dim = random.pick({64, random.between(2, 130)}),
                            .dtype = random.pick({DType::kF16, DType::kBF16, DType::kF32})};
    const Stream stream = test::random_stream(shape, random);
    const int longest = random.pick({1, 5, 20, stream.tokens});
    const int longest_guide = random.pick({1, 4, 40});
    const HostOptions options{
        .max_slots = config.budget + longest + longest_guide + random.between(0, 5),
        .keys = {.dtype = shape.dtype, .gap = random.between(0, 5), .reversed = random.coin()},
        .freeing = random.pick({test::Freeing::kHighest, test::Freeing::kRandom}),
        .shuffled = random.coin(),
        .queries_per_call = random.pick({-1, -1, config.window}),
        .scale = static_cast<float>(random.pick({1.0, 0.5, 2.0}) / std::sqrt(shape.dim)),
        .softcap = random.pick({0.0f, 1.5f, 20.0f}),
        .seed = static_cast<std::uint64_t>(run)};
    FollowedHost host(config, stream, options);
    while (host.left() > 0 && !testing::Test::HasFatalFailure()) {
      const int tokens = std::min(random.between(1, longest), host.left());
      host.extend(tokens);
      for (int i = random.pick({0, 1, 1, 1, 2, 3}); i > 0; --i) {
        shape.tokens = random.between(1, longest_guide);
        if (random.between(0, 3) == 0) {
          host.guide_by_last(std::min(shape.tokens, tokens));
        } else {
          host.guide(test::random_stream(shape, random));
        }
      }
      host.evict();
      for (int i = random.pick({0, 0, 3}); i > 0 && host.left() > 0; --i) host.feed_one();
    }
    if (testing::Test::HasFatalFailure()) FAIL() << "run " << run;
    evictions += host.evictions();
    near_ties += host.near_ties();
  }
  EXPECT_GT(evictions, 8000);
  EXPECT_LE(near_ties, kRuns / 50);
}

TEST(Guide, WithKeysKeepsWhatTheRuleSaysForRandomShapes) {
  follow_the_rule(QuerySource::kKeys, 301);
}

TEST(Guide, WithAttentionKeepsWhatTheRuleSaysForRandomShapes) {
  follow_the_rule(QuerySource::kAttention, 302);
}

// ---------------------------------------------------------------- one head

// One head whose row of token t lies in slot t. The rows of a guide lie behind those held, where
// the next tokens will.
class FlatHead {
 public:
  FlatHead(const CacheConfig& config, const Stream& stream)
      : stream_(&stream),
        head_(config, *make_policy(config), {}, stream.tokens + kGuideSlots),
        rows_({}, stream.tokens + kGuideSlots, stream.dim),
        workspace_(stream.tokens + kGuideSlots, std::max(1, stream.group), stream.dim) {}

  FlatHead& append(int tokens) { return take(tokens, &HeadRetention::append); }
  FlatHead& extend(int tokens) { return take(tokens, &HeadRetention::extend); }
  FlatHead& guide(const Stream& guide) {
    for (int t = 0; t < guide.tokens; ++t) rows_.set(token_ + t, guide.key(t, 0));
    const auto slots = slots_from(token_, guide.tokens);
    head_.guide(rows_of(guide, 0, slots), workspace_);
    for (const int slot : slots) rows_.fill(slot, test::kPoison);
    return *this;
  }
  FlatHead& guide_by_last(int tokens) {
    const auto slots = slots_from(token_ - tokens, tokens);
    head_.guide(rows_of(*stream_, token_ - tokens, slots), workspace_);
    return *this;
  }
  FlatHead& evict() {
    head_.evict(workspace_);
    return *this;
  }

  FlatHead copy() const { return FlatHead(*this); }
  int left() const { return stream_->tokens - token_; }
  Positions positions() const {
    const auto positions = head_.keep().positions();
    return {positions.begin(), positions.end()};
  }
  std::vector<float> memory() const {
    std::vector<float> memory;
    head_.save(memory);
    return memory;
  }
  const HeadRetention& head() const { return head_; }

 private:
  static constexpr int kGuideSlots = 20;

  FlatHead(const FlatHead& other)
      : stream_(other.stream_),
        head_(other.head_.copy()),
        rows_(other.rows_),
        workspace_(other.workspace_),
        token_(other.token_) {}

  static std::vector<int> slots_from(int first, int n) {
    std::vector<int> slots(static_cast<std::size_t>(n));
    std::iota(slots.begin(), slots.end(), first);
    return slots;
  }
  NewRows rows_of(const Stream& of, int first, const std::vector<int>& slots) const {
    NewRows rows{.slots = slots, .keys = rows_.view(), .queries = {}};
    if (of.group > 0) {
      rows.queries = {of.query_data(first, 0),
                      of.query_token_stride,
                      of.query_group_stride,
                      static_cast<int>(slots.size()),
                      of.group,
                      of.dim};
    }
    return rows;
  }
  FlatHead& take(int tokens, void (HeadRetention::*step)(const NewRows&, Position, Workspace&)) {
    for (int t = token_; t < token_ + tokens; ++t) rows_.set(t, stream_->key(t, 0));
    const auto slots = slots_from(token_, tokens);
    (head_.*step)(rows_of(*stream_, token_, slots), token_, workspace_);
    token_ += tokens;
    return *this;
  }

  const Stream* stream_;
  HeadRetention head_;
  test::StoredRows rows_;
  Workspace workspace_;
  int token_ = 0;
};

CacheConfig small(QuerySource source, int budget = 24) {
  return {.budget = budget, .n_sink = 2, .window = 4, .queries = source};
}

Stream some_stream(int tokens, std::uint64_t seed) {
  Random random(seed);
  return test::random_stream({.tokens = tokens, .group = 2, .dim = 12}, random);
}

constexpr QuerySource kSources[] = {QuerySource::kKeys, QuerySource::kAttention};

TEST(Guide, LeavesNoTraceWhereNothingHasToLeave) {
  const Stream stream = some_stream(90, 311);
  const Stream question = some_stream(9, 312);
  for (const QuerySource source : kSources) {
    FlatHead guided(small(source, 40), stream);
    FlatHead plain(small(source, 40), stream);
    for (const int piece : {1, 17, 3, 18}) {
      guided.extend(piece).guide(question).guide_by_last(1).evict();
      plain.append(piece);
      EXPECT_TRUE(guided.head().victims().empty());
      EXPECT_EQ(guided.memory(), plain.memory());
    }
    guided.guide(question);  // forgotten with the next token
    while (plain.left() > 0) {
      guided.append(1);
      plain.append(1);
      ASSERT_EQ(guided.positions(), plain.positions()) << plain.left();
    }
    EXPECT_EQ(guided.memory(), plain.memory());
  }
}

TEST(Guide, OfAnEmptyHeadIsNone) {
  const Stream stream = some_stream(40, 313);
  for (const QuerySource source : kSources) {
    FlatHead guided(small(source), stream);
    FlatHead plain(small(source), stream);
    guided.guide(some_stream(5, 314)).evict();
    EXPECT_TRUE(guided.positions().empty());
    EXPECT_EQ(guided.extend(40).evict().positions(), plain.extend(40).evict().positions());
  }
}

TEST(Guide, IsForgottenWhenMoreTokensCome) {
  const Stream stream = some_stream(70, 315);
  const Stream question = some_stream(6, 316);
  for (const QuerySource source : kSources) {
    const auto plain = FlatHead(small(source), stream).extend(50).extend(3).evict().positions();
    FlatHead early(small(source), stream);
    EXPECT_EQ(early.extend(50).guide(question).extend(3).evict().positions(), plain);
    FlatHead late(small(source), stream);
    EXPECT_NE(late.extend(50).extend(3).guide(question).evict().positions(), plain);

    FlatHead appended(small(source), stream);
    EXPECT_EQ(appended.extend(50).guide(question).append(1).positions(),
              FlatHead(small(source), stream).extend(50).append(1).positions());
  }
}

TEST(Guide, IsUsedUpByAnEviction) {
  const Stream stream = some_stream(60, 317);
  for (const QuerySource source : kSources) {
    FlatHead head(small(source), stream);
    const Positions kept = head.extend(60).guide(some_stream(6, 318)).evict().positions();
    EXPECT_EQ(kept.size(), 24u);
    EXPECT_EQ(head.head().victims().size(), 36u);
    EXPECT_TRUE(std::is_sorted(head.head().victims().begin(), head.head().victims().end()));
    EXPECT_EQ(head.evict().positions(), kept);
    EXPECT_TRUE(head.head().victims().empty());
  }
}

TEST(Guide, IsCopiedWithTheHead) {
  const Stream stream = some_stream(60, 319);
  for (const QuerySource source : kSources) {
    FlatHead head(small(source), stream);
    const auto unguided = head.extend(60).copy().evict().positions();
    FlatHead copy = head.guide(some_stream(6, 320)).copy();
    EXPECT_EQ(copy.evict().positions(), head.evict().positions());
    EXPECT_NE(copy.positions(), unguided);
  }
}

TEST(Guide, CanBeTheWindowItself) {
  const Stream stream = some_stream(120, 321);
  FlatHead guided(small(QuerySource::kAttention), stream);
  FlatHead plain(small(QuerySource::kAttention), stream);
  for (const int piece : {60, 7, 4, 49}) {
    guided.extend(piece).guide_by_last(4).evict();
    EXPECT_EQ(guided.positions(), plain.append(piece).positions());
  }
}

TEST(Extend, AndEvictWithoutAGuideAreAnAppendThatEvictsAtItsEnd) {
  const Stream stream = some_stream(150, 322);
  for (const char* policy :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random", "full"}) {
    CacheConfig config = small(QuerySource::kAttention);
    config.policy = policy;
    FlatHead parts(config, stream);
    FlatHead whole(config, stream);
    for (const int piece : {1, 40, 7, 1, 31}) {
      const int held = parts.head().keep().size();
      parts.extend(piece);
      EXPECT_EQ(parts.head().keep().size(), held + piece) << policy;
      EXPECT_TRUE(parts.head().victims().empty());
      parts.evict();
      whole.append(piece);
      EXPECT_EQ(parts.positions(), whole.positions()) << policy;
      EXPECT_EQ(parts.memory(), whole.memory()) << policy;
    }
  }
}

// ---------------------------------------------------------------- built by hand

// One row for each number: that much along one axis.
struct Along {
  int axis;
  float by;
};

Stream rows_along(const std::vector<Along>& rows) {
  Stream stream{.tokens = static_cast<int>(rows.size()), .heads = 1, .group = 1, .dim = 4};
  for (const Along& row : rows) {
    for (int d = 0; d < stream.dim; ++d) stream.keys.push_back(d == row.axis ? row.by : 0.0f);
  }
  stream.queries.assign(stream.keys.size(), 0.0f);
  stream.query_token_stride = stream.query_group_stride = stream.dim;
  return stream;
}

// A guide of one token, whose own row draws nothing.
Stream asking(Along query) {
  Stream guide = rows_along({{0, 0.0f}});
  guide.queries[static_cast<std::size_t>(query.axis)] = query.by;
  return guide;
}

TEST(Guide, SharesTheBudgetFairlyHoweverSharplyOthersLook) {
  // Even rows lie along one axis, odd ones along another; the last is the tail.
  std::vector<Along> rows;
  for (int i = 0; i < 12; ++i) {
    const float by = 1.0f + 0.25f * static_cast<float>(i);
    rows.insert(rows.end(), {{0, by}, {1, by}});
  }
  rows.push_back({3, 1.0f});
  const Stream stream = rows_along(rows);
  const Stream sharp = asking({0, 30.0f});
  const Stream flat = asking({1, 0.1f});
  const CacheConfig config{
      .budget = 9, .n_sink = 0, .window = 1, .queries = QuerySource::kAttention};
  const Positions four_of_each = {16, 17, 18, 19, 20, 21, 22, 23, 24};
  FlatHead head(config, stream);
  head.extend(25);
  EXPECT_EQ(head.copy().guide(sharp).guide(flat).evict().positions(), four_of_each);
  EXPECT_EQ(head.copy().guide(flat).guide(sharp).evict().positions(), four_of_each);
  EXPECT_EQ(head.copy().guide(sharp).evict().positions(),
            (Positions{8, 10, 12, 14, 16, 18, 20, 22, 24}));
  EXPECT_EQ(head.copy().guide(flat).evict().positions(),
            (Positions{9, 11, 13, 15, 17, 19, 21, 23, 24}));
}

TEST(Guide, LosesNoShareByLookingAtWhatIsProtected) {
  // One guide loves the tail most, then the even rows; the other only the odd ones.
  std::vector<Along> rows;
  for (int i = 0; i < 12; ++i) {
    const float by = 1.0f + 0.25f * static_cast<float>(i);
    rows.insert(rows.end(), {{0, by}, {1, by}});
  }
  rows.insert(rows.end(), 4, {0, 9.0f});
  const Stream stream = rows_along(rows);
  const CacheConfig config{
      .budget = 12, .n_sink = 0, .window = 1, .recent = 4, .queries = QuerySource::kAttention};
  FlatHead head(config, stream);
  head.extend(28);
  EXPECT_EQ(head.guide(asking({0, 1.0f})).guide(asking({1, 1.0f})).evict().positions(),
            (Positions{16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27}));
}

TEST(Guide, DoesNotReachTheSinksAndTheTail) {
  std::vector<Along> rows(20, {0, -1.0f});
  for (std::size_t i = 2; i < 17; ++i) rows[i].by = static_cast<float>(i % 5);
  const Stream stream = rows_along(rows);
  const CacheConfig config{
      .budget = 8, .n_sink = 2, .window = 1, .recent = 3, .queries = QuerySource::kAttention};
  FlatHead head(config, stream);
  head.extend(20).guide(asking({0, 5.0f})).evict();
  EXPECT_EQ(head.positions(), (Positions{0, 1, 4, 9, 14, 17, 18, 19}));
}

TEST(Guide, TokensSeeTheirOwnRowsUpToThemselves) {
  // The second row of the guide would draw all the attention of its first token, which prefers
  // row 1; the second token only tells the others by a little.
  const Stream stream = rows_along({{1, 0.0f}, {0, 1.0f}, {2, 1.0f}, {3, 0.0f}});
  Stream guide = rows_along({{3, 0.0f}, {0, 40.0f}});
  guide.queries = {4.0f, 0, 0, 0, 0, 0, 1.0f, 0};
  const CacheConfig config{
      .budget = 2, .n_sink = 0, .window = 1, .queries = QuerySource::kAttention};
  FlatHead head(config, stream);
  EXPECT_EQ(head.extend(4).guide(guide).evict().positions(), (Positions{1, 3}));
}

}  // namespace
}  // namespace morphkv

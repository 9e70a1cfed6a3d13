// Which rows stay: the step against the rule written plainly (oracle.h), and the values of the
// field cases. Where rows lie is the matter of retention_slots_test.cc.
#include "morphkv/retention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "generators.h"
#include "oracle.h"
#include "simulated_host.h"

namespace morphkv {
namespace {

using test::HeadOracle;
using test::HostOptions;
using test::Random;
using test::SimulatedHost;
using test::Stream;
using test::StreamShape;

using Positions = std::vector<Position>;

int one() { return 1; }

DType any_dtype(Random& random) { return random.pick({DType::kF16, DType::kBF16, DType::kF32}); }

CacheConfig random_config(QuerySource queries, Random& random) {
  CacheConfig config{.n_sink = random.between(0, 5),
                     .window = random.pick({1, 2, 4, 8, random.between(1, 24)}),
                     .pool = random.pick({1, 1, 3, 7}),
                     .fusion = random.coin() ? Fusion::kMean : Fusion::kMax,
                     .queries = queries};
  if (random.coin()) config.recent = config.window + random.between(0, 6);
  config.budget =
      config.n_sink + config.protected_tail() + random.pick({1, 2, random.between(3, 30)});
  return config;
}

HostOptions random_options(const CacheConfig& config, DType dtype, int longest_call,
                           Random& random) {
  return {.max_slots = config.budget + longest_call + random.between(0, 5),
          .keys = {.dtype = dtype, .gap = random.between(0, 5), .reversed = random.coin()},
          .freeing = random.pick(
              {test::Freeing::kHighest, test::Freeing::kOldest, test::Freeing::kRandom}),
          .shuffled = random.coin(),
          .seed = static_cast<std::uint64_t>(random.between(0, 1 << 30))};
}

// ---------------------------------------------------------------- the rule

struct Agreement {
  int evictions = 0;
  int near_ties = 0;
};

// Feeds the stream to the core and to one oracle per head. Where rounding decided, the oracle
// follows the core.
void follow_oracle(const CacheConfig& config, const Stream& stream, const HostOptions& options,
                   const std::function<int()>& sizes, Agreement& seen) {
  SimulatedHost host(config, stream, options);
  std::vector<HeadOracle> oracles(static_cast<std::size_t>(stream.heads),
                                  HeadOracle(config, options.scale, options.softcap));
  while (host.offset() < stream.tokens) {
    const int first = host.offset();
    const int tokens = std::min(sizes(), stream.tokens - first);
    host.feed(tokens);
    for (int h = 0; h < stream.heads; ++h) {
      HeadOracle& oracle = oracles[static_cast<std::size_t>(h)];
      for (int t = first; t < first + tokens; ++t) {
        oracle.append(stream.key(t, h));
        std::vector<std::vector<double>> group;
        for (int g = 0; g < stream.group; ++g) {
          const auto query = stream.query(t, h, g);
          group.emplace_back(query.begin(), query.end());
        }
        oracle.ask(std::move(group));
      }
      const Positions kept = host.positions(h);
      Positions left;
      std::set_difference(oracle.positions().begin(), oracle.positions().end(), kept.begin(),
                          kept.end(), std::back_inserter(left));
      const Positions rule = oracle.victims();
      seen.evictions += static_cast<int>(rule.size());
      if (left != rule) {
        ASSERT_TRUE(oracle.is_near_tie_with(left))
            << "token " << first + tokens - 1 << ", head " << h << ": "
            << ::testing::PrintToString(left) << " left, the rule says "
            << ::testing::PrintToString(rule);
        ++seen.near_ties;
      }
      oracle.evict(left);
      ASSERT_EQ(oracle.positions(), kept);
    }
  }
}

TEST(Retention, WithKeysFollowsTheRuleForRandomShapes) {
  Random random(101);
  constexpr int kRuns = 500;
  int runs_with_near_ties = 0;
  int evictions = 0;
  for (int run = 0; run < kRuns; ++run) {
    const DType dtype = any_dtype(random);
    const CacheConfig config = random_config(QuerySource::kKeys, random);
    const Stream stream = test::random_stream({.tokens = config.budget + random.between(1, 60),
                                               .heads = random.between(1, 4),
                                               .dim = random.pick({64, random.between(1, 130)}),
                                               .dtype = dtype,
                                               .spread = random.pick({0.3, 1.0, 1.0, 1.5})},
                                              random);
    Agreement seen;
    follow_oracle(config, stream, random_options(config, dtype, 1, random), one, seen);
    if (HasFatalFailure()) FAIL() << "run " << run;
    runs_with_near_ties += seen.near_ties > 0 ? 1 : 0;
    evictions += seen.evictions;
  }
  EXPECT_GT(evictions, 20000);
  EXPECT_LE(runs_with_near_ties, kRuns / 50);
}

TEST(Retention, WithAttentionFollowsTheRuleForRandomShapesAndCalls) {
  Random random(102);
  constexpr int kRuns = 320;
  int runs_with_near_ties = 0;
  int evictions = 0;
  for (int run = 0; run < kRuns; ++run) {
    const DType dtype = any_dtype(random);
    const CacheConfig config = random_config(QuerySource::kAttention, random);
    const int dim = random.pick({64, random.between(1, 130)});
    const Stream stream = test::random_stream({.tokens = config.budget + random.between(1, 50),
                                               .heads = random.between(1, 3),
                                               .group = 1 + run % 8,
                                               .dim = dim,
                                               .dtype = dtype},
                                              random);
    const int longest = random.pick({1, 3, 20, stream.tokens});
    HostOptions options = random_options(config, dtype, longest, random);
    options.scale = static_cast<float>(random.pick({1.0, 0.5, 2.0}) / std::sqrt(dim));
    options.softcap = random.pick({0.0f, 0.0f, 1.5f, 20.0f});
    // Hosts may show all queries of a call or only those that can still ask at its end.
    options.queries_per_call = random.pick({-1, config.window, config.window + 3});
    Agreement seen;
    follow_oracle(
        config, stream, options, [&] { return random.between(1, longest); }, seen);
    if (HasFatalFailure()) FAIL() << "run " << run;
    runs_with_near_ties += seen.near_ties > 0 ? 1 : 0;
    evictions += seen.evictions;
  }
  EXPECT_GT(evictions, 8000);
  EXPECT_LE(runs_with_near_ties, kRuns / 50);
}

// Logits in the hundreds: most weights are too small for float, where all of them are equal to 0.
TEST(Retention, WithKeysFollowsTheRuleForPeakedScores) {
  Random random(103);
  for (int run = 0; run < 30; ++run) {
    const CacheConfig config = random_config(QuerySource::kKeys, random);
    const Stream stream = test::random_stream({.tokens = config.budget + 50,
                                               .heads = 2,
                                               .dim = random.between(8, 130),
                                               .dtype = DType::kF16,
                                               .spread = 4.0},
                                              random);
    Agreement seen;
    follow_oracle(config, stream, random_options(config, DType::kF16, 1, random), one, seen);
    if (HasFatalFailure()) FAIL() << "run " << run;
  }
}

TEST(Retention, KeepsTheSameRowsForEverySplitOfTheStream) {
  Random random(104);
  for (int run = 0; run < 40; ++run) {
    const DType dtype = any_dtype(random);
    const CacheConfig config = random_config(QuerySource::kKeys, random);
    const Stream stream = test::random_stream({.tokens = config.budget + random.between(60, 150),
                                               .heads = 2,
                                               .dim = random.between(1, 64),
                                               .dtype = dtype},
                                              random);
    std::vector<std::vector<Positions>> kept_after = {{}};  // [tokens fed][head]
    SimulatedHost reference(config, stream, random_options(config, dtype, 1, random));
    reference.feed_all([&] {
      if (reference.offset() > 0) kept_after.push_back(reference.all_positions());
      return 1;
    });
    kept_after.push_back(reference.all_positions());

    for (const int longest : {2, 9, 32, 33, 80, stream.tokens}) {
      SimulatedHost host(config, stream, random_options(config, dtype, longest, random));
      host.feed_all([&] {
        if (host.offset() > 0) {
          EXPECT_EQ(host.all_positions(), kept_after[static_cast<std::size_t>(host.offset())]);
        }
        return longest == stream.tokens ? longest : random.between(1, longest);
      });
      ASSERT_EQ(host.all_positions(), kept_after.back())
          << "run " << run << ", calls up to " << longest;
    }
  }
}

TEST(Retention, OfAHeadDoesNotDependOnTheOtherHeads) {
  Random random(105);
  for (const QuerySource queries : {QuerySource::kKeys, QuerySource::kAttention}) {
    for (int run = 0; run < 10; ++run) {
      const CacheConfig config = random_config(queries, random);
      const StreamShape shape{
          .tokens = config.budget + 60, .heads = 4, .group = 2, .dim = random.between(2, 40)};
      const Stream together = test::random_stream(shape, random);
      const HostOptions options = random_options(config, DType::kF16, 7, random);
      SimulatedHost host(config, together, options);
      host.feed_all([] { return 7; });
      for (int h = 0; h < 4; ++h) {
        Stream alone = together;  // strides are those of four heads, the data begins at head h
        alone.heads = 1;
        alone.keys.clear();
        for (int t = 0; t < shape.tokens; ++t) {
          const auto key = together.key(t, h);
          alone.keys.insert(alone.keys.end(), key.begin(), key.end());
        }
        alone.queries.erase(alone.queries.begin(),
                            alone.queries.begin() + h * together.query_head_stride);
        SimulatedHost single(config, alone, options);
        single.feed_all([] { return 7; });
        EXPECT_EQ(single.positions(0), host.positions(h)) << "head " << h;
      }
    }
  }
}

TEST(Retention, OfOneLayerDoesNotDependOnAnotherThatSharesItsWorkspace) {
  Random random(106);
  const CacheConfig config{.budget = 20, .n_sink = 2, .window = 4};
  const Stream stream = test::random_stream({.tokens = 80, .dim = 8}, random);
  const auto policy = make_policy(config);
  SimulatedHost expected(config, stream, {.max_slots = 90});
  expected.feed_all([] { return 40; });

  test::StoredRows rows({}, 90, 8);
  test::StoredRows other_rows({}, 90, 8);
  std::vector<int> slots;
  for (int t = 0; t < 80; ++t) {
    rows.set(t, stream.key(t, 0));
    other_rows.set(t, stream.key(79 - t, 0));
    slots.push_back(t);
  }
  LayerRetention layer(config, *policy, 0, 1, 90);
  LayerRetention other(config, *policy, 1, 1, 90);
  Workspace workspace(90, 1, 8);
  for (int first = 0; first < 80; first += 40) {
    const RowsView views[] = {rows.view(), other_rows.view()};
    const auto call_slots = std::span(slots).subspan(static_cast<std::size_t>(first), 40);
    layer.append({call_slots, first, std::span(views).first(1), {}}, workspace);
    other.append({call_slots, first, std::span(views).last(1), {}}, workspace);
  }
  const auto positions = layer.keep(0).positions();
  EXPECT_EQ(Positions(positions.begin(), positions.end()), expected.positions(0));
}

TEST(Retention, IgnoresACallWithoutTokens) {
  Random random(107);
  for (const QuerySource queries : {QuerySource::kKeys, QuerySource::kAttention}) {
    const CacheConfig config{.budget = 8, .n_sink = 1, .window = 2, .queries = queries};
    const Stream stream = test::random_stream({.tokens = 20, .group = 1, .dim = 4}, random);
    SimulatedHost host(config, stream, {.max_slots = 20});
    host.feed(0);
    EXPECT_TRUE(host.positions(0).empty());
    host.feed(12);
    const Positions before = host.positions(0);
    host.feed(0);
    EXPECT_EQ(host.positions(0), before);
    EXPECT_TRUE(host.layer().victims(0).empty());
  }
}

// ---------------------------------------------------------------- TOVA

// The rule of TOVA (Oren et al., 2024) for one head: the last token's attention weights, the least
// one leaves.
Positions tova(const Stream& stream, int budget, int n_sink) {
  Positions kept;
  for (int t = 0; t < stream.tokens; ++t) {
    kept.push_back(t);
    if (static_cast<int>(kept.size()) <= budget) continue;
    std::vector<double> weights;
    double sum = 0.0;
    for (const Position position : kept) {
      double logit = 0.0;
      for (int d = 0; d < stream.dim; ++d) {
        const auto i = static_cast<std::size_t>(d);
        logit += double{stream.key(t, 0)[i]} * stream.key(static_cast<int>(position), 0)[i];
      }
      weights.push_back(std::exp(logit / std::sqrt(stream.dim)));
      sum += weights.back();
    }
    std::size_t least = static_cast<std::size_t>(n_sink);
    for (std::size_t i = least; i + 1 < kept.size(); ++i) {
      if (weights[i] / sum < weights[least] / sum) least = i;
    }
    kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(least));
  }
  return kept;
}

TEST(Retention, WithAWindowOfOneIsTova) {
  Random random(108);
  for (int run = 0; run < 60; ++run) {
    const int n_sink = random.between(0, 3);
    const int budget = n_sink + random.between(2, 30);
    const Stream stream = test::random_stream(
        {.tokens = budget + random.between(1, 80), .dim = random.between(3, 64)}, random);
    const CacheConfig config{.budget = budget, .n_sink = n_sink, .window = 1};
    SimulatedHost host(config, stream, {.max_slots = budget + 10});
    host.feed_all([&] { return random.between(1, 10); });
    EXPECT_EQ(host.positions(0), tova(stream, budget, n_sink)) << "run " << run;
  }
}

// ---------------------------------------------------------------- field cases

TEST(Generators, GiveTheFirstRowOfTheFieldCases) {
  const Stream stream = test::gen_stream(300, 2, 8);
  const auto row = stream.key(0, 0);
  EXPECT_EQ(std::vector<float>(row.begin(), row.end()),
            (std::vector<float>{0.546875f, -0.015625f, 0.0078125f, -0.1640625f, -0.4140625f,
                                0.9609375f, 0.765625f, 0.9609375f}));
  for (const float value : stream.keys) EXPECT_EQ(test::stored_as(DType::kF16, value), value);
}

TEST(Generators, ConvertHalfPrecisionBothWays) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const bool finite_f16 = (half & 0x7C00) != 0x7C00;
    const bool finite_bf16 = (half & 0x7F80) != 0x7F80;
    EXPECT_TRUE(!finite_f16 || test::to_f16(test::from_f16(half)) == half) << bits;
    EXPECT_TRUE(!finite_bf16 || test::to_bf16(test::from_bf16(half)) == half) << bits;
  }
  EXPECT_EQ(test::from_f16(0x3555), 0.333251953125f);
  EXPECT_EQ(test::to_f16(1.0f + 0x1p-11f), 0x3C00);      // a tie, to even
  EXPECT_EQ(test::to_f16(1.0f + 3 * 0x1p-11f), 0x3C02);  // a tie, to even
  EXPECT_EQ(test::from_f16(test::to_f16(1e5f)), 65504.0f);
}

const CacheConfig kFieldConfig{.budget = 16, .n_sink = 2, .window = 4};

TEST(Retention, KeepsTheRowsOfTheFieldCasesForTheirCommonInput) {
  const Stream stream = test::gen_stream(300, 2, 8);
  const std::vector<Positions> expected = {
      {0, 1, 258, 269, 280, 281, 282, 286, 289, 290, 293, 295, 296, 297, 298, 299},
      {0, 1, 215, 276, 280, 286, 287, 290, 291, 292, 293, 294, 296, 297, 298, 299}};
  for (const DType dtype : {DType::kF16, DType::kF32}) {
    for (const int size : {1, 50, 300}) {
      SimulatedHost host(kFieldConfig, stream, {.max_slots = 316, .keys = {.dtype = dtype}});
      host.feed_all([size] { return size; });
      EXPECT_EQ(host.all_positions(), expected) << "calls of " << size;
    }
  }
  Agreement seen;
  follow_oracle(kFieldConfig, stream, {.max_slots = 17}, one, seen);
  EXPECT_EQ(seen.near_ties, 0);
  EXPECT_EQ(seen.evictions, 2 * 284);
}

// Field case 1.
TEST(Retention, StaysAtTheBudgetWhileTheOffsetGoesOn) {
  const Stream stream = test::gen_stream(300, 2, 8);
  SimulatedHost host(kFieldConfig, stream, {.max_slots = 66});
  host.feed(50);
  while (host.offset() < 300) {
    for (int h = 0; h < 2; ++h) {
      EXPECT_EQ(host.layer().keep(h).size(), 16);
      EXPECT_EQ(host.positions(h).back(), host.offset() - 1);
    }
    host.feed(1);
  }
  EXPECT_EQ(host.broken_invariants(), std::vector<std::string>{});
}

// Field case 7.
TEST(Retention, EvictsNothingUpToTheBudgetAndOneRowForOneMore) {
  Random random(109);
  const Stream stream =
      test::random_stream({.tokens = 17, .heads = 2, .group = 2, .dim = 8}, random);
  for (const char* policy :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random"}) {
    for (const QuerySource queries : {QuerySource::kKeys, QuerySource::kAttention}) {
      CacheConfig config = kFieldConfig;
      config.policy = policy;
      config.queries = queries;
      for (const int size : {1, 5, 16}) {
        SimulatedHost host(config, stream, {.max_slots = 32});
        while (host.offset() < 16) {
          host.feed(std::min(size, 16 - host.offset()));
          EXPECT_EQ(host.layer().keep(0).size(), host.offset());
          EXPECT_TRUE(host.layer().victims(0).empty());
          EXPECT_TRUE(host.layer().victims(1).empty());
        }
        host.feed(1);
        for (int h = 0; h < 2; ++h) {
          EXPECT_EQ(host.layer().keep(h).size(), 16);
          EXPECT_EQ(host.layer().victims(h).size(), 1u);
        }
      }
    }
  }
}

// Positions kept of the keys given, fed one by one.
Positions kept_of(const CacheConfig& config, const std::vector<std::vector<float>>& keys) {
  Stream stream{.tokens = static_cast<int>(keys.size()),
                .heads = 1,
                .dim = static_cast<int>(keys.front().size())};
  for (const auto& key : keys) stream.keys.insert(stream.keys.end(), key.begin(), key.end());
  SimulatedHost host(config, stream, {.max_slots = config.budget + 1});
  host.feed_all(one);
  return host.positions(0);
}

// Field case 14. Without the scale 1 / sqrt(D) position 2 would leave.
TEST(Retention, ScalesItsLogits) {
  const std::vector<std::vector<float>> keys = {{0, 0, 0, 0}, {3, -3, 0, 0},   {1, 1, 0, 0},
                                                {3, 3, 0, 0}, {0.5f, 0, 0, 0}, {0, 0.5f, 0, 0}};
  EXPECT_EQ(kept_of({.budget = 5, .n_sink = 1, .window = 2}, keys), (Positions{0, 2, 3, 4, 5}));
  auto doubled = keys;  // logits are four times as large; the scale would be 1 for D = 1
  for (auto& key : doubled) {
    for (float& value : key) value *= std::sqrt(2.0f);
  }
  EXPECT_EQ(kept_of({.budget = 5, .n_sink = 1, .window = 2}, doubled), (Positions{0, 1, 3, 4, 5}));
}

// Field case 14.
TEST(Retention, OfEqualKeysEvictsTheLowestPosition) {
  for (const Fusion fusion : {Fusion::kMean, Fusion::kMax}) {
    for (const int pool : {1, 3}) {
      const CacheConfig config{
          .budget = 6, .n_sink = 1, .window = 2, .pool = pool, .fusion = fusion};
      const std::vector<std::vector<float>> keys(12, {0.3f, -1.25f, 2.0f});
      EXPECT_EQ(kept_of(config, keys), (Positions{0, 7, 8, 9, 10, 11}));
    }
  }
}

TEST(Retention, OfRepeatedTokensEvictsTheLowestPositionOfEachKind) {
  // Five kinds of tokens in random order, so that most scores have equals, in whatever slots they
  // lie.
  Random random(110);
  int near_ties = 0;
  for (int run = 0; run < 20; ++run) {
    Stream stream = test::random_stream({.tokens = 120, .heads = 2, .dim = 16}, random);
    for (int t = 5; t < stream.tokens; ++t) {
      const int kind = random.between(0, 4);
      for (int h = 0; h < 2; ++h) {
        std::copy_n(stream.key(kind, h).begin(), stream.dim, stream.key(t, h).begin());
      }
    }
    const CacheConfig config{.budget = 24, .n_sink = 2, .window = random.pick({1, 4, 8})};
    Agreement seen;
    follow_oracle(config, stream, random_options(config, DType::kF16, 1, random), one, seen);
    if (HasFatalFailure()) FAIL() << "run " << run;
    near_ties += seen.near_ties;
  }
  EXPECT_EQ(near_ties, 0);
}

TEST(Retention, OfHugeKeysFollowsTheRule) {
  Random random(111);
  for (int run = 0; run < 20; ++run) {
    Stream stream =
        test::random_stream({.tokens = 80, .heads = 2, .dim = random.between(1, 100)}, random);
    for (float& value : stream.keys) value = random.pick({-65504.0f, 0.0f, 0.0f, 65504.0f});
    const CacheConfig config{.budget = 20, .n_sink = 2, .window = random.pick({1, 5})};
    Agreement seen;
    follow_oracle(config, stream, random_options(config, DType::kF16, 1, random), one, seen);
    if (HasFatalFailure()) FAIL() << "run " << run;
    EXPECT_EQ(seen.near_ties, 0) << "run " << run;
  }
}

TEST(Retention, WorksAtTheLeastLegalNumbers) {
  Random random(112);
  for (const QuerySource queries : {QuerySource::kKeys, QuerySource::kAttention}) {
    const CacheConfig config{.budget = 2, .n_sink = 0, .window = 1, .queries = queries};
    const Stream stream =
        test::random_stream({.tokens = 60, .heads = 2, .group = 1, .dim = 1}, random);
    Agreement seen;
    HostOptions options = random_options(config, DType::kF32, 1, random);
    options.max_slots = 3;
    follow_oracle(config, stream, options, one, seen);
    EXPECT_EQ(seen.evictions, 2 * 58);
  }
}

}  // namespace
}  // namespace morphkv

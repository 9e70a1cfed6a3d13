// The rows that a cache returns and then holds: against the rule written plainly (oracle.h), for
// every way to bring the stream. Counters, limits and refusals are in cache_contract_test.cc.
#include "morphkv/cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "cache_harness.h"
#include "oracle.h"

namespace morphkv {
namespace {

using test::CacheHarness;
using test::HeadOracle;
using test::HostArray;
using test::Positions;
using test::Random;
using test::Tensor;

CacheConfig random_config(QuerySource queries, Random& random) {
  CacheConfig config{.n_sink = random.between(0, 4),
                     .window = random.pick({1, 2, 4, random.between(1, 12)}),
                     .pool = random.pick({1, 1, 3, 7}),
                     .fusion = random.coin() ? Fusion::kMean : Fusion::kMax,
                     .queries = queries};
  if (random.coin()) config.recent = config.window + random.between(0, 6);
  config.budget =
      config.n_sink + config.protected_tail() + random.pick({1, 2, random.between(3, 40)});
  return config;
}

struct Case {
  CacheConfig config;
  DType in = DType::kF32;
  Tensor keys = {};
  Tensor values = {};
  Tensor queries = {};  // kAttention only
  std::int64_t group = 1;

  CacheHarness harness() const {
    CacheHarness made(MorphKVCache(config), keys, values, in);
    if (config.queries == QuerySource::kAttention) made.set_queries(queries);
    return made;
  }
};

Case random_case(QuerySource source, Random& random) {
  Case c{.config = random_config(source, random)};
  c.in = random.pick({DType::kF16, DType::kBF16, DType::kF32, DType::kF64});
  const std::int64_t batch = random.between(1, 2);
  const std::int64_t heads = random.between(1, 3);
  const std::int64_t tokens = c.config.budget + random.between(1, 160);
  const std::int64_t dim = random.pick({8, 16, random.between(1, 40)});
  c.group = random.between(1, 3);
  c.keys = test::random_tensor({batch, heads, tokens, dim}, random);
  c.values = test::random_tensor({batch, heads, tokens, dim}, random);
  if (source == QuerySource::kAttention) {
    c.queries = test::random_tensor({batch, heads * c.group, tokens, dim}, random);
  }
  return c;
}

// ---------------------------------------------------------------- the oracle

struct Agreement {
  int evictions = 0;
  int near_ties = 0;
};

// Feeds calls of these sizes and follows with an oracle for each head. With keys, calls bring one
// token. Where rounding decided, the oracle follows the cache.
template <class Sizes>
void follow_oracle(const Case& c, CacheHarness& harness, const Sizes& sizes, Random& random,
                   Agreement& seen) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(c.keys.shape[3]));
  std::vector<HeadOracle> oracles(static_cast<std::size_t>(harness.n_heads()),
                                  HeadOracle(c.config, scale));
  while (harness.left() > 0) {
    const std::int64_t first = harness.offset();
    const std::int64_t tokens = std::min<std::int64_t>(sizes(), harness.left());
    harness.feed(tokens, test::any_layout(random), test::any_layout(random));
    if (random.between(0, 9) == 0) harness.expect_rows_live();
    ASSERT_FALSE(testing::Test::HasFailure());
    const auto kept = harness.held();
    for (std::size_t h = 0; h < oracles.size(); ++h) {
      HeadOracle& oracle = oracles[h];
      const auto b = static_cast<std::int64_t>(h) / c.keys.shape[1];
      const auto head = static_cast<std::int64_t>(h) % c.keys.shape[1];
      for (std::int64_t t = first; t < first + tokens; ++t) {
        oracle.append(harness.stored_key(static_cast<std::int64_t>(h), t));
        if (c.queries.numbers.empty()) continue;
        std::vector<std::vector<double>> group(static_cast<std::size_t>(c.group));
        for (std::int64_t g = 0; g < c.group; ++g) {
          for (std::int64_t d = 0; d < c.keys.shape[3]; ++d) {
            group[static_cast<std::size_t>(g)].push_back(
                static_cast<float>(c.queries.at(b, head * c.group + g, t, d)));
          }
        }
        oracle.ask(std::move(group));
      }
      const Positions rule = oracle.victims();
      seen.evictions += static_cast<int>(rule.size());
      Positions left;
      std::set_difference(oracle.positions().begin(), oracle.positions().end(), kept[h].begin(),
                          kept[h].end(), std::back_inserter(left));
      if (left != rule) {
        ASSERT_TRUE(oracle.is_near_tie_with(left))
            << "offset " << harness.offset() << ", head " << h << ": "
            << testing::PrintToString(left) << " left, the rule says "
            << testing::PrintToString(rule);
        ++seen.near_ties;
      }
      oracle.evict(left);
      ASSERT_EQ(oracle.positions(), kept[h]);
    }
  }
}

// A near tie is so seldom that more than a few would be a fault of the cache.
void expect_few_near_ties(const Agreement& seen, int least_evictions) {
  EXPECT_GT(seen.evictions, least_evictions);
  EXPECT_LE(seen.near_ties, 2 + seen.evictions / 1000);
  testing::Test::RecordProperty("evictions", seen.evictions);
  testing::Test::RecordProperty("near_ties", seen.near_ties);
}

TEST(Cache, WithKeysReturnsAllThatIsDueAndHoldsWhatTheRuleKeeps) {
  Random random(41);
  Agreement seen;
  for (int run = 0; run < 60; ++run) {
    const Case c = random_case(QuerySource::kKeys, random);
    CacheHarness harness = c.harness();
    follow_oracle(
        c, harness, [] { return 1; }, random, seen);
    if (HasFailure()) FAIL() << "run " << run;
  }
  expect_few_near_ties(seen, 5000);
}

TEST(Cache, WithQueriesReturnsAllThatIsDueAndHoldsWhatTheRuleKeepsForCallsOfAnyLength) {
  Random random(42);
  Agreement seen;
  for (int run = 0; run < 60; ++run) {
    const Case c = random_case(QuerySource::kAttention, random);
    CacheHarness harness = c.harness();
    const int longest = random.pick({1, 3, 20, 300});
    follow_oracle(
        c, harness, [&] { return random.between(1, longest); }, random, seen);
    if (HasFailure()) FAIL() << "run " << run;
  }
  expect_few_near_ties(seen, 5000);
}

// ---------------------------------------------------------------- splits

TEST(Cache, WithKeysEndsInTheSameStateForEverySplitOfTheStream) {
  Random random(43);
  for (int run = 0; run < 40; ++run) {
    const Case c = random_case(QuerySource::kKeys, random);
    CacheHarness one_by_one = c.harness();
    while (one_by_one.left() > 0) one_by_one.feed(1);
    CacheHarness at_once = c.harness();
    at_once.feed(at_once.left(), test::any_layout(random), test::any_layout(random));
    at_once.expect_rows_live();
    test::expect_same_state(at_once.cache().state(), one_by_one.cache().state());
    // Calls within the slack of the store (32 rows) and beyond it.
    for (const int longest : {4, 60, 120}) {
      CacheHarness split = c.harness();
      while (split.left() > 0) {
        split.feed(std::min<std::int64_t>(random.between(1, longest), split.left()));
      }
      split.expect_rows_live();
      test::expect_same_state(split.cache().state(), one_by_one.cache().state());
    }
    if (HasFailure()) FAIL() << "run " << run;
  }
}

TEST(Cache, KeepsTheRowsOfTheFieldCasesForEverySplit) {
  const Tensor gen = test::gen_tensor(300, 2, 8);
  EXPECT_EQ(gen.at(0, 0, 0, 0), 0.546875);
  const std::vector<Positions> expected = {
      {0, 1, 258, 269, 280, 281, 282, 286, 289, 290, 293, 295, 296, 297, 298, 299},
      {0, 1, 215, 276, 280, 286, 287, 290, 291, 292, 293, 294, 296, 297, 298, 299}};
  const CacheConfig config{.budget = 16, .n_sink = 2, .window = 4};
  for (const DType in : {DType::kF16, DType::kF32, DType::kF64}) {
    for (const int size : {1, 2, 7, 50, 299, 300}) {
      CacheHarness harness(MorphKVCache(config), gen, gen, in);
      while (harness.left() > 0) harness.feed(std::min<std::int64_t>(size, harness.left()));
      EXPECT_EQ(harness.held(), expected) << size;
    }
  }
}

TEST(Cache, OffsetIsTheTokensSeenAndRowsStayAtTheBudget) {
  const Tensor gen = test::gen_tensor(300, 2, 8);
  CacheHarness harness(MorphKVCache({.budget = 16, .n_sink = 2, .window = 4}), gen, gen);
  harness.feed(50);
  EXPECT_EQ(harness.cache().offset(), 50);
  EXPECT_EQ(harness.cache().tokens_kept(), 16);
  for (int t = 51; t <= 300; ++t) {
    harness.feed(1);
    ASSERT_EQ(harness.cache().offset(), t);
    ASSERT_EQ(harness.cache().tokens_kept(), 16);
  }
}

// Field case 14.
TEST(Cache, ScalesItsLogitsAndBreaksTiesByTheLowestPosition) {
  const CacheConfig config{.budget = 5, .n_sink = 1, .window = 2};
  const Tensor keys{{1, 1, 6, 4},
                    {0, 0, 0, 0, 3, -3, 0, 0, 1, 1, 0, 0, 3, 3, 0, 0, .5, 0, 0, 0, 0, 0.5, 0, 0}};
  CacheHarness scaled(MorphKVCache(config), keys, keys);
  scaled.feed(6);
  EXPECT_EQ(scaled.held()[0], (Positions{0, 2, 3, 4, 5}));
  const Tensor equal{{1, 1, 12, 4}, std::vector<double>(48, 1.0)};
  CacheHarness tied(MorphKVCache({.budget = 6, .n_sink = 1, .window = 2}), equal, equal);
  tied.feed(12);
  EXPECT_EQ(tied.held()[0], (Positions{0, 7, 8, 9, 10, 11}));
}

// ---------------------------------------------------------------- types and layouts

TEST(Cache, ReadsEveryTypeAndLayoutAsTheContiguousArrayOfTheSameNumbers) {
  Random random(44);
  const std::array<std::int64_t, 4> shape = {2, 3, 70, 12};
  const Tensor keys = test::random_tensor(shape, random);
  const Tensor values = test::random_tensor(shape, random);
  const CacheConfig config{.budget = 20, .n_sink = 2, .window = 4};
  for (const DType in : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    CacheHarness plain(MorphKVCache(config), keys, values, in);
    while (plain.left() > 0) plain.feed(std::min<std::int64_t>(13, plain.left()));
    for (int run = 0; run < 12; ++run) {
      CacheHarness strided(MorphKVCache(config), keys, values, in);
      while (strided.left() > 0) {
        strided.feed(std::min<std::int64_t>(13, strided.left()), test::any_layout(random),
                     test::any_layout(random));
      }
      test::expect_same_state(strided.cache().state(), plain.cache().state());
    }
  }
}

TEST(Cache, ReadsAnArrayWithStridesOfZeroAsOneThatRepeats) {
  Random random(45);
  const Tensor one = test::random_tensor({1, 1, 40, 6}, random);
  Tensor repeated{{2, 3, 40, 6}};
  for (int i = 0; i < 6; ++i) {
    repeated.numbers.insert(repeated.numbers.end(), one.numbers.begin(), one.numbers.end());
  }
  const CacheConfig config{.budget = 12, .n_sink = 1, .window = 3};
  const HostArray plain(repeated, DType::kF32);
  const HostArray single(one, DType::kF32);
  ArrayView broadcast = single.view();
  broadcast.shape = repeated.shape;
  broadcast.strides[0] = 0;
  broadcast.strides[1] = 0;
  MorphKVCache expected(config);
  MorphKVCache cache(config);
  expected.update_and_fetch(plain.view(), plain.view());
  cache.update_and_fetch(broadcast, broadcast);
  test::expect_same_state(cache.state(), expected.state());
}

TEST(Cache, StoresBf16OnlyWhenBothInputsAreAndKeepsTheTypeOfItsFirstCall) {
  Random random(46);
  const Tensor tensor = test::random_tensor({1, 1, 3, 4}, random);
  const HostArray bf16(tensor, DType::kBF16);
  const HostArray f32(tensor, DType::kF32);
  MorphKVCache both({});
  EXPECT_EQ(both.update_and_fetch(bf16.view(), bf16.view()).keys.dtype, DType::kBF16);
  EXPECT_EQ(both.update_and_fetch(f32.view(), f32.view()).values.dtype, DType::kBF16);
  MorphKVCache one({});
  EXPECT_EQ(one.update_and_fetch(bf16.view(), f32.view()).keys.dtype, DType::kF16);
  EXPECT_EQ(one.update_and_fetch(bf16.view(), bf16.view()).keys.dtype, DType::kF16);
  // The rows of both calls, the second rounded to the type of the first.
  const Rows rows = both.keys();
  ASSERT_EQ(rows.rows, 6);
  for (int t = 0; t < 3; ++t) {
    EXPECT_EQ(std::memcmp(rows.head(0, 0).row(t), rows.head(0, 0).row(t + 3), 8), 0) << t;
  }
}

// ---------------------------------------------------------------- independence

TEST(Cache, KeepsItsBatchRowsAndHeadsIndependent) {
  Random random(47);
  const std::array<std::int64_t, 4> shape = {2, 3, 90, 8};
  const Tensor keys = test::random_tensor(shape, random);
  const CacheConfig config{.budget = 24, .n_sink = 2, .window = 4};
  CacheHarness together(MorphKVCache(config), keys, keys);
  while (together.left() > 0) together.feed(std::min<std::int64_t>(9, together.left()));
  const auto held = together.held();
  EXPECT_NE(held[0], held[1]);
  for (std::int64_t head = 0; head < 6; ++head) {
    Tensor alone{{1, 1, 90, 8}};
    const auto begin = keys.numbers.begin() + head * 90 * 8;
    alone.numbers.assign(begin, begin + std::int64_t{90} * 8);
    CacheHarness single(MorphKVCache(config), alone, alone);
    while (single.left() > 0) single.feed(std::min<std::int64_t>(9, single.left()));
    EXPECT_EQ(single.held()[0], held[static_cast<std::size_t>(head)]) << head;
  }
}

}  // namespace
}  // namespace morphkv

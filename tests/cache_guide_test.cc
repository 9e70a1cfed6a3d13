// Guided prefill in the cache class: extend_and_fetch(), guide_and_fetch() and evict() return what
// is due, hold what the rule written plainly (oracle.h) keeps, and leave no trace of a guide.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache_harness.h"
#include "morphkv/cache.h"
#include "oracle.h"

namespace morphkv {
namespace {

using test::CacheHarness;
using test::HeadOracle;
using test::HostArray;
using test::Positions;
using test::Random;
using test::refusal;
using test::Tensor;

using Vectors = std::vector<std::vector<double>>;

CacheConfig small(QuerySource queries = QuerySource::kKeys, std::string policy = "morphkv") {
  return {.budget = 16, .n_sink = 2, .window = 4, .queries = queries, .policy = std::move(policy)};
}

Tensor random_tokens(std::int64_t tokens, std::uint64_t seed, std::int64_t heads = 2) {
  Random random(seed);
  return test::random_tensor({1, heads, tokens, 8}, random);
}

// 100 tokens of two KV heads, read by four query heads.
CacheHarness harness_of(const CacheConfig& config) {
  CacheHarness harness(MorphKVCache(config), random_tokens(100, 1), random_tokens(100, 2));
  if (config.queries == QuerySource::kAttention) harness.set_queries(random_tokens(100, 3, 4));
  return harness;
}

struct Question {
  Tensor keys = {};
  Tensor values = {};
  std::optional<Tensor> queries = {};

  void ask(CacheHarness& harness) const { harness.guide(keys, values, queries); }
  void ask(MorphKVCache& cache) const {
    const HostArray k(keys, DType::kF32);
    const HostArray v(values, DType::kF32);
    if (!queries) return static_cast<void>(cache.guide_and_fetch(k.view(), v.view()));
    cache.guide_and_fetch(k.view(), v.view(), HostArray(*queries, DType::kF32).view());
  }
};

Question question_for(const CacheConfig& config, std::int64_t tokens = 5) {
  Question q{random_tokens(tokens, 4), random_tokens(tokens, 5)};
  if (config.queries == QuerySource::kAttention) q.queries = random_tokens(tokens, 6, 4);
  return q;
}

const CacheConfig kBothSources[] = {small(), small(QuerySource::kAttention)};

// ---------------------------------------------------------------- the oracle

Vectors group_of(const Tensor& queries, std::int64_t b, std::int64_t first_head, std::int64_t group,
                 std::int64_t token) {
  Vectors result(static_cast<std::size_t>(group));
  for (std::int64_t g = 0; g < group; ++g) {
    for (std::int64_t d = 0; d < queries.shape[3]; ++d) {
      result[static_cast<std::size_t>(g)].push_back(
          static_cast<float>(queries.at(b, first_head + g, token, d)));
    }
  }
  return result;
}

struct Agreement {
  int evictions = 0;
  int near_ties = 0;
};

// A prompt in pieces, with a guide or two after most of them.
void follow_oracle(QuerySource source, Random& random, Agreement& seen) {
  const CacheConfig config{.budget = random.between(20, 50),
                           .n_sink = random.between(0, 4),
                           .window = random.between(1, 10),
                           .pool = random.pick({1, 3, 7}),
                           .fusion = random.coin() ? Fusion::kMean : Fusion::kMax,
                           .queries = source};
  const std::int64_t batch = random.between(1, 2);
  const std::int64_t heads = random.between(1, 3);
  const std::int64_t group = random.between(1, 3);
  const std::int64_t dim = random.between(2, 40);
  const bool asks = source == QuerySource::kAttention;
  const auto tokens_of = [&](std::int64_t n, std::int64_t of_heads) {
    return test::random_tensor({batch, of_heads, n, dim}, random);
  };
  const Tensor queries = tokens_of(240, heads * group);
  CacheHarness harness(MorphKVCache(config), tokens_of(240, heads), tokens_of(240, heads),
                       random.pick({DType::kF16, DType::kBF16, DType::kF32, DType::kF64}));
  if (asks) harness.set_queries(queries);
  std::vector<HeadOracle> oracles(static_cast<std::size_t>(batch * heads),
                                  HeadOracle(config, 1.0 / std::sqrt(static_cast<double>(dim))));

  while (harness.left() > 0) {
    const std::int64_t first = harness.offset();
    harness.extend(std::min<std::int64_t>(random.pick({1, 9, 60}), harness.left()),
                   test::any_layout(random), test::any_layout(random));
    ASSERT_FALSE(testing::Test::HasFailure());
    for (std::int64_t h = 0; h < batch * heads; ++h) {
      for (std::int64_t t = first; t < harness.offset(); ++t) {
        oracles[static_cast<std::size_t>(h)].append(harness.stored_key(h, t));
        if (!asks) continue;
        oracles[static_cast<std::size_t>(h)].ask(
            group_of(queries, h / heads, h % heads * group, group, t));
      }
    }
    for (int guides = random.pick({0, 1, 1, 2}); guides > 0; --guides) {
      const std::int64_t n = random.pick({1, 4, 50});
      Question q{tokens_of(n, heads), tokens_of(n, heads)};
      if (asks) q.queries = tokens_of(n, heads * group);
      q.ask(harness);
      ASSERT_FALSE(testing::Test::HasFailure());
      for (std::int64_t h = 0; h < batch * heads; ++h) {
        Vectors keys;
        std::vector<Vectors> questions;
        for (std::int64_t t = 0; t < n; ++t) {
          const auto key = harness.stored_row(q.keys, h, t);
          keys.emplace_back(key.begin(), key.end());
          questions.push_back(asks ? group_of(*q.queries, h / heads, h % heads * group, group, t)
                                   : Vectors{keys.back()});
        }
        oracles[static_cast<std::size_t>(h)].guide(keys, questions);
      }
      if (random.coin()) harness.expect_rows_live();
    }
    harness.cache().evict();
    const auto kept = harness.held();
    for (std::size_t h = 0; h < oracles.size(); ++h) {
      Positions left;
      std::set_difference(oracles[h].positions().begin(), oracles[h].positions().end(),
                          kept[h].begin(), kept[h].end(), std::back_inserter(left));
      const Positions rule = oracles[h].victims();
      seen.evictions += static_cast<int>(rule.size());
      if (left != rule) {
        ASSERT_TRUE(oracles[h].is_near_tie_with(left))
            << "offset " << harness.offset() << ", head " << h;
        ++seen.near_ties;
      }
      oracles[h].evict(left);
      ASSERT_EQ(oracles[h].positions(), kept[h]);
    }
    if (random.coin()) harness.expect_rows_live();
  }
}

TEST(CacheGuide, HoldsWhatTheRuleKeepsAndReturnsAllThatIsDue) {
  Random random(401);
  Agreement seen;
  for (int run = 0; run < 80; ++run) {
    follow_oracle(run % 2 == 0 ? QuerySource::kKeys : QuerySource::kAttention, random, seen);
    if (HasFailure()) FAIL() << "run " << run;
  }
  EXPECT_GT(seen.evictions, 20000);
  EXPECT_LE(seen.near_ties, 2 + seen.evictions / 1000);
}

// ---------------------------------------------------------------- no trace

TEST(CacheGuide, LeavesNoTraceWithinTheBudget) {
  for (const CacheConfig& config : kBothSources) {
    CacheHarness guided = harness_of(config);
    CacheHarness plain = harness_of(config);
    Question question = question_for(config, 60);
    question.values.numbers[0] = 1e6;  // saturates, and is not counted
    for (int piece = 0; piece < 2; ++piece) {
      guided.feed(7);
      plain.feed(7);
      question.ask(guided);
      test::expect_same_state(guided.cache().state(), plain.cache().state());
      guided.cache().evict();
      ASSERT_FALSE(HasFailure());
    }
    while (plain.left() > 0) {
      guided.feed(1);
      plain.feed(1);
      test::expect_same_state(guided.cache().state(), plain.cache().state());
      ASSERT_FALSE(HasFailure()) << "offset " << plain.offset();
    }
  }
}

TEST(CacheGuide, OfAnEmptyCacheLeavesItEmpty) {
  for (const CacheConfig& config : kBothSources) {
    CacheHarness guided = harness_of(config);
    CacheHarness plain = harness_of(config);
    question_for(config).ask(guided);
    guided.cache().evict();
    EXPECT_EQ(guided.cache().keys().rows, 0);
    MorphKVCache restored(config);
    restored.set_state(guided.cache().state());
    EXPECT_EQ(restored.offset(), 0);
    guided.feed(40);
    plain.feed(40);
    test::expect_same_state(guided.cache().state(), plain.cache().state());
  }
}

// ---------------------------------------------------------------- over the budget

TEST(CacheGuide, IsCopiedWithTheCache) {
  for (const CacheConfig& config : kBothSources) {
    CacheHarness harness = harness_of(config);
    harness.extend(60);
    MorphKVCache unguided = harness.cache().copy();
    question_for(config).ask(harness);
    MorphKVCache copy = harness.cache().copy();
    for (MorphKVCache* cache : {&harness.cache(), &copy, &unguided}) cache->evict();
    test::expect_same_state(copy.state(), harness.cache().state());
    EXPECT_NE(copy.positions(), unguided.positions());
  }
}

TEST(CacheGuide, OverTheBudgetIsFollowedByEvictBeforeTheStateIsTaken) {
  CacheHarness harness = harness_of(small());
  harness.extend(17);
  question_for(small()).ask(harness);
  EXPECT_NE(refusal([&] { harness.cache().state(); }).find("evict()"), std::string::npos);
  const std::string path = testing::TempDir() + "cache_guide_test_state";
  std::remove(path.c_str());
  EXPECT_NE(refusal([&] { harness.cache().save(path); }).find("evict()"), std::string::npos);
  EXPECT_EQ(std::fopen(path.c_str(), "rb"), nullptr);
  harness.cache().evict();
  EXPECT_EQ(harness.cache().state().rows(), 16);
}

TEST(CacheExtend, IsBroughtBackToTheBudgetByTheNextUpdate) {
  for (const char* policy :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random"}) {
    for (const QuerySource source : {QuerySource::kKeys, QuerySource::kAttention}) {
      for (const std::int64_t tokens : {1, 50}) {
        CacheHarness harness = harness_of(small(source, policy));
        harness.feed(7);
        harness.extend(90);
        harness.feed(tokens);
        EXPECT_EQ(harness.cache().tokens_kept(), 16);
        harness.expect_rows_live();
      }
    }
  }
}

TEST(CacheExtend, WithoutAGuideEvictsAsAnUpdateThatEvictsAtItsEnd) {
  for (const char* policy :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random", "full"}) {
    const CacheConfig config = small(QuerySource::kAttention, policy);
    CacheHarness parts = harness_of(config);
    CacheHarness whole = harness_of(config);
    for (const std::int64_t tokens : {5, 60, 1, 20}) {
      parts.extend(tokens);
      parts.cache().evict();
      whole.feed(tokens);
      test::expect_same_state(parts.cache().state(), whole.cache().state());
    }
  }
}

TEST(CacheGuide, LeavesTheMemoryOfTheUsualSize) {
  for (const CacheConfig& config : kBothSources) {
    CacheHarness plain = harness_of(config);
    plain.feed(20);
    plain.cache().keys();
    CacheHarness guided = harness_of(config);
    guided.extend(90);
    question_for(config, 60).ask(guided);
    EXPECT_GT(guided.cache().allocated_bytes(), plain.cache().allocated_bytes());
    guided.cache().evict();
    EXPECT_EQ(guided.cache().allocated_bytes(), plain.cache().allocated_bytes());
    guided.expect_rows_live();
  }
}

// ---------------------------------------------------------------- refusals

TEST(CacheGuide, IsRefusedByEveryPolicyButMorphkvAndRkv) {
  for (const char* policy : {"h2o", "snapkv", "tova", "keydiff", "streaming", "random", "full"}) {
    CacheHarness harness = harness_of(small(QuerySource::kKeys, policy));
    harness.feed(30);
    const CacheState before = harness.cache().state();
    const std::string text = refusal([&] { question_for(small()).ask(harness.cache()); });
    EXPECT_NE(text.find(policy), std::string::npos) << text;
    EXPECT_NE(text.find("takes no guide"), std::string::npos) << text;
    test::expect_same_state(harness.cache().state(), before);
  }
}

struct Bad {
  Question guide;
  const char* refusal;
};

TEST(CacheGuide, ThatDoesNotFitIsRefusedAndLeavesTheCacheAsItWas) {
  for (const CacheConfig& config : kBothSources) {
    const Question good = question_for(config);
    const auto nan = [](Tensor tensor) {
      tensor.numbers.back() = std::numeric_limits<double>::quiet_NaN();
      return tensor;
    };
    const std::optional<Tensor>& queries = good.queries;
    std::vector<Bad> bad = {
        {{nan(good.keys), good.values, queries}, "keys of batch 0, head 1 contain NaN"},
        {{good.keys, nan(good.values), queries}, "values of batch 0, head 1 contain NaN"},
        {{random_tokens(5, 7, 3), random_tokens(5, 8, 3), queries}, "this cache holds"},
        {{good.keys, random_tokens(4, 8), queries}, "must have the shape of keys"}};
    if (queries) {
      bad.push_back({{good.keys, good.values, {}}, "needs the queries"});
      bad.push_back({{good.keys, good.values, nan(*queries)}, "queries contain NaN"});
      bad.push_back({{good.keys, good.values, random_tokens(5, 9, 3)}, "do not fit"});
    }
    for (const Bad& b : bad) {
      const std::string text = b.refusal;
      CacheHarness harness = harness_of(config);
      harness.extend(60);
      good.ask(harness);
      MorphKVCache twin = harness.cache().copy();
      const std::string refused = refusal([&] { b.guide.ask(harness.cache()); });
      EXPECT_NE(refused.find(text), std::string::npos) << refused;
      harness.expect_rows_live();
      harness.cache().evict();
      twin.evict();
      test::expect_same_state(harness.cache().state(), twin.state());

      MorphKVCache empty(config);
      if (text == "this cache holds") continue;
      EXPECT_NE(refusal([&] { b.guide.ask(empty); }).find(text), std::string::npos);
      EXPECT_EQ(empty.allocated_bytes(), 0u);
    }
  }
}

}  // namespace
}  // namespace morphkv

// From weights to one score per row: softmax, fusion, scale, soft cap, pooling.
#include "morphkv/scores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "generators.h"
#include "morphkv/policy.h"
#include "oracle.h"
#include "policies/window_head.h"

namespace morphkv {
namespace {

using test::Random;
using test::StoredRows;
using Keys = std::vector<std::vector<float>>;

// Scores [rank] of the rows in `keys`, stored in the slots given, through the policy that config
// names.
std::vector<float> keys_scores(const CacheConfig& config, const Keys& keys,
                               const std::vector<int>& slots) {
  const int max_slots = *std::max_element(slots.begin(), slots.end()) + 1;
  const auto dim = static_cast<int>(keys.front().size());
  const auto head = make_policy(config)->make_head({});
  head->columns().resize(max_slots);
  Workspace workspace(max_slots, 1, dim);
  StoredRows rows({.dtype = DType::kF32}, max_slots, dim);
  for (std::size_t t = 0; t < keys.size(); ++t) rows.set(slots[t], keys[t]);
  KeepSet keep(max_slots);
  for (std::size_t t = 0; t < keys.size(); ++t) {
    keep.append(slots[t], static_cast<Position>(t));
    const auto first = static_cast<int>(t);
    head->append(keep, {.slots = slots, .keys = rows.view(), .queries = {}}, first, 1, workspace);
  }
  std::vector<float> slot_scores(static_cast<std::size_t>(max_slots));
  head->score(keep, slot_scores, workspace);
  std::vector<float> scores(keys.size());
  by_rank(keep, slot_scores.data(), scores);
  return scores;
}

std::vector<int> first_slots(std::size_t n) {
  std::vector<int> slots(n);
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

const Keys kFieldCase14 = {{0, 0, 0, 0}, {3, -3, 0, 0},   {1, 1, 0, 0},
                           {3, 3, 0, 0}, {0.5f, 0, 0, 0}, {0, 0.5f, 0, 0}};

TEST(Scores, AreThoseOfFieldCase14) {
  const CacheConfig config{.budget = 5, .n_sink = 1, .window = 2};
  const auto scores = keys_scores(config, kFieldCase14, first_slots(6));
  EXPECT_NEAR(scores[1], 0.1561, 5e-5);
  EXPECT_NEAR(scores[2], 0.1658, 5e-5);
  EXPECT_NEAR(scores[3], 0.2734, 5e-5);
}

TEST(Scores, OfTheOracleAreThoseOfFieldCase14) {
  test::HeadOracle oracle({.budget = 5, .n_sink = 1, .window = 2});
  for (const auto& key : kFieldCase14) oracle.append(key);
  const auto scores = oracle.scores();
  EXPECT_NEAR(scores[1], 0.1561, 5e-5);
  EXPECT_NEAR(scores[2], 0.1658, 5e-5);
  EXPECT_NEAR(scores[3], 0.2734, 5e-5);
  EXPECT_EQ(oracle.victims(), std::vector<Position>{1});
}

TEST(Scores, DoNotDependOnTheSlots) {
  for (const Fusion fusion : {Fusion::kMean, Fusion::kMax}) {
    const CacheConfig config{.budget = 5, .n_sink = 1, .window = 2, .fusion = fusion};
    EXPECT_EQ(keys_scores(config, kFieldCase14, {7, 2, 9, 0, 4, 1}),
              keys_scores(config, kFieldCase14, first_slots(6)));
  }
}

TEST(Scores, FusedByMeanAddUpToOne) {
  Random random(1);
  for (const int window : {1, 3, 8}) {
    Keys keys;
    for (int t = 0; t < 20; ++t) {
      keys.emplace_back();
      for (int d = 0; d < 5; ++d) keys.back().push_back(static_cast<float>(random.normal()));
    }
    const auto scores =
        keys_scores({.budget = 30, .n_sink = 0, .window = window}, keys, first_slots(20));
    EXPECT_NEAR(std::accumulate(scores.begin(), scores.end(), 0.0), 1.0, 1e-5);
  }
}

TEST(Scores, FusedByMaximumAreTheLargestWeightOfTheWindow) {
  // Two queries; what each gives to the rows is known.
  policies::WindowHead window({QuerySource::kAttention, 2, Fusion::kMean});
  window.columns().resize(3);
  const float weights[2][3] = {{0.5f, 0.3f, 0.2f}, {0.1f, 0.6f, 0.3f}};
  for (const auto& row : weights) std::copy(row, row + 3, window.push_query());
  std::vector<float> scores(3);
  window.fuse(Fusion::kMax, 3, scores);
  EXPECT_EQ(scores, (std::vector<float>{0.5f, 0.6f, 0.3f}));
  window.fuse(Fusion::kMean, 3, scores);
  EXPECT_FLOAT_EQ(scores[0], 0.3f);
  EXPECT_FLOAT_EQ(scores[1], 0.45f);
  EXPECT_FLOAT_EQ(scores[2], 0.25f);
}

TEST(Scores, OfHugeKeysAreNumbers) {
  const float huge = 65504.0f;
  for (const int dim : {1, 7, 128}) {
    Keys keys;
    Random random(static_cast<std::uint64_t>(dim));
    for (int t = 0; t < 24; ++t) {
      keys.emplace_back();
      for (int d = 0; d < dim; ++d) keys.back().push_back(random.pick({-huge, 0.0f, 1.0f, huge}));
    }
    for (const Fusion fusion : {Fusion::kMean, Fusion::kMax}) {
      const CacheConfig config{.budget = 30, .n_sink = 0, .window = 4, .fusion = fusion};
      for (const float score : keys_scores(config, keys, first_slots(24))) {
        EXPECT_GE(score, 0.0f);
        EXPECT_LE(score, 1.0001f);
      }
    }
  }
}

// What the last tokens of a call pay, against the softmax in double, for one random shape.
void expect_attention_weights(Random& random) {
  const int slots = random.between(1, 40);
  const int dim = random.between(1, 130);
  const int group = random.between(1, 8);
  const int tokens = random.between(1, 20);
  const double scale = random.pick({1.0 / std::sqrt(static_cast<double>(dim)), 0.05, 0.3});
  const float softcap = random.pick({0.0f, 2.0f, 30.0f});
  const Fusion fusion = random.coin() ? Fusion::kMean : Fusion::kMax;
  const DType dtype = random.pick({DType::kF16, DType::kBF16, DType::kF32});

  StoredRows rows({.dtype = dtype, .gap = random.between(0, 3), .reversed = random.coin()}, slots,
                  dim);
  std::vector<int> visible;  // oldest first
  std::vector<std::vector<double>> keys;
  SlotSet seen(slots);
  for (int slot = 0; slot < slots; ++slot) visible.push_back(slot);
  random.shuffle(visible);
  visible.resize(static_cast<std::size_t>(random.between(1, slots)));
  for (const int slot : visible) {
    std::vector<float> key;
    for (int d = 0; d < dim; ++d) key.push_back(static_cast<float>(random.normal()));
    rows.set(slot, key);
    const auto stored = rows.get(slot);
    keys.emplace_back(stored.begin(), stored.end());
    seen.add(slot);
  }
  std::vector<float> queries;
  const int gap = random.between(0, 2);
  for (int i = 0; i < tokens * group * (dim + gap); ++i) {
    queries.push_back(static_cast<float>(random.normal()));
  }
  const QueriesView view{.data = queries.data(),
                         .token_stride = std::int64_t{group} * (dim + gap),
                         .group_stride = dim + gap,
                         .tokens = tokens,
                         .group = group,
                         .dim = dim};
  const auto asking = static_cast<std::size_t>(
      random.between(1, std::min(tokens, static_cast<int>(visible.size()))));

  Workspace workspace(slots, group, dim);
  AttentionPass pass({.queries = view,
                      .slots = std::span(visible).last(asking),
                      .keys = rows.view(),
                      .rows = seen,
                      .scale = static_cast<float>(scale),
                      .softcap = softcap,
                      .fusion = fusion},
                     workspace);
  keys.resize(keys.size() - asking);
  for (std::size_t a = 0; a < asking; ++a) {
    const auto own = rows.get(visible[keys.size()]);
    keys.emplace_back(own.begin(), own.end());
    std::vector<double> expected(static_cast<std::size_t>(slots), 0.0);
    for (int g = 0; g < group; ++g) {
      const float* asked = view.query(tokens - static_cast<int>(asking - a), g);
      const std::vector<double> query(asked, asked + dim);
      const auto weights = test::softmax_of(query, keys, static_cast<float>(scale), softcap);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        double& slot = expected[static_cast<std::size_t>(visible[i])];
        slot = fusion == Fusion::kMean ? slot + weights[i] / group : std::max(slot, weights[i]);
      }
    }
    std::vector<float> weights(static_cast<std::size_t>(slots), 0.0f);
    ASSERT_TRUE(pass.next());
    pass.add_to(weights.data());
    for (int slot = 0; slot < slots; ++slot) {
      const double want = expected[static_cast<std::size_t>(slot)];
      // Logits up to 40: their rounding in float is 4e-6, which exp passes on as a relative error.
      ASSERT_NEAR(weights[static_cast<std::size_t>(slot)], want, 2e-5 * want + 1e-30);
      if (want == 0.0) {
        ASSERT_EQ(weights[static_cast<std::size_t>(slot)], 0.0f) << "not visible";
      }
    }
  }
  ASSERT_FALSE(pass.next());
}

TEST(Scores, OfAttentionAreTheSoftmaxOfEachQueryFusedOverTheGroup) {
  Random random(5);
  for (int run = 0; run < 400; ++run) {
    expect_attention_weights(random);
    if (HasFatalFailure()) FAIL() << "run " << run;
  }
}

std::vector<float> pool_of(int pool, std::vector<float> scores) {
  std::vector<float> scratch(3 * scores.size());
  pool_scores(pool, scores, scratch);
  return scores;
}

using Floats = std::vector<float>;

TEST(Pooling, IsOffAtWidthOne) { EXPECT_EQ(pool_of(1, {3, 1, 2}), (Floats{3, 1, 2})); }

TEST(Pooling, TakesTheMaximumOverTheNeighboursOnBothSides) {
  EXPECT_EQ(pool_of(3, {0, 0, 5, 0, 0, 0, 1}), (Floats{0, 5, 5, 5, 0, 1, 1}));
  EXPECT_EQ(pool_of(5, {0, 0, 0, 5, 0, 0, 0}), (Floats{0, 5, 5, 5, 5, 5, 0}));
  EXPECT_EQ(pool_of(3, {5, 0, 0, 4}), (Floats{5, 5, 4, 4}));
}

TEST(Pooling, WiderThanAllRowsGivesEachTheLargestScore) {
  EXPECT_EQ(pool_of(7, {1, 9, 2}), (Floats{9, 9, 9}));
  EXPECT_EQ(pool_of(std::numeric_limits<int>::max(), {1, 9, 2}), (Floats{9, 9, 9}));
  EXPECT_EQ(pool_of(9, {4}), (Floats{4}));
  EXPECT_EQ(pool_of(9, {}), (Floats{}));
}

TEST(Pooling, AgreesWithTheOracleOnRandomScores) {
  Random random(6);
  for (int run = 0; run < 500; ++run) {
    Floats scores;
    const int rows = random.between(1, 50);
    for (int i = 0; i < rows; ++i) scores.push_back(static_cast<float>(random.uniform()));
    const int pool = 1 + 2 * random.between(0, 12);
    const auto expected = test::pooled({scores.begin(), scores.end()}, pool);
    EXPECT_EQ(pool_of(pool, scores), Floats(expected.begin(), expected.end())) << "pool " << pool;
  }
}

}  // namespace
}  // namespace morphkv

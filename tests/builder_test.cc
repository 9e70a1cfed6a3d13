// One cache for each layer, and caches by the name of their policy.
#include "morphkv/builder.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cache_harness.h"

namespace morphkv {
namespace {

std::vector<Position> kept_of_random_rows(MorphKVCache& cache) {
  test::Random random(91);
  const test::HostArray rows(test::random_tensor({1, 1, 120, 4}, random), DType::kF32);
  cache.update_and_fetch(rows.view(), rows.view());
  return cache.positions();
}

TEST(CacheBuilder, MakesOneCachePerLayerFromOneConfiguration) {
  const CacheConfig config{.budget = 20, .n_sink = 2, .window = 4};
  const ModelSpec spec{.n_layers = 30, .n_heads_kv = 3, .head_dim = 64};
  auto caches = CacheBuilder::for_model(spec, config);
  ASSERT_EQ(caches.size(), 30u);
  for (MorphKVCache& cache : caches) {
    EXPECT_EQ(cache.config(), config);
    EXPECT_EQ(cache.offset(), 0);
    EXPECT_EQ(cache.allocated_bytes(), 0u);
  }
  kept_of_random_rows(caches[3]);
  EXPECT_EQ(caches[3].offset(), 120);
  EXPECT_EQ(caches[4].offset(), 0);
}

TEST(CacheBuilder, TellsLayersApartForThePolicyThatDrawsLots) {
  const CacheConfig config{.budget = 20, .n_sink = 2, .window = 4, .policy = "random"};
  auto caches = CacheBuilder::for_model({.n_layers = 2}, config);
  MorphKVCache second = CacheBuilder::create("random", config, 1);
  const auto of_layer_0 = kept_of_random_rows(caches[0]);
  const auto of_layer_1 = kept_of_random_rows(caches[1]);
  EXPECT_NE(of_layer_0, of_layer_1);
  EXPECT_EQ(kept_of_random_rows(second), of_layer_1);
}

TEST(CacheBuilder, MakesACacheByTheNameOfEveryPolicy) {
  for (const char* name :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random", "full"}) {
    const MorphKVCache cache = CacheBuilder::create(name, {.budget = 20});
    EXPECT_EQ(cache.config().policy, name);
    EXPECT_EQ(cache.config().budget, 20);
  }
}

TEST(CacheBuilder, RefusesUnknownNamesIllegalNumbersAndModelsWithoutLayers) {
  EXPECT_THROW(CacheBuilder::create("lru"), std::invalid_argument);
  EXPECT_THROW(CacheBuilder::create("morphkv", {.budget = 12}), std::invalid_argument);
  EXPECT_THROW(CacheBuilder::for_model({.n_layers = 1}, {.window = 0}), std::invalid_argument);
  for (const int n : {0, -1}) {
    try {
      CacheBuilder::for_model({.n_layers = n}, {});
      FAIL() << n << " layers were accepted";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("n_layers " + std::to_string(n)), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace morphkv

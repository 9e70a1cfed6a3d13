// In decode the evictor allocates nothing after warm-up, on one thread or two.
#include <gtest/gtest.h>

#include <span>

#include "count_allocations.h"
#include "model_support.h"

namespace morphkv::test {
namespace {

TEST(EvictorAllocations, AreNoneInADecodeStepAfterWarmUp) {
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    for (const int threads : {1, 2}) {
      CacheConfig cache = small_cache("morphkv", queries);
      cache.pool = 5;
      Bounded bounded(test_model(), {.cache = cache, .threads = threads});
      const auto text = prose_tokens(120);
      bounded.feed(std::span(text).first(64));
      for (int t = 64; t < 110; ++t) bounded.feed(std::span(text).subspan(t, 1));
      long allocations = 0;
      for (int t = 110; t < 120; ++t) {
        ASSERT_EQ(decode(bounded.context(), std::span(text).subspan(t, 1)), 0);
        const long before = g_allocations;
        bounded.evictor().after_decode();
        allocations += g_allocations - before;
      }
      EXPECT_EQ(allocations, 0) << to_string(queries) << ", threads " << threads;
      EXPECT_EQ(bounded.evictor().stats().rows_evicted, 120 - 64);
    }
  }
}

}  // namespace
}  // namespace morphkv::test

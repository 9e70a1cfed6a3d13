// Each cell holds the row that an independent bookkeeping says it holds, for every layer and head:
// streams of pieces of many sizes, with every policy, on the trained model.
#include <gtest/gtest.h>

#include <vector>

#include "kv_probe.h"
#include "model_support.h"

namespace morphkv::test {
namespace {

// Single tokens, odd pieces, whole micro-batches; below, at and over the budget of 64.
const std::vector<int> kPieces = {30, 34, 1, 1, 1, 17, 64, 1, 2, 64, 40, 5, 1, 1, 1, 1, 1, 1, 9};

void expect_rows_where_they_should_be(const CacheConfig& cache) {
  BoundOptions options{.cache = cache, .poison_freed_rows = true};
  WatchedStream stream(test_model(), options);
  const auto text = prose_tokens(400);
  std::size_t fed = 0;
  for (const int piece : kPieces) {
    stream.feed(std::span(text).subspan(fed, static_cast<std::size_t>(piece)));
    if (testing::Test::HasFatalFailure()) return;
    fed += static_cast<std::size_t>(piece);
  }
  EXPECT_EQ(stream.evictor().stats().rows_evicted, static_cast<std::int64_t>(fed) - cache.budget);
}

TEST(EvictorRows, AttentionPolicyKeepsTheRightRowInEveryCell) {
  CacheConfig cache = small_cache();
  cache.pool = 7;
  cache.recent = 16;
  expect_rows_where_they_should_be(cache);
}

TEST(EvictorRows, KeysPolicyKeepsTheRightRowInEveryCell) {
  expect_rows_where_they_should_be(small_cache("morphkv", QuerySource::kKeys));
}

TEST(EvictorRows, RandomPolicyKeepsTheRightRowInEveryCell) {
  expect_rows_where_they_should_be(small_cache("random"));
}

TEST(EvictorRows, StreamingPolicyKeepsTheRightRowInEveryCell) {
  expect_rows_where_they_should_be(small_cache("streaming"));
}

}  // namespace
}  // namespace morphkv::test

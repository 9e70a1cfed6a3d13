// The same rows are kept on every vector target of this CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cache_harness.h"
#include "highway_targets.h"
#include "kernels/kernels.h"
#include "morphkv/cache.h"

namespace morphkv {
namespace {

using test::CacheHarness;
using test::OnlyTarget;
using test::Positions;
using test::Random;
using test::targets_here;

// What is held after each of some calls, on one target.
std::vector<std::vector<Positions>> held_on(std::int64_t target, const CacheConfig& config) {
  const OnlyTarget only(target);
  EXPECT_STREQ(kernels::target_name(), hwy::TargetName(target));
  Random random(61);
  const std::array<std::int64_t, 4> shape = {1, 2, 500, 37};
  CacheHarness harness(MorphKVCache(config), test::random_tensor(shape, random),
                       test::random_tensor(shape, random));
  if (config.queries == QuerySource::kAttention) {
    harness.set_queries(test::random_tensor({1, 4, 500, 37}, random));
  }
  std::vector<std::vector<Positions>> held;
  while (harness.left() > 0) {
    harness.feed(std::min<std::int64_t>(random.pick({1, 1, 1, 7}), harness.left()));
    held.push_back(harness.held());
  }
  return held;
}

// No input of these has a near tie, so nothing may differ.
TEST(CacheOnEveryTarget, KeepsTheSameRowsAtEveryStep) {
  const auto targets = targets_here();
  RecordProperty("targets", static_cast<int>(targets.size()));
  for (const char* policy : {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv"}) {
    for (const auto source : {QuerySource::kKeys, QuerySource::kAttention}) {
      const CacheConfig config{
          .budget = 50, .n_sink = 3, .window = 8, .queries = source, .policy = policy};
      const auto expected = held_on(targets.front(), config);
      for (const std::int64_t target : targets) {
        const auto held = held_on(target, config);
        const auto differ = std::mismatch(held.begin(), held.end(), expected.begin());
        EXPECT_TRUE(differ.first == held.end())
            << policy << ", " << to_string(source) << ", " << hwy::TargetName(target) << " and "
            << hwy::TargetName(targets.front()) << " part at call " << differ.first - held.begin();
      }
    }
  }
}

}  // namespace
}  // namespace morphkv

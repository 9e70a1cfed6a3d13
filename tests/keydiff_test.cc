// Policy keydiff: the keys that differ most from the mean of all stay.
#include <gtest/gtest.h>

#include "plain_policy.h"

namespace morphkv {
namespace {

using test::PlainHead;
using test::PlainRule;
using test::Positions;
using test::SimulatedHost;
using test::Stream;

double length(const std::vector<double>& x) {
  double square = 0.0;
  for (const double number : x) square += number * number;
  return std::sqrt(square);
}

class PlainKeydiff final : public PlainRule {
 public:
  PlainKeydiff(const CacheConfig& /*config*/, const PlainHead& head) : head_(head) {}

  void append(const Positions& /*held*/, int /*tokens*/) override {}
  std::vector<double> scores(const Positions& held) override {
    const auto keys = head_.keys(held);
    std::vector<double> anchor(keys.front().size(), 0.0);
    for (const auto& key : keys) {
      for (std::size_t d = 0; d < key.size(); ++d) anchor[d] += key[d] / length(key);
    }
    std::vector<double> scores;
    for (const auto& key : keys) {
      double product = 0.0;
      for (std::size_t d = 0; d < key.size(); ++d) product += key[d] * anchor[d];
      scores.push_back(-product / (length(key) * length(anchor)));
    }
    return scores;
  }

 private:
  PlainHead head_;
};

std::unique_ptr<PlainRule> plain(const CacheConfig& config, const PlainHead& head) {
  return std::make_unique<PlainKeydiff>(config, head);
}

// Cosines are sums of terms of either sign, each off by a few units in the last place of float.
bool is_near(double a, double b) { return std::fabs(a - b) <= 2e-6; }

TEST(KeydiffPolicy, FollowsTheCosineWithTheMeanOfAllKeysHeld) {
  for (const auto source : {QuerySource::kKeys, QuerySource::kAttention}) {
    const auto seen = test::follow_many("keydiff", source, 60, 61, plain, is_near);
    EXPECT_GT(seen.evictions, 2000);
    EXPECT_LE(seen.near_ties, 6);
  }
}

TEST(KeydiffPolicy, FollowsALongStreamWithoutDrift) {
  test::Random random(62);
  const Stream stream = test::random_stream({.tokens = 2500, .dim = 300}, random);
  const CacheConfig config{.budget = 24, .n_sink = 2, .window = 3, .policy = "keydiff"};
  test::Followed seen;
  test::follow(
      config, stream, {.max_slots = 40},
      [&] {
        return random.pick({1, 1, 1, 9});
      },
      plain, is_near, seen);
  EXPECT_EQ(seen.evictions, 2500 - 24);
  EXPECT_LE(seen.near_ties, 6);
}

TEST(KeydiffPolicy, KeepsTheKeysThatDifferWhateverTheirLength) {
  // Six keys lie along one axis, one short and one long one across, one of zeros. Of those along
  // the axis the oldest leave, all being alike.
  const Stream stream = test::written({{3, 0, 0},
                                       {1, 0, 0},
                                       {0, 0.25f, 0},
                                       {4, 0, 0},
                                       {0, 0, 0},
                                       {0, 0, 40},
                                       {2, 0, 0},
                                       {0.5f, 0, 0},
                                       {1, 0, 0}});
  const CacheConfig config{.budget = 6, .n_sink = 1, .window = 1, .pool = 7, .policy = "keydiff"};
  SimulatedHost host(config, stream, {.max_slots = 9});
  host.feed(9);
  EXPECT_EQ(host.positions(0), (Positions{0, 2, 4, 5, 7, 8}));
}

// A saved cache, a copy and eviction apart from the rows' coming read all keys again: same bits.
TEST(KeydiffPolicy, GoesOnTheSameWhereItMustReadAllKeysAgain) {
  test::Random random(63);
  const Stream stream = test::random_stream({.tokens = 400, .heads = 2, .dim = 20}, random);
  const CacheConfig config{.budget = 24, .n_sink = 2, .window = 3, .policy = "keydiff"};
  SimulatedHost whole(config, stream, {.max_slots = 40});
  SimulatedHost parts(config, stream, {.max_slots = 40});
  while (whole.offset() < 400) {
    const int tokens = std::min(random.between(1, 9), 400 - whole.offset());
    whole.feed(tokens);
    if (random.coin()) {
      parts.feed(tokens);
    } else {
      parts.extend(tokens);
      parts.evict();
    }
    ASSERT_EQ(parts.all_positions(), whole.all_positions()) << whole.offset();
  }
}

}  // namespace
}  // namespace morphkv

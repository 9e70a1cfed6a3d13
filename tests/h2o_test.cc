// Policy h2o: against cumulative attention written plainly, and the values of field case 6.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "cache_harness.h"
#include "oracle.h"
#include "simulated_host.h"

namespace morphkv {
namespace {

using test::HostOptions;
using test::Positions;
using test::Random;
using test::SimulatedHost;
using test::Stream;

CacheConfig h2o(CacheConfig config, QuerySource queries = QuerySource::kKeys) {
  config.policy = "h2o";
  config.queries = queries;
  return config;
}

CacheConfig random_config(QuerySource queries, Random& random) {
  CacheConfig config{.n_sink = random.between(0, 4),
                     .window = random.between(1, 8),
                     .pool = random.pick({1, 1, 3, 7}),
                     .fusion = random.coin() ? Fusion::kMean : Fusion::kMax};
  if (random.coin()) config.recent = config.window + random.between(0, 6);
  config.budget = config.n_sink + config.protected_tail() + random.between(1, 30);
  return h2o(config, queries);
}

int one() { return 1; }

// One head, in double; a row's total grows with each query that could see it.
class PlainH2o {
 public:
  PlainH2o(const CacheConfig& config, const Stream& stream, int head, double scale, double softcap)
      : config_(config), stream_(stream), head_(head), scale_(scale), softcap_(softcap) {}

  // A call ends: it brought tokens up to `last`.
  void append(Position last) {
    const auto first = static_cast<Position>(totals_.size());
    for (Position t = first; t <= last; ++t) {
      held_.push_back(t);
      totals_.push_back(0.0);
      ask(t);
    }
  }
  const Positions& held() const { return held_; }

  std::vector<double> scores() const {
    std::vector<double> scores;
    for (const Position p : held_) scores.push_back(totals_[static_cast<std::size_t>(p)]);
    return test::pooled(scores, config_.pool);
  }

  // What leaves by the rule, or `other` if the difference is a matter of rounding.
  void evict(const Positions& kept, int& near_ties) {
    const auto rows = static_cast<int>(held_.size());
    const auto values = scores();
    std::vector<std::pair<double, Position>> order;
    const int tail = std::max(config_.window, config_.recent);
    for (int rank = config_.n_sink; rank < rows - tail; ++rank) {
      order.emplace_back(values[static_cast<std::size_t>(rank)],
                         held_[static_cast<std::size_t>(rank)]);
    }
    std::sort(order.begin(), order.end());
    const auto n = static_cast<std::size_t>(std::max(0, rows - config_.budget));
    const double limit = n == 0 ? 0.0 : order[n - 1].first;
    const std::set<Position> stays(kept.begin(), kept.end());
    ASSERT_EQ(kept.size(), held_.size() - n);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const bool leaves = !stays.contains(order[i].second);
      if (leaves == (i < n)) continue;
      ASSERT_TRUE(test::is_near_tie(order[i].first, limit) ||
                  (i >= n && test::is_near_tie(order[i].first, order[n].first)))
          << "position " << order[i].second << " of score " << order[i].first << " at " << limit;
      ++near_ties;
    }
    held_ = kept;
  }

 private:
  void ask(Position t) {
    std::vector<std::vector<double>> keys;
    for (const Position p : held_) keys.push_back(row(stream_.key(static_cast<int>(p), head_)));
    std::vector<double> fused(held_.size(), 0.0);
    const bool with_keys = config_.queries == QuerySource::kKeys;
    const int group = with_keys ? 1 : stream_.group;
    for (int g = 0; g < group; ++g) {
      const auto query = row(with_keys ? stream_.key(static_cast<int>(t), head_)
                                       : stream_.query(static_cast<int>(t), head_, g));
      const double scale = with_keys ? 1.0 / std::sqrt(static_cast<double>(stream_.dim)) : scale_;
      const auto weights = test::softmax_of(query, keys, scale, with_keys ? 0.0 : softcap_);
      for (std::size_t i = 0; i < fused.size(); ++i) {
        fused[i] = config_.fusion == Fusion::kMean ? fused[i] + weights[i] / group
                                                   : std::max(fused[i], weights[i]);
      }
    }
    for (std::size_t i = 0; i < fused.size(); ++i) {
      totals_[static_cast<std::size_t>(held_[i])] += fused[i];
    }
  }
  static std::vector<double> row(std::span<const float> x) { return {x.begin(), x.end()}; }

  CacheConfig config_;
  const Stream& stream_;
  int head_;
  double scale_;
  double softcap_;
  Positions held_;
  std::vector<double> totals_;  // [position]
};

void follow(const CacheConfig& config, const Stream& stream, const HostOptions& options,
            const std::function<int()>& sizes, int& evictions, int& near_ties) {
  SimulatedHost host(config, stream, options);
  std::vector<PlainH2o> plain;
  for (int h = 0; h < stream.heads; ++h) {
    plain.emplace_back(config, stream, h, options.scale, options.softcap);
  }
  while (host.offset() < stream.tokens) {
    host.feed(std::min(sizes(), stream.tokens - host.offset()));
    for (int h = 0; h < stream.heads; ++h) {
      PlainH2o& head = plain[static_cast<std::size_t>(h)];
      head.append(host.offset() - 1);
      evictions += std::max(0, static_cast<int>(head.held().size()) - config.budget);
      head.evict(host.positions(h), near_ties);
      ASSERT_FALSE(testing::Test::HasFailure()) << "offset " << host.offset() << ", head " << h;
    }
  }
  host.expect_rows_in_place();
  EXPECT_EQ(host.broken_invariants(), std::vector<std::string>{});
}

HostOptions any_host(const CacheConfig& config, int longest, Random& random) {
  return {.max_slots = config.budget + longest + random.between(0, 5),
          .freeing = random.pick(
              {test::Freeing::kHighest, test::Freeing::kOldest, test::Freeing::kRandom}),
          .shuffled = random.coin(),
          .scale = 0.3f,
          .softcap = random.coin() ? 20.0f : 0.0f,
          .seed = static_cast<std::uint64_t>(random.between(0, 1 << 30))};
}

TEST(H2oPolicy, WithKeysFollowsCumulativeAttention) {
  Random random(31);
  int evictions = 0;
  int near_ties = 0;
  for (int run = 0; run < 60; ++run) {
    const CacheConfig config = random_config(QuerySource::kKeys, random);
    const Stream stream = test::random_stream({.tokens = config.budget + random.between(1, 90),
                                               .heads = random.between(1, 3),
                                               .dim = random.between(1, 40)},
                                              random);
    follow(config, stream, any_host(config, 1, random), one, evictions, near_ties);
    if (HasFailure()) FAIL() << "run " << run;
  }
  EXPECT_GT(evictions, 2000);
  EXPECT_LE(near_ties, 6);
}

TEST(H2oPolicy, WithQueriesFollowsCumulativeCausalAttentionOfAllTokensOfACall) {
  Random random(32);
  int evictions = 0;
  int near_ties = 0;
  for (int run = 0; run < 60; ++run) {
    const CacheConfig config = random_config(QuerySource::kAttention, random);
    const Stream stream = test::random_stream({.tokens = config.budget + random.between(1, 90),
                                               .heads = random.between(1, 3),
                                               .group = random.between(1, 3),
                                               .dim = random.between(1, 40)},
                                              random);
    const int longest = random.pick({1, 4, 30});
    follow(
        config, stream, any_host(config, longest, random),
        [&] { return random.between(1, longest); }, evictions, near_ties);
    if (HasFailure()) FAIL() << "run " << run;
  }
  EXPECT_GT(evictions, 2000);
  EXPECT_LE(near_ties, 6);
}

TEST(H2oPolicy, IsShownEveryQueryOfACallByTheCache) {
  Random random(33);
  const std::array<std::int64_t, 4> shape = {1, 1, 60, 8};
  const CacheConfig config = h2o({.budget = 59, .n_sink = 1, .window = 2}, QuerySource::kAttention);
  test::CacheHarness cache(MorphKVCache(config), test::random_tensor(shape, random),
                           test::random_tensor(shape, random));
  cache.set_queries(test::random_tensor(shape, random));
  cache.feed(30);
  const CacheState state = cache.cache().state();
  // Each of the thirty queries gave away one.
  EXPECT_NEAR(std::accumulate(state.memory[0].begin(), state.memory[0].end(), 0.0), 30.0, 1e-4);
}

TEST(H2oPolicy, WithKeysKeepsTheSameRowsForEverySplitOfTheStream) {
  Random random(34);
  const std::array<std::int64_t, 4> shape = {1, 3, 250, 16};
  const auto keys = test::random_tensor(shape, random);
  const CacheConfig config = h2o({.budget = 30, .n_sink = 2, .window = 5, .pool = 3});
  test::CacheHarness one_by_one(MorphKVCache(config), keys, keys);
  while (one_by_one.left() > 0) one_by_one.feed(1);
  for (const int longest : {5, 40, 250}) {
    test::CacheHarness split(MorphKVCache(config), keys, keys);
    while (split.left() > 0) {
      split.feed(std::min<std::int64_t>(random.between(1, longest), split.left()));
    }
    test::expect_same_state(split.cache().state(), one_by_one.cache().state());
  }
}

// Field case 6. Beyond the tail the heavy hitters of the beginning stay: what a late row can gather
// never reaches their totals. That is the method; the tail is what goes on.
TEST(H2oPolicy, AlwaysKeepsTheRecentTailWhenTheBudgetIsTight) {
  const Stream stream = test::gen_stream(64, 1, 8);
  for (int n_sink = 0; n_sink <= 4; ++n_sink) {
    const CacheConfig config = h2o({.budget = 14, .n_sink = n_sink, .window = 4});
    SimulatedHost host(config, stream, {.max_slots = 15});
    Positions at_44;
    while (host.offset() < 64) {
      host.feed(1);
      const Positions held = host.positions(0);
      if (host.offset() == 44) at_44 = held;
      for (int i = 1; i <= std::min(4, host.offset()); ++i) {
        EXPECT_EQ(held[held.size() - static_cast<std::size_t>(i)], host.offset() - i);
      }
    }
    const Positions held = host.positions(0);
    EXPECT_NE(held, at_44);
    EXPECT_GT(std::accumulate(held.begin(), held.end(), 0.0) / 14.0, 14.0);
  }
}

TEST(H2oPolicy, RefusesAMemoryThatIsNotItsOwn) {
  const auto head = make_policy(h2o({}))->make_head({});
  head->columns().resize(8);
  KeepSet keep(8);
  for (int i = 0; i < 3; ++i) keep.append(i, i);
  EXPECT_TRUE(head->load(keep, std::vector<float>{1, 0, 2.5f}));
  for (const std::vector<float>& bad :
       {std::vector<float>{}, {1, 2}, {1, 2, 3, 4}, {1, -1, 2}, {1, std::nanf(""), 2}}) {
    EXPECT_FALSE(head->load(keep, bad));
  }
  std::vector<float> saved;
  head->save(keep, saved);
  EXPECT_EQ(saved, (std::vector<float>{1, 0, 2.5f}));
}

}  // namespace
}  // namespace morphkv

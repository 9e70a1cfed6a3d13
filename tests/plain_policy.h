// Follows a policy with its rule written plainly: one head, double precision, recomputed from the
// vectors at every step. A rule shares nothing with the fast path but the configuration.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "oracle.h"
#include "simulated_host.h"

namespace morphkv::test {

using Positions = std::vector<Position>;
using Vectors = std::vector<std::vector<double>>;

// What a rule is asked about: one head of a stream, and the attention of its model.
struct PlainHead {
  const Stream& stream;
  int head;
  double scale;
  double softcap;

  std::vector<double> key(Position position) const {
    const auto key = stream.key(static_cast<int>(position), head);
    return {key.begin(), key.end()};
  }
  Vectors keys(const Positions& positions) const {
    Vectors all;
    for (const Position position : positions) all.push_back(key(position));
    return all;
  }
  Vectors queries(Position position) const {
    Vectors group;
    for (int g = 0; g < stream.group; ++g) {
      const auto query = stream.query(static_cast<int>(position), head, g);
      group.emplace_back(query.begin(), query.end());
    }
    return group;
  }
};

class PlainRule {
 public:
  virtual ~PlainRule() = default;
  // A call has ended: `held` are the rows held, of which it brought the last `tokens`.
  virtual void append(const Positions& held, int tokens) = 0;
  // [rank] of these rows. The least leaves; of equal ones the oldest.
  virtual std::vector<double> scores(const Positions& held) = 0;
  // What is held after the call.
  virtual void keep(const Positions& held) { static_cast<void>(held); }
};

struct Followed {
  int evictions = 0;
  int near_ties = 0;
};

using MakeRule = std::function<std::unique_ptr<PlainRule>(const CacheConfig&, const PlainHead&)>;
using IsNear = std::function<bool(double, double)>;

// `kept` must be what the rule keeps of the rows held, but for scores that are near one another.
inline void expect_kept(const CacheConfig& config, const Positions& held,
                        const std::vector<double>& scores, const Positions& kept,
                        const IsNear& is_near, Followed& seen) {
  std::vector<std::pair<double, Position>> order;
  const int rows = static_cast<int>(held.size());
  for (int rank = config.n_sink; rank < rows - config.protected_tail(); ++rank) {
    const auto i = static_cast<std::size_t>(rank);
    order.emplace_back(scores[i], held[i]);
  }
  std::sort(order.begin(), order.end());
  const auto n = static_cast<std::size_t>(std::max(0, rows - config.budget));
  ASSERT_EQ(kept.size(), held.size() - n);
  ASSERT_TRUE(std::includes(held.begin(), held.end(), kept.begin(), kept.end()));
  const std::set<Position> stays(kept.begin(), kept.end());
  std::size_t left = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const bool leaves = !stays.contains(order[i].second);
    left += leaves ? 1 : 0;
    if (leaves == (i < n)) continue;
    const bool near_last = n > 0 && is_near(order[i].first, order[n - 1].first);
    const bool near_next = n < order.size() && is_near(order[i].first, order[n].first);
    ASSERT_TRUE(i < n ? near_next : near_last)
        << "position " << order[i].second << " of score " << order[i].first << ", the last of " << n
        << " to leave has " << order[n - 1].first;
    ++seen.near_ties;
  }
  ASSERT_EQ(left, n) << "a sink or a row of the tail has left";
  seen.evictions += static_cast<int>(n);
}

// Feeds a host the whole stream and compares what every head keeps after each call.
inline void follow(const CacheConfig& config, const Stream& stream, const HostOptions& options,
                   const std::function<int()>& sizes, const MakeRule& make_rule,
                   const IsNear& is_near, Followed& seen) {
  SimulatedHost host(config, stream, options);
  std::vector<std::unique_ptr<PlainRule>> rules;
  for (int h = 0; h < stream.heads; ++h) {
    rules.push_back(make_rule(config, {stream, h, options.scale, options.softcap}));
  }
  std::vector<Positions> held(rules.size());
  while (host.offset() < stream.tokens) {
    const int tokens = std::min(sizes(), stream.tokens - host.offset());
    host.feed(tokens);
    for (int h = 0; h < stream.heads; ++h) {
      const auto i = static_cast<std::size_t>(h);
      for (int t = tokens; t > 0; --t) held[i].push_back(host.offset() - t);
      rules[i]->append(held[i], tokens);
      const Positions kept = host.positions(h);
      expect_kept(config, held[i], rules[i]->scores(held[i]), kept, is_near, seen);
      ASSERT_FALSE(testing::Test::HasFailure()) << "offset " << host.offset() << ", head " << h;
      held[i] = kept;
      rules[i]->keep(kept);
    }
  }
  host.expect_rows_in_place();
  EXPECT_EQ(host.broken_invariants(), std::vector<std::string>{});
}

inline CacheConfig any_config(const char* policy, QuerySource queries, Random& random) {
  CacheConfig config{.n_sink = random.between(0, 4),
                     .window = random.between(1, 8),
                     .pool = random.pick({1, 1, 3, 7}),
                     .fusion = random.coin() ? Fusion::kMean : Fusion::kMax,
                     .queries = queries,
                     .policy = policy};
  if (random.coin()) config.recent = config.window + random.between(0, 6);
  config.budget = config.n_sink + config.protected_tail() + random.between(1, 30);
  return config;
}

inline HostOptions any_host(const CacheConfig& config, int longest, Random& random) {
  return {.max_slots = config.budget + longest + random.between(0, 5),
          .freeing = random.pick({Freeing::kHighest, Freeing::kOldest, Freeing::kRandom}),
          .shuffled = random.coin(),
          .scale = 0.3f,
          .softcap = random.coin() ? 20.0f : 0.0f,
          .seed = static_cast<std::uint64_t>(random.between(0, 1 << 30))};
}

// Random configurations and streams. A policy that evicts per token is fed one by one: what it does
// within a call is another test's matter (expect_same_for_every_split).
inline Followed follow_many(const char* policy, QuerySource queries, int runs, std::uint64_t seed,
                            const MakeRule& make_rule, const IsNear& is_near = is_near_tie) {
  Random random(seed);
  Followed seen;
  for (int run = 0; run < runs; ++run) {
    const CacheConfig config = any_config(policy, queries, random);
    const Stream stream = random_stream({.tokens = config.budget + random.between(1, 90),
                                         .heads = random.between(1, 3),
                                         .group = random.between(1, 3),
                                         .dim = random.between(2, 40)},
                                        random);
    const bool per_token = make_policy(config)->traits().evicts_per_token;
    const int longest = per_token ? 1 : random.pick({1, 4, 30});
    follow(
        config, stream, any_host(config, longest, random),
        [&] { return random.between(1, longest); }, make_rule, is_near, seen);
    if (testing::Test::HasFailure()) {
      ADD_FAILURE() << "run " << run;
      return seen;
    }
  }
  return seen;
}

// A policy that evicts per token keeps the same rows whatever the calls are.
inline void expect_same_for_every_split(const char* policy, std::uint64_t seed) {
  Random random(seed);
  for (int run = 0; run < 10; ++run) {
    const CacheConfig config = any_config(policy, QuerySource::kKeys, random);
    const Stream stream =
        random_stream({.tokens = 150, .heads = 2, .dim = random.between(2, 40)}, random);
    SimulatedHost one_by_one(config, stream, {.max_slots = config.budget + 1});
    one_by_one.feed_all([] { return 1; });
    for (const int longest : {5, 40, 150}) {
      SimulatedHost split(config, stream, any_host(config, longest, random));
      split.feed_all([&] { return random.between(1, longest); });
      ASSERT_EQ(split.all_positions(), one_by_one.all_positions()) << "run " << run;
    }
  }
}

// One head whose keys (and queries, of one query head) are written out.
inline Stream written(const std::vector<std::vector<float>>& keys,
                      const std::vector<std::vector<float>>& queries = {}) {
  Stream stream{.tokens = static_cast<int>(keys.size()),
                .heads = 1,
                .group = queries.empty() ? 0 : 1,
                .dim = static_cast<int>(keys.front().size())};
  for (const auto& key : keys) stream.keys.insert(stream.keys.end(), key.begin(), key.end());
  for (const auto& query : queries) {
    stream.queries.insert(stream.queries.end(), query.begin(), query.end());
  }
  stream.query_token_stride = stream.query_group_stride = stream.query_head_stride = stream.dim;
  return stream;
}

}  // namespace morphkv::test

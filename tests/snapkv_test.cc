// Policy snapkv: a prompt is scored once, by its last tokens, and the scores last.
#include <gtest/gtest.h>

#include <limits>

#include "plain_policy.h"

namespace morphkv {
namespace {

using test::PlainHead;
using test::PlainRule;
using test::Positions;
using test::SimulatedHost;
using test::Stream;
using test::Vectors;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class PlainSnapkv final : public PlainRule {
 public:
  PlainSnapkv(const CacheConfig& config, const PlainHead& head) : config_(config), head_(head) {}

  void append(const Positions& held, int tokens) override {
    scores_.resize(static_cast<std::size_t>(held.back()) + 1, kInfinity);
    if (tokens == 1) return;
    const int asking = std::min(tokens, config_.window);
    std::vector<double> of_rank(held.size(), 0.0);
    for (int t = asking; t > 0; --t) {
      const Positions seen(held.begin(), held.end() - (t - 1));
      const bool keys_ask = config_.queries == QuerySource::kKeys;
      const Vectors group = keys_ask ? Vectors{head_.key(seen.back())} : head_.queries(seen.back());
      const double scale =
          keys_ask ? 1.0 / std::sqrt(static_cast<double>(head_.stream.dim)) : head_.scale;
      for (const auto& query : group) {
        const auto weights =
            test::softmax_of(query, head_.keys(seen), scale, keys_ask ? 0.0 : head_.softcap);
        for (std::size_t i = 0; i < weights.size(); ++i) {
          of_rank[i] += weights[i] / (asking * static_cast<double>(group.size()));
        }
      }
    }
    of_rank = test::pooled(of_rank, config_.pool);
    for (std::size_t i = 0; i < held.size(); ++i) {
      scores_[static_cast<std::size_t>(held[i])] = of_rank[i];
    }
  }
  std::vector<double> scores(const Positions& held) override {
    std::vector<double> scores;
    for (const Position p : held) scores.push_back(scores_[static_cast<std::size_t>(p)]);
    return scores;
  }

 private:
  CacheConfig config_;
  PlainHead head_;
  std::vector<double> scores_;  // [position]
};

std::unique_ptr<PlainRule> plain(const CacheConfig& config, const PlainHead& head) {
  return std::make_unique<PlainSnapkv>(config, head);
}

TEST(SnapkvPolicy, WithKeysFollowsTheWindowAtTheEndOfEachPrompt) {
  const auto seen = test::follow_many("snapkv", QuerySource::kKeys, 80, 51, plain);
  EXPECT_GT(seen.evictions, 2000);
  EXPECT_LE(seen.near_ties, 6);
}

TEST(SnapkvPolicy, WithQueriesFollowsTheWindowAtTheEndOfEachPrompt) {
  const auto seen = test::follow_many("snapkv", QuerySource::kAttention, 80, 52, plain);
  EXPECT_GT(seen.evictions, 2000);
  EXPECT_LE(seen.near_ties, 6);
}

// A prompt, an answer, the next turn, an answer.
TEST(SnapkvPolicy, FollowsAChat) {
  test::Random random(53);
  test::Followed seen;
  for (const auto source : {QuerySource::kKeys, QuerySource::kAttention}) {
    for (int run = 0; run < 20; ++run) {
      const CacheConfig config = test::any_config("snapkv", source, random);
      const Stream stream =
          test::random_stream({.tokens = 220, .heads = 2, .group = 2, .dim = 12}, random);
      int calls = 0;
      test::follow(
          config, stream, test::any_host(config, 90, random),
          [&] { return ++calls == 1  ? 90
                       : calls == 60 ? 25
                                     : 1; }, plain, test::is_near_tie, seen);
      if (HasFailure()) FAIL() << "run " << run;
    }
  }
  EXPECT_GT(seen.evictions, 5000);
  EXPECT_LE(seen.near_ties, 6);
}

TEST(SnapkvPolicy, LetsThePromptGoFirstAndThenTheOldest) {
  // The prompt's end, token 4, looks along the first axis: tokens 1 and 3 lie there, 2 does not.
  std::vector<std::vector<float>> keys = {{0, 1}, {1, 0}, {0, 1}, {3, 0}, {3, 0}};
  while (keys.size() < 14) keys.push_back({0, 0.5f});
  const Stream stream = test::written(keys);
  const CacheConfig config{.budget = 5, .n_sink = 1, .window = 1, .policy = "snapkv"};
  SimulatedHost host(config, stream, {.max_slots = 10});
  host.feed(5);
  const std::vector<Positions> due = {{0, 1, 3, 4, 5}, {0, 3, 4, 5, 6}, {0, 4, 5, 6, 7},
                                      {0, 5, 6, 7, 8}, {0, 6, 7, 8, 9}, {0, 7, 8, 9, 10}};
  for (const Positions& kept : due) {
    host.feed(1);
    EXPECT_EQ(host.positions(0), kept);
  }
  // The next turn scores all that is held; its end is as far along the second axis as the others.
  host.feed(3);
  EXPECT_EQ(host.positions(0), (Positions{0, 10, 11, 12, 13}));
}

TEST(SnapkvPolicy, PoolsOverThePromptOnly) {
  // Token 3 draws all attention and lends it to 2 and 4, not to those that are generated.
  const Stream stream = test::written(
      {{0, 0}, {0, 0}, {0, 0}, {9, 0}, {0, 0}, {0, 0}, {1, 0}, {0, 0}, {0, 0}, {0, 0}, {0, 0}});
  const CacheConfig config{.budget = 7, .n_sink = 0, .window = 1, .pool = 3, .policy = "snapkv"};
  SimulatedHost host(config, stream, {.max_slots = 10});
  host.feed(7);
  host.feed_all([] { return 1; });
  EXPECT_EQ(host.positions(0), (Positions{2, 3, 4, 7, 8, 9, 10}));
}

TEST(SnapkvPolicy, FedOneByOneFromTheStartIsStreaming) {
  test::Random random(54);
  const Stream stream = test::random_stream({.tokens = 60, .dim = 6}, random);
  const CacheConfig config{.budget = 10, .n_sink = 3, .window = 2, .pool = 5, .policy = "snapkv"};
  SimulatedHost host(config, stream, {.max_slots = 11});
  host.feed_all([] { return 1; });
  EXPECT_EQ(host.positions(0), (Positions{0, 1, 2, 53, 54, 55, 56, 57, 58, 59}));
}

TEST(SnapkvPolicy, RemembersItsScoresAndRefusesOthers) {
  const auto head = make_policy({.policy = "snapkv"})->make_head({});
  head->columns().resize(8);
  KeepSet keep(8);
  for (int i = 0; i < 3; ++i) keep.append(i, i);
  const std::vector<float> good = {0.5f, 0.0f, std::numeric_limits<float>::infinity()};
  EXPECT_TRUE(head->load(keep, good));
  for (const std::vector<float>& bad :
       {std::vector<float>{}, {1, 2}, {1, 2, 3, 4}, {1, -1, 2}, {1, std::nanf(""), 2}}) {
    EXPECT_FALSE(head->load(keep, bad));
  }
  std::vector<float> saved;
  head->save(keep, saved);
  EXPECT_EQ(saved, good);
}

}  // namespace
}  // namespace morphkv

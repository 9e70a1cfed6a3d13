// Policy tova: the window rule with a window of 1, whatever config.window protects.
#include <gtest/gtest.h>

#include "plain_policy.h"

namespace morphkv {
namespace {

using test::HeadOracle;
using test::PlainHead;
using test::PlainRule;
using test::Positions;
using test::SimulatedHost;
using test::Stream;

// The rule of the reference page or of the MorphKV paper, window 1, mean over the group, no
// pooling.
class PlainTova final : public PlainRule {
 public:
  PlainTova(const CacheConfig& config, const PlainHead& head)
      : head_(head),
        oracle_({.budget = config.budget,
                 .n_sink = config.n_sink,
                 .window = 1,
                 .recent = config.protected_tail(),
                 .queries = config.queries},
                head.scale, head.softcap) {}

  void append(const Positions& held, int tokens) override {
    for (const Position token : std::vector(held.end() - tokens, held.end())) {
      oracle_.append(head_.stream.key(static_cast<int>(token), head_.head));
      oracle_.ask(head_.queries(token));
    }
  }
  std::vector<double> scores(const Positions& /*held*/) override { return oracle_.scores(); }
  void keep(const Positions& kept) override {
    Positions left;
    std::set_difference(oracle_.positions().begin(), oracle_.positions().end(), kept.begin(),
                        kept.end(), std::back_inserter(left));
    oracle_.evict(left);
  }

 private:
  PlainHead head_;
  HeadOracle oracle_;
};

std::unique_ptr<PlainRule> plain(const CacheConfig& config, const PlainHead& head) {
  return std::make_unique<PlainTova>(config, head);
}

TEST(TovaPolicy, WithKeysFollowsTheReferenceRuleWithWindow1) {
  const auto seen = test::follow_many("tova", QuerySource::kKeys, 60, 41, plain);
  EXPECT_GT(seen.evictions, 2000);
  EXPECT_LE(seen.near_ties, 6);
}

TEST(TovaPolicy, WithQueriesFollowsTheAttentionOfTheLastToken) {
  const auto seen = test::follow_many("tova", QuerySource::kAttention, 60, 42, plain);
  EXPECT_GT(seen.evictions, 2000);
  EXPECT_LE(seen.near_ties, 6);
}

TEST(TovaPolicy, WithKeysKeepsTheSameRowsForEverySplitOfTheStream) {
  test::expect_same_for_every_split("tova", 43);
}

TEST(TovaPolicy, KeepsWhatMorphkvKeepsWithWindow1) {
  test::Random random(44);
  const Stream stream =
      test::random_stream({.tokens = 120, .heads = 2, .group = 3, .dim = 8}, random);
  for (const auto source : {QuerySource::kKeys, QuerySource::kAttention}) {
    CacheConfig config{
        .budget = 20, .n_sink = 2, .window = 1, .recent = 5, .queries = source, .policy = "tova"};
    SimulatedHost tova(config, stream, {.max_slots = 30});
    config.policy = "morphkv";
    SimulatedHost morphkv(config, stream, {.max_slots = 30});
    while (tova.offset() < 120) {
      tova.feed(5);
      morphkv.feed(5);
      EXPECT_EQ(tova.all_positions(), morphkv.all_positions());
    }
  }
}

TEST(TovaPolicy, AsksWithTheLastTokenAloneHoweverLongTheWindow) {
  // Tokens 1 and 2 look along one axis each; the last looks along the first.
  const Stream stream = test::written({{2, 0}, {0, 2}, {0, 2}, {2, 0}});
  for (const int window : {1, 2}) {
    const CacheConfig config{.budget = 3, .n_sink = 0, .window = window, .policy = "tova"};
    SimulatedHost host(config, stream, {.max_slots = 4});
    host.feed_all([] { return 1; });
    EXPECT_EQ(host.positions(0), (Positions{0, 2, 3})) << window;
  }
}

}  // namespace
}  // namespace morphkv

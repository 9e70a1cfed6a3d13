// Policy rkv: the importance of morphkv less the likeness to other keys.
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

constexpr double kLambda = 0.1;

double cosine(const std::vector<double>& a, const std::vector<double>& b) {
  double ab = 0.0;
  double aa = 0.0;
  double bb = 0.0;
  for (std::size_t d = 0; d < a.size(); ++d) {
    ab += a[d] * b[d];
    aa += a[d] * a[d];
    bb += b[d] * b[d];
  }
  return aa * bb > 0.0 ? ab / std::sqrt(aa * bb) : 0.0;
}

// Every pair of keys; importance from the oracle of morphkv, mean fusion.
class PlainRkv final : public PlainRule {
 public:
  PlainRkv(const CacheConfig& config, const PlainHead& head)
      : head_(head), oracle_(with_mean(config), head.scale, head.softcap) {}

  void append(const Positions& held, int tokens) override {
    for (const Position token : std::vector(held.end() - tokens, held.end())) {
      oracle_.append(head_.stream.key(static_cast<int>(token), head_.head));
      oracle_.ask(head_.queries(token));
    }
  }
  std::vector<double> scores(const Positions& held) override {
    const auto keys = head_.keys(held);
    std::vector<double> redundancy;
    double all = 0.0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      double sum = 0.0;
      for (std::size_t j = 0; j < keys.size(); ++j) {
        if (j != i) sum += cosine(keys[i], keys[j]);
      }
      redundancy.push_back(std::exp(sum / std::max(1.0, static_cast<double>(keys.size()) - 1.0)));
      all += redundancy.back();
    }
    std::vector<double> scores = oracle_.scores();
    double importance = 0.0;
    for (const double score : scores) importance += score;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      scores[i] = kLambda * scores[i] / importance - (1.0 - kLambda) * redundancy[i] / all;
    }
    return scores;
  }
  void keep(const Positions& kept) override {
    Positions left;
    std::set_difference(oracle_.positions().begin(), oracle_.positions().end(), kept.begin(),
                        kept.end(), std::back_inserter(left));
    oracle_.evict(left);
  }

 private:
  static CacheConfig with_mean(CacheConfig config) {
    config.fusion = Fusion::kMean;
    return config;
  }

  PlainHead head_;
  HeadOracle oracle_;
};

std::unique_ptr<PlainRule> plain(const CacheConfig& config, const PlainHead& head) {
  return std::make_unique<PlainRkv>(config, head);
}

// A difference of two shares, each with the errors of its own.
bool is_near(double a, double b) { return std::fabs(a - b) <= 2e-7; }

TEST(RkvPolicy, WithKeysFollowsImportanceLessRedundancy) {
  const auto seen = test::follow_many("rkv", QuerySource::kKeys, 50, 71, plain, is_near);
  EXPECT_GT(seen.evictions, 2000);
  EXPECT_LE(seen.near_ties, 6);
}

TEST(RkvPolicy, WithQueriesFollowsImportanceLessRedundancy) {
  const auto seen = test::follow_many("rkv", QuerySource::kAttention, 50, 72, plain, is_near);
  EXPECT_GT(seen.evictions, 2000);
  EXPECT_LE(seen.near_ties, 6);
}

TEST(RkvPolicy, WithKeysKeepsTheSameRowsForEverySplitOfTheStream) {
  test::expect_same_for_every_split("rkv", 73);
}

TEST(RkvPolicy, LetsRepetitionsGoBeforeRowsThatNobodyAttendsTo) {
  // Tokens 1, 3 and 4 repeat one key. The last query is zero, so all rows are attended to alike.
  const std::vector<std::vector<float>> keys = {{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0},
                                                {0, 1, 0, 0}, {0, 1, 0, 0}, {0, 0, 0, 1},
                                                {1, 0, 0, 0}};
  const std::vector<std::vector<float>> nowhere(7, {0, 0, 0, 0});
  auto at_last = nowhere;
  at_last.back() = {0, 9, 0, 0};
  CacheConfig config{
      .budget = 5, .n_sink = 1, .window = 1, .queries = QuerySource::kAttention, .policy = "rkv"};
  const Stream even = test::written(keys, nowhere);
  SimulatedHost host(config, even, {.max_slots = 8});
  host.feed(7);
  EXPECT_EQ(host.positions(0), (Positions{0, 2, 4, 5, 6}));

  // Attention alone would let 2 and 5 go: the last token looks at the repetitions, a third each.
  const Stream looked_at = test::written(keys, at_last);
  SimulatedHost other(config, looked_at, {.max_slots = 8});
  other.feed(7);
  config.policy = "morphkv";
  SimulatedHost attention(config, looked_at, {.max_slots = 8});
  attention.feed(7);
  EXPECT_EQ(attention.positions(0), (Positions{0, 1, 3, 4, 6}));
  EXPECT_EQ(other.positions(0), (Positions{0, 2, 4, 5, 6}));
}

TEST(RkvPolicy, ARowIsWorthItsBestPlaceByAGuideOrByItsOwnScore) {
  // As above: by rkv alone 1 and 3 leave. A guide that looks at the repetitions ranks them 4, 3, 1
  // (ties: the later ones are better) and the others last; so of all rows 1 and 2 are the worst.
  const std::vector<std::vector<float>> keys = {{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0},
                                                {0, 1, 0, 0}, {0, 1, 0, 0}, {0, 0, 0, 1},
                                                {1, 0, 0, 0}};
  const Stream stream = test::written(keys, std::vector<std::vector<float>>(7, {0, 0, 0, 0}));
  const Stream guide = test::written({{0, 0, 0, 0}}, {{0, 9, 0, 0}});
  CacheConfig config{
      .budget = 5, .n_sink = 1, .window = 1, .queries = QuerySource::kAttention, .policy = "rkv"};
  const auto kept = [&] {
    SimulatedHost host(config, stream, {.max_slots = 10});
    host.extend(7);
    host.guide(guide);
    host.evict();
    return host.positions(0);
  };
  EXPECT_EQ(kept(), (Positions{0, 3, 4, 5, 6}));
  config.policy = "morphkv";
  EXPECT_EQ(kept(), (Positions{0, 1, 3, 4, 6}));
}

}  // namespace
}  // namespace morphkv

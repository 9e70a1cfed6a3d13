// One head on its own, as the cache class drives it: rows in token order, gaps closed by shifting,
// copies and saved states. The rule itself is in retention_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <vector>

#include "generators.h"
#include "morphkv/retention.h"
#include "oracle.h"
#include "simulated_host.h"

namespace morphkv {
namespace {

using test::Random;
using test::SimulatedHost;
using test::Stream;

using Positions = std::vector<Position>;

// One head whose host keeps its rows in token order, as the cache class does: new rows go behind
// the last, and the gap of a victim is closed by shifting one of the two sides.
class OrderedHead {
 public:
  OrderedHead(const CacheConfig& config, const Stream& stream)
      : stream_(stream),
        policy_(make_policy(config)),
        head_(config, *policy_, {}, kSlots),
        rows_({}, kSlots, stream.dim),
        workspace_(kSlots, 1, stream.dim) {}
  OrderedHead(const OrderedHead& other)
      : stream_(other.stream_),
        policy_(other.policy_),
        head_(other.head_.copy()),
        rows_(other.rows_),
        workspace_(other.workspace_),
        start_(other.start_),
        token_(other.token_) {}
  OrderedHead& operator=(const OrderedHead&) = delete;

  void feed_one(bool close_from_front) {
    if (start_ + head_.keep().size() == kSlots) shift(start_, kSlots, -start_), start_ = 0;
    const std::vector<int> slots = {start_ + head_.keep().size()};
    rows_.set(slots[0], stream_.key(token_, 0));
    head_.append({.slots = slots, .keys = rows_.view(), .queries = {}}, token_, workspace_);
    ++token_;
    if (head_.victims().empty()) return;
    const int victim = head_.victims()[0];
    if (close_from_front) {
      shift(start_, victim, 1);
      ++start_;
    } else {
      shift(victim + 1, start_ + head_.keep().size() + 1, -1);
    }
    head_.forget_victims();
    EXPECT_TRUE(head_.victims().empty());
  }

  // The same rows at slots 0, 1, ... of another object.
  OrderedHead saved_and_loaded(const CacheConfig& config) const {
    OrderedHead loaded(config, stream_);
    std::vector<float> memory;
    head_.save(memory);
    EXPECT_TRUE(loaded.head_.load(head_.keep().positions(), memory));
    for (int rank = 0; rank < head_.keep().size(); ++rank) {
      loaded.rows_.set(rank, rows_.get(start_ + rank));
    }
    loaded.token_ = token_;
    return loaded;
  }

  Positions positions() const {
    const auto positions = head_.keep().positions();
    return {positions.begin(), positions.end()};
  }
  HeadRetention& head() { return head_; }
  int token() const { return token_; }

 private:
  static constexpr int kSlots = 40;

  void shift(int first, int last, int by) {
    if (by < 0) {
      for (int slot = first; slot < last; ++slot) rows_.copy(slot, slot + by);
    } else {
      for (int slot = last; slot-- > first;) rows_.copy(slot, slot + by);
    }
    head_.shift(first, last, by);
  }

  const Stream& stream_;
  std::shared_ptr<const Policy> policy_;
  HeadRetention head_;
  test::StoredRows rows_;
  Workspace workspace_;
  int start_ = 0;
  int token_ = 0;
};

TEST(HeadRetention, KeepsTheSameRowsShiftedCopiedAndReloaded) {
  Random random(161);
  const Stream stream = test::random_stream({.tokens = 300, .dim = 12}, random);
  for (const char* policy :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random"}) {
    const CacheConfig config{.budget = 24, .n_sink = 2, .window = 4, .policy = policy};
    SimulatedHost host(config, stream, {.max_slots = 30});
    OrderedHead shifted(config, stream);
    auto copied = std::make_unique<OrderedHead>(shifted);
    auto reloaded = std::make_unique<OrderedHead>(shifted);
    while (host.offset() < stream.tokens) {
      host.feed(1);
      shifted.feed_one(random.coin());
      copied->feed_one(random.coin());
      reloaded->feed_one(random.coin());
      if (random.between(0, 4) == 0) copied = std::make_unique<OrderedHead>(*copied);
      if (random.between(0, 4) == 0) {
        reloaded = std::make_unique<OrderedHead>(reloaded->saved_and_loaded(config));
      }
      ASSERT_EQ(shifted.positions(), host.positions(0)) << policy << " " << host.offset();
      ASSERT_EQ(copied->positions(), host.positions(0)) << policy << " " << host.offset();
      ASSERT_EQ(reloaded->positions(), host.positions(0)) << policy << " " << host.offset();
    }
  }
}

TEST(HeadRetention, RefusesAMemoryOfOtherRowsAndStaysAsItWas) {
  Random random(162);
  const Stream stream = test::random_stream({.tokens = 40, .dim = 6}, random);
  for (const char* policy : {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming"}) {
    const CacheConfig config{.budget = 24, .n_sink = 2, .window = 4, .policy = policy};
    OrderedHead head(config, stream);
    while (head.token() < 40) head.feed_one(true);
    const Positions before = head.positions();
    std::vector<float> memory;
    head.head().save(memory);
    memory.push_back(0.0f);
    EXPECT_FALSE(head.head().load(before, memory)) << policy;
    EXPECT_EQ(head.positions(), before);
  }
}

// Whatever the ring adds up over the steps, it must not drift away from the rule: keys that grow
// and shrink by a factor of 8 make its references stale again and again.
TEST(HeadRetention, FollowsTheRuleForAHundredThousandSteps) {
  constexpr int kTokens = 100'000;
  const CacheConfig config{.budget = 16, .n_sink = 2, .window = 4};
  Random random(162);
  Stream stream = test::random_stream({.tokens = kTokens, .dim = 8}, random);
  for (int t = 0; t < kTokens; ++t) {
    const double size = 0.5 * std::pow(8.0, (1.0 + std::sin(t / 700.0)) / 2.0);
    for (float& value : stream.key(t, 0)) {
      value = test::stored_as(DType::kF16, static_cast<float>(size * value));
    }
  }
  OrderedHead head(config, stream);
  test::HeadOracle oracle(config);
  int near_ties = 0;
  for (int t = 0; t < kTokens; ++t) {
    head.feed_one(t % 3 == 0);
    oracle.append(stream.key(t, 0));
    const Positions held = head.positions();
    Positions victims;
    std::ranges::set_difference(oracle.positions(), held, std::back_inserter(victims));
    if (victims != oracle.victims()) {
      ASSERT_TRUE(oracle.is_near_tie_with(victims)) << "token " << t;
      ++near_ties;
    }
    oracle.evict(victims);
    ASSERT_EQ(held, oracle.positions()) << "token " << t;
  }
  EXPECT_LT(near_ties, kTokens / 100) << "or this is no test";
}

}  // namespace
}  // namespace morphkv

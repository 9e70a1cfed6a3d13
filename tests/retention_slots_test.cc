// Where rows lie: a host that stores them as it likes, frees the slots it likes and carries out the
// moves finds each row where the core says; and nothing about slots changes which rows stay.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "generators.h"
#include "morphkv/retention.h"
#include "simulated_host.h"

namespace morphkv {
namespace {

using test::Freeing;
using test::HostOptions;
using test::Random;
using test::SimulatedHost;
using test::Stream;

struct Rule {
  const char* policy;
  QuerySource queries;
};
constexpr Rule kRules[] = {{"morphkv", QuerySource::kKeys},   {"morphkv", QuerySource::kAttention},
                           {"snapkv", QuerySource::kKeys},    {"snapkv", QuerySource::kAttention},
                           {"tova", QuerySource::kAttention}, {"keydiff", QuerySource::kKeys},
                           {"rkv", QuerySource::kKeys},       {"rkv", QuerySource::kAttention},
                           {"streaming", QuerySource::kKeys}, {"random", QuerySource::kKeys}};
constexpr Freeing kFreeings[] = {Freeing::kHighest, Freeing::kOldest, Freeing::kRandom};

CacheConfig config_of(const Rule& rule) {
  return {.budget = 24,
          .n_sink = 3,
          .window = 5,
          .recent = 7,
          .pool = 3,
          .queries = rule.queries,
          .policy = rule.policy,
          .seed = 77};
}

Stream stream_of(int tokens) {
  Random random(201);
  return test::random_stream({.tokens = tokens, .heads = 3, .group = 2, .dim = 9}, random);
}

// The same sizes each time it is made.
class CallSizes {
 public:
  explicit CallSizes(int longest, std::uint64_t seed = 5) : longest_(longest), random_(seed) {}
  int next() { return random_.between(1, longest_); }

 private:
  int longest_;
  Random random_;
};

// Feeds host and reference alike and compares what they keep after each call.
void feed_both(SimulatedHost& host, SimulatedHost& reference, int until, CallSizes& sizes) {
  while (host.offset() < until) {
    const int tokens = std::min(sizes.next(), until - host.offset());
    host.feed(tokens);
    reference.feed(tokens);
    ASSERT_EQ(host.all_positions(), reference.all_positions()) << "offset " << host.offset();
    host.expect_rows_in_place();
    ASSERT_FALSE(::testing::Test::HasFatalFailure()) << "offset " << host.offset();
  }
}

TEST(RetentionSlots, HoldEachRowWhereTheCoreSaysWhateverTheHostFrees) {
  const Stream stream = stream_of(400);
  for (const Rule& rule : kRules) {
    for (const Freeing freeing : kFreeings) {
      for (const bool shuffled : {false, true}) {
        const CacheConfig config = config_of(rule);
        // As few slots as a call of 32 tokens needs.
        SimulatedHost host(config, stream,
                           {.max_slots = 56, .freeing = freeing, .shuffled = shuffled});
        SimulatedHost reference(config, stream, {.max_slots = 200});
        CallSizes sizes(32);
        feed_both(host, reference, stream.tokens, sizes);
        if (HasFatalFailure()) FAIL() << rule.policy;
      }
    }
  }
}

TEST(RetentionSlots, NameAsManyVictimsInEveryHeadAscendingAndInUse) {
  const Stream stream = stream_of(200);
  SimulatedHost host(config_of(kRules[0]), stream, {.max_slots = 56, .freeing = Freeing::kRandom});
  CallSizes sizes(32);
  int before = 0;
  host.feed_all([&] {
    for (int h = 0; h < 3; ++h) {
      const auto victims = host.layer().victims(h);
      EXPECT_TRUE(std::is_sorted(victims.begin(), victims.end()));
      EXPECT_EQ(std::adjacent_find(victims.begin(), victims.end()), victims.end());
      EXPECT_EQ(static_cast<int>(victims.size()),
                host.offset() - before - host.layer().keep(h).size() + (before > 24 ? 24 : before));
    }
    before = host.offset();
    return sizes.next();
  });
}

// Field case 5.
TEST(RetentionSlots, ThatAreFreeMayHoldAnything) {
  const Stream stream = stream_of(200);
  for (const Rule& rule : kRules) {
    SimulatedHost clean(config_of(rule), stream, {.max_slots = 40, .poison = false});
    SimulatedHost poisoned(config_of(rule), stream, {.max_slots = 40, .poison = true});
    CallSizes sizes(16);
    feed_both(poisoned, clean, stream.tokens, sizes);
    if (HasFatalFailure()) FAIL() << rule.policy;
  }
}

// A prompt is read in a larger store, and the answer goes on in a smaller one.
TEST(RetentionSlots, MoveToASmallerStoreWithoutAnyEffectOnWhatIsKept) {
  const Stream stream = stream_of(300);
  for (const Rule& rule : kRules) {
    for (const Freeing freeing : kFreeings) {
      const CacheConfig config = config_of(rule);
      SimulatedHost host(config, stream, {.max_slots = 174, .freeing = freeing, .shuffled = true});
      SimulatedHost reference(config, stream, {.max_slots = 174, .freeing = freeing});
      host.feed(150);
      reference.feed(150);
      host.transfer(28);
      host.expect_rows_in_place();
      EXPECT_EQ(host.max_slots(), 28);
      for (int h = 0; h < 3; ++h) EXPECT_TRUE(host.layer().victims(h).empty());
      CallSizes sizes(4);
      feed_both(host, reference, stream.tokens, sizes);
      if (HasFatalFailure()) FAIL() << rule.policy;
    }
  }
}

TEST(RetentionSlots, MoveToALargerStoreAndMayUseAllOfIt) {
  const Stream stream = stream_of(300);
  for (const Rule& rule : kRules) {
    const CacheConfig config = config_of(rule);
    SimulatedHost host(config, stream,
                       {.max_slots = 28, .freeing = Freeing::kRandom, .shuffled = true});
    SimulatedHost reference(config, stream, {.max_slots = 28});
    CallSizes small(4);
    feed_both(host, reference, 100, small);
    host.transfer(124);
    reference.transfer(124);
    CallSizes large(100);
    feed_both(host, reference, stream.tokens, large);
    if (HasFatalFailure()) FAIL() << rule.policy;
  }
}

TEST(RetentionSlots, MayMoveBeyondTheOldStoreInATransfer) {
  Random random(202);
  const Stream stream = test::random_stream({.tokens = 40, .dim = 4}, random);
  const CacheConfig config{.budget = 8, .n_sink = 1, .window = 2};
  LayerRetention layer(config, *make_policy(config), 0, 1, 9);
  SimulatedHost reference(config, stream, {.max_slots = 9});
  Workspace workspace(32, 1, 4);
  test::StoredRows rows({}, 32, 4);
  const auto feed = [&](int token, int slot) {
    rows.set(slot, stream.key(token, 0));
    const int slots[] = {slot};
    const RowsView views[] = {rows.view()};
    layer.append({slots, token, views, {}}, workspace);
    reference.feed(1);
    const auto positions = layer.keep(0).positions();
    EXPECT_EQ(std::vector<Position>(positions.begin(), positions.end()), reference.positions(0));
  };
  for (int token = 0; token < 8; ++token) feed(token, token);
  std::vector<RowMove> moves;
  for (int slot = 0; slot < 8; ++slot) {
    moves.push_back({slot, 31 - slot});
    rows.copy(slot, 31 - slot);
  }
  layer.transfer(moves, 32);
  for (int token = 8; token < 30; ++token) {
    feed(token, token - 8);
  }
}

TEST(RetentionSlots, AreAllFreeAfterClearAndTheLayerIsAsNew) {
  const Stream stream = stream_of(200);
  for (const Rule& rule : kRules) {
    const CacheConfig config = config_of(rule);
    const HostOptions options{.max_slots = 40, .freeing = Freeing::kOldest};
    SimulatedHost used(config, stream, options);
    CallSizes before(16, 6);
    used.feed_all([&] { return before.next(); });
    used.clear();
    for (int h = 0; h < 3; ++h) {
      EXPECT_EQ(used.layer().keep(h).size(), 0);
      EXPECT_TRUE(used.layer().victims(h).empty());
    }
    SimulatedHost fresh(config, stream, options);
    CallSizes sizes(16);
    feed_both(used, fresh, stream.tokens, sizes);
    if (HasFatalFailure()) FAIL() << rule.policy;
  }
}

TEST(RetentionSlots, MayChangeBetweenCallsThatEvictNothing) {
  // A host that defragments its store: moves without victims.
  const Stream stream = stream_of(120);
  for (const Rule& rule : kRules) {
    const CacheConfig config = config_of(rule);
    SimulatedHost host(config, stream, {.max_slots = 60, .shuffled = true});
    SimulatedHost reference(config, stream, {.max_slots = 60});
    CallSizes sizes(8);
    for (int until = 15; until <= 120; until += 15) {
      feed_both(host, reference, until, sizes);
      host.transfer(60);  // compacts the rows
      host.expect_rows_in_place();
      if (HasFatalFailure()) FAIL() << rule.policy;
    }
  }
}

}  // namespace
}  // namespace morphkv

// The invariants hold for every real state, and each of them can be broken alone.
#include "morphkv/snapshot.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "generators.h"
#include "simulated_host.h"

namespace morphkv {
namespace {

using test::Freeing;
using test::Random;
using test::SimulatedHost;
using test::Stream;

TEST(Snapshot, OfEveryRealStateBreaksNoInvariant) {
  Random random(21);
  for (const char* policy :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random"}) {
    for (const QuerySource queries : {QuerySource::kKeys, QuerySource::kAttention}) {
      for (const Freeing freeing : {Freeing::kHighest, Freeing::kOldest, Freeing::kRandom}) {
        const Stream stream =
            test::random_stream({.tokens = 300, .heads = 3, .group = 2, .dim = 6}, random);
        const CacheConfig config{.budget = 20,
                                 .n_sink = 3,
                                 .window = 4,
                                 .recent = random.pick({0, 7}),
                                 .pool = random.pick({1, 3}),
                                 .queries = queries,
                                 .policy = policy};
        SimulatedHost host(config, stream,
                           {.max_slots = 40, .freeing = freeing, .shuffled = random.coin()});
        host.feed_all([&] {
          EXPECT_EQ(host.broken_invariants(), std::vector<std::string>{});
          return random.between(1, 20);
        });
        EXPECT_EQ(host.broken_invariants(), std::vector<std::string>{});
      }
    }
  }
}

TEST(Snapshot, RecordsWhatTheLayerHolds) {
  Random random(22);
  const Stream stream = test::random_stream({.tokens = 30, .heads = 2, .dim = 4}, random);
  const CacheConfig config{.budget = 12, .n_sink = 1, .window = 2};
  SimulatedHost host(config, stream, {.max_slots = 15});
  host.feed_all([] { return 3; });
  const LayerSnapshot snapshot = take_snapshot(host.layer(), 30, 15);
  EXPECT_EQ(snapshot.config, config);
  EXPECT_TRUE(snapshot.evicts);
  EXPECT_EQ(snapshot.offset, 30);
  EXPECT_EQ(snapshot.max_slots, 15);
  ASSERT_EQ(snapshot.heads.size(), 2u);
  for (int h = 0; h < 2; ++h) {
    const auto slots = host.layer().keep(h).slots();
    EXPECT_EQ(snapshot.heads[static_cast<std::size_t>(h)].positions, host.positions(h));
    EXPECT_EQ(snapshot.heads[static_cast<std::size_t>(h)].slots,
              std::vector<int>(slots.begin(), slots.end()));
  }
}

// Two heads, budget 6, 2 sinks, tail 2, offset 20.
LayerSnapshot sound() {
  return {.config = {.budget = 6, .n_sink = 2, .window = 2},
          .offset = 20,
          .max_slots = 8,
          .heads = {{.slots = {0, 1, 2, 3, 4, 5}, .positions = {0, 1, 7, 11, 18, 19}},
                    {.slots = {5, 0, 3, 2, 1, 4}, .positions = {0, 1, 4, 16, 18, 19}}}};
}

// One violation, of head `head`, whose text has `part`.
void expect_only(const LayerSnapshot& layer, int head, const std::string& part) {
  const auto broken = violations(layer);
  ASSERT_EQ(broken.size(), 1u) << ::testing::PrintToString(broken);
  EXPECT_EQ(broken.front().find("head " + std::to_string(head) + ": "), 0u) << broken.front();
  EXPECT_NE(broken.front().find(part), std::string::npos) << broken.front();
}

TEST(Snapshot, OfASoundStateIsSound) {
  EXPECT_EQ(violations(sound()), std::vector<std::string>{});
  EXPECT_EQ(violations({}), std::vector<std::string>{});
}

TEST(Snapshot, OfFewTokensMissesNeitherSinksNorTail) {
  LayerSnapshot layer = sound();
  layer.offset = 1;
  layer.heads = {{.slots = {4}, .positions = {0}}, {.slots = {4}, .positions = {0}}};
  EXPECT_EQ(violations(layer), std::vector<std::string>{});
  layer.offset = 0;
  layer.heads = {{}, {}};
  EXPECT_EQ(violations(layer), std::vector<std::string>{});
}

TEST(Snapshot, ShowsABrokenBound) {
  LayerSnapshot layer = sound();
  layer.heads.resize(1);
  layer.heads[0].slots.insert(layer.heads[0].slots.begin() + 3, 6);
  layer.heads[0].positions.insert(layer.heads[0].positions.begin() + 3, 8);
  expect_only(layer, 0, "7 rows, budget 6");
  layer.evicts = false;
  EXPECT_EQ(violations(layer), std::vector<std::string>{});
}

TEST(Snapshot, ShowsSlotsWithoutPositions) {
  LayerSnapshot layer = sound();
  layer.heads[1].positions.erase(layer.heads[1].positions.begin() + 2);
  expect_only(layer, 1, "as many positions as slots");
}

TEST(Snapshot, ShowsABrokenOrder) {
  LayerSnapshot layer = sound();
  layer.heads[0].positions[3] = 7;  // twice
  expect_only(layer, 0, "position 7 after 7");
  layer = sound();
  layer.heads[1].positions[2] = 17;  // above its successor
  expect_only(layer, 1, "position 16 after 17");
}

TEST(Snapshot, ShowsAPositionThatWasNeverSeen) {
  LayerSnapshot layer = sound();
  layer.config.budget = 7;
  for (auto& head : layer.heads) head.slots.push_back(6);
  layer.heads[0].positions.push_back(20);
  layer.heads[1].positions.insert(layer.heads[1].positions.begin() + 2, 3);
  expect_only(layer, 0, "position 20 after 19, offset 20");
  layer = sound();
  layer.config.n_sink = 0;
  layer.heads[0].positions[0] = -1;
  expect_only(layer, 0, "position -1");
}

TEST(Snapshot, ShowsASlotThatIsUsedTwice) {
  LayerSnapshot layer = sound();
  layer.heads.resize(1);
  layer.heads[0].slots[2] = 5;
  expect_only(layer, 0, "used twice");
}

TEST(Snapshot, ShowsASlotThatDoesNotExist) {
  for (const int slot : {8, -1}) {
    LayerSnapshot layer = sound();
    layer.heads.resize(1);
    layer.heads[0].slots[2] = slot;
    expect_only(layer, 0, "outside [0, 8)");
  }
}

TEST(Snapshot, ShowsHeadsThatUseDifferentSlots) {
  LayerSnapshot layer = sound();
  layer.heads[1].slots[2] = 7;
  expect_only(layer, 1, "other slots than head 0");
}

TEST(Snapshot, ShowsAnEvictedSink) {
  for (const int sink : {0, 1}) {
    LayerSnapshot layer = sound();
    auto& positions = layer.heads[0].positions;
    positions.erase(positions.begin() + sink);
    positions.insert(positions.begin() + 1, 3);
    expect_only(layer, 0, "sink " + std::to_string(sink));
  }
}

TEST(Snapshot, ShowsAnEvictedRowOfTheTail) {
  for (const int recent : {18, 19}) {
    LayerSnapshot layer = sound();
    auto& positions = layer.heads[1].positions;
    positions.erase(positions.begin() + 4 + (recent - 18));
    positions.insert(positions.begin() + 4, 17);
    expect_only(layer, 1, "recent row " + std::to_string(recent));
  }
}

TEST(Snapshot, ShowsATailShorterThanRecent) {
  LayerSnapshot layer = sound();
  layer.config.recent = 3;
  layer.heads.resize(1);
  expect_only(layer, 0, "recent row 17");
}

TEST(Snapshot, ShowsAllThatIsBroken) {
  LayerSnapshot layer = sound();
  layer.config.budget = 5;
  layer.offset = 21;
  // In both heads: too many rows, and position 20 of the tail is missing.
  EXPECT_EQ(violations(layer).size(), 4u);
}

}  // namespace
}  // namespace morphkv

// The bookkeeping of one head's rows, against the same kept in a map.
#include "morphkv/keep_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "generators.h"

namespace morphkv {
namespace {

std::vector<int> slots_of(const KeepSet& keep) {
  return {keep.slots().begin(), keep.slots().end()};
}
std::vector<Position> positions_of(const KeepSet& keep) {
  return {keep.positions().begin(), keep.positions().end()};
}

KeepSet five_rows() {
  KeepSet keep(16);
  const int slots[] = {3, 9, 0, 7, 5};
  for (int i = 0; i < 5; ++i) keep.append(slots[i], 10 * i);
  return keep;
}

TEST(KeepSet, StartsEmpty) {
  const KeepSet keep(4);
  EXPECT_EQ(keep.size(), 0);
  EXPECT_EQ(keep.held().limit(), 0);
  EXPECT_TRUE(keep.slots().empty());
  EXPECT_TRUE(keep.positions().empty());
}

TEST(KeepSet, ListsItsRowsByAscendingPositionWhateverTheirSlots) {
  const KeepSet keep = five_rows();
  EXPECT_EQ(keep.size(), 5);
  EXPECT_EQ(slots_of(keep), (std::vector<int>{3, 9, 0, 7, 5}));
  EXPECT_EQ(positions_of(keep), (std::vector<Position>{0, 10, 20, 30, 40}));
}

TEST(KeepSet, KnowsTheRankOfASlot) {
  const KeepSet keep = five_rows();
  for (int rank = 0; rank < 5; ++rank)
    EXPECT_EQ(keep.rank_of(keep.slots()[static_cast<std::size_t>(rank)]), rank);
}

using Runs = std::vector<std::pair<int, int>>;

Runs runs_of(const SlotSet& slots) {
  Runs runs;
  slots.for_each_run([&](int first, int last) { runs.emplace_back(first, last); });
  return runs;
}

TEST(KeepSet, KnowsItsSlotsAsRunsOfNeighbours) {
  KeepSet keep = five_rows();
  EXPECT_EQ(runs_of(keep.held()), (Runs{{0, 1}, {3, 4}, {5, 6}, {7, 8}, {9, 10}}));
  EXPECT_EQ(keep.held().limit(), 10);
  keep.append(4, 50);
  keep.erase(std::vector<int>{1});
  EXPECT_EQ(runs_of(keep.held()), (Runs{{0, 1}, {3, 6}, {7, 8}}));
  EXPECT_EQ(keep.held().limit(), 8);
  keep.move(0, 15);
  EXPECT_EQ(runs_of(keep.held()), (Runs{{3, 6}, {7, 8}, {15, 16}}));
  EXPECT_EQ(keep.held().limit(), 16);
  keep.clear();
  EXPECT_EQ(runs_of(keep.held()), Runs{});
}

// Against a plain list of flags, over word boundaries.
TEST(SlotSet, AgreesWithAListOfFlags) {
  test::Random random(1);
  for (int run = 0; run < 300; ++run) {
    const int n = random.between(1, 200);
    SlotSet set(n);
    std::vector<bool> flags(static_cast<std::size_t>(n), false);
    for (int i = 0; i < n; ++i) {
      if (random.between(0, 3) == 0) continue;
      set.add(i);
      flags[static_cast<std::size_t>(i)] = true;
    }
    const int first = random.between(0, n - 1);
    const int last = random.between(first, n);
    const int by = random.between(-first, n - last);
    // What lies in the way is not in the set.
    for (int i = std::max(0, first + by); i < std::min(n, last + by); ++i) {
      if (i >= first && i < last) continue;
      set.remove(i);
      flags[static_cast<std::size_t>(i)] = false;
    }
    set.shift(first, last, by);
    std::vector<bool> shifted = flags;
    for (int i = first; i < last; ++i) shifted[static_cast<std::size_t>(i)] = false;
    for (int i = first; i < last; ++i)
      shifted[static_cast<std::size_t>(i + by)] = flags[static_cast<std::size_t>(i)];
    Runs expected;
    for (int i = 0; i < n; ++i) {
      ASSERT_EQ(set.contains(i), shifted[static_cast<std::size_t>(i)]) << i;
      if (!shifted[static_cast<std::size_t>(i)]) continue;
      if (!expected.empty() && expected.back().second == i) {
        ++expected.back().second;
      } else {
        expected.emplace_back(i, i + 1);
      }
    }
    ASSERT_EQ(runs_of(set), expected);
    ASSERT_EQ(set.limit(), expected.empty() ? 0 : expected.back().second);
  }
}

TEST(KeepSet, ErasesTheFirstTheLastAndNeighbouringRanks) {
  KeepSet keep = five_rows();
  keep.erase(std::vector<int>{});
  EXPECT_EQ(keep.size(), 5);
  keep.erase(std::vector<int>{0, 4});
  EXPECT_EQ(slots_of(keep), (std::vector<int>{9, 0, 7}));
  keep.erase(std::vector<int>{1, 2});
  EXPECT_EQ(slots_of(keep), (std::vector<int>{9}));
  EXPECT_EQ(positions_of(keep), (std::vector<Position>{10}));
  keep.erase(std::vector<int>{0});
  EXPECT_EQ(keep.size(), 0);
}

TEST(KeepSet, MovesARowToAnotherSlotAndKeepsItsRank) {
  KeepSet keep = five_rows();
  keep.move(9, 1);
  EXPECT_EQ(slots_of(keep), (std::vector<int>{3, 1, 0, 7, 5}));
  EXPECT_EQ(positions_of(keep), (std::vector<Position>{0, 10, 20, 30, 40}));
}

TEST(KeepSet, ShiftsARunOfSlotsAndKeepsRanks) {
  KeepSet keep = five_rows();  // slots 3 9 0 7 5
  keep.shift(3, 8, 1);
  EXPECT_EQ(slots_of(keep), (std::vector<int>{4, 9, 0, 8, 6}));
  keep.shift(4, 9, -2);
  EXPECT_EQ(slots_of(keep), (std::vector<int>{2, 9, 0, 6, 4}));
  keep.shift(9, 10, 6);
  EXPECT_EQ(slots_of(keep), (std::vector<int>{2, 15, 0, 6, 4}));
  keep.shift(10, 12, -1);  // no row lies there
  EXPECT_EQ(slots_of(keep), (std::vector<int>{2, 15, 0, 6, 4}));
  EXPECT_EQ(positions_of(keep), (std::vector<Position>{0, 10, 20, 30, 40}));
}

TEST(KeepSet, IsEmptyAndUsableAfterClear) {
  KeepSet keep = five_rows();
  keep.clear();
  EXPECT_EQ(keep.size(), 0);
  keep.append(2, 0);
  EXPECT_EQ(slots_of(keep), (std::vector<int>{2}));
}

TEST(KeepSet, KeepsItsRowsWhenTheNumberOfSlotsChanges) {
  KeepSet keep = five_rows();
  keep.reserve(64);
  keep.append(63, 41);
  EXPECT_EQ(slots_of(keep), (std::vector<int>{3, 9, 0, 7, 5, 63}));
}

TEST(KeepSet, LiesInTheOrderOfItsRanksWhenPutInOrder) {
  KeepSet keep = five_rows();
  const std::vector<Position> positions = positions_of(keep);
  keep.put_in_order();
  EXPECT_EQ(slots_of(keep), (std::vector<int>{0, 1, 2, 3, 4}));
  EXPECT_EQ(positions_of(keep), positions);
  EXPECT_EQ(keep.held().limit(), 5);
  keep.append(9, 41);
  EXPECT_EQ(keep.rank_of(9), 5);
}

TEST(KeepSet, NeverReallocatesWithinItsSlots) {
  KeepSet keep(32);
  keep.append(0, 0);
  const int* const slots = keep.slots().data();
  const Position* const positions = keep.positions().data();
  for (int i = 1; i < 32; ++i) keep.append(i, i);
  EXPECT_EQ(keep.slots().data(), slots);
  EXPECT_EQ(keep.positions().data(), positions);
}

TEST(KeepSet, AgreesWithAMapOverRandomSteps) {
  constexpr int kSlots = 24;
  test::Random random(7);
  KeepSet keep(kSlots);
  std::map<Position, int> rows;  // position -> slot
  std::vector<int> free_slots;
  for (int slot = 0; slot < kSlots; ++slot) free_slots.push_back(slot);
  Position next = 0;
  for (int step = 0; step < 4000; ++step) {
    random.shuffle(free_slots);
    const int action = random.between(0, 3);
    if (action <= 1 && !free_slots.empty()) {
      keep.append(free_slots.back(), next);
      rows[next] = free_slots.back();
      free_slots.pop_back();
      next += random.between(1, 3);
    } else if (action == 2 && !free_slots.empty() && !rows.empty()) {
      const auto row = std::next(rows.begin(), random.between(0, keep.size() - 1));
      const int from = row->second;
      keep.move(from, free_slots.back());
      row->second = free_slots.back();
      free_slots.back() = from;
    } else {
      std::vector<int> ranks;
      std::vector<Position> gone;
      int rank = 0;
      for (const auto& [position, slot] : rows) {
        if (random.between(0, 4) == 0) {
          ranks.push_back(rank);
          gone.push_back(position);
          free_slots.push_back(slot);
        }
        ++rank;
      }
      keep.erase(ranks);
      for (const Position position : gone) rows.erase(position);
    }
    std::vector<Position> positions;
    std::vector<int> slots;
    for (const auto& [position, slot] : rows) {
      positions.push_back(position);
      slots.push_back(slot);
    }
    ASSERT_EQ(positions_of(keep), positions) << "step " << step;
    ASSERT_EQ(slots_of(keep), slots) << "step " << step;
  }
}

}  // namespace
}  // namespace morphkv

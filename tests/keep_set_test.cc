// The bookkeeping of one head's rows, against the same kept in a map.
#include "morphkv/keep_set.h"

#include <gtest/gtest.h>

#include <map>
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
  EXPECT_EQ(keep.slot_limit(), 0);
  EXPECT_TRUE(keep.slots().empty());
  EXPECT_TRUE(keep.positions().empty());
}

TEST(KeepSet, ListsItsRowsByAscendingPositionWhateverTheirSlots) {
  const KeepSet keep = five_rows();
  EXPECT_EQ(keep.size(), 5);
  EXPECT_EQ(slots_of(keep), (std::vector<int>{3, 9, 0, 7, 5}));
  EXPECT_EQ(positions_of(keep), (std::vector<Position>{0, 10, 20, 30, 40}));
}

TEST(KeepSet, SlotLimitIsOneMoreThanTheHighestSlotInUse) {
  KeepSet keep = five_rows();
  EXPECT_EQ(keep.slot_limit(), 10);
  keep.erase(std::vector<int>{1});
  EXPECT_EQ(keep.slot_limit(), 8);
  keep.move(0, 15);
  EXPECT_EQ(keep.slot_limit(), 16);
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

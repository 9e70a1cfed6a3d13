// How evicted rows make room: the plan, and what is left after it was carried out.
#include "morphkv/row_moves.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "generators.h"

namespace morphkv {
namespace {

using Slots = std::vector<int>;

std::vector<RowMove> plan(const Slots& victims, const Slots& freed) {
  std::vector<RowMove> moves(freed.size());
  moves.resize(static_cast<std::size_t>(plan_row_moves(victims, freed, moves)));
  return moves;
}

TEST(RowMoves, NeedNothingWhenTheVictimsAreTheFreedSlots) {
  EXPECT_TRUE(plan({}, {}).empty());
  EXPECT_TRUE(plan({3}, {3}).empty());
  EXPECT_TRUE(plan({0, 4, 9}, {0, 4, 9}).empty());
}

TEST(RowMoves, CopyTheRowOfAFreedSlotOverAVictim) {
  EXPECT_EQ(plan({2}, {7}), (std::vector<RowMove>{{.from = 7, .to = 2}}));
  EXPECT_EQ(plan({7}, {2}), (std::vector<RowMove>{{.from = 2, .to = 7}}));
}

TEST(RowMoves, PairTheSlotsInAscendingOrder) {
  EXPECT_EQ(plan({1, 5, 6}, {5, 8, 9}), (std::vector<RowMove>{{8, 1}, {9, 6}}));
  EXPECT_EQ(plan({5, 8, 9}, {1, 5, 6}), (std::vector<RowMove>{{1, 8}, {6, 9}}));
  EXPECT_EQ(plan({0, 9}, {4, 5}), (std::vector<RowMove>{{4, 0}, {5, 9}}));
}

// Any subset of `slots` of size n, ascending.
Slots choose(Slots slots, int n, test::Random& random) {
  random.shuffle(slots);
  slots.resize(static_cast<std::size_t>(n));
  std::sort(slots.begin(), slots.end());
  return slots;
}

TEST(RowMoves, LeaveExactlyTheSurvivorsOutsideTheFreedSlots) {
  test::Random random(11);
  for (int run = 0; run < 3000; ++run) {
    const int n_slots = random.between(1, 40);
    Slots all;
    for (int slot = 0; slot < n_slots; ++slot) all.push_back(slot);
    const Slots used = choose(all, random.between(1, n_slots), random);
    const int n = random.between(0, static_cast<int>(used.size()));
    const Slots victims = choose(used, n, random);
    const Slots freed = choose(used, n, random);

    std::vector<int> memory(static_cast<std::size_t>(n_slots), -1);  // [slot] content
    for (const int slot : used) memory[static_cast<std::size_t>(slot)] = 100 + slot;
    std::set<int> survivors;
    for (const int slot : used) {
      if (!std::binary_search(victims.begin(), victims.end(), slot)) survivors.insert(100 + slot);
    }

    auto moves = plan(victims, freed);
    random.shuffle(moves);  // their order must not matter
    for (const RowMove& move : moves) {
      memory[static_cast<std::size_t>(move.to)] = memory[static_cast<std::size_t>(move.from)];
    }
    std::set<int> left;
    for (const int slot : used) {
      if (!std::binary_search(freed.begin(), freed.end(), slot)) {
        left.insert(memory[static_cast<std::size_t>(slot)]);
      }
    }
    ASSERT_EQ(left, survivors) << "run " << run;
  }
}

TEST(RowMoves, NeverReadASlotThatAnotherMoveWritesAndNeverMoveARowInVain) {
  test::Random random(12);
  for (int run = 0; run < 1000; ++run) {
    Slots all;
    for (int slot = 0; slot < 20; ++slot) all.push_back(slot);
    const int n = random.between(1, 12);
    const Slots victims = choose(all, n, random);
    const Slots freed = choose(all, n, random);
    std::set<int> read;
    std::set<int> written;
    for (const RowMove& move : plan(victims, freed)) {
      EXPECT_TRUE(read.insert(move.from).second);
      EXPECT_TRUE(written.insert(move.to).second);
      EXPECT_FALSE(std::binary_search(victims.begin(), victims.end(), move.from));
      EXPECT_FALSE(std::binary_search(freed.begin(), freed.end(), move.to));
    }
    for (const int slot : read) EXPECT_EQ(written.count(slot), 0u);
  }
}

}  // namespace
}  // namespace morphkv

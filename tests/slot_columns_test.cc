// Numbers that go where their rows go, against a map from row to numbers.
#include "morphkv/slot_columns.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "generators.h"
#include "morphkv/keep_set.h"

namespace morphkv {
namespace {

using test::Random;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows in slots, each with three numbers that no other row has.
class Rows {
 public:
  explicit Rows(int max_slots) : keep_(max_slots) {
    EXPECT_EQ(columns_.add(2, 0.0f), 0);
    EXPECT_EQ(columns_.add(1, -kInfinity), 2);
    columns_.resize(max_slots);
  }

  void come(int slot) {
    keep_.append(slot, next_);
    for (int c = 0; c < 3; ++c) columns_[c][slot] = number(next_, c);
    ++next_;
  }
  void leave(int rank) {
    columns_.erase(keep_.slots()[static_cast<std::size_t>(rank)]);
    const int ranks[] = {rank};
    keep_.erase(ranks);
  }
  void move(int rank, int to) {
    const int from = keep_.slots()[static_cast<std::size_t>(rank)];
    columns_.move(from, to);
    keep_.move(from, to);
  }
  void shift(int first, int last, int by) {
    columns_.shift(first, last, by);
    keep_.shift(first, last, by);
  }
  void put_in_order() {
    columns_.gather(keep_.slots());
    keep_.put_in_order();
  }
  void resize(int max_slots) {
    columns_.resize(max_slots);
    keep_.reserve(max_slots);
  }

  void expect_in_place() const {
    std::map<int, Position> row_in;
    for (std::size_t rank = 0; rank < keep_.slots().size(); ++rank) {
      row_in[keep_.slots()[rank]] = keep_.positions()[rank];
    }
    for (int slot = 0; slot < columns_.max_slots(); ++slot) {
      const auto row = row_in.find(slot);
      for (int c = 0; c < 3; ++c) {
        const float least = c == 2 ? -kInfinity : 0.0f;
        const float due = row == row_in.end() ? least : number(row->second, c);
        ASSERT_EQ(columns_[c][slot], due) << "column " << c << ", slot " << slot;
      }
    }
  }
  int free_slot(Random& random) const {
    std::vector<int> free;
    for (int slot = 0; slot < columns_.max_slots(); ++slot) {
      if (!keep_.held().contains(slot)) free.push_back(slot);
    }
    return free[static_cast<std::size_t>(random.between(0, static_cast<int>(free.size()) - 1))];
  }
  SlotColumns& columns() { return columns_; }
  const KeepSet& keep() const { return keep_; }

 private:
  static float number(Position row, int column) {
    return (column == 2 ? -1.0f : 1.0f) * static_cast<float>(3 * row + column + 1);
  }

  SlotColumns columns_;
  KeepSet keep_;
  Position next_ = 0;
};

TEST(SlotColumns, FollowTheRowsWhateverHappensToThem) {
  Random random(71);
  Rows rows(20);
  for (int step = 0; step < 3000; ++step) {
    const int held = rows.keep().size();
    const int what = random.between(0, 6);
    if (held < 6 || (what == 0 && held < 15)) {
      rows.come(rows.free_slot(random));
    } else if (what == 1) {
      rows.leave(random.between(0, held - 1));
    } else if (what == 2) {
      rows.move(random.between(0, held - 1), rows.free_slot(random));
    } else if (what == 3) {
      rows.put_in_order();
    } else if (what == 4) {
      rows.put_in_order();
      rows.resize(random.pick({16, 20, 33}));
    } else if (what == 5) {
      // In order, the rows behind a gap close it, or those before it do.
      const int gap = random.between(0, held - 1);
      rows.put_in_order();
      rows.leave(gap);
      random.coin() ? rows.shift(0, gap, 1) : rows.shift(gap + 1, held, -1);
    }
    rows.expect_in_place();
    if (HasFatalFailure()) FAIL() << "step " << step << ", what " << what;
  }
}

TEST(SlotColumns, ShiftByMoreThanTheirNumber) {
  for (const auto& [first, last, by] :
       {std::array{4, 7, 5}, {4, 7, -4}, {4, 5, 3}, {4, 5, -3}, {4, 7, 1}, {4, 7, -1}}) {
    Rows rows(16);
    for (int slot = first; slot < last; ++slot) rows.come(slot);
    rows.shift(first, last, by);
    rows.expect_in_place();
  }
}

TEST(SlotColumns, AreSavedByRankAndLoadedIntoAnySlots) {
  Rows rows(8);
  for (const int slot : {5, 0, 3}) rows.come(slot);
  std::vector<float> saved;
  rows.columns().save(rows.keep().slots(), saved);
  EXPECT_EQ(saved, (std::vector<float>{1, 4, 7, 2, 5, 8, -3, -6, -9}));

  Rows other(12);
  for (int slot = 0; slot < 4; ++slot) other.come(slot);
  const std::vector<int> slots = {11, 2, 7};
  ASSERT_TRUE(other.columns().load(slots, saved));
  std::vector<float> again;
  other.columns().save(slots, again);
  EXPECT_EQ(again, saved);
  for (const int slot : {0, 1, 3}) EXPECT_EQ(other.columns()[0][slot], 0.0f) << "of an earlier row";
}

TEST(SlotColumns, RefuseNumbersThatAreNotTheirsAndStayAsTheyWere) {
  Rows rows(8);
  for (const int slot : {5, 0}) rows.come(slot);
  const auto slots = rows.keep().slots();
  std::vector<float> good;
  rows.columns().save(slots, good);
  const auto refuses = [&](std::size_t at, float value) {
    std::vector<float> bad = good;
    bad[at] = value;
    EXPECT_FALSE(rows.columns().load(slots, bad)) << at << ": " << value;
  };
  for (std::size_t i = 0; i < 4; ++i) refuses(i, -0.5f);
  for (std::size_t i = 0; i < 6; ++i) refuses(i, std::nanf(""));
  EXPECT_FALSE(rows.columns().load(slots, {}));
  EXPECT_FALSE(rows.columns().load({}, good));
  EXPECT_FALSE(rows.columns().load(slots, std::span(good).first(5)));
  rows.expect_in_place();
}

TEST(SlotColumns, OfNoRowsAreAsNew) {
  Rows rows(8);
  for (const int slot : {5, 0}) rows.come(slot);
  ASSERT_TRUE(rows.columns().load({}, {}));
  for (int slot = 0; slot < 8; ++slot) {
    EXPECT_EQ(rows.columns()[1][slot], 0.0f);
    EXPECT_EQ(rows.columns()[2][slot], -kInfinity);
  }
}

TEST(SlotColumns, KeepAnOddNumberOfCacheLinesApart) {
  for (const int max_slots : {1, 16, 17, 512, 519}) {
    SlotColumns columns;
    columns.add(2, 0.0f);
    columns.resize(max_slots);
    EXPECT_GE(columns.stride(), max_slots);
    EXPECT_EQ(columns.stride() % 32, 16);
    EXPECT_EQ(columns[1], columns[0] + columns.stride());
  }
}

}  // namespace
}  // namespace morphkv

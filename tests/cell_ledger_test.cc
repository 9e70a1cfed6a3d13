#include "cell_ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace morphkv::llama_cpp {
namespace {

using Cells = std::vector<int>;
using Labels = std::vector<Position>;

CellLedger ledger_of(int n_cells, int n_sink, const Cells& cells) {
  CellLedger ledger(n_cells, n_sink);
  for (const int cell : cells) ledger.append(cell);
  return ledger;
}

FreePlan plan_of(const CellLedger& ledger, int n) {
  FreePlan plan;
  ledger.plan_free(n, plan);
  return plan;
}

TEST(CellLedger, AFreshLedgerHoldsNothing) {
  const CellLedger ledger(8, 2);
  EXPECT_EQ(ledger.offset(), 0);
  EXPECT_EQ(ledger.rows(), 0);
  EXPECT_TRUE(ledger.cells_in_use().empty());
  EXPECT_TRUE(ledger.is_free(0));
  EXPECT_TRUE(violations(ledger.snapshot()).empty());
}

TEST(CellLedger, TheOffsetCountsTokensWhateverLeaves) {
  CellLedger ledger = ledger_of(8, 2, {0, 1, 2, 3, 4});
  EXPECT_EQ(ledger.offset(), 5);
  ledger.free(plan_of(ledger, 3));
  EXPECT_EQ(ledger.offset(), 5);
  EXPECT_EQ(ledger.rows(), 2);
  ledger.append(2);
  EXPECT_EQ(ledger.offset(), 6);
}

TEST(CellLedger, WhileOnlySinksAreHeldTheOffsetCountsThem) {
  CellLedger ledger(8, 4);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(ledger.offset(), i);
    ledger.append(7 - i);
  }
  EXPECT_EQ(ledger.offset(), 4);
  EXPECT_EQ(ledger.rows(), 4);
}

TEST(CellLedger, TheOldestLabelsThatAreNoSinksLeaveFirst) {
  CellLedger ledger = ledger_of(8, 2, {5, 0, 7, 1, 3, 2});
  const FreePlan plan = plan_of(ledger, 3);
  EXPECT_EQ(plan.first, 2);
  EXPECT_EQ(plan.last, 5);
  EXPECT_EQ(plan.cells, (Cells{1, 3, 7}));  // ascending, not by label
  ledger.free(plan);
  const LedgerSnapshot after = ledger.snapshot();
  EXPECT_EQ(after.labels, (Labels{0, 1, 5}));
  EXPECT_EQ(after.cells, (Cells{5, 0, 2}));
}

TEST(CellLedger, PlanningChangesNothingAndForgetsAnOlderPlan) {
  CellLedger ledger = ledger_of(8, 0, {3, 1, 2});
  FreePlan plan{.first = 9, .last = 12, .cells = {0, 0, 0, 0}};
  ledger.plan_free(2, plan);
  EXPECT_EQ(plan.first, 0);
  EXPECT_EQ(plan.last, 2);
  EXPECT_EQ(plan.cells, (Cells{1, 3}));
  EXPECT_EQ(ledger.rows(), 3);
  ledger.plan_free(0, plan);
  EXPECT_EQ(plan.first, plan.last);
  EXPECT_TRUE(plan.cells.empty());
}

TEST(CellLedger, WithoutSinksTheVeryFirstLabelLeaves) {
  CellLedger ledger = ledger_of(4, 0, {2, 0});
  ledger.free(plan_of(ledger, 1));
  EXPECT_EQ(ledger.snapshot().labels, (Labels{1}));
  EXPECT_TRUE(ledger.is_free(2));
  EXPECT_FALSE(ledger.is_free(0));
}

TEST(CellLedger, AFreedCellCanBeUsedAgain) {
  CellLedger ledger = ledger_of(3, 1, {0, 1, 2});
  EXPECT_FALSE(ledger.is_free(1));
  ledger.free(plan_of(ledger, 1));
  EXPECT_TRUE(ledger.is_free(1));
  ledger.append(1);
  EXPECT_FALSE(ledger.is_free(1));
  EXPECT_EQ(ledger.snapshot().labels, (Labels{0, 2, 3}));
  EXPECT_EQ(ledger.snapshot().cells, (Cells{0, 2, 1}));
}

TEST(CellLedger, CompactingNumbersTheCellsInUseFromZeroInTheirOrder) {
  CellLedger ledger = ledger_of(100, 2, {90, 10, 50, 20, 70});
  ledger.free(plan_of(ledger, 1));  // cell 50
  const Cells held = {10, 20, 70, 90};
  ledger.compact(held, 6);
  const LedgerSnapshot after = ledger.snapshot();
  EXPECT_EQ(after.n_cells, 6);
  EXPECT_EQ(after.labels, (Labels{0, 1, 3, 4}));
  EXPECT_EQ(after.cells, (Cells{3, 0, 1, 2}));
  EXPECT_EQ(ledger.offset(), 5);
  EXPECT_FALSE(ledger.is_free(3));
  EXPECT_TRUE(ledger.is_free(4));
  EXPECT_TRUE(violations(after).empty());
  ledger.append(5);
  ledger.append(4);
  EXPECT_EQ(ledger.rows(), 6);
}

TEST(CellLedger, ClearingStartsAgainFromTheFirstSink) {
  CellLedger ledger = ledger_of(8, 2, {0, 1, 2, 3});
  ledger.free(plan_of(ledger, 1));
  ledger.clear();
  EXPECT_EQ(ledger.offset(), 0);
  EXPECT_EQ(ledger.rows(), 0);
  for (int cell = 0; cell < 8; ++cell) EXPECT_TRUE(ledger.is_free(cell)) << cell;
  ledger.append(6);
  EXPECT_EQ(ledger.snapshot().labels, (Labels{0}));
  EXPECT_EQ(ledger.snapshot().cells, (Cells{6}));
}

// --- Invariants
// -----------------------------------------------------------------------------------

// A sound one: sinks 0 and 1, labels 5 to 7, offset 8.
const LedgerSnapshot kSound{
    .n_cells = 10, .n_sink = 2, .offset = 8, .labels = {0, 1, 5, 6, 7}, .cells = {4, 0, 9, 1, 2}};

// The change breaks one invariant and no other.
void expect_only(const LedgerSnapshot& broken, const std::string& words) {
  const auto found = violations(broken);
  ASSERT_EQ(found.size(), 1u) << (found.empty() ? "" : found.back());
  EXPECT_NE(found[0].find(words), std::string::npos) << found[0];
}

TEST(CellLedgerInvariants, ASoundLedgerBreaksNone) {
  EXPECT_TRUE(violations(kSound).empty());
  EXPECT_TRUE(violations(CellLedger(4, 2).snapshot()).empty());
  EXPECT_TRUE(
      violations({.n_cells = 4, .n_sink = 2, .offset = 1, .labels = {0}, .cells = {3}}).empty());
}

TEST(CellLedgerInvariants, ACellWithTwoLabelsIsFound) {
  LedgerSnapshot broken = kSound;
  broken.cells[2] = broken.cells[0];
  expect_only(broken, "carries two labels");
}

TEST(CellLedgerInvariants, ACellBelowZeroIsFound) {
  LedgerSnapshot broken = kSound;
  broken.cells[3] = -1;
  expect_only(broken, "outside [0, 10)");
}

TEST(CellLedgerInvariants, ACellBeyondTheLastIsFound) {
  LedgerSnapshot broken = kSound;
  broken.cells[3] = 10;
  expect_only(broken, "outside [0, 10)");
}

TEST(CellLedgerInvariants, ALabelWithoutACellIsFound) {
  LedgerSnapshot broken = kSound;
  broken.cells.pop_back();
  expect_only(broken, "as many labels as cells");
}

TEST(CellLedgerInvariants, ASinkThatIsGoneIsFound) {
  LedgerSnapshot broken = kSound;
  broken.labels[1] = 4;
  expect_only(broken, "sink 1 is not held");
}

TEST(CellLedgerInvariants, ASinkThatIsGoneWhileNothingElseIsHeldIsFound) {
  expect_only({.n_cells = 4, .n_sink = 2, .offset = 2, .labels = {0}, .cells = {1}},
              "sink 1 is not held");
}

TEST(CellLedgerInvariants, AGapBetweenTheLabelsIsFound) {
  LedgerSnapshot broken = kSound;
  broken.labels[2] = 4;
  expect_only(broken, "label 4 stands where 5 is due");
}

TEST(CellLedgerInvariants, ANewestLabelThatIsNotTheLastTokenIsFound) {
  LedgerSnapshot broken = kSound;
  broken.offset = 9;
  expect_only(broken, "label 7 stands where 8 is due");
}

TEST(CellLedgerInvariants, AHeldLabelThatHasNotBeenSeenIsFound) {
  LedgerSnapshot broken = kSound;
  broken.offset = 7;
  expect_only(broken, "label 7 stands where 6 is due");
}

// --- Against a naive map
// --------------------------------------------------------------------------

// The same thing without any cleverness.
struct NaiveLedger {
  int n_sink;
  Position offset = 0;
  std::map<Position, int> cell_of;

  Labels oldest(int n) const {
    Labels labels;
    for (const auto& [label, cell] : cell_of) {
      if (label >= n_sink && static_cast<int>(labels.size()) < n) labels.push_back(label);
    }
    return labels;
  }
  Cells cells() const {
    Cells out;
    for (const auto& [label, cell] : cell_of) out.push_back(cell);
    std::sort(out.begin(), out.end());
    return out;
  }
  void compact() {
    const Cells in_use = cells();
    for (auto& [label, cell] : cell_of) {
      cell = static_cast<int>(std::find(in_use.begin(), in_use.end(), cell) - in_use.begin());
    }
  }
};

void expect_same(const CellLedger& ledger, const NaiveLedger& naive, int n_cells) {
  ASSERT_EQ(ledger.offset(), naive.offset);
  ASSERT_EQ(ledger.rows(), static_cast<int>(naive.cell_of.size()));
  ASSERT_EQ(ledger.cells_in_use(), naive.cells());
  const LedgerSnapshot snapshot = ledger.snapshot();
  std::map<Position, int> cell_of;
  for (std::size_t i = 0; i < snapshot.labels.size(); ++i) {
    cell_of[snapshot.labels[i]] = snapshot.cells[i];
  }
  ASSERT_EQ(cell_of, naive.cell_of);
  ASSERT_TRUE(std::is_sorted(snapshot.labels.begin(), snapshot.labels.end()));
  const Cells in_use = naive.cells();
  for (int cell = 0; cell < n_cells; ++cell) {
    ASSERT_NE(ledger.is_free(cell), std::binary_search(in_use.begin(), in_use.end(), cell)) << cell;
  }
  ASSERT_EQ(violations(snapshot), std::vector<std::string>{});
}

TEST(CellLedgerProperty, RandomHistoriesAgreeWithANaiveMap) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto below = [&](int n) {
      return static_cast<int>(random() % static_cast<unsigned>(std::max(n, 1)));
    };
    int n_cells = 1 + below(40);
    const int n_sink = below(std::min(n_cells, 6));
    CellLedger ledger(n_cells, n_sink);
    NaiveLedger naive{n_sink, 0, {}};
    FreePlan plan;
    for (int step = 0; step < 60; ++step) {
      const int evictable = std::max(0, static_cast<int>(naive.cell_of.size()) - n_sink);
      const int what = below(20);
      if (what == 0) {
        ledger.clear();
        naive = {n_sink, 0, {}};
      } else if (what == 1) {
        n_cells = static_cast<int>(naive.cell_of.size()) + 1 + below(20);
        ledger.compact(ledger.cells_in_use(), n_cells);
        naive.compact();
      } else if (what < 8 && evictable > 0) {
        const int n = 1 + below(evictable);
        ledger.plan_free(n, plan);
        const Labels labels = naive.oldest(n);
        ASSERT_EQ(plan.first, labels.front());
        ASSERT_EQ(plan.last, labels.back() + 1);
        Cells cells;
        for (const Position label : labels) cells.push_back(naive.cell_of[label]);
        std::sort(cells.begin(), cells.end());
        ASSERT_EQ(plan.cells, cells);
        ledger.free(plan);
        for (const Position label : labels) naive.cell_of.erase(label);
      } else {
        Cells free;
        for (int cell = 0; cell < n_cells; ++cell) {
          if (ledger.is_free(cell)) free.push_back(cell);
        }
        if (free.empty()) continue;
        const int cell = free[static_cast<std::size_t>(below(static_cast<int>(free.size())))];
        ledger.append(cell);
        naive.cell_of[naive.offset++] = cell;
      }
      expect_same(ledger, naive, n_cells);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(CellLedger, LoadsWhatItsSnapshotShows) {
  CellLedger ledger(12, 2);
  for (const int cell : {3, 0, 5, 7, 1, 2}) ledger.append(cell);
  FreePlan plan;
  ledger.plan_free(2, plan);
  ledger.free(plan);
  const LedgerSnapshot shown = ledger.snapshot();
  CellLedger loaded(12, 2);
  loaded.append(9);
  loaded.load(shown.offset, shown.cells);
  EXPECT_EQ(loaded.snapshot().labels, shown.labels);
  EXPECT_EQ(loaded.snapshot().cells, shown.cells);
  EXPECT_EQ(loaded.offset(), 6);
  EXPECT_EQ(loaded.cells_in_use(), ledger.cells_in_use());
  EXPECT_TRUE(loaded.is_free(9));
  loaded.load(0, {});
  EXPECT_EQ(loaded.offset(), 0);
  EXPECT_EQ(loaded.rows(), 0);
}

}  // namespace
}  // namespace morphkv::llama_cpp

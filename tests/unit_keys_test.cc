// Mean cosines from a sum that rows enter and leave, against every pair of keys.
#include "policies/unit_keys.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "generators.h"

namespace morphkv {
namespace {

using policies::UnitKeys;
using test::Random;
using test::StoredRows;

double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  const auto product = [](const auto& x, const auto& y) {
    return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
  };
  const double lengths = std::sqrt(product(a, a) * product(b, b));
  return lengths > 0.0 ? product(a, b) / lengths : 0.0;
}

// Rows that come and leave in a store of `slots`.
class Rows {
 public:
  Rows(DType dtype, int slots, int dim)
      : store({.dtype = dtype}, slots, dim), keep(slots), ws(slots, 1, dim), units(columns) {
    columns.resize(slots);
  }

  void come(int slot, const std::vector<float>& key) {
    store.set(slot, key);
    keep.append(slot, next_++);
    const int slots[] = {slot};
    units.append(columns, keep, {.slots = slots, .keys = store.view(), .queries = {}}, 0, 1, ws);
  }
  void leave(int rank, bool shown = true) {
    const int slot = keep.slots()[static_cast<std::size_t>(rank)];
    const RowsView keys = store.view();
    units.erased(columns, slot, shown ? &keys : nullptr, ws);
    columns.erase(slot);
    const int ranks[] = {rank};
    keep.erase(ranks);
    store.fill(slot, test::kPoison);
  }
  void expect_all_pairs() const {
    for (const int a : keep.slots()) {
      double sum = 0.0;
      double others = 0.0;
      for (const int b : keep.slots()) {
        sum += cosine(store.get(a), store.get(b));
        if (a != b) others += cosine(store.get(a), store.get(b));
      }
      EXPECT_NEAR(units.mean_cosine(columns, a), sum / keep.size(), 1e-6);
      if (keep.size() > 1) {
        EXPECT_NEAR(units.mean_cosine_with_others(columns, a, keep.size()),
                    others / (keep.size() - 1), 3e-6);
      }
    }
  }

  StoredRows store;
  KeepSet keep;
  Workspace ws;
  SlotColumns columns;
  UnitKeys units;

 private:
  Position next_ = 0;
};

std::vector<float> random_key(int dim, double spread, Random& random) {
  std::vector<float> key;
  for (int d = 0; d < dim; ++d) key.push_back(static_cast<float>(spread * random.normal()));
  return key;
}

TEST(UnitKeys, GiveTheMeanOverEveryPairWhateverComesAndLeaves) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const int dim : {1, 3, 64, 257, 600}) {
      Random random(81);
      Rows rows(dtype, 12, dim);
      std::vector<int> free = {3, 7, 0, 11, 5, 2};
      for (int step = 0; step < 60; ++step) {
        if (free.empty()) {
          const int rank = random.between(0, rows.keep.size() - 1);
          free.push_back(rows.keep.slots()[static_cast<std::size_t>(rank)]);
          rows.leave(rank, random.coin());
        }
        const double spread = random.pick({1e-3, 1.0, 50.0, 0.0});
        rows.come(free.back(), random_key(dim, spread, random));
        free.pop_back();
        rows.expect_all_pairs();
      }
    }
  }
}

TEST(UnitKeys, HaveTheSameBitsWhenAllKeysAreReadAgain) {
  Random random(82);
  Rows kept(DType::kF16, 8, 70);
  for (int i = 0; i < 200; ++i) {
    if (kept.keep.size() == 8) kept.leave(random.between(0, 7));
    int slot = 0;
    while (kept.keep.held().contains(slot)) ++slot;
    kept.come(slot, random_key(70, 1.0, random));
  }
  SlotColumns columns;
  UnitKeys again(columns);
  columns.resize(8);
  again.forget();
  again.append(columns, kept.keep, {.slots = {}, .keys = kept.store.view(), .queries = {}}, 0, 0,
               kept.ws);
  for (const int slot : kept.keep.slots()) {
    EXPECT_EQ(again.mean_cosine(columns, slot), kept.units.mean_cosine(kept.columns, slot));
  }
}

TEST(UnitKeys, TakeKeysTooShortForAnInverseAsZeros) {
  Rows rows(DType::kBF16, 4, 2);
  rows.come(0, {1e-38f, 0});
  rows.come(1, {1, 0});
  EXPECT_TRUE(std::isfinite(rows.units.mean_cosine(rows.columns, 0)));
  rows.come(2, {1e-39f, 1e-39f});
  for (int slot = 0; slot < 3; ++slot)
    EXPECT_TRUE(std::isfinite(rows.units.mean_cosine(rows.columns, slot)));
  EXPECT_EQ(rows.units.mean_cosine(rows.columns, 2), 0.0f);
}

TEST(UnitKeys, AreAsNewWhenOtherRowsAreHeld) {
  Rows rows(DType::kF16, 4, 2);
  rows.come(0, {1, 0});
  rows.units.forget();
  rows.keep.clear();
  rows.come(1, {0, 1});
  EXPECT_EQ(rows.units.mean_cosine(rows.columns, 1), 1.0f);
  EXPECT_EQ(rows.units.mean_cosine_with_others(rows.columns, 1, 1), 0.0f);
}

}  // namespace
}  // namespace morphkv

// How alike the keys of a head are: the cosine of each with all others, in one pass over the keys
// per call. The mean cosine of a key with n keys is its product with the mean of their unit
// vectors, so their sum is kept: a row adds its unit vector when it comes and takes it back when it
// leaves.
#pragma once

#include <cstdint>
#include <vector>

#include "morphkv/keep_set.h"
#include "morphkv/policy.h"
#include "policies/slot_values.h"

namespace morphkv::policies {

class UnitKeys {
 public:
  explicit UnitKeys(int max_slots);

  // The tokens [first, first + count) of the call were just appended to `keep`.
  void append(const KeepSet& keep, const NewRows& rows, int first, int count, Workspace& ws);
  // Mean cosine of the row's key with those of all rows held at the last append(), itself included;
  // a key of zeros counts as at right angles to all.
  float mean_cosine(int slot) const { return mean_cosine_[slot]; }
  // The same with the other keys of so many rows.
  float mean_cosine_with_others(int slot, int rows) const {
    if (rows < 2) return 0.0f;
    const float itself = inverse_norm_[slot] > 0.0f ? 1.0f : 0.0f;
    return (static_cast<float>(rows) * mean_cosine_[slot] - itself) / static_cast<float>(rows - 1);
  }

  // HeadPolicy::erase_shown().
  void erase(int slot, const RowsView& keys, Workspace& ws) { add(slot, keys, -1.0, ws); }
  // Rows have left, or come, that are not shown: the next append() reads all keys again. The sum is
  // exact, so nothing else changes by that, and there is nothing to save.
  void forget() { stale_ = true; }
  void move(int from, int to);
  void shift(int first, int last, int by);
  void clear();
  void resize(int max_slots);

 private:
  void add(int slot, const RowsView& keys, double times, Workspace& ws);

  std::vector<std::int64_t> sum_;  // [dim] of the unit vectors, in units of 2^-38
  bool stale_ = false;             // sum_ and inverse_norm_ are not those of the rows held
  SlotValues inverse_norm_;        // 1 / length of the key; 0 for a key of zeros
  SlotValues mean_cosine_;
};

}  // namespace morphkv::policies

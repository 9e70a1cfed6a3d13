// How alike the keys of a head are: the cosine of each with all others, in one pass over the keys
// per call. The mean cosine of a key with n keys is its product with the mean of their unit
// vectors, so their sum is kept: a row adds its unit vector when it comes and takes it back when it
// leaves.
#pragma once

#include <cstdint>
#include <vector>

#include "morphkv/keep_set.h"
#include "morphkv/slot_columns.h"
#include "morphkv/tensor_view.h"
#include "morphkv/workspace.h"

namespace morphkv::policies {

// Lengths and cosines are columns. Every call is given the columns that the constructor was given,
// or their copy.
class UnitKeys {
 public:
  explicit UnitKeys(SlotColumns& columns);

  // The tokens [first, first + count) of the call were just appended to `keep`.
  void append(SlotColumns& columns, const KeepSet& keep, const NewRows& rows, int first, int count,
              Workspace& ws);
  // Mean cosine of the row's key with those of all rows held at the last append(), itself included;
  // a key of zeros counts as at right angles to all.
  float mean_cosine(const SlotColumns& columns, int slot) const {
    return columns[mean_cosine_][slot];
  }
  // The same with the other keys of so many rows.
  float mean_cosine_with_others(const SlotColumns& columns, int slot, int rows) const {
    if (rows < 2) return 0.0f;
    const float itself = columns[inverse_norm_][slot] > 0.0f ? 1.0f : 0.0f;
    return (static_cast<float>(rows) * mean_cosine(columns, slot) - itself) /
           static_cast<float>(rows - 1);
  }

  // HeadPolicy::erased().
  void erased(SlotColumns& columns, int slot, const RowsView* keys, Workspace& ws);
  // Other rows are held: the next append() reads all keys again. The sum is exact, so nothing else
  // changes by that, and there is nothing to save.
  void forget() { stale_ = true; }

 private:
  void add(SlotColumns& columns, int slot, const RowsView& keys, double times, Workspace& ws);

  std::vector<std::int64_t> sum_;  // [dim] of the unit vectors, in units of 2^-38
  bool stale_ = false;             // sum_ and lengths are not those of the rows held
  int inverse_norm_;               // column: 1 / length of the key; 0 for a key of zeros
  int mean_cosine_;                // column
};

}  // namespace morphkv::policies

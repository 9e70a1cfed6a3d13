#include "policies/unit_keys.h"

#include <algorithm>
#include <cmath>

#include "dot_slots.h"
#include "kernels/kernels.h"

namespace morphkv::policies {
namespace {

// A head learns its dimension from its first rows: longer keys than this allocate then, once.
constexpr std::size_t kUsualDim = 256;

// Fixed point makes the sum independent of the order in which rows came and left, so that a copy, a
// saved cache and every split of a stream give the same bits. kMaxBudget rows fit.
constexpr double kOne = 0x1p38;

// Shorter keys, whose inverse length may be no float, count as zeros.
constexpr double kLeastSquare = 1e-70;

}  // namespace

UnitKeys::UnitKeys(SlotColumns& columns)
    : sum_(kUsualDim, 0),
      inverse_norm_(columns.add(1, 0.0f)),
      mean_cosine_(columns.add(1, -1.0f)) {}

void UnitKeys::append(SlotColumns& columns, const KeepSet& keep, const NewRows& rows, int first,
                      int count, Workspace& ws) {
  const int dim = rows.keys.dim;
  if (sum_.size() < static_cast<std::size_t>(dim)) sum_.resize(static_cast<std::size_t>(dim), 0);
  if (stale_) {
    std::fill(sum_.begin(), sum_.end(), 0);
    for (const int slot : keep.slots()) add(columns, slot, rows.keys, 1.0, ws);
    stale_ = false;
  } else {
    for (int t = first; t < first + count; ++t) add(columns, rows.slots[t], rows.keys, 1.0, ws);
  }

  float* mean = ws.queries.data();
  for (int d = 0; d < dim; ++d) {
    mean[d] = static_cast<float>(static_cast<double>(sum_[d]) / (kOne * keep.size()));
  }
  float* cosine = columns[mean_cosine_];
  dot_slots({.queries = mean,
             .query_stride = dim,
             .n_queries = 1,
             .rows = rows.keys,
             .first_slot = 0,
             .last_slot = 0,
             .scale = 1.0f,
             .out = cosine,
             .out_stride = dim},
            keep.held());
  for (const int slot : keep.slots()) cosine[slot] *= columns[inverse_norm_][slot];
}

void UnitKeys::add(SlotColumns& columns, int slot, const RowsView& keys, double times,
                   Workspace& ws) {
  float* key = ws.queries.data();
  kernels::to_float(keys.row(slot), keys.dtype, keys.dim, key);
  double square = 0.0;
  for (int d = 0; d < keys.dim; ++d) square += static_cast<double>(key[d]) * key[d];
  const double inverse_norm = square > kLeastSquare ? 1.0 / std::sqrt(square) : 0.0;
  columns[inverse_norm_][slot] = static_cast<float>(inverse_norm);
  const double factor = times * inverse_norm * kOne;
  for (int d = 0; d < keys.dim; ++d) sum_[d] += static_cast<std::int64_t>(factor * key[d]);
}

void UnitKeys::erased(SlotColumns& columns, int slot, const RowsView* keys, Workspace& ws) {
  if (keys == nullptr) {
    forget();
  } else {
    add(columns, slot, *keys, -1.0, ws);
  }
}

}  // namespace morphkv::policies

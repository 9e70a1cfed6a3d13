#include "morphkv/scores.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/kernels.h"

namespace morphkv {

void fuse_window(WindowLogits& window, Fusion fusion, const KeepSet& keep,
                 std::span<float> slot_scores, std::span<float> scores) {
  const int limit = keep.slot_limit();
  std::fill_n(slot_scores.data(), limit, 0.0f);
  for (int i = 0; i < window.queries(); ++i) {
    const float inverse = 1.0f / window.normaliser(i, limit);
    if (fusion == Fusion::kMean) {
      kernels::add_scaled(window.weights(i), limit, inverse / static_cast<float>(window.queries()),
                          slot_scores.data());
    } else {
      kernels::max_scaled(window.weights(i), limit, inverse, slot_scores.data());
    }
  }
  for (int rank = 0; rank < keep.size(); ++rank) scores[rank] = slot_scores[keep.slots()[rank]];
}

void add_attention_weights(const AttentionArgs& a, std::span<float> logits, float* weights) {
  const int group = a.queries.group;
  std::fill_n(logits.data(), static_cast<std::size_t>(group) * a.slot_limit,
              -std::numeric_limits<float>::infinity());
  kernels::dot_rows({.queries = a.queries.query(a.token, 0),
                     .query_stride = a.queries.group_stride,
                     .n_queries = group,
                     .rows = a.keys,
                     .slots = a.visible_slots.data(),
                     .n_slots = static_cast<int>(a.visible_slots.size()),
                     .scale = a.scale,
                     .out = logits.data(),
                     .out_stride = a.slot_limit});
  for (int g = 0; g < group; ++g) {
    float* row = logits.data() + static_cast<std::size_t>(g) * a.slot_limit;
    if (a.softcap > 0.0f) {
      for (const int slot : a.visible_slots)
        row[slot] = a.softcap * std::tanh(row[slot] / a.softcap);
    }
    kernels::exp_shifted(row, a.slot_limit, kernels::max_of(row, a.slot_limit), row);
    const float inverse = 1.0f / kernels::sum_of(row, a.slot_limit);
    if (a.fusion == Fusion::kMean) {
      kernels::add_scaled(row, a.slot_limit, inverse / static_cast<float>(group), weights);
    } else {
      kernels::max_scaled(row, a.slot_limit, inverse, weights);
    }
  }
}

QueriesView key_as_query(const RowsView& keys, int slot, std::span<float> out) {
  kernels::to_float(keys.row(slot), keys.dtype, keys.dim, out.data());
  return {out.data(), keys.dim, keys.dim, 1, 1, keys.dim};
}

void pool_scores(int pool, std::span<float> scores, std::span<float> scratch) {
  if (pool <= 1) return;
  const int n = static_cast<int>(scores.size());
  const int reach = pool / 2;
  std::copy(scores.begin(), scores.end(), scratch.begin());
  for (int shift = 1; shift <= std::min(reach, n - 1); ++shift) {
    for (int rank = 0; rank + shift < n; ++rank) {
      scores[rank] = std::max(scores[rank], scratch[rank + shift]);
      scores[rank + shift] = std::max(scores[rank + shift], scratch[rank]);
    }
  }
}

}  // namespace morphkv

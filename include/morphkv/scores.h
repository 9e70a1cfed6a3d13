// From the window's weights to one score per row: softmax sums, fusion over the window, neighbour
// pooling. All functions write into memory of the caller and allocate nothing.
#pragma once

#include <span>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"
#include "morphkv/tensor_view.h"
#include "morphkv/window_logits.h"

namespace morphkv {

// slot_scores[slot] = mean or maximum over the queries of `window` of their probability for the
// slot, for slots below keep.slot_limit(); then scores[rank] = slot_scores of that rank's slot.
// `scores` has keep.size() entries.
void fuse_window(WindowLogits& window, Fusion fusion, const KeepSet& keep,
                 std::span<float> slot_scores, std::span<float> scores);

// Adds to weights [slot] one token's attention to the rows in visible_slots: softmax of
// scale * q . k (soft-capped to softcap * tanh(x / softcap) when softcap > 0), fused over the G
// queries of the group by mean or maximum. `weights` is zero on entry; `logits` is scratch for
// [group, slot], `slot_limit` wide.
struct AttentionArgs {
  QueriesView queries;  // [token, group, dim]
  int token = 0;        // which of them asks
  RowsView keys;        // [slot, dim]
  std::span<const int> visible_slots;
  int slot_limit = 0;
  float scale = 1.0f;
  float softcap = 0.0f;
  Fusion fusion = Fusion::kMean;
};
void add_attention_weights(const AttentionArgs& args, std::span<float> logits, float* weights);

// The stored key in `slot` as the only query of its group, 1 token; `out` [dim] holds it.
QueriesView key_as_query(const RowsView& keys, int slot, std::span<float> out);

// scores[rank] becomes the maximum over the `pool` nearest ranks (pool / 2 on each side). `scratch`
// is as long.
void pool_scores(int pool, std::span<float> scores, std::span<float> scratch);

}  // namespace morphkv

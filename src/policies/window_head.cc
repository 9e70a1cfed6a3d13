#include "policies/window_head.h"

#include <algorithm>
#include <cmath>

#include "dot_slots.h"
#include "kernels/kernels.h"
#include "morphkv/scores.h"

namespace morphkv::policies {

void WindowHead::append(const KeepSet& keep, const NewRows& rows, int first, int count,
                        Workspace& ws) {
  if (source() == QuerySource::kKeys) {
    const int in_block = first % Workspace::kBlock;
    if (in_block == 0) multiply_block(keep, rows, first, ws);
    const auto logits = static_cast<std::ptrdiff_t>(in_block) * columns_.max_slots();
    push_key(keep, ws.logits.data() + logits);
    return;
  }
  // Only the last `window` tokens still ask when the call is over.
  const auto asking = static_cast<std::size_t>(std::min(count, window()));
  AttentionPass pass(asked_by(source(), rows, rows.slots.last(asking), keep.held(), fusion_), ws);
  while (pass.next()) pass.add_to(push_query());
}

// Logits of the next tokens of the call with the rows held and with one another: one blocked
// product.
void WindowHead::multiply_block(const KeepSet& keep, const NewRows& rows, int first,
                                Workspace& ws) {
  const auto begin = static_cast<std::size_t>(first);
  const auto tokens = rows.slots.subspan(
      begin, std::min<std::size_t>(Workspace::kBlock, rows.slots.size() - begin));
  const int dim = rows.keys.dim;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    kernels::to_float(rows.keys.row(tokens[t]), rows.keys.dtype, dim,
                      ws.queries.data() + t * static_cast<std::size_t>(dim));
  }
  // The first token of the block is already held; the others follow.
  ws.seen = keep.held();
  for (const int slot : tokens) ws.seen.add(slot);
  dot_slots({.queries = ws.queries.data(),
             .query_stride = dim,
             .n_queries = static_cast<int>(tokens.size()),
             .rows = rows.keys,
             .first_slot = 0,
             .last_slot = 0,
             .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
             .out = ws.logits.data(),
             .out_stride = columns_.max_slots()},
            ws.seen);
}

void WindowHead::score(const KeepSet& keep, std::span<float> scores, Workspace& /*ws*/) {
  fuse(fusion_, keep.held().limit(), scores);
}

// Each token of the guide asks as a token of the window would, with its query or its stored key. A
// row counts as much as the token and query head that looks at it most: a question has words that
// look nowhere in particular, and a mean over them would drown those that do (docs/guided.md).
void WindowHead::score_by_guide(const KeepSet& keep, const NewRows& guide, std::span<float> scores,
                                Workspace& ws) {
  ws.seen = keep.held();
  for (const int slot : guide.slots) ws.seen.add(slot);
  std::fill_n(ws.slot_scores.begin(), ws.seen.limit(), 0.0f);
  AttentionPass pass(asked_by(source(), guide, guide.slots, ws.seen, Fusion::kMax), ws);
  while (pass.next()) pass.add_to(ws.slot_scores.data());
  by_rank(keep, ws.slot_scores.data(), scores);
}

PolicyTraits window_traits(QuerySource source) {
  const bool keys = source == QuerySource::kKeys;
  return {.needs_keys = true, .needs_queries = !keys, .evicts_per_token = keys, .by_slot = true};
}

}  // namespace morphkv::policies

#include "policies/window_head.h"

#include <algorithm>
#include <cmath>

#include "dot_slots.h"
#include "kernels/kernels.h"
#include "morphkv/scores.h"
#include "morphkv/window_logits.h"

namespace morphkv::policies {
namespace {

// What the two query sources share: a ring of window weights, fused into scores.
class WindowHead : public HeadPolicy {
 public:
  WindowHead(const WindowRule& rule, int max_slots)
      : source_(rule.source), fusion_(rule.fusion), window_(rule.source, rule.window, max_slots) {}

  void score(const KeepSet& keep, std::span<float> scores, Workspace&) override {
    fuse_window(window_, fusion_, keep.held().limit(), scores);
  }
  // Each token of the guide asks as a token of the window would, with its query or its stored key.
  // A row counts as much as the token and query head that looks at it most: a question has words
  // that look nowhere in particular, and a mean over them would drown those that do
  // (docs/guided.md).
  void score_by_guide(const KeepSet& keep, const NewRows& guide, std::span<float> scores,
                      Workspace& ws) override {
    ws.seen = keep.held();
    for (const int slot : guide.slots) ws.seen.add(slot);
    std::fill_n(ws.slot_scores.begin(), ws.seen.limit(), 0.0f);
    AttentionPass pass(asked_by(source_, guide, guide.slots, ws.seen, Fusion::kMax), ws);
    while (pass.next()) pass.add_to(ws.slot_scores.data());
    by_rank(keep, ws.slot_scores.data(), scores);
  }
  void prefetch(int slot_limit) const override { window_.prefetch(slot_limit); }
  void erase(int slot) override { window_.erase(slot); }
  void move(int from, int to) override { window_.move(from, to); }
  void shift(int first, int last, int by) override { window_.shift(first, last, by); }
  void clear() override { window_.clear(); }
  void resize(int max_slots) override { window_.resize(max_slots); }
  void save(const KeepSet& keep, std::vector<float>& out) const override {
    window_.save(keep.slots(), out);
  }
  bool load(const KeepSet& keep, std::span<const float> saved) override {
    return window_.load(keep.slots(), saved);
  }

 protected:
  QuerySource source_;
  Fusion fusion_;
  WindowLogits window_;
};

// The rule of the reference page: stored keys ask, every row answers, one eviction per token.
class KeysHead final : public WindowHead {
 public:
  using WindowHead::WindowHead;

  void append(const KeepSet& keep, const NewRows& rows, int first, int /*count*/,
              Workspace& ws) override {
    const int in_block = first % Workspace::kBlock;
    if (in_block == 0) multiply_block(keep, rows, first, ws);
    window_.push_key(keep.slots().back(), keep.held(), ws.logits.data() + block_offset(in_block));
  }

  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<KeysHead>(*this); }

 private:
  std::size_t block_offset(int token) const {
    return static_cast<std::size_t>(token) * static_cast<std::size_t>(window_.max_slots());
  }

  // Logits of the next tokens of the call with the rows held and with one another: one blocked
  // product.
  void multiply_block(const KeepSet& keep, const NewRows& rows, int first, Workspace& ws) {
    const auto tokens = rows.slots.subspan(
        static_cast<std::size_t>(first),
        std::min<std::size_t>(Workspace::kBlock,
                              rows.slots.size() - static_cast<std::size_t>(first)));
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
               .out_stride = window_.max_slots()},
              ws.seen);
  }
};

// The rule of the paper: the model's own queries ask, causally; all of a call leave at its end.
class AttentionHead final : public WindowHead {
 public:
  using WindowHead::WindowHead;

  void append(const KeepSet& keep, const NewRows& rows, int /*first*/, int count,
              Workspace& ws) override {
    // Only the last `window` tokens still ask when the call is over.
    const auto asking = static_cast<std::size_t>(std::min(count, window_.window()));
    AttentionPass pass(asked_by(source_, rows, rows.slots.last(asking), keep.held(), fusion_), ws);
    while (pass.next()) pass.add_to(window_.push_query());
  }

  std::unique_ptr<HeadPolicy> clone() const override {
    return std::make_unique<AttentionHead>(*this);
  }
};

}  // namespace

std::unique_ptr<HeadPolicy> make_window_head(const WindowRule& rule, int max_slots) {
  if (rule.source == QuerySource::kKeys) return std::make_unique<KeysHead>(rule, max_slots);
  return std::make_unique<AttentionHead>(rule, max_slots);
}

PolicyTraits window_traits(QuerySource source) {
  const bool keys = source == QuerySource::kKeys;
  return {.needs_keys = true, .needs_queries = !keys, .evicts_per_token = keys, .by_slot = true};
}

}  // namespace morphkv::policies

#include "morphkv/retention.h"

#include <algorithm>

#include "morphkv/scores.h"
#include "morphkv/victim.h"

namespace morphkv {

LayerRetention::LayerRetention(const CacheConfig& config, const Policy& policy, int layer,
                               int n_heads, int max_slots)
    : config_(config), traits_(policy.traits()), max_slots_(max_slots) {
  validate(config);
  heads_.reserve(static_cast<std::size_t>(n_heads));
  for (int h = 0; h < n_heads; ++h) {
    heads_.push_back({KeepSet(max_slots), policy.make_head({layer, h}, max_slots), {}});
    heads_.back().victims.reserve(static_cast<std::size_t>(max_slots));
  }
}

void LayerRetention::append(const LayerCall& call, Workspace& ws) {
  const int tokens = static_cast<int>(call.slots.size());
  const int step = traits_.evicts_per_token ? 1 : tokens;
  for (std::size_t h = 0; h < heads_.size(); ++h) {
    Head& head = heads_[h];
    const NewRows rows{.slots = call.slots,
                       .keys = call.keys.empty() ? RowsView{} : call.keys[h],
                       .queries = call.queries.empty() ? QueriesView{} : call.queries[h],
                       .scale = call.scale,
                       .softcap = call.softcap};
    head.victims.clear();
    for (int first = 0; first < tokens; first += step) {
      for (int t = first; t < first + step; ++t) {
        head.keep.append(call.slots[t], call.first_position + t);
      }
      head.policy->append(head.keep, rows, first, step, ws);
      evict_to_budget(head, ws);
    }
    std::sort(head.victims.begin(), head.victims.end());
  }
}

void LayerRetention::evict_to_budget(Head& head, Workspace& ws) {
  const int rows = head.keep.size();
  if (!traits_.evicts || rows <= config_.budget) return;

  const auto scores = std::span(ws.scores).first(static_cast<std::size_t>(rows));
  head.policy->score(head.keep, scores, ws);
  if (traits_.pools) pool_scores(config_.pool, scores, ws.pooled);

  const auto n_victims = static_cast<std::size_t>(rows - config_.budget);
  const auto ranks = std::span(ws.ranks).first(n_victims);
  const auto scratch = std::span(ws.ranks).last(ws.ranks.size() / 2);
  choose_victims(scores, evictable_ranks(rows, config_.n_sink, config_.protected_tail()), scratch,
                 ranks);

  for (const int rank : ranks) {
    const int slot = head.keep.slots()[rank];
    head.victims.push_back(slot);
    head.policy->erase(slot);
  }
  head.keep.erase(ranks);
}

void LayerRetention::apply_moves(int head, std::span<const RowMove> moves) {
  for (const RowMove& move : moves) {
    heads_[head].keep.move(move.from, move.to);
    heads_[head].policy->move(move.from, move.to);
  }
}

void LayerRetention::transfer(std::span<const RowMove> moves, int max_slots) {
  for (int h = 0; h < n_heads(); ++h) {
    // A larger store has its slots before rows move there, a smaller one loses them afterwards.
    if (max_slots > max_slots_) heads_[h].policy->resize(max_slots);
    apply_moves(h, moves);
    if (max_slots < max_slots_) heads_[h].policy->resize(max_slots);
    heads_[h].keep.reserve(max_slots);
    heads_[h].victims = {};
    heads_[h].victims.reserve(static_cast<std::size_t>(max_slots));
  }
  max_slots_ = max_slots;
}

void LayerRetention::clear() {
  for (Head& head : heads_) {
    head.keep.clear();
    head.policy->clear();
    head.victims.clear();
  }
}

}  // namespace morphkv

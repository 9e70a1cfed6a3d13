#include "morphkv/retention.h"

#include <algorithm>

#include "morphkv/scores.h"
#include "morphkv/victim.h"

namespace morphkv {
namespace {

const CacheConfig& validated(const CacheConfig& config) {
  validate(config);
  return config;
}

}  // namespace

HeadRetention::HeadRetention(const CacheConfig& config, const Policy& policy, HeadId id,
                             int max_slots)
    : config_(validated(config)),
      traits_(policy.traits()),
      max_slots_(max_slots),
      keep_(max_slots),
      policy_(policy.make_head(id, max_slots)) {
  victims_.reserve(static_cast<std::size_t>(max_slots));
}

HeadRetention::HeadRetention(const HeadRetention& other)
    : config_(other.config_),
      traits_(other.traits_),
      max_slots_(other.max_slots_),
      keep_(other.keep_),
      policy_(other.policy_->clone()),
      victims_(other.victims_) {
  keep_.reserve(max_slots_);
  victims_.reserve(static_cast<std::size_t>(max_slots_));
}

bool HeadRetention::load(std::span<const Position> positions, std::span<const float> saved) {
  KeepSet keep(max_slots_);
  for (std::size_t rank = 0; rank < positions.size(); ++rank) {
    keep.append(static_cast<int>(rank), positions[rank]);
  }
  if (!policy_->load(keep, saved)) return false;
  keep_ = std::move(keep);
  victims_.clear();
  return true;
}

void HeadRetention::append(const NewRows& rows, Position first_position, Workspace& ws) {
  const int tokens = static_cast<int>(rows.slots.size());
  const int step = traits_.evicts_per_token ? 1 : tokens;
  victims_.clear();
  for (int first = 0; first < tokens; first += step) {
    for (int t = first; t < first + step; ++t) keep_.append(rows.slots[t], first_position + t);
    policy_->append(keep_, rows, first, step, ws);
    evict_to_budget(ws);
  }
  std::sort(victims_.begin(), victims_.end());
}

void HeadRetention::evict_to_budget(Workspace& ws) {
  const int rows = keep_.size();
  if (!traits_.evicts || rows <= config_.budget) return;

  const auto scores = std::span(ws.scores).first(static_cast<std::size_t>(rows));
  policy_->score(keep_, scores, ws);
  if (traits_.pools) pool_scores(config_.pool, scores, ws.pooled);

  const auto n_victims = static_cast<std::size_t>(rows - config_.budget);
  const auto ranks = std::span(ws.ranks).first(n_victims);
  const auto scratch = std::span(ws.ranks).last(ws.ranks.size() / 2);
  choose_victims(scores, evictable_ranks(rows, config_.n_sink, config_.protected_tail()), scratch,
                 ranks);

  for (const int rank : ranks) {
    const int slot = keep_.slots()[rank];
    victims_.push_back(slot);
    policy_->erase(slot);
  }
  keep_.erase(ranks);
}

void HeadRetention::apply_moves(std::span<const RowMove> moves) {
  for (const RowMove& move : moves) {
    keep_.move(move.from, move.to);
    policy_->move(move.from, move.to);
  }
}

void HeadRetention::shift(int first, int last, int by) {
  keep_.shift(first, last, by);
  policy_->shift(first, last, by);
}

void HeadRetention::transfer(std::span<const RowMove> moves, int max_slots) {
  // A larger store has its slots before rows move there, a smaller one loses them afterwards.
  if (max_slots > max_slots_) policy_->resize(max_slots);
  apply_moves(moves);
  if (max_slots < max_slots_) policy_->resize(max_slots);
  keep_.reserve(max_slots);
  victims_ = {};
  victims_.reserve(static_cast<std::size_t>(max_slots));
  max_slots_ = max_slots;
}

void HeadRetention::clear() {
  keep_.clear();
  policy_->clear();
  victims_.clear();
}

LayerRetention::LayerRetention(const CacheConfig& config, const Policy& policy, int layer,
                               int n_heads, int max_slots)
    : config_(validated(config)) {
  heads_.reserve(static_cast<std::size_t>(n_heads));
  for (int h = 0; h < n_heads; ++h)
    heads_.emplace_back(config, policy, HeadId{layer, h}, max_slots);
}

void LayerRetention::append(const LayerCall& call, Workspace& ws) {
  for (std::size_t h = 0; h < heads_.size(); ++h) {
    heads_[h].append({.slots = call.slots,
                      .keys = call.keys.empty() ? RowsView{} : call.keys[h],
                      .queries = call.queries.empty() ? QueriesView{} : call.queries[h],
                      .scale = call.scale,
                      .softcap = call.softcap},
                     call.first_position, ws);
  }
}

void LayerRetention::apply_moves(int head, std::span<const RowMove> moves) {
  heads_[head].apply_moves(moves);
}

void LayerRetention::transfer(std::span<const RowMove> moves, int max_slots) {
  for (HeadRetention& head : heads_) head.transfer(moves, max_slots);
}

void LayerRetention::clear() {
  for (HeadRetention& head : heads_) head.clear();
}

}  // namespace morphkv

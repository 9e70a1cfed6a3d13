#include "morphkv/retention.h"

#include <algorithm>
#include <numeric>

#include "kernels/kernels.h"
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
      keep_(max_slots),
      policy_(policy.make_head(id)) {
  resize(max_slots);
}

HeadRetention::HeadRetention(const HeadRetention& other)
    : config_(other.config_),
      traits_(other.traits_),
      keep_(other.keep_),
      policy_(other.policy_->clone()),
      places_(other.places_),
      victims_(other.victims_) {
  resize(max_slots());
}

void HeadRetention::resize(int max_slots) {
  policy_->columns().resize(max_slots);
  keep_.reserve(max_slots);
  places_.reserve(static_cast<std::size_t>(max_slots));
  victims_.reserve(static_cast<std::size_t>(max_slots));
}

bool HeadRetention::load(std::span<const Position> positions, std::span<const float> saved) {
  std::vector<int> slots(positions.size());
  std::iota(slots.begin(), slots.end(), 0);
  return load(slots, positions, saved);
}

bool HeadRetention::load(std::span<const int> slots, std::span<const Position> positions,
                         std::span<const float> saved) {
  KeepSet keep(max_slots());
  for (std::size_t rank = 0; rank < positions.size(); ++rank) {
    keep.append(slots[rank], positions[rank]);
  }
  if (!policy_->load(keep, saved)) return false;
  keep_ = std::move(keep);
  places_.clear();
  victims_.clear();
  return true;
}

void HeadRetention::append(const NewRows& rows, Position first_position, Workspace& ws) {
  const int tokens = static_cast<int>(rows.slots.size());
  const int step = traits_.evicts_per_token ? 1 : tokens;
  victims_.clear();
  for (int first = 0; first < tokens; first += step) {
    take_in(rows, first, step, first_position, ws);
    evict_to_budget(&rows.keys, ws);
  }
  std::sort(victims_.begin(), victims_.end());
}

void HeadRetention::prefetch() const {
  kernels::prefetch(std::as_bytes(keep_.slots()));
  kernels::prefetch(std::as_bytes(keep_.positions()));
  policy_->prefetch(keep_.held().limit());
}

void HeadRetention::extend(const NewRows& rows, Position first_position, Workspace& ws) {
  const int tokens = static_cast<int>(rows.slots.size());
  const int step = traits_.evicts_per_token ? 1 : tokens;
  victims_.clear();
  for (int first = 0; first < tokens; first += step) {
    take_in(rows, first, step, first_position, ws);
  }
}

void HeadRetention::take_in(const NewRows& rows, int first, int count, Position first_position,
                            Workspace& ws) {
  places_.clear();
  for (int t = first; t < first + count; ++t) keep_.append(rows.slots[t], first_position + t);
  policy_->append(keep_, rows, first, count, ws);
}

void HeadRetention::guide(const NewRows& guide, Workspace& ws) {
  const auto scores = std::span(ws.scores).first(static_cast<std::size_t>(keep_.size()));
  policy_->score_by_guide(keep_, guide, scores, ws);
  if (pools()) pool_scores(config_.pool, scores, ws.pooled);
  improve_places_by(scores, ws);
}

// Protected rows take no place: a guide that looks at them would lose its share of the others.
void HeadRetention::improve_places_by(std::span<const float> scores, Workspace& ws) {
  const EvictableRanks ranked = evictable();
  const auto first = static_cast<std::size_t>(ranked.first);
  const auto count = static_cast<std::size_t>(ranked.last - ranked.first);
  places_.resize(scores.size(), keep_.size());
  if (count > 0) {
    improve_places(scores.subspan(first, count), ws.ranks,
                   std::span(places_).subspan(first, count));
  }
}

EvictableRanks HeadRetention::evictable() const {
  return evictable_ranks(keep_.size(), config_.n_sink, config_.protected_tail());
}

void HeadRetention::evict(Workspace& ws) {
  victims_.clear();
  evict_to_budget(nullptr, ws);
  std::sort(victims_.begin(), victims_.end());
}

void HeadRetention::evict_to_budget(const RowsView* keys, Workspace& ws) {
  const int excess = keep_.size() - config_.budget;
  if (!traits_.evicts || excess <= 0) return;
  const auto ranks = std::span(ws.ranks).first(static_cast<std::size_t>(excess));
  choose(ranks, ws);
  for (const int rank : ranks) {
    const int slot = keep_.slots()[rank];
    victims_.push_back(slot);
    policy_->erased(slot, keys, ws);
    policy_->columns().erase(slot);
  }
  keep_.erase(ranks);
}

void HeadRetention::choose(std::span<int> ranks, Workspace& ws) {
  const bool by_slot = traits_.by_slot && ranks.size() == 1 && !pools() && places_.empty();
  if (by_slot) {
    policy_->score(keep_, ws.slot_scores, ws);
    ranks[0] = choose_victim(keep_, evictable(), ws.slot_scores);
  } else {
    const auto scores = std::span(ws.scores).first(static_cast<std::size_t>(keep_.size()));
    places_.empty() ? score(scores, ws) : score_by_places(scores, ws);
    choose_victims(scores, evictable(), std::span(ws.ranks).last(ws.ranks.size() / 2), ranks);
  }
}

void HeadRetention::score(std::span<float> scores, Workspace& ws) {
  policy_->score(keep_, traits_.by_slot ? ws.slot_scores : scores, ws);
  if (traits_.by_slot) by_rank(keep_, ws.slot_scores.data(), scores);
  if (pools()) pool_scores(config_.pool, scores, ws.pooled);
}

void HeadRetention::score_by_places(std::span<float> scores, Workspace& ws) {
  if (traits_.beside_guides) {
    score(scores, ws);
    improve_places_by(scores, ws);
  }
  std::transform(places_.begin(), places_.end(), scores.begin(),
                 [](int place) { return -static_cast<float>(place); });
  places_.clear();
}

void HeadRetention::apply_moves(std::span<const RowMove> moves) {
  for (const RowMove& move : moves) {
    keep_.move(move.from, move.to);
    policy_->columns().move(move.from, move.to);
  }
}

void HeadRetention::shift(int first, int last, int by) {
  keep_.shift(first, last, by);
  policy_->columns().shift(first, last, by);
}

void HeadRetention::put_in_order() {
  policy_->columns().gather(keep_.slots());
  keep_.put_in_order();
}

void HeadRetention::transfer(std::span<const RowMove> moves, int max_slots) {
  // A larger store has its slots before rows move there, a smaller one loses them afterwards.
  resize(std::max(max_slots, this->max_slots()));
  apply_moves(moves);
  victims_ = {};
  resize(max_slots);
}

void HeadRetention::clear() {
  keep_.clear();
  policy_->load(keep_, {});
  places_.clear();
  victims_.clear();
}

LayerRetention::LayerRetention(const CacheConfig& config, const Policy& policy, int layer,
                               int n_heads, int max_slots)
    : config_(validated(config)) {
  heads_.reserve(static_cast<std::size_t>(n_heads));
  for (int h = 0; h < n_heads; ++h)
    heads_.emplace_back(config, policy, HeadId{layer, h}, max_slots);
}

LayerRetention LayerRetention::copy() const {
  LayerRetention out(config_);
  out.heads_.reserve(heads_.size());
  for (const HeadRetention& head : heads_) out.heads_.push_back(head.copy());
  return out;
}

NewRows LayerRetention::rows_of(const LayerCall& call, std::size_t head) {
  return {.slots = call.slots,
          .keys = call.keys.empty() ? RowsView{} : call.keys[head],
          .queries = call.queries.empty() ? QueriesView{} : call.queries[head],
          .scale = call.scale,
          .softcap = call.softcap};
}

// An engine stores the heads of a row side by side. Brought in row by row, all of them come at the
// speed of the memory; head by head each waits for every second line.
void LayerRetention::prefetch(const LayerCall& call) const {
  if (heads_.size() < 2) return;
  for (const HeadRetention& head : heads_) head.prefetch();
  if (call.keys.empty()) return;
  const RowsView& first = call.keys.front();
  const std::ptrdiff_t row_bytes = call.keys.back().row(0) - first.row(0) +
                                   static_cast<std::ptrdiff_t>(size_of(first.dtype)) * first.dim;
  if (row_bytes != first.slot_stride) return;
  heads_.front().keep().held().for_each_run([&](int from, int to) {
    kernels::prefetch({first.row(from), static_cast<std::size_t>((to - from) * row_bytes)});
  });
}

void LayerRetention::append(const LayerCall& call, Workspace& ws) {
  prefetch(call);
  for (std::size_t h = 0; h < heads_.size(); ++h) {
    heads_[h].append(rows_of(call, h), call.first_position, ws);
  }
}

void LayerRetention::extend(const LayerCall& call, Workspace& ws) {
  for (std::size_t h = 0; h < heads_.size(); ++h) {
    heads_[h].extend(rows_of(call, h), call.first_position, ws);
  }
}

void LayerRetention::guide(const LayerCall& call, Workspace& ws) {
  for (std::size_t h = 0; h < heads_.size(); ++h) heads_[h].guide(rows_of(call, h), ws);
}

void LayerRetention::evict(Workspace& ws) {
  for (HeadRetention& head : heads_) head.evict(ws);
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

// The step of the algorithm: append the new rows, score, choose victims, plan the row
// moves. Host-free: the vectors stay where the host keeps them and are only read; the host carries
// out the moves.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"
#include "morphkv/policy.h"
#include "morphkv/row_moves.h"
#include "morphkv/tensor_view.h"
#include "morphkv/victim.h"

namespace morphkv {

// The rule for one KV head.
class HeadRetention {
 public:
  // Room for slots 0 .. max_slots - 1, allocated here once; a call may bring max_slots - budget
  // tokens. `policy` is only used during construction. Throws std::invalid_argument (validate()).
  HeadRetention(const CacheConfig& config, const Policy& policy, HeadId id, int max_slots);
  HeadRetention(HeadRetention&&) noexcept = default;
  HeadRetention& operator=(HeadRetention&&) noexcept = default;
  HeadRetention copy() const { return HeadRetention(*this); }

  // The step. Appends the rows, takes those that leave out of the keep set and remembers their
  // slots as victims().
  void append(const NewRows& rows, Position first_position, Workspace& workspace);

  // The step in parts, for guided prefill: extend() appends and evicts nothing; guide() lets a
  // guide rank the rows held (HeadPolicy::score_by_guide) and leaves no trace of its own rows;
  // evict() lets the excess leave, by the guides since the last extend() if there were any, else as
  // append() would. Several guides share the budget: a row is worth its best place with any of
  // them.
  void extend(const NewRows& rows, Position first_position, Workspace& workspace);
  void guide(const NewRows& guide, Workspace& workspace);
  void evict(Workspace& workspace);

  // Brings into the cache what the next step will read.
  void prefetch() const;

  // Slots given up in the last append() or evict(), ascending.
  std::span<const int> victims() const { return victims_; }
  // The host has made use of them.
  void forget_victims() { victims_.clear(); }
  const KeepSet& keep() const { return keep_; }
  bool evicts() const { return traits_.evicts; }

  // The host has carried out these moves, in order.
  void apply_moves(std::span<const RowMove> moves);
  // The host has moved the rows in slots [first, last) by `by` slots, over slots that are not held.
  void shift(int first, int last, int by);
  // The host has put its rows into slots 0, 1, ... in the order of their ranks. Allocates.
  void put_in_order();
  // All rows have moved, in this order, to a store with `max_slots` slots. Allocates.
  void transfer(std::span<const RowMove> moves, int max_slots);
  void clear();

  // What the policy remembers (HeadPolicy::save), and taking over rows at slots 0, 1, ... with such
  // a memory. load() returns false, having changed nothing, if the memory does not fit.
  void save(std::vector<float>& out) const { policy_->save(keep_, out); }
  bool load(std::span<const Position> positions, std::span<const float> saved);
  // The same with each row in a slot of its own: slots[rank].
  bool load(std::span<const int> slots, std::span<const Position> positions,
            std::span<const float> saved);

 private:
  HeadRetention(const HeadRetention& other);
  void take_in(const NewRows& rows, int first, int count, Position first_position,
               Workspace& workspace);
  // `keys` are those of the call that the rows leave in, or null.
  void evict_to_budget(const RowsView* keys, Workspace& workspace);
  // Writes the ranks that leave, ascending.
  void choose(std::span<int> ranks, Workspace& workspace);
  // scores[rank] by the policy, pooled; by the guides that have asked.
  void score(std::span<float> scores, Workspace& workspace);
  void score_by_places(std::span<float> scores, Workspace& workspace);
  // Each rank's place by these scores, or a better one that it has already.
  void improve_places_by(std::span<const float> scores, Workspace& workspace);
  int max_slots() const { return policy_->columns().max_slots(); }
  void resize(int max_slots);
  bool pools() const { return traits_.pools && config_.pool > 1; }
  EvictableRanks evictable() const;

  CacheConfig config_;
  PolicyTraits traits_;
  KeepSet keep_;
  std::unique_ptr<HeadPolicy> policy_;
  std::vector<int> places_;  // [rank] 0 = best, as the guides see it; empty when none has asked
  std::vector<int> victims_;
};

// What one call of S tokens brings to a layer.
struct LayerCall {
  std::span<const int> slots;  // [token] where the new rows lie, the same for all heads
  Position first_position = 0;
  std::span<const RowsView> keys;  // [head], each [slot, dim]; empty unless the policy needs keys
  std::span<const QueriesView> queries;  // [head], each [token, group, dim] of the last tokens of
                                         // the call; empty unless the policy needs queries
  float scale = 1.0f;                    // of query . key in the model's attention
  float softcap = 0.0f;                  // soft cap of the model's attention logits, 0 = none
};

class LayerRetention {
 public:
  // Room for slots 0 .. max_slots - 1, allocated here once. A call may bring max_slots - budget
  // tokens. `policy` is only used during construction. Throws std::invalid_argument (validate()).
  LayerRetention(const CacheConfig& config, const Policy& policy, int layer, int n_heads,
                 int max_slots);
  LayerRetention(LayerRetention&&) noexcept = default;
  LayerRetention& operator=(LayerRetention&&) noexcept = default;
  LayerRetention copy() const;

  // The step. Appends the rows of the call to every head, takes those that leave out of the keep
  // sets and remembers their slots as victims().
  void append(const LayerCall& call, Workspace& workspace);
  // The step in parts (HeadRetention).
  void extend(const LayerCall& call, Workspace& workspace);
  void guide(const LayerCall& call, Workspace& workspace);
  void evict(Workspace& workspace);

  // Slots that `head` gave up in the last append() or evict(), ascending. Equally many in every
  // head.
  std::span<const int> victims(int head) const { return heads_[head].victims(); }

  // Moves that empty the slots `freed` in `head` (plan_row_moves). `freed` ascends, as long as
  // victims().
  int plan_moves(int head, std::span<const int> freed, std::span<RowMove> out) const {
    return plan_row_moves(heads_[head].victims(), freed, out);
  }
  // The host has carried out these moves.
  void apply_moves(int head, std::span<const RowMove> moves);

  // All rows have moved to another store with `max_slots` slots: the same moves for every head, in
  // order.
  void transfer(std::span<const RowMove> moves, int max_slots);

  // HeadRetention::save() and load().
  void save(int head, std::vector<float>& out) const { heads_[head].save(out); }
  bool load(int head, std::span<const int> slots, std::span<const Position> positions,
            std::span<const float> saved) {
    return heads_[head].load(slots, positions, saved);
  }

  bool evicts() const { return heads_.front().evicts(); }
  int n_heads() const { return static_cast<int>(heads_.size()); }
  const KeepSet& keep(int head) const { return heads_[head].keep(); }
  const CacheConfig& config() const { return config_; }
  void clear();

 private:
  explicit LayerRetention(const CacheConfig& config) : config_(config) {}
  static NewRows rows_of(const LayerCall& call, std::size_t head);
  void prefetch(const LayerCall& call) const;

  CacheConfig config_;
  std::vector<HeadRetention> heads_;
};

}  // namespace morphkv

// The step of the algorithm for one layer: append the new rows, score, choose victims, plan the row
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

namespace morphkv {

// What one call of S tokens brings to a layer.
struct LayerCall {
  std::span<const int> slots;  // [token] where the new rows lie, the same for all heads
  Position first_position = 0;
  std::span<const RowsView> keys;  // [head], each [slot, dim]; empty unless the policy needs keys
  std::span<const QueriesView> queries;  // [head], each [token, group, dim] of the last tokens of
                                         // the call; empty unless the policy needs queries
  float scale = 1.0f;    // of query . key in the model's attention
  float softcap = 0.0f;  // soft cap of the model's attention logits, 0 = none
};

class LayerRetention {
 public:
  // Room for slots 0 .. max_slots - 1, allocated here once. A call may bring max_slots - budget
  // tokens. `policy` is only used during construction. Throws std::invalid_argument (validate()).
  LayerRetention(const CacheConfig& config, const Policy& policy, int layer, int n_heads,
                 int max_slots);

  // The step. Appends the rows of the call to every head, takes those that leave out of the keep
  // sets and remembers their slots as victims(). This and apply_moves() are the only steps that
  // change state.
  void append(const LayerCall& call, Workspace& workspace);

  // Slots that `head` gave up in the last append(), ascending. Equally many in every head.
  std::span<const int> victims(int head) const { return heads_[head].victims; }

  // Moves that empty the slots `freed` in `head` (plan_row_moves). `freed` ascends, as long as
  // victims().
  int plan_moves(int head, std::span<const int> freed, std::span<RowMove> out) const {
    return plan_row_moves(heads_[head].victims, freed, out);
  }
  // The host has carried out these moves.
  void apply_moves(int head, std::span<const RowMove> moves);

  // All rows have moved to another store with `max_slots` slots: the same moves for every head, in
  // order.
  void transfer(std::span<const RowMove> moves, int max_slots);

  int n_heads() const { return static_cast<int>(heads_.size()); }
  const KeepSet& keep(int head) const { return heads_[head].keep; }
  const CacheConfig& config() const { return config_; }
  void clear();

 private:
  struct Head {
    KeepSet keep;
    std::unique_ptr<HeadPolicy> policy;
    std::vector<int> victims;
  };
  void evict_to_budget(Head& head, Workspace& workspace);

  CacheConfig config_;
  PolicyTraits traits_;
  int max_slots_;
  std::vector<Head> heads_;
};

}  // namespace morphkv

// One sequence of a context and the rule that bounds it: its cells, the rows of each layer, and the
// parts of a call of the rule. What concerns all layers is done once, the rest layer by layer, on
// any thread. The Evictor puts the parts in order.
#pragma once

#include <llama.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cell_ledger.h"
#include "engine_state.h"
#include "kv_store.h"
#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/retention.h"
#include "rule.h"
#include "tensor_tap.h"

namespace morphkv::llama_cpp {

struct Checkpoint::State {
  CacheConfig config;
  CellLedger ledger;
  std::vector<LayerRetention> layers;
  std::vector<int> layer_indices;  // [layer] number in the model
  TensorTap::Call call;
  std::vector<int> cells;  // all in use, ascending
  EngineState engine;
  std::int64_t rows_evicted = 0;
  double evict_ms = 0.0;
};

// What one thread needs to work on a layer.
struct Worker {
  Workspace workspace;
  KvScratch scratch;
  std::vector<int> cells_held;  // before the call, and its new ones
  std::vector<QueriesView> queries;
  std::vector<RowMove> moves;
};

class BoundedSequence {
 public:
  // `tap` has surveyed the context. `guide_tokens`: most that ask at once as a guide.
  BoundedSequence(llama_context* context, llama_seq_id id, TensorTap& tap, Rule rule,
                  int guide_tokens, bool poisons);

  // Forgets all tokens, in the engine as well; with a rule, that one holds from now on.
  void clear();
  void clear(Rule rule);

  // --- A call, in order -----------------------------------------------------------------------
  // Notes where the tokens lie that the engine has kept since the last call: all that were
  // evaluated, or fewer after an error or an abort. Throws EngineError.
  void find_new_cells();
  int new_tokens() const { return static_cast<int>(new_cells_.size()); }
  // They belong to the sequence from now on; the last `asking` ones rank the rows like a guide.
  void adopt(int asking);
  // Which cells are to be empty when the heads are down to the budget.
  void plan_free();
  // Layer by layer: the new rows are appended and the excess leaves; only appended; they ask and
  // leave no trace; the excess leaves.
  void append(int layer, Worker& worker);
  void extend(int layer, Worker& worker);
  void guide(int layer, Worker& worker);
  void evict(int layer, Worker& worker);
  // The engine may use the emptied cells again.
  void free_cells();
  // The engine forgets the tokens of a guide.
  void remove_guide();
  // The call is over.
  void end_call() { tap_.clear_call(id_); }
  // Throws EngineError if the tokens of a guide have overwritten rows that the text still needs.
  void require_sliding_rows_intact() const;

  std::shared_ptr<const Checkpoint::State> checkpoint() const;
  void restore(const Checkpoint::State& state);

  Position offset() const { return ledger_.offset(); }
  int n_layers() const { return static_cast<int>(layers_.size()); }
  const Rule& rule() const { return rule_; }
  EvictorStats stats() const;
  std::vector<BoundLayer> snapshot() const;
  std::vector<std::string> violations() const;
  void add_evict_ms(double ms) { evict_ms_ += ms; }

 private:
  // A layer that is bounded: where its rows lie and who decides about them.
  struct Layer {
    TappedLayer tapped;
    KvStore store;
    LayerRetention retention;
  };

  LayerRetention make_retention(const TappedLayer& tapped) const;
  int queries_kept() const;
  void forget();
  LayerCall call_of(Layer& layer, Position first_position, std::span<const int> slots,
                    Worker& worker);
  void empty_cells(Layer& layer, Worker& worker);
  void remove_labels(Position first, Position last);
  void require_fitting(const Checkpoint::State& state) const;
  llama_pos newest_label() const;

  llama_context* context_;
  llama_seq_id id_;
  TensorTap& tap_;
  Rule rule_;
  int guide_tokens_;
  bool poisons_;
  int n_cells_;
  CellLedger ledger_;
  std::vector<Layer> layers_;
  std::vector<int> new_cells_;
  std::vector<int> asking_cells_;
  Position first_position_ = 0;  // of the new cells
  FreePlan plan_;
  std::int64_t rows_evicted_ = 0;
  double evict_ms_ = 0.0;
};

}  // namespace morphkv::llama_cpp

// Listens to the engine's graph (llama_context_params::cb_eval): finds each layer's K and V
// tensors, notes the cells that the tokens were written to, and copies the queries of the last
// tokens. Names and shapes that it relies on are pinned by tests/llama_contract_test.cc.
#pragma once

#include <ggml-backend.h>
#include <llama.h>

#include <cstdint>
#include <string>
#include <vector>

#include "morphkv/tensor_view.h"

namespace morphkv::llama_cpp {

// What one attention layer looks like in the engine. Its cells, not its rows, are shared by all
// heads.
struct TappedLayer {
  int index = 0;             // layer number in the model
  ggml_tensor* k = nullptr;  // [n_head_kv * dim_k, cells, sequence]
  ggml_tensor* v = nullptr;  // [n_head_kv * dim_v, cells, sequence]; null with MLA
  int n_head_kv = 0;
  int group = 0;  // query heads per KV head
  int dim_k = 0;
  int dim_v = 0;
  float scale = 0.0f;  // of query . key
  float softcap = 0.0f;
  float max_alibi_bias = 0.0f;
  int attention_nodes = 0;  // how many attention operations of one graph read this K tensor
};

class TensorTap {
 public:
  TensorTap() = default;
  TensorTap(const TensorTap&) = delete;
  TensorTap& operator=(const TensorTap&) = delete;

  // Installs itself in front of a callback that is already there. Must outlive the context.
  void install(llama_context_params& params);

  // While surveying, every layer is looked at and nothing recorded.
  void start_survey();
  // Ends the survey: from now on cells and their labels in `memory` are noted, of the layers with
  // `n_cells` cells for each of `sequences` sequences. Returns what is wrong with the graph, or "".
  std::string finish_survey(llama_memory_t memory, int n_cells, int sequences);
  // From now on the queries of the last `window` tokens of a call of the sequence are copied; 0 =
  // of none. Allocates. Not within a call.
  void keep_queries(llama_seq_id sequence, int window);

  // Layers to evict from, in model order; valid after finish_survey().
  const std::vector<TappedLayer>& layers() const { return layers_; }
  // All layers, those with other cell counts (sliding windows) included.
  const std::vector<TappedLayer>& all_layers() const { return surveyed_; }

  // Cells of the sequence's tokens evaluated since the last clear_call(), in order, and the labels
  // that the engine gave them.
  const std::vector<std::int64_t>& cells(llama_seq_id sequence) const {
    return call_of(sequence).cells;
  }
  const std::vector<llama_pos>& labels(llama_seq_id sequence) const {
    return call_of(sequence).labels;
  }
  // How many of these tokens the first micro-batch had.
  int first_micro_batch(llama_seq_id sequence) const { return call_of(sequence).first_micro_batch; }
  // Queries of KV head `head` of layers()[layer]: the last min(window, tokens) of them, oldest
  // first. [token, group, dim]. `tokens` = how many of the noted tokens count (an aborted call has
  // fewer). Several threads may ask, each about another layer or sequence.
  QueriesView queries(llama_seq_id sequence, std::size_t layer, int head, int tokens);
  // Forgets cells, labels and queries. A call that failed leaves nothing behind.
  void clear_call(llama_seq_id sequence);

  // What is known of the call that is going on.
  struct Call {
    std::vector<std::int64_t> cells;
    std::vector<llama_pos> labels;
    int first_micro_batch = 0;
    int window = 0;
    std::vector<std::vector<float>> queries;  // [layer] of the last min(window, tokens) tokens,
                                              // oldest first: [token, head, dim]
  };
  Call call(llama_seq_id sequence) const;
  // Goes on with a call of another tap of the same model. Queries beyond the window are dropped.
  void go_on(llama_seq_id sequence, const Call& call);

 private:
  static bool callback(ggml_tensor* node, bool ask, void* self);
  bool on_node(ggml_tensor* node, bool ask);
  bool wants(const ggml_tensor* node) const;
  void survey(ggml_tensor* node);
  void note_cells(const ggml_tensor* node);
  void copy_queries(const ggml_tensor* node);
  int layer_of(const ggml_tensor* k) const;
  std::size_t token_floats(std::size_t layer) const;

  // Queries of one layer: a ring over tokens, straightened when they are read.
  struct QueryRing {
    std::vector<float> data;  // [window, n_head, dim]
    std::vector<float> ordered;
    std::int64_t seen = 0;  // tokens since clear_call()
  };
  // The call of one sequence that is going on.
  struct SequenceCall {
    int window = 0;
    std::vector<QueryRing> rings;  // [layer]
    std::vector<std::int64_t> cells;
    std::vector<llama_pos> labels;
    int first_micro_batch = 0;
  };
  // Consecutive tokens of a micro-batch that are of one sequence.
  struct Part {
    llama_seq_id sequence = 0;
    int tokens = 0;
  };
  const SequenceCall& call_of(llama_seq_id sequence) const {
    return calls_[static_cast<std::size_t>(sequence)];
  }
  SequenceCall& call_of(llama_seq_id sequence) {
    return calls_[static_cast<std::size_t>(sequence)];
  }

  bool surveying_ = false;
  bool copies_queries_ = false;  // of any sequence
  std::vector<TappedLayer> surveyed_;
  std::vector<TappedLayer> layers_;
  std::vector<SequenceCall> calls_;  // [sequence]
  llama_memory_t memory_ = nullptr;
  std::vector<std::int64_t> indices_;
  std::vector<Part> parts_;  // of the micro-batch that is going on
  std::vector<std::byte> staging_;
  ggml_backend_sched_eval_callback user_callback_ = nullptr;
  void* user_data_ = nullptr;
  bool user_asked_ = false;
};

}  // namespace morphkv::llama_cpp

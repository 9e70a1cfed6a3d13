// Keeps the KV cache of a llama.cpp context at `budget` rows per KV head, from inside anybody's
// decode loop:
//
//   Evictor evictor(model, options);
//   evictor.attach(params);                       // before the context is made
//   ContextPtr context(llama_init_from_model(model, params));
//   evictor.bind(context.get());                  // finds the tensors, allocates
//   ... llama_decode(context.get(), batch); evictor.after_decode(); ...
//
// A context holds one sequence (seq_id 0), or several (EvictorOptions::sequences), each with a
// budget of its own. Uses llama.cpp's public API only. examples/llama_step.cc is a whole loop.
#pragma once

#include <llama.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"
#include "morphkv/profile.h"
#include "morphkv/snapshot.h"

namespace morphkv::llama_cpp {

// This model, context or build of llama.cpp cannot be bounded; what() is one line with the reason.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The engine did something that the ledger does not expect, or a call failed.
class EngineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr int kMostSequences = 64;

struct EvictorOptions {
  CacheConfig cache = default_profile().with_budget(512);
  int sequences =
      1;  // seq_id 0 .. sequences - 1, at most kMostSequences; each has cells of its own
  // Overwrite the rows of freed cells with 3e4, to show that nobody reads them. Unset: only when
  // the library was built for debugging.
  std::optional<bool> poison_freed_rows = std::nullopt;
};

// The micro-batch that attach() settles on, when `asked` tokens are asked for: it never outweighs
// the budget.
int bounded_micro_batch(int asked, int budget);
// A line for the user where that is less than was asked for, else "".
std::string lowered_notice(int asked, int budget);

struct EvictorStats {
  std::int64_t tokens_seen = 0;
  int rows_kept = 0;                   // per KV head, as measured
  std::int64_t rows_evicted = 0;       // per KV head
  std::size_t kv_bytes_kept = 0;       // K and V of the rows held, all layers and heads
  std::size_t kv_bytes_allocated = 0;  // K and V tensors of the engine, of all sequences
  std::size_t kv_bytes_full = 0;       // K and V if every token were kept
  double evict_ms = 0.0;               // time spent in after_decode() and its parts
};

// What a KV head of one layer holds, for tests and tools.
struct BoundLayer {
  int index = 0;  // layer number in the model
  LayerSnapshot rows;
};

// Everything that a sequence is at one moment, for the engine and for the rule: its rows, who they
// are, and the call that is going on. Cheap to copy (shared).
class Checkpoint {
 public:
  Position offset() const;    // tokens decided about
  int rows() const;           // cells it takes
  std::size_t bytes() const;  // memory it takes
  const CacheConfig& config() const;

 private:
  friend class BoundedSequence;
  friend class Evictor;
  friend struct SavedText;
  struct State;
  explicit Checkpoint(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

class Evictor {
 public:
  // Checks what can be known of the model without a context. Throws std::invalid_argument
  // (validate()) or Unsupported.
  Evictor(const llama_model* model, EvictorOptions options);
  ~Evictor();
  Evictor(Evictor&&) noexcept;
  Evictor& operator=(Evictor&&) noexcept;

  // Sets what eviction depends on: n_ctx = sequences * (budget + max(n_ubatch, call_tokens)),
  // n_batch, n_seq_max, flash attention on, sequences and sliding windows in their own cells, and
  // cb_eval (one that is already set is called too). n_ubatch is lowered to bounded_micro_batch().
  // `call_tokens`: most tokens of a sequence between two calls of after_decode(); 0 = n_ubatch.
  // With policy full nothing leaves, and call_tokens is the most tokens there will ever be.
  // `guide_tokens`: most tokens that ask at once as a guide (hold(), guide()). Returns one line for
  // the user if it had to change something the user chose, else "". Throws Unsupported for settings
  // that exclude eviction.
  std::string attach(llama_context_params& params, int call_tokens = 0, int guide_tokens = 0);

  // Finds the tensors by evaluating one token, clears the memory, allocates. Best on the thread
  // that will decode: with OpenMP, a second thread that evaluates slows down both. Throws
  // Unsupported, EngineError.
  void bind(llama_context* context);

  // To be called after llama_decode(), whatever it returned: looks at what the engine now holds,
  // then evicts down to the budget, in every sequence that has new tokens. Tokens of several
  // llama_decode() calls count as one call of the rule. Throws EngineError.
  void after_decode();
  // The same for some of the sequences; the tokens of the others wait.
  void after_decode(std::span<const llama_seq_id> sequences);

  // after_decode() in parts for one sequence, for guided prefill: hold() takes the new tokens over
  // and evicts nothing; then any number of guides, each evaluated with llama_decode() at the
  // following positions and ended with guide(), which lets its queries rank the rows held and
  // removes it from the engine without a trace; then evict(), down to the budget. With asking > 0
  // the last `asking` tokens taken over rank the rows like a guide, and stay. Rows and guide must
  // fit into n_ctx: attach() with call_tokens. Of a model with sliding windows a guide must be one
  // micro-batch, and clear() is all that is left after a longer one. Throw EngineError,
  // std::invalid_argument for a policy that takes no guide.
  void hold(int asking = 0, llama_seq_id sequence = 0);
  void guide(llama_seq_id sequence = 0);
  void evict(llama_seq_id sequence = 0);
  bool takes_guides(llama_seq_id sequence = 0) const;

  // Forgets all tokens of the sequence, in the engine as well.
  void clear(llama_seq_id sequence = 0);
  // The same, and another rule from now on. Throws like the constructor, and std::invalid_argument
  // for a budget that leaves the context no room for a micro-batch; nothing is forgotten then.
  void clear(const CacheConfig& cache, llama_seq_id sequence = 0);

  // A moment to come back to, as often as wanted: in this context, in a smaller or larger one after
  // bind(), or in another evictor for the same model. May be taken before after_decode(): then the
  // tokens of the call come back undecided. restore() wants the configuration that the checkpoint
  // was made with, unless nothing had been decided yet: a prompt that was evaluated once can so be
  // evicted from by many rules. Throws EngineError, std::invalid_argument for a checkpoint of
  // another model or configuration and for one that does not fit; nothing has changed then.
  Checkpoint checkpoint(llama_seq_id sequence = 0) const;
  void restore(const Checkpoint& checkpoint, llama_seq_id sequence = 0);

  // Tokens seen = position of the next token.
  Position offset(llama_seq_id sequence = 0) const;
  EvictorStats stats(llama_seq_id sequence = 0) const;
  const CacheConfig& config(llama_seq_id sequence = 0) const;
  // The state of every layer that is bounded.
  std::vector<BoundLayer> snapshot(llama_seq_id sequence = 0) const;
  // Broken invariants of the ledger and of every layer; empty when all is well.
  std::vector<std::string> violations() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace morphkv::llama_cpp

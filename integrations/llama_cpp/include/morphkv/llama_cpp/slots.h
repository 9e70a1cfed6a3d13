// Many texts with one model, each in constant memory of its own: one context, one sequence for each
// slot, and every step evaluates one batch for all of them. A slot keeps what it has seen after a
// turn ends, and the next turn may go on from there. Knows nothing of text formats, files or
// threads: one thread calls it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/sampling.h"
#include "morphkv/llama_cpp/saved_text.h"
#include "morphkv/llama_cpp/turn.h"

namespace morphkv::llama_cpp {

struct SlotsOptions {
  int slots = 1;
  int budget = 512;  // most rows per KV head that a turn may ask for, in each slot
  // Most tokens of a prompt between two evictions, guides included; lowered to the budget
  // (bounded_micro_batch()). Larger ones are read faster, and forget no more (docs/guided.md).
  int piece = 512;
  int guide_tokens = kMostGuide;  // most tokens of a guide
  int call_tokens = 0;  // most tokens between two evictions, guides included; 0 = what suits both
  int batch_tokens = 128;  // most tokens evaluated in one step, over all slots
  int threads = 0;         // 0 = one per core
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;
  bool evicts = true;   // false: for turns of policy full, of at most `budget` tokens
  bool reserve = true;  // false: the context is made with the first turn
  // Asked often while the engine works; true ends the turns that are in the step, in good order
  // (FinishReason::kInterrupted).
  std::function<bool()> cancelled = {};
};

struct GeneratedToken {
  llama_token token = 0;
  std::string text;  // bytes; may end within a UTF-8 character
  std::optional<TokenProbability> chosen;
  std::vector<TokenProbability> likeliest;
};

struct SlotStats {
  bool busy = false;
  bool reading = false;           // the prompt, still
  bool asking = false;            // a guide is what is read next
  std::int64_t tokens_seen = 0;   // evaluated since the slot was empty
  int rows_kept = 0;              // per KV head
  std::int64_t rows_evicted = 0;  // per KV head
  std::size_t kv_bytes_kept = 0;  // K and V of the rows held
  std::size_t kv_bytes_full = 0;  // K and V if every token were kept
  int prompt_tokens = 0;          // of the turn
  int reused_tokens = 0;          // of the prompt: seen already, not evaluated again
  int prompt_read = 0;            // of the prompt: seen by now, the reused ones included
  int generated_tokens = 0;       // of the turn
  // How the turn's prompt is read; nothing when it fits into the budget.
  std::optional<Prefill> prefill_mode = std::nullopt;
  int guide_tokens = 0;   // of all its guides together; 0 when none is needed
  double guide_ms = 0.0;  // evaluating and asking them
  double evict_ms = 0.0;  // since the slot was empty
  CacheConfig cache;
};

class Slots {
 public:
  // What a turn tells its owner, from within step(). A handler must not call the slots.
  struct Handler {
    std::function<void(GeneratedToken)> on_token;
    std::function<void(FinishReason)> on_end;          // once, unless end() or on_error came first
    std::function<void(const std::string&)> on_error;  // the engine failed; the slot is empty now
  };

  // Reserves all memory. Throws std::invalid_argument, Unsupported, EngineError. The model must
  // outlive the slots.
  Slots(const llama_model* model, const SlotsOptions& options);
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  // Throws std::invalid_argument that names what is wrong with the turn, TooLong with both numbers.
  void check(const Turn& turn) const;
  // Tokens of the turn's prompt that need not be evaluated in this slot: those that say all that it
  // has seen, if the prompt goes on exactly from there under the same rule, else 0. Where generated
  // text comes back cut into other tokens, the slot's own stand for them.
  int reusable(int slot, const Turn& turn) const;

  // Begins a turn in a slot that is not busy: from what it has seen if that is reusable(), else
  // from nothing. Throws like check(); the slot is as before then.
  void begin(int slot, Turn turn, Handler handler);
  // One batch: a token for each slot that answers, and a share of the prompts that are being read.
  // Returns false if no slot is busy. What fails ends only the turns it concerns.
  bool step();
  // Ends the turn in the slot now, without a call of its handler; what it has seen stays, but of a
  // prompt that was not read to its end nothing does: the rest would be read in other pieces.
  void end(int slot);
  // The same as if the user had cancelled it: also what was read of a prompt stays.
  void interrupt(int slot);
  // Forgets all that the slot has seen. Not while it is busy.
  void erase(int slot);

  // What an idle slot holds, as bytes (SavedText), and back into an idle slot, this one or that of
  // other slots for the same model and cell types, however many and how large. The slot then goes
  // on as the saved one would; its rows lie in other cells, so sums are added up in another order
  // and logits may differ in their last bits. Both throw std::invalid_argument for a busy slot;
  // restore() also for a text of another model or with a budget above the one reserved, for bytes
  // that are damaged or of another version, and EngineError if the engine fails. A slot whose
  // restore() was refused is as before. save() keeps `messages` with the text.
  std::string save(int slot, std::vector<ChatMessage> messages = {}) const;
  SavedText restore(int slot, std::string_view bytes);
  void restore(int slot, const SavedText& saved);

  int slots() const;
  SlotStats stats(int slot) const;
  // All that was read and written; the last tokens of it may not be evaluated yet.
  std::span<const llama_token> text(int slot) const;
  // What is evaluated of it.
  std::span<const llama_token> tokens_seen(int slot) const;
  // Of the token that follows the prompt or the token evaluated last; empty when a slot has
  // evaluated nothing. [vocabulary]
  std::span<const float> logits(int slot) const;
  // Which rows each head of each layer holds.
  std::vector<BoundLayer> snapshot(int slot) const;
  std::size_t kv_bytes_allocated() const;  // of all slots, and of whole prompts that are read
  const SlotsOptions& options() const;
  const Evictor& evictor() const;
  llama_context* context() const;  // null before it is made

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace morphkv::llama_cpp

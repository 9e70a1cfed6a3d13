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
#include "morphkv/llama_cpp/session.h"

namespace morphkv::llama_cpp {

struct SlotsOptions {
  int slots = 1;
  int budget = 512;        // most rows per KV head that a turn may ask for, in each slot
  int piece = 256;         // most tokens of a prompt between two evictions, guides included
  int batch_tokens = 128;  // most tokens evaluated in one step, over all slots
  int threads = 0;         // 0 = one per core
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;
};

// A prompt and the answer wanted for it.
struct Turn {
  std::vector<llama_token> prompt;     // the whole text so far, what the slot has seen included
  CacheConfig cache;                   // its budget is at most that of the slots
  Prefill prefill = Prefill::kGuided;  // or kStream
  std::vector<std::vector<llama_token>> guides = {};  // as in Prompt
  bool end_guides_too = false;
  std::size_t question = 0;  // index in `prompt`
  SamplingOptions sampling;
  int max_tokens = -1;  // negative: until the model ends, the trained length or kTokenCap
  bool ignore_eos = false;
  bool allow_past_training = false;
  bool strict = false;    // refuse rather than evict
  int top_logprobs = -1;  // likeliest tokens beside each chosen one; negative: no logprobs at all
};

// The turn would need more rows than it may have, and must not evict.
class TooLong : public std::invalid_argument {
 public:
  TooLong(const std::string& what, int has, int may_have)
      : std::invalid_argument(what), tokens(has), limit(may_have) {}
  int tokens;  // that the prompt has
  int limit;   // that there is room or training for
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
  std::int64_t tokens_seen = 0;   // evaluated since the slot was empty
  int rows_kept = 0;              // per KV head
  std::int64_t rows_evicted = 0;  // per KV head
  std::size_t kv_bytes_kept = 0;  // K and V of the rows held
  std::size_t kv_bytes_full = 0;  // K and V if every token were kept
  int prompt_tokens = 0;          // of the turn
  int reused_tokens = 0;          // of the prompt: seen already, not evaluated again
  int prompt_read = 0;            // of the prompt: seen by now, the reused ones included
  int generated_tokens = 0;       // of the turn
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
  // Ends the turn in the slot now, without a call of its handler; what it has seen stays.
  void end(int slot);
  // Forgets all that the slot has seen. Not while it is busy.
  void erase(int slot);

  // What an idle slot holds, as bytes (SavedText), and back into an idle slot, this one or that of
  // other slots for the same model and cell types, however many and how large. The slot then goes
  // on as the saved one would; its rows lie in other cells, so sums are added up in another order
  // and logits may differ in their last bits. Both throw std::invalid_argument for a busy slot;
  // restore() also for bytes that are damaged, of another version or model, or with a budget above
  // the one reserved, and EngineError if the engine fails. A slot whose restore() was refused is as
  // before.
  std::string save(int slot) const;
  void restore(int slot, std::string_view bytes);

  int slots() const;
  SlotStats stats(int slot) const;
  std::span<const llama_token> tokens_seen(int slot) const;
  // Which rows each head of each layer holds.
  std::vector<BoundLayer> snapshot(int slot) const;
  std::size_t kv_bytes_allocated() const;  // of all slots
  const SlotsOptions& options() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace morphkv::llama_cpp

// One text with one model in constant memory: reads a prompt of any length, then generates.
// `morphkv run` is a thin shell around it. It is one slot of Slots whose context suits its prompt:
// with policy `full` the engine keeps every row, and a prompt that is read whole has room.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/llama_cpp/slots.h"

namespace morphkv::llama_cpp {

struct SessionOptions {
  CacheConfig cache = default_profile().with_budget(512);
  Prefill prefill = Prefill::kGuided;
  int guide = 0;  // tokens at the prompt's end that are its guide; 0 = kGuideTokens or fewer
  SamplingOptions sampling;
  int max_tokens = -1;  // negative: until the model ends, the trained length or kTokenCap
  bool ignore_eos = false;
  bool allow_past_training = false;
  int threads = 0;        // 0 = one per core
  int micro_batch = 512;  // most tokens evaluated at once, and of a piece and its guide
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;
};

struct SessionCallbacks {
  // One line for the user: a setting had to be changed.
  std::function<void(std::string_view)> on_notice;
  // Tokens of the prompt read so far, all of them, and the rows that a KV head holds of them.
  std::function<void(int done, int total, int rows)> on_prompt;
  // A new token, its text (may end within a UTF-8 character), and the milliseconds of the step that
  // chose it.
  std::function<void(llama_token token, std::string_view text, double ms)> on_token;
  // Asked often; true ends the work soon, in good order.
  std::function<bool()> cancelled;
};

struct SessionResult {
  FinishReason finish_reason = FinishReason::kStop;
  int reused_tokens = 0;  // seen before the prompt, in the text that was resumed
  // Evaluated of the prompt, and a token of the resumed text that had not been.
  int prompt_tokens = 0;
  int generated_tokens = 0;
  // How the prompt was read; nothing when it fitted into the budget.
  std::optional<Prefill> prefill_mode = std::nullopt;
  int guide_tokens = 0;           // of all guides together; 0 when none was needed
  double guide_ms = 0.0;          // evaluating and asking them, part of prefill_ms
  double prefill_ms = 0.0;        // eviction included
  double decode_ms = 0.0;         // eviction included
  double evict_ms = 0.0;          // in the prompt and in decoding
  double evict_decode_ms = 0.0;   // in decoding
  std::size_t kv_bytes_peak = 0;  // most K and V memory allocated at once
  EvictorStats cache;             // at the end
};

// What run() checks of a prompt behind the tokens `before` of a resumed text, for a model that may
// be loaded vocab_only. Throws like check_turn().
void check_prompt(const Prompt& prompt, const SessionOptions& options, const llama_model* model,
                  std::span<const llama_token> before = {});

class Session {
 public:
  // Throws std::invalid_argument (validate(), limits) or Unsupported. The model must outlive the
  // session.
  Session(const llama_model* model, const SessionOptions& options);

  // Goes on from a saved text: the prompt that is read follows it. Before read(). Throws
  // std::invalid_argument for one of another model, cell type or CacheConfig, with both.
  void resume(SavedText text);

  // Reads the prompt and generates. Once per session. Throws std::invalid_argument (check_turn();
  // rows of a resumed text that the engine refuses), EngineError when the engine fails.
  SessionResult run(const Prompt& prompt, const SessionCallbacks& callbacks);
  SessionResult run(std::span<const llama_token> tokens, const SessionCallbacks& callbacks) {
    return run(Prompt{.tokens = tokens}, callbacks);
  }

  // run() in parts, for those who choose the tokens themselves. read() reads the prompt, once per
  // session, and leaves the rest of the result at zero; its finish_reason is kInterrupted if it was
  // cancelled, else kStop. feed() evaluates further tokens and evicts.
  SessionResult read(const Prompt& prompt, const SessionCallbacks& callbacks);
  void feed(std::span<const llama_token> tokens);
  // Of the token that follows. [vocabulary]
  std::span<const float> logits() const { return require_slots("logits").logits(0); }

  // All that the session has read and written, to be resumed by another one (SavedText::to_bytes);
  // the last token of an answer is text though it was not evaluated. After read() or run().
  std::string save(std::vector<ChatMessage> messages = {}) const {
    return require_slots("save").save(0, std::move(messages));
  }
  // Whether read() has come to the prompt's end.
  bool prompt_read() const { return prompt_read_; }

  const Evictor& evictor() const { return require_slots("evictor").evictor(); }
  llama_context* context() const { return slots_ ? slots_->context() : nullptr; }

 private:
  void make_slots(const Turn& turn, const SessionCallbacks& callbacks);
  void take_over_resumed();
  SessionResult carry_out(const Prompt& prompt, int max_tokens, const SessionCallbacks& callbacks);
  Slots& require_slots(const char* call) const;

  const llama_model* model_;
  SessionOptions options_;
  std::optional<SavedText> resumed_;          // until it is read on
  std::unique_ptr<Slots> slots_;              // once the prompt is known
  const SessionCallbacks* active_ = nullptr;  // while a turn goes on
  bool prompt_read_ = false;
};

}  // namespace morphkv::llama_cpp

// One text with one model in constant memory: reads a prompt of any length, then generates.
// `morphkv run` is a thin shell around it. The bounding itself is the Evictor's; with policy `full`
// the engine keeps every row.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/llama_ptr.h"
#include "morphkv/llama_cpp/sampling.h"
#include "morphkv/llama_cpp/saved_text.h"
#include "morphkv/profile.h"

namespace morphkv::llama_cpp {

using morphkv::Prefill;
using morphkv::to_string;

struct SessionOptions {
  EvictorOptions evictor;
  Prefill prefill = Prefill::kGuided;
  // Tokens at the prompt's end that are its guide; 0 = kGuideTokens, less where that would cost
  // more than an eighth of a micro-batch.
  int guide = 0;
  SamplingOptions sampling;
  int max_tokens =
      -1;  // tokens to generate; negative: until the model ends, the trained length or kTokenCap
  bool ignore_eos = false;
  bool allow_past_training = false;
  int threads = 0;  // 0 = one per core
  int micro_batch = 512;
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;
  bool flash_attention = true;
};

inline constexpr int kGuideTokens = 24;

// There is always an end: this many tokens when neither a limit nor the trained length gives one.
inline constexpr int kTokenCap = 32768;

// What is read before the answer.
struct Prompt {
  std::span<const llama_token> tokens;
  // Texts that guide Prefill::kGuided, each at most one micro-batch long; they are not part of the
  // prompt and share the budget. Empty: the prompt's own last tokens.
  std::vector<std::vector<llama_token>> guides = {};
  bool end_guides_too = false;  // the prompt's last tokens beside those texts
  // Where the newest question begins: the prompt's own guide does not reach back beyond it.
  std::size_t question = 0;
};

enum class FinishReason : std::uint8_t { kStop, kLength, kTrainedLength, kInterrupted };
std::string_view to_string(FinishReason reason);

struct SessionCallbacks {
  // One line for the user: a setting had to be changed.
  std::function<void(std::string_view)> on_notice;
  // Tokens of the prompt read so far, all of them, and the rows that a KV head holds of them.
  std::function<void(int done, int total, int rows)> on_prompt;
  // A new token, its text (may end within a UTF-8 character), and the milliseconds its decode step
  // took.
  std::function<void(llama_token token, std::string_view text, double ms)> on_token;
  // Asked often; true ends the work soon, in good order.
  std::function<bool()> cancelled;
};

struct SessionResult {
  FinishReason finish_reason = FinishReason::kStop;
  int reused_tokens = 0;  // seen before the prompt, in the text that was resumed
  int prompt_tokens = 0;  // evaluated of the prompt, and a token of the resumed text that had not
                          // been
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

// All that can be wrong with a prompt before a model is loaded: no tokens, more than the trained
// length (0 = unknown), the `before` tokens of a resumed text included, a question or guides that
// do not fit. Throws std::invalid_argument.
void check_prompt(const Prompt& prompt, const SessionOptions& options, int trained_length,
                  std::size_t before = 0);

class PromptReader;

class Session {
 public:
  // Throws std::invalid_argument (validate(), limits) or Unsupported. The model must outlive the
  // session.
  Session(const llama_model* model, const SessionOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Goes on from a saved text: the prompt that is read follows it. Before read(). Throws
  // std::invalid_argument for one of another model, cell type or CacheConfig, with both.
  void resume(SavedText text);

  // Reads the prompt and generates. Once per session. Throws std::invalid_argument
  // (check_prompt(); rows of a resumed text that the engine refuses), EngineError when the engine
  // fails.
  SessionResult run(const Prompt& prompt, const SessionCallbacks& callbacks);
  SessionResult run(std::span<const llama_token> tokens, const SessionCallbacks& callbacks) {
    return run(Prompt{.tokens = tokens}, callbacks);
  }

  // run() in parts, for those who choose the tokens themselves. read() reads the prompt, once per
  // session, and leaves the rest of the result at zero; its finish_reason is kInterrupted if it was
  // cancelled, else kStop. feed() evaluates further tokens, at most one micro-batch, and evicts.
  SessionResult read(const Prompt& prompt, const SessionCallbacks& callbacks);
  void feed(std::span<const llama_token> tokens);
  // Of the token that follows. [vocabulary]
  std::span<const float> logits() const { return logits_; }

  // All that the session has read and written, to be resumed by another one (SavedText::to_bytes);
  // the last token of an answer is text though it was not evaluated. After read() or run().
  std::string save() const;
  // Whether read() has come to the prompt's end.
  bool prompt_read() const { return prompt_read_; }

  const Evictor& evictor() const { return evictor_; }
  llama_context* context() const { return context_.get(); }

 private:
  std::string make_context(int call_tokens);
  void move_to_small_context();
  void take_over_resumed();
  bool read_pieces(PromptReader reader, int total);
  void report_progress(int done, int total) const;
  FinishReason generate(const SessionCallbacks& callbacks, SessionResult& result);
  bool decode(std::span<const llama_token> tokens);
  bool evaluate(std::span<const llama_token> tokens);
  int token_limit() const;
  int most_rows(std::int64_t tokens) const;

  const llama_model* model_;
  SessionOptions options_;
  Evictor evictor_;
  Sampler sampler_;
  ContextPtr context_;                        // after evictor_: the context calls it back
  int trained_length_ = 0;                    // 0 = unknown
  std::vector<float> logits_;                 // of the next token
  std::vector<llama_token> text_;             // read and written
  std::optional<SavedText> resumed_;          // until it is read on
  const SessionCallbacks* active_ = nullptr;  // during run()
  std::size_t kv_bytes_peak_ = 0;
  bool prompt_read_ = false;
  int most_asking_ = 0;    // tokens of a guide at once
  double guide_ms_ = 0.0;  // what the guides cost
};

}  // namespace morphkv::llama_cpp

// Text in, text out, on one slot: prompts and chats become tokens that go on from what the session
// has seen, tokens become whole characters without the stop texts. Knows nothing of Python; one
// thread at a time calls it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/llama_cpp/chat_template.h"
#include "morphkv/llama_cpp/llama_ptr.h"
#include "morphkv/llama_cpp/slots.h"
#include "stop_text.h"

namespace morphkv::python {

struct TextSessionOptions {
  CacheConfig cache;
  std::string guide_text;  // guides beside the prompt's end, of turns without guides; "" = none
  int threads = 0;         // 0 = one per core
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;
  bool allow_past_training = false;
};

struct TextTurn {
  llama_cpp::SamplingOptions sampling;
  int max_tokens = -1;  // negative: until the model ends
  std::vector<std::string> stop;
  std::vector<std::string> guides;  // in place of the prompt's end
  Prefill prefill = Prefill::kGuided;
  bool ignore_eos = false;
  bool strict = false;
};

struct TextStats {
  std::int64_t tokens_seen = 0;
  int rows_kept = 0;
  std::int64_t rows_evicted = 0;
  int prompt_tokens = 0;      // of the last turn
  int reused_tokens = 0;      // of its prompt
  int generated_tokens = 0;   // of the last turn
  std::string finish_reason;  // of the last turn; "" while it goes on or when there was none
  std::size_t kv_bytes_allocated = 0;
};

class TextSession {
 public:
  // Throws as Slots does.
  TextSession(llama_cpp::ModelPtr model, const TextSessionOptions& options);
  TextSession(const TextSession&) = delete;
  TextSession& operator=(const TextSession&) = delete;

  // Begin a turn. The text goes on behind all there was; the messages do if that is how they begin,
  // else they start from nothing. Throw as Slots::begin() and ChatTemplate do, and
  // std::invalid_argument; nothing has changed then.
  void begin(const std::string& text, const TextTurn& turn);
  void begin(const std::vector<llama_cpp::ChatMessage>& messages, const TextTurn& turn);
  bool busy() const { return slots_.stats(0).busy; }
  // One batch; returns what may be shown of the answer by now. Throws EngineError; the session is
  // empty then.
  std::string step();
  // Ends the turn; a session that was still reading its prompt is empty then.
  void end();

  // Forgets everything.
  void reset();
  // Not while busy(). save() evaluates a token that was shown last and is not seen yet. After
  // restore() the rule is that of the saved session, until reset().
  std::string save();
  void restore(std::string_view bytes);

  TextStats stats() const;

 private:
  using Tokens = std::vector<llama_token>;

  Tokens said() const;
  void begin(Tokens prompt, std::size_t question, const TextTurn& turn);
  void finish(llama_cpp::FinishReason reason);
  const llama_cpp::ChatTemplate& chat_template();

  llama_cpp::ModelPtr model_;
  TextSessionOptions options_;
  CacheConfig cache_;  // the rule in force
  llama_cpp::Slots slots_;
  std::optional<llama_cpp::ChatTemplate> chat_template_;
  std::optional<llama_token> unseen_;  // generated last, and not evaluated by the slot
  cli::AnswerText text_;
  std::string shown_;  // since the last step
  std::optional<std::string> error_;
  int prompt_tokens_ = 0;
  int reused_tokens_ = 0;
  int generated_tokens_ = 0;
  std::string finish_reason_;
};

}  // namespace morphkv::python

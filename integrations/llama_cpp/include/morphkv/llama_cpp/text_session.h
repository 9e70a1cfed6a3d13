// Text in, text out, on one slot: prompts and chats become tokens that go on from what the session
// has seen, tokens become whole characters without the stop texts. `morphkv chat` and Python's
// Session are thin shells around it. One thread at a time calls it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/llama_cpp/chat_template.h"
#include "morphkv/llama_cpp/slots.h"
#include "morphkv/llama_cpp/stop_text.h"

namespace morphkv::llama_cpp {

struct TextSessionOptions {
  ResolvedSettings settings;
  int threads = 0;  // 0 = one per core
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;
  bool allow_past_training = false;
};

struct TextTurn {
  SamplingOptions sampling;
  int max_tokens = -1;  // negative: until the model ends
  std::vector<std::string> stop;
  std::vector<std::string> guides;  // in place of the prompt's end
  std::optional<Prefill> prefill;   // in place of the settings'
  bool ignore_eos = false;
  bool strict = false;
};

class TextSession {
 public:
  // Throws as Slots does. The model must outlive the session.
  TextSession(const llama_model* model, const TextSessionOptions& options);

  // Begin a turn. The text goes on behind all there was ("": an answer that was cut does); the
  // messages do if that is how they begin, else they start from nothing. say() adds a message of
  // the user to the chat. Throw as Slots::begin() and ChatTemplate do, and std::invalid_argument;
  // nothing has changed then.
  void begin(const std::string& text, const TextTurn& turn);
  void begin(const std::vector<ChatMessage>& messages, const TextTurn& turn);
  void say(const std::string& content, const TextTurn& turn);
  bool busy() const { return slots_.stats(0).busy; }
  // One batch; returns what may be shown of the answer by now. Throws EngineError; the session is
  // empty then.
  std::string step();
  // Ends the turn; a session that was still reading its prompt is empty then. Returns what was held
  // back of the answer.
  std::string end();

  // Forgets everything. A chat then begins with these messages.
  void reset(std::vector<ChatMessage> messages = {});
  // Not while busy(), as SavedText. After restore() the rule is that of the saved session, until
  // reset().
  std::string save() const { return slots_.save(0, messages_); }
  void restore(std::string_view bytes);

  // The chat so far, answers included; empty where the session holds a text, or a chat that nobody
  // knows the messages of.
  const std::vector<ChatMessage>& messages() const { return messages_; }
  // Of the last turn: "stop" (the model ended), "stop_text", "length", "trained_length",
  // "interrupted", "error"; "" while it goes on or when there was none.
  const std::string& finish_reason() const { return finish_reason_; }
  SlotStats stats() const { return slots_.stats(0); }
  std::size_t kv_bytes_allocated() const { return slots_.kv_bytes_allocated(); }
  // What every turn without settings of its own asks for, with the rule in force.
  ResolvedSettings settings() const;

 private:
  using Tokens = std::vector<llama_token>;

  Turn turn_of(Tokens prompt, std::size_t question, const TextTurn& turn) const;
  void begin(Turn turn, const TextTurn& wishes);
  void finish(std::string reason);
  const ChatTemplate& chat_template();

  const llama_model* model_;
  TextSessionOptions options_;
  CacheConfig cache_;  // the rule in force
  Slots slots_;
  std::optional<ChatTemplate> chat_template_;
  std::vector<ChatMessage> messages_;
  AnswerText text_;
  std::string shown_;   // since the last step
  std::string answer_;  // of the turn
  std::optional<std::string> error_;
  std::string finish_reason_;
};

}  // namespace morphkv::llama_cpp

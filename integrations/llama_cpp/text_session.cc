#include "morphkv/llama_cpp/text_session.h"

#include <stdexcept>
#include <utility>

#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::llama_cpp {

TextSession::TextSession(const llama_model* model, const TextSessionOptions& options)
    : model_(model),
      options_(options),
      cache_(options.settings.cache),
      slots_(model, {.budget = options.settings.cache.budget,
                     .threads = options.threads,
                     .type_k = options.type_k,
                     .type_v = options.type_v}) {
  slots_.check(turn_of({0}, 0, {}));  // what every turn asks for must be possible
}

ResolvedSettings TextSession::settings() const {
  ResolvedSettings settings = options_.settings;
  settings.cache = cache_;
  return settings;
}

const ChatTemplate& TextSession::chat_template() {
  if (!chat_template_) chat_template_.emplace(model_);
  return *chat_template_;
}

Turn TextSession::turn_of(Tokens prompt, std::size_t question, const TextTurn& t) const {
  Turn turn;
  turn.use(options_.settings, model_, t.guides);
  turn.cache = cache_;
  turn.prompt = std::move(prompt);
  turn.question = question;
  turn.prefill = t.prefill.value_or(turn.prefill);
  if (turn.prefill != Prefill::kGuided) {
    if (!t.guides.empty()) {
      throw std::invalid_argument("guides are given, but prefill '" +
                                  std::string(to_string(turn.prefill)) + "' asks none: use guided");
    }
    turn.guides.clear();
  }
  turn.sampling = t.sampling;
  turn.max_tokens = t.max_tokens;
  turn.ignore_eos = t.ignore_eos;
  turn.allow_past_training = options_.allow_past_training;
  turn.strict = t.strict;
  return turn;
}

void TextSession::begin(const std::string& text, const TextTurn& turn) {
  const auto said = slots_.text(0);
  if (text.empty() && said.size() == slots_.tokens_seen(0).size()) {
    throw std::invalid_argument(
        "the prompt is empty, and no cut answer is there to go on with: give some text");
  }
  Tokens prompt(said.begin(), said.end());
  const Tokens more =
      prompt.empty() ? tokenize(model_, text, false) : tokenize_continuation(model_, text);
  if (!text.empty()) prompt.insert(prompt.end(), more.begin(), more.end());
  begin(turn_of(std::move(prompt), 0, turn), turn);
  messages_.clear();
}

void TextSession::begin(const std::vector<ChatMessage>& messages, const TextTurn& turn) {
  const RenderChat render = [this](const auto& list, bool add_assistant) {
    return chat_template().render(list, add_assistant);
  };
  Tokens prompt = tokenize(model_, render(messages, true), true);
  if (prompt.empty()) throw std::invalid_argument("the chat template makes no prompt of that");
  const std::size_t question = question_in(model_, render, messages, prompt);
  begin(turn_of(std::move(prompt), question, turn), turn);
  messages_ = messages;
}

// What was said stays as it was read, and only what is new is evaluated, where the template allows
// that: else the whole chat is rendered anew.
void TextSession::say(const std::string& content, const TextTurn& turn) {
  const auto said = slots_.text(0);
  std::vector<ChatMessage> chat = messages_;
  chat.push_back({"user", content});
  if (said.empty()) return begin(chat, turn);
  std::string next;
  try {
    next = chat_template().next_turn(content);
  } catch (const std::invalid_argument&) {
    if (messages_.empty()) throw;
    return begin(chat, turn);
  }
  Tokens prompt(said.begin(), said.end());
  const std::size_t question = prompt.size();
  const Tokens more = tokenize_continuation(model_, next, true);
  prompt.insert(prompt.end(), more.begin(), more.end());
  begin(turn_of(std::move(prompt), question, turn), turn);
  if (!messages_.empty()) messages_ = std::move(chat);
}

void TextSession::begin(Turn turn, const TextTurn& wishes) {
  AnswerText text(wishes.stop);
  slots_.begin(
      0, std::move(turn),
      {.on_token = [this](const GeneratedToken& token) { shown_ += text_.push(token.text); },
       .on_end = [this](FinishReason reason) { finish(std::string(to_string(reason))); },
       .on_error = [this](const std::string& what) { error_ = what; }});
  finish_reason_.clear();
  text_ = std::move(text);
  shown_.clear();
  answer_.clear();
  error_.reset();
}

void TextSession::finish(std::string reason) {
  shown_ += text_.finish();
  finish_reason_ = text_.stopped() ? "stop_text" : std::move(reason);
  if (!messages_.empty()) messages_.push_back({"assistant", answer_ + shown_});
}

std::string TextSession::step() {
  slots_.step();
  if (error_) {
    finish_reason_ = "error";
    throw EngineError(*std::exchange(error_, {}));
  }
  if (text_.stopped() && busy()) {
    slots_.end(0);
    finish("stop_text");
  }
  answer_ += shown_;
  return std::exchange(shown_, {});
}

std::string TextSession::end() {
  if (!busy()) return "";
  slots_.end(0);
  finish("interrupted");
  answer_ += shown_;
  return std::exchange(shown_, {});
}

void TextSession::reset(std::vector<ChatMessage> messages) {
  slots_.end(0);
  slots_.erase(0);
  cache_ = options_.settings.cache;
  messages_ = std::move(messages);
  finish_reason_.clear();
}

void TextSession::restore(std::string_view bytes) {
  SavedText saved = slots_.restore(0, bytes);
  cache_ = saved.checkpoint.config();
  messages_ = std::move(saved.messages);
  finish_reason_.clear();
}

}  // namespace morphkv::llama_cpp

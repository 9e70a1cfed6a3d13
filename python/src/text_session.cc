#include "text_session.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::python {

using namespace llama_cpp;  // NOLINT: the whole file is about its types

TextSession::TextSession(ModelPtr model, const TextSessionOptions& options)
    : model_(std::move(model)),
      options_(options),
      cache_(options.cache),
      slots_(model_.get(), {.slots = 1,
                            .budget = options.cache.budget,
                            .batch_tokens = 128,
                            .threads = options.threads,
                            .type_k = options.type_k,
                            .type_v = options.type_v}) {}

// All that was read and generated.
TextSession::Tokens TextSession::said() const {
  const auto seen = slots_.tokens_seen(0);
  Tokens tokens(seen.begin(), seen.end());
  if (unseen_) tokens.push_back(*unseen_);
  return tokens;
}

const ChatTemplate& TextSession::chat_template() {
  if (!chat_template_) chat_template_.emplace(model_.get());
  return *chat_template_;
}

void TextSession::begin(const std::string& text, const TextTurn& turn) {
  // An empty text goes on with an answer that was cut.
  if (text.empty() && !unseen_) {
    throw std::invalid_argument(
        "the prompt is empty, and no cut answer is there to go on with: give some text");
  }
  Tokens prompt = said();
  if (prompt.empty()) {
    prompt = tokenize(model_.get(), text, false);
  } else if (!text.empty()) {
    const Tokens more = tokenize_continuation(model_.get(), text);
    prompt.insert(prompt.end(), more.begin(), more.end());
  }
  begin(std::move(prompt), 0, turn);
}

void TextSession::begin(const std::vector<ChatMessage>& messages, const TextTurn& turn) {
  const RenderChat render = [this](const auto& list, bool add_assistant) {
    return chat_template().render(list, add_assistant);
  };
  Tokens prompt = tokenize(model_.get(), render(messages, true), true);
  if (prompt.empty()) throw std::invalid_argument("the chat template makes no prompt of that");
  const std::size_t question = question_in(model_.get(), render, messages, prompt);
  begin(std::move(prompt), question, turn);
}

void TextSession::begin(Tokens prompt, std::size_t question, const TextTurn& t) {
  cli::AnswerText text(t.stop);
  const auto prompt_tokens = static_cast<int>(prompt.size());
  Turn turn{.prompt = std::move(prompt),
            .cache = cache_,
            .prefill = t.prefill,
            .question = question,
            .sampling = t.sampling,
            .max_tokens = t.max_tokens,
            .ignore_eos = t.ignore_eos,
            .allow_past_training = options_.allow_past_training,
            .strict = t.strict};
  for (const std::string& guide : t.guides)
    turn.guides.push_back(tokenize_continuation(model_.get(), guide));
  if (turn.guides.empty() && !options_.guide_text.empty() && t.prefill == Prefill::kGuided) {
    turn.guides.push_back(tokenize_continuation(model_.get(), options_.guide_text));
    turn.end_guides_too = true;
  }
  slots_.begin(0, std::move(turn),
               {.on_token =
                    [this](const GeneratedToken& token) {
                      unseen_ = token.token;
                      ++generated_tokens_;
                      shown_ += text_.push(token.text);
                    },
                .on_end = [this](FinishReason reason) { finish(reason); },
                .on_error = [this](const std::string& what) { error_ = what; }});
  prompt_tokens_ = prompt_tokens;
  reused_tokens_ = slots_.stats(0).reused_tokens;
  generated_tokens_ = 0;
  finish_reason_.clear();
  unseen_.reset();
  text_ = std::move(text);
  shown_.clear();
  error_.reset();
}

void TextSession::finish(FinishReason reason) {
  if (reason == FinishReason::kStop) unseen_.reset();  // the end was chosen behind it
  shown_ += text_.finish();
  finish_reason_ = text_.stopped() ? "stop_text" : to_string(reason);
}

std::string TextSession::step() {
  slots_.step();
  if (error_) {
    unseen_.reset();
    finish_reason_ = "error";
    throw EngineError(*std::exchange(error_, {}));
  }
  if (text_.stopped() && busy()) {
    slots_.end(0);
    finish_reason_ = "stop_text";
  }
  return std::exchange(shown_, {});
}

void TextSession::end() {
  if (!busy()) return;
  slots_.end(0);
  if (slots_.tokens_seen(0).empty()) unseen_.reset();
  finish_reason_ = "interrupted";
}

void TextSession::reset() {
  end();
  slots_.erase(0);
  cache_ = options_.cache;
  unseen_.reset();
  prompt_tokens_ = reused_tokens_ = generated_tokens_ = 0;
  finish_reason_.clear();
}

std::string TextSession::save() {
  if (unseen_) {
    std::optional<std::string> error;
    slots_.begin(
        0,
        {.prompt = said(),
         .cache = cache_,
         .prefill = Prefill::kStream,
         .sampling = {},
         .max_tokens = 0,
         .allow_past_training = true},
        {.on_token = {}, .on_end = {}, .on_error = [&](const std::string& what) { error = what; }});
    while (busy()) slots_.step();
    unseen_.reset();
    if (error) throw EngineError(*error);
  }
  return slots_.save(0);
}

void TextSession::restore(std::string_view bytes) {
  try {
    slots_.restore(0, bytes);
  } catch (const EngineError&) {  // it left nothing behind
    unseen_.reset();
    throw;
  }
  cache_ = slots_.stats(0).cache;
  unseen_.reset();
  prompt_tokens_ = reused_tokens_ = generated_tokens_ = 0;
  finish_reason_.clear();
}

TextStats TextSession::stats() const {
  const SlotStats slot = slots_.stats(0);
  return {.tokens_seen = slot.tokens_seen,
          .rows_kept = slot.rows_kept,
          .rows_evicted = slot.rows_evicted,
          .prompt_tokens = prompt_tokens_,
          .reused_tokens = reused_tokens_,
          .generated_tokens = generated_tokens_,
          .finish_reason = finish_reason_,
          .kv_bytes_allocated = slots_.kv_bytes_allocated()};
}

}  // namespace morphkv::python

#include "text_session.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::python {

using namespace llama_cpp;  // NOLINT: the whole file is about its types

TextSession::TextSession(ModelPtr model, const TextSessionOptions& options)
    : model_(std::move(model)),
      vocab_(llama_model_get_vocab(model_.get())),
      options_(options),
      cache_(options.cache),
      slots_(model_.get(), {.slots = 1,
                            .budget = options.cache.budget,
                            .batch_tokens = 128,
                            .threads = options.threads,
                            .type_k = options.type_k,
                            .type_v = options.type_v}) {}

// Tokens of a text that follows another one: without a start token.
TextSession::Tokens TextSession::tokenize_behind(std::string_view text, bool parse_special) const {
  const auto plain = [&](std::string_view t) {
    Tokens tokens = tokenize(model_.get(), t, parse_special);
    if (llama_vocab_get_add_bos(vocab_) && !tokens.empty()) tokens.erase(tokens.begin());
    return tokens;
  };
  if (llama_vocab_type(vocab_) == LLAMA_VOCAB_TYPE_SPM) {
    // It would put a space before the text; behind a line end, which is then taken off, it does
    // not.
    const Tokens line_end = plain("\n");
    const Tokens whole = plain("\n" + std::string(text));
    const auto [end, rest] =
        std::mismatch(line_end.begin(), line_end.end(), whole.begin(), whole.end());
    if (end == line_end.end()) return {rest, whole.end()};
  }
  return plain(text);
}

std::string TextSession::text_of(std::span<const llama_token> tokens) const {
  std::string text;
  for (const llama_token token : tokens) text += token_text(model_.get(), token, true);
  return text;
}

TextSession::Tokens TextSession::control_tokens(std::span<const llama_token> tokens) const {
  Tokens control;
  for (const llama_token token : tokens) {
    if (llama_vocab_is_control(vocab_, token)) control.push_back(token);
  }
  return control;
}

// The prompt of a chat that begins with all there was. Compared as text: the model's own answer may
// be cut into other tokens than the tokenizer would cut it into.
std::optional<TextSession::Tokens> TextSession::continued(const std::string& rendered) const {
  std::span<const llama_token> before = tokens_;
  const bool starts = llama_vocab_get_add_bos(vocab_) && !before.empty() &&
                      before.front() == llama_vocab_bos(vocab_);
  if (starts) before = before.subspan(1);
  const std::string text = text_of(before);
  if (text.empty() || rendered.size() <= text.size() || !rendered.starts_with(text)) return {};
  // The same text may stand for a control token, or be written out by the user.
  if (control_tokens(tokenize_behind(text, true)) != control_tokens(before)) return {};
  Tokens prompt = tokens_;
  const Tokens rest = tokenize_behind(std::string_view(rendered).substr(text.size()), true);
  prompt.insert(prompt.end(), rest.begin(), rest.end());
  return prompt;
}

// Where the newest question begins: up to there another question makes the same prompt.
std::size_t TextSession::question_of(std::vector<ChatMessage> messages,
                                     const Tokens& prompt) const {
  const auto newest = std::find_if(messages.rbegin(), messages.rend(),
                                   [](const ChatMessage& m) { return m.role == "user"; });
  if (newest == messages.rend()) return 0;
  newest->content = newest->content.starts_with('a') ? "b" : "a";
  const Tokens other = tokenize(model_.get(), chat_template_->render(messages), true);
  const auto [end, ignored] =
      std::mismatch(prompt.begin(), prompt.end(), other.begin(), other.end());
  return std::min(static_cast<std::size_t>(end - prompt.begin()), prompt.size() - 1);
}

const ChatTemplate& TextSession::chat_template() {
  if (!chat_template_) chat_template_.emplace(model_.get());
  return *chat_template_;
}

void TextSession::begin(const std::string& text, const TextTurn& turn) {
  Tokens prompt = tokens_;
  if (prompt.empty()) {
    prompt = tokenize(model_.get(), text, false);
  } else {
    const Tokens more = text.empty() ? Tokens{} : tokenize_behind(text, false);
    prompt.insert(prompt.end(), more.begin(), more.end());
  }
  // An empty text goes on with an answer that was cut.
  if (text.empty() && prompt.size() == slots_.tokens_seen(0).size()) {
    throw std::invalid_argument(
        "the prompt is empty, and no cut answer is there to go on with: give some text");
  }
  begin(std::move(prompt), 0, turn);
}

void TextSession::begin(const std::vector<ChatMessage>& messages, const TextTurn& turn) {
  const std::string rendered = chat_template().render(messages);
  std::optional<Tokens> prompt = continued(rendered);
  if (!prompt) prompt = tokenize(model_.get(), rendered, true);
  if (prompt->empty()) throw std::invalid_argument("the chat template makes no prompt of that");
  const std::size_t question = question_of(messages, *prompt);
  begin(*std::move(prompt), question, turn);
}

void TextSession::begin(Tokens prompt, std::size_t question, const TextTurn& t) {
  cli::StopText stop(t.stop);
  Turn turn{.prompt = prompt,
            .cache = cache_,
            .prefill = t.prefill,
            .question = question,
            .sampling = t.sampling,
            .max_tokens = t.max_tokens,
            .ignore_eos = t.ignore_eos,
            .allow_past_training = options_.allow_past_training,
            .strict = t.strict};
  for (const std::string& guide : t.guides) turn.guides.push_back(tokenize_behind(guide, false));
  if (turn.guides.empty() && !options_.guide_text.empty() && t.prefill == Prefill::kGuided) {
    turn.guides.push_back(tokenize_behind(options_.guide_text, false));
    turn.end_guides_too = true;
  }
  slots_.begin(0, std::move(turn),
               {.on_token =
                    [this](const GeneratedToken& token) {
                      tokens_.push_back(token.token);
                      ++generated_tokens_;
                      shown_ += stop_.push(characters_.push(token.text));
                    },
                .on_end = [this](FinishReason reason) { finish(to_string(reason)); },
                .on_error = [this](const std::string& what) { error_ = what; }});
  prompt_tokens_ = static_cast<int>(prompt.size());
  reused_tokens_ = slots_.stats(0).reused_tokens;
  generated_tokens_ = 0;
  finish_reason_.clear();
  tokens_ = std::move(prompt);
  characters_ = {};
  stop_ = std::move(stop);
  shown_.clear();
  error_.reset();
}

void TextSession::finish(std::string_view reason) {
  shown_ += stop_.push(characters_.finish());
  shown_ += stop_.finish();
  finish_reason_ = stop_.stopped() ? "stop_text" : reason;
}

std::string TextSession::step() {
  slots_.step();
  if (error_) {
    tokens_.clear();
    finish_reason_ = "error";
    throw EngineError(*std::exchange(error_, {}));
  }
  if (stop_.stopped() && busy()) {
    slots_.end(0);
    finish_reason_ = "stop_text";
  }
  return std::exchange(shown_, {});
}

void TextSession::end() {
  if (!busy()) return;
  slots_.end(0);
  if (slots_.tokens_seen(0).empty()) tokens_.clear();
  finish_reason_ = "interrupted";
}

void TextSession::reset() {
  end();
  slots_.erase(0);
  cache_ = options_.cache;
  tokens_.clear();
  prompt_tokens_ = reused_tokens_ = generated_tokens_ = 0;
  finish_reason_.clear();
}

std::string TextSession::save() {
  if (tokens_.size() > slots_.tokens_seen(0).size()) {
    std::optional<std::string> error;
    slots_.begin(
        0,
        {.prompt = tokens_,
         .cache = cache_,
         .prefill = Prefill::kStream,
         .sampling = {},
         .max_tokens = 0,
         .allow_past_training = true},
        {.on_token = {}, .on_end = {}, .on_error = [&](const std::string& what) { error = what; }});
    while (busy()) slots_.step();
    if (error) {
      tokens_.clear();
      throw EngineError(*error);
    }
  }
  return slots_.save(0);
}

void TextSession::restore(std::string_view bytes) {
  try {
    slots_.restore(0, bytes);
  } catch (const EngineError&) {  // it left nothing behind
    tokens_.clear();
    throw;
  }
  cache_ = slots_.stats(0).cache;
  const auto seen = slots_.tokens_seen(0);
  tokens_.assign(seen.begin(), seen.end());
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

#include "morphkv/llama_cpp/chat_template.h"

#include <chat-auto-parser.h>
#include <chat.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::llama_cpp {
namespace {

constexpr const char* kRemedy =
    ": give the whole prompt as text, without a template (`morphkv run` without --chat)";

// What went wrong on one line, without the excerpt of the template that common puts before it.
std::string reason_of(const std::exception& error) {
  std::string text = error.what();
  for (const std::string_view mark : {"Error: ", "Jinja Exception: "}) {
    const std::size_t at = text.rfind(mark);
    if (at != std::string::npos) text.erase(0, at + mark.size());
  }
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string template_of(const llama_model* model) {
  const char* source = llama_model_chat_template(model, nullptr);
  if (source == nullptr || *source == '\0') {
    throw BadModelFile(std::string("the model file has no chat template") + kRemedy);
  }
  return source;
}

std::string special_text(const llama_model* model, llama_token token) {
  return token == LLAMA_TOKEN_NULL ? "" : token_text(model, token, true);
}

common_chat_template parse(const llama_model* model) {
  const llama_vocab* vocab = llama_model_get_vocab(model);
  const std::string source = template_of(model);
  try {
    return {source, special_text(model, llama_vocab_bos(vocab)),
            special_text(model, llama_vocab_eos(vocab))};
  } catch (const std::exception& error) {
    throw BadModelFile("the chat template of the model file cannot be parsed: " + reason_of(error) +
                       kRemedy);
  }
}

// For a template that knows no system role: its message begins the next one, as in llama.cpp's own
// server.
std::vector<ChatMessage> merge_system(std::vector<ChatMessage> messages) {
  if (messages.size() < 2 || messages.front().role != "system") return messages;
  messages[1].content = messages[0].content + "\n" + messages[1].content;
  messages.erase(messages.begin());
  return messages;
}

common_json to_json(const std::vector<ChatMessage>& messages) {
  common_json list = common_json::array();
  for (const auto& [role, content] : messages)
    list.push_back({{"role", role}, {"content", content}});
  return list;
}

}  // namespace

// common_chat_templates_apply() would also make a parser for the answer, several renderings per
// call, and log; so only its parts that render are used.
struct ChatTemplate::Parsed {
  common_chat_template jinja;
  bool add_bos;
  bool add_eos;
};

ChatTemplate::ChatTemplate(const llama_model* model)
    : parsed_(new Parsed{parse(model), llama_vocab_get_add_bos(llama_model_get_vocab(model)),
                         llama_vocab_get_add_eos(llama_model_get_vocab(model))}) {}
ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

std::string ChatTemplate::render(const std::vector<ChatMessage>& messages,
                                 bool add_assistant) const {
  const common_chat_template& jinja = parsed_->jinja;
  try {
    autoparser::generation_params input;
    input.messages =
        to_json(jinja.original_caps().supports_system_role ? messages : merge_system(messages));
    input.add_generation_prompt = add_assistant;
    input.add_bos = parsed_->add_bos;  // removes what tokenize() will add
    input.add_eos = parsed_->add_eos;
    static std::mutex one_at_a_time;  // a template that asks for the date calls std::localtime
    const std::scoped_lock lock(one_at_a_time);
    return common_chat_template_direct_apply(jinja, input);
  } catch (const std::exception& error) {
    throw std::invalid_argument("the model's chat template refuses the messages: " +
                                reason_of(error));
  }
}

// Rendered behind an exchange whose text is known, and cut there.
std::string ChatTemplate::next_turn(const std::string& content) const {
  const ChatMessage question{"user", "question"};
  const ChatMessage answer{"assistant", "answer"};
  const std::string before = render({question}) + answer.content;
  std::string text = render({question, answer, {"user", content}});
  if (!text.starts_with(before)) {
    throw std::invalid_argument(
        "the model's chat template writes earlier turns in another way than new ones: give the "
        "next turn as text, without --chat");
  }
  text.erase(0, before.size());
  return text;
}

namespace {

// The first n of the messages, alone; "" where the template refuses them or needs the next one to
// show them.
std::string render_first(const RenderChat& render, const std::vector<ChatMessage>& messages,
                         std::size_t n) {
  if (n == 0) return "";
  std::string text;
  try {
    text = render({messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(n)}, false);
  } catch (const std::invalid_argument&) {
    return "";
  }
  return text.find(messages[n - 1].content) == std::string::npos ? "" : text;
}

}  // namespace

int tokens_of_first(const llama_model* model, const RenderChat& render,
                    std::vector<ChatMessage> messages, std::size_t n,
                    std::span<const llama_token> prompt) {
  std::string start = render_first(render, messages, n);
  if (start.empty() && n < messages.size()) {
    // Up to where another text of the next message makes another prompt.
    std::string& next = messages[n].content;
    next = next.starts_with('a') ? "b" : "a";
    start = render(messages, true);
  }
  const auto tokens = tokenize(model, start, true);
  const auto [end, ignored] =
      std::mismatch(tokens.begin(), tokens.end(), prompt.begin(), prompt.end());
  return static_cast<int>(end - tokens.begin());
}

std::size_t question_in(const llama_model* model, const RenderChat& render,
                        const std::vector<ChatMessage>& messages,
                        std::span<const llama_token> prompt) {
  std::size_t newest = messages.size();
  while (newest > 0 && messages[newest - 1].role != "user") --newest;
  if (newest == 0) return 0;
  const auto begin =
      static_cast<std::size_t>(tokens_of_first(model, render, messages, newest - 1, prompt));
  return begin < prompt.size() ? begin : 0;
}

}  // namespace morphkv::llama_cpp

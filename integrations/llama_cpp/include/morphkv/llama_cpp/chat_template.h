// Chats as prompts: the Jinja template that a model brings along, rendered by llama.cpp's library
// common. Tools and reasoning are left out: a message is a role and a text.
#pragma once

#include <llama.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "morphkv/llama_cpp/chat_message.h"

namespace morphkv::llama_cpp {

class ChatTemplate {
 public:
  // The template of `model`, which may be loaded vocab_only and need not outlive this. Throws
  // BadModelFile when there is none or it cannot be parsed.
  explicit ChatTemplate(const llama_model* model);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  // The messages as the text of a prompt, for tokenize() with parse_special: a start token that
  // tokenize() adds is left out. `add_assistant` opens the assistant's answer. Throws
  // std::invalid_argument, in the template's own words, when it refuses the messages: many want
  // user and assistant to take turns. May be called from several threads at once.
  std::string render(const std::vector<ChatMessage>& messages, bool add_assistant = true) const;
  // What follows an answer when the user says `content`, up to where the next answer begins: the
  // end of the answer included. Throws like render(), and for a template whose text so far depends
  // on what comes later.
  std::string next_turn(const std::string& content) const;

 private:
  struct Parsed;
  std::unique_ptr<const Parsed> parsed_;
};

// ChatTemplate::render(), or what stands for it.
using RenderChat = std::function<std::string(const std::vector<ChatMessage>&, bool add_assistant)>;

// Tokens at the start of `prompt`, which is the tokens of all messages, before message n; the
// template may begin with some of its own. Throws like `render`.
int tokens_of_first(const llama_model* model, const RenderChat& render,
                    std::vector<ChatMessage> messages, std::size_t n,
                    std::span<const llama_token> prompt);
// Where the newest message of the user begins in `prompt`; 0 if there is none. Throws like
// `render`.
std::size_t question_in(const llama_model* model, const RenderChat& render,
                        const std::vector<ChatMessage>& messages,
                        std::span<const llama_token> prompt);

}  // namespace morphkv::llama_cpp

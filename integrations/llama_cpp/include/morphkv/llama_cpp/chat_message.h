// One message of a chat.
#pragma once

#include <string>

namespace morphkv::llama_cpp {

struct ChatMessage {
  std::string role;
  std::string content;

  bool operator==(const ChatMessage&) const = default;
};

}  // namespace morphkv::llama_cpp

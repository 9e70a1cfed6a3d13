// The prompt as the user gives it: an argument, a file, standard input, or a file of messages.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "morphkv/llama_cpp/chat_template.h"

namespace morphkv::cli {

// The text of `file` ("-": standard input), then that of `prompt`; with neither, standard input.
// Both: an empty line in between. Throws std::invalid_argument for text that cannot be read, is
// empty or is refused by require_text().
std::string gather_prompt(const std::optional<std::string>& file,
                          const std::optional<std::string>& prompt);

// A JSON array of {"role": ..., "content": ...}, both texts, at least one of them. Throws
// std::invalid_argument that names the file and what is wrong in it.
std::vector<llama_cpp::ChatMessage> read_messages(const std::string& path);

// Throws std::invalid_argument that names `what` when `text` is no valid UTF-8 or has a NUL, at
// which engines would cut it.
void require_text(const std::string& what, const std::string& text);

}  // namespace morphkv::cli

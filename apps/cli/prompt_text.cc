#include "prompt_text.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "morphkv/llama_cpp/text_stream.h"

namespace morphkv::cli {
namespace {

std::string read_stream(std::istream& in) {
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// Without the newline that ends the last line, like llama.cpp's own tools: a file and the same text
// with -p are the same prompt.
std::string read_prompt_file(const std::string& path) {
  std::string text;
  if (path == "-") {
    if (isatty(STDIN_FILENO) == 1)
      std::fputs("reading the prompt from the terminal; end it with Ctrl-D\n", stderr);
    text = read_stream(std::cin);
  } else {
    std::ifstream file(path, std::ios::binary);
    std::error_code ignored;
    if (!file || std::filesystem::is_directory(path, ignored)) {
      throw std::invalid_argument("prompt file '" + path +
                                  "' cannot be read: give the path of a text file with -f");
    }
    text = read_stream(file);
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

}  // namespace

void require_text(const std::string& what, const std::string& text) {
  if (const auto bad = llama_cpp::first_invalid_utf8(text); bad != std::string::npos) {
    throw std::invalid_argument(what + " is no valid UTF-8 at byte " + std::to_string(bad) +
                                ": convert the text to UTF-8");
  }
  if (const auto nul = text.find('\0'); nul != std::string::npos) {
    throw std::invalid_argument(what + " has a NUL character at byte " + std::to_string(nul) +
                                ": give plain text");
  }
}

std::string gather_prompt(const std::optional<std::string>& file,
                          const std::optional<std::string>& prompt) {
  std::string text;
  if (file || !prompt) text = read_prompt_file(file.value_or("-"));
  if (file && prompt) text += "\n\n";
  text += prompt.value_or("");
  if (text.empty())
    throw std::invalid_argument("the prompt is empty: give it with -p, -f or on standard input");
  require_text("the prompt", text);
  return text;
}

std::vector<llama_cpp::ChatMessage> read_messages(const std::string& path) {
  const std::string name = "--messages '" + path + "'";
  const auto refuse = [&](const std::string& what) { throw std::invalid_argument(name + what); };
  std::ifstream file(path, std::ios::binary);
  std::error_code ignored;
  if (!file || std::filesystem::is_directory(path, ignored)) {
    refuse(" cannot be read: give the path of a JSON file");
  }
  const auto json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_array() || json.empty()) {
    refuse(R"( is no JSON array of messages [{"role": "user", "content": "..."}])");
  }
  std::vector<llama_cpp::ChatMessage> messages;
  for (const auto& entry : json) {
    const std::string which = ": message " + std::to_string(messages.size());
    const auto text = [&](const char* field) {
      if (!entry.is_object() || !entry.contains(field) || !entry[field].is_string()) {
        refuse(which + " has no text \"" + field + "\"");
      }
      auto value = entry[field].get<std::string>();
      require_text(name + which + ", \"" + field + "\"", value);
      return value;
    };
    messages.push_back({text("role"), text("content")});
    if (messages.back().role.empty()) refuse(which + " has an empty \"role\"");
  }
  return messages;
}

}  // namespace morphkv::cli

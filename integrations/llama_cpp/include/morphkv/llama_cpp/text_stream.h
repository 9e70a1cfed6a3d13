// Turns the bytes of tokens into text that never breaks within a UTF-8 character.
#pragma once

#include <string>
#include <string_view>

namespace morphkv::llama_cpp {

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

class TextStream {
 public:
  // Takes bytes, returns the characters that are complete now. Bytes that cannot be UTF-8 become
  // U+FFFD.
  std::string push(std::string_view bytes);
  // What is left at the end: U+FFFD if a character was cut, else nothing.
  std::string finish();

 private:
  std::string pending_;
};

// Offset of the first byte that is no valid UTF-8, or npos.
std::size_t first_invalid_utf8(std::string_view text);

}  // namespace morphkv::llama_cpp

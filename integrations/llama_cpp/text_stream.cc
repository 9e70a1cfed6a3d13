#include "morphkv/llama_cpp/text_stream.h"

#include <algorithm>

namespace morphkv::llama_cpp {
namespace {

enum class Kind { kComplete, kCut, kInvalid };
struct Character {
  Kind kind;
  std::size_t length;  // bytes to take; of a cut one: bytes there are
};

// The character at the start of `text`, by table 3-7 of the Unicode standard.
Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {Kind::kComplete, 1};
  const std::size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                             : lead >= 0xE0 && lead <= 0xEF ? 3
                             : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                            : 0;
  if (length == 0) return {Kind::kInvalid, 1};
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Kind::kCut, i};
    unsigned low = 0x80;
    unsigned high = 0xBF;
    if (i == 1) {
      if (lead == 0xE0) low = 0xA0;   // no overlong forms
      if (lead == 0xED) high = 0x9F;  // no surrogates
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    }
    if (byte(i) < low || byte(i) > high) return {Kind::kInvalid, i};
  }
  return {Kind::kComplete, length};
}

}  // namespace

std::string TextStream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string_view rest = pending_;
  std::string out;
  while (!rest.empty()) {
    const Character c = first_character(rest);
    if (c.kind == Kind::kCut) break;
    out += c.kind == Kind::kComplete ? rest.substr(0, c.length) : kReplacement;
    rest.remove_prefix(c.length);
  }
  pending_ = std::string(rest);
  return out;
}

std::string TextStream::finish() {
  const bool cut = !pending_.empty();
  pending_.clear();
  return cut ? std::string(kReplacement) : "";
}

std::size_t first_invalid_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const Character c = first_character(text.substr(i));
    if (c.kind != Kind::kComplete) return i;
    i += c.length;
  }
  return std::string_view::npos;
}

}  // namespace morphkv::llama_cpp

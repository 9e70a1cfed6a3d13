// Ends a text where one of the stop texts comes, whatever the pieces it comes in: what may be the
// beginning of a stop text is held back until it is known.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "morphkv/llama_cpp/text_stream.h"

namespace morphkv::llama_cpp {

class StopText {
 public:
  // Throws std::invalid_argument for an empty stop text.
  explicit StopText(std::vector<std::string> stops);

  // Takes text, returns what may be shown now. The stop text that is complete first ends the text
  // (of several at the same place the longest one); neither it nor what follows is ever returned.
  // Whole UTF-8 characters in, whole characters out.
  std::string push(std::string_view text);
  // What was held back at the end when no stop text came; else nothing.
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  // Knuth, Morris and Pratt: the work per byte does not depend on how long the stop text is.
  struct Stop {
    std::string text;
    std::vector<std::size_t> border;  // [byte] of text up to it: longest prefix that ends it too
    std::size_t matched = 0;          // bytes at the end of what came that begin this stop text
  };
  static bool advance(Stop& stop, char byte);

  std::vector<Stop> stops_;
  std::string held_;
  bool stopped_ = false;
};

// What may be shown of an answer, from the bytes of its tokens: whole characters, up to a stop
// text.
class AnswerText {
 public:
  explicit AnswerText(std::vector<std::string> stops = {}) : stop_(std::move(stops)) {}

  std::string push(std::string_view bytes) { return stop_.push(characters_.push(bytes)); }
  std::string finish() {
    std::string shown = stop_.push(characters_.finish());
    return shown += stop_.finish();
  }
  bool stopped() const { return stop_.stopped(); }

 private:
  TextStream characters_;
  StopText stop_;
};

}  // namespace morphkv::llama_cpp

// The texts that come with the tool, for mode text. Written for this project; eval/texts.
#pragma once

#include <string_view>
#include <vector>

namespace morphkv::eval {

struct ShippedText {
  std::string_view name;
  std::string_view what;
  std::string_view text;
};

const std::vector<ShippedText>& shipped_texts();

}  // namespace morphkv::eval

// List continuation: numbered lines, "Item 41: box 41", to be gone on with. The score is the share
// of the asked lines that are right before the first wrong one.
#include <array>

#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "list-continuation";
constexpr std::array<std::string_view, 6> kBoxes = {"box",    "crate", "basket",
                                                    "barrel", "sack",  "case"};
constexpr std::size_t kShown = 20;  // lines of the prompt
constexpr std::size_t kAsked = 60;  // lines of the continuation
constexpr int kTokensOfLine = 14;   // with a token for each digit

std::string line(std::string_view box, std::size_t item) {
  const std::string number = std::to_string(item);
  return "Item " + number + ": " + std::string(box) + " " + number + "\n";
}

Continuation continuation(std::uint64_t number) {
  Random random(seed_of(kName, number));
  const std::string_view box = kBoxes[random.below(kBoxes.size())];
  const std::size_t first = 10 + random.below(50);
  std::string prompt = "What lies in the store of the harbour, item by item.\n\n";
  for (std::size_t i = 0; i < kShown; ++i) prompt += line(box, first + i);
  prompt.pop_back();  // the model begins with the line's end
  const auto judge = [box, first](std::string_view generated) -> std::map<std::string, double> {
    if (generated.starts_with('\n')) generated.remove_prefix(1);
    std::size_t right = 0;
    while (right < kAsked) {
      const std::string expected = line(box, first + kShown + right);
      if (!generated.starts_with(expected)) break;
      generated.remove_prefix(expected.size());
      ++right;
    }
    return {{"score", static_cast<double>(right) / static_cast<double>(kAsked)},
            {"lines_right", static_cast<double>(right)}};
  };
  return {.prompt = prompt,
          .tokens = kTokensOfLine * static_cast<int>(kAsked),
          .temperature = 0.0f,
          .judge = judge};
}

}  // namespace

Task list_continuation_task() {
  return {kName, "numbered lines, gone on with", "long output", nullptr, continuation};
}

}  // namespace morphkv::eval

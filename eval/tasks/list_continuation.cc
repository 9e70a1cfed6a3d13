// List continuation: numbered lines with names that come round in a fixed order, to be gone on
// with. The prompt shows the round one and a half times; a line is right when number and name are.
// The score is the share of the asked lines that are right before the first wrong one.
#include <array>

#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "list-continuation";
constexpr std::array<std::string_view, 20> kNames = {
    "Anna", "Ben",  "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida",  "Jack",
    "Kate", "Leo",  "Maria", "Nina",  "Oscar", "Paul", "Rosa",  "Sam",   "Tina", "Victor"};
constexpr std::size_t kRound = 12;
constexpr std::size_t kShown = 30;      // lines of the prompt
constexpr std::size_t kAsked = 80;      // lines of the continuation
constexpr int kTokensOfLine = 10;       // more than any takes when digits are tokens

using Round = std::vector<std::string_view>;

std::string line(const Round& round, std::size_t i) {
  return std::to_string(i + 1) + ". " + std::string(round[i % round.size()]) + "\n";
}

Continuation continuation(std::uint64_t number) {
  Random random(seed_of(kName, number));
  Deck deck(kNames.size());
  Round round;
  while (round.size() < kRound) round.push_back(kNames[deck.deal(random)]);
  std::string prompt =
      "The people of the house clean the stairs in turns, always in the same order.\n\n";
  for (std::size_t i = 0; i < kShown; ++i) prompt += line(round, i);
  prompt.pop_back();  // the model begins with the line's end
  const auto judge = [round](std::string_view generated) -> std::map<std::string, double> {
    if (generated.starts_with('\n')) generated.remove_prefix(1);
    std::size_t right = 0;
    while (right < kAsked) {
      const std::string expected = line(round, kShown + right);
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
  return {kName, "numbered lines whose names come round, gone on with", "long output", nullptr,
          continuation};
}

}  // namespace morphkv::eval

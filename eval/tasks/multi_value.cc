// Multi-value needles (RULER, Hsieh et al. 2024, arXiv 2404.06654): one thing has three codes, in
// three sentences far apart; asked for all, in the order of the text. A part of the answer is a
// code with what leads to it. Made for about 800 tokens: SmolLM2-135M with all rows loses some of
// the codes at 2,500.
#include <array>

#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "multi-value";
constexpr std::string_view kOpening =
    "Some codes are hidden in the following text. Remember them: you will be asked for them at the "
    "end.";
constexpr int kDigits = 4;
constexpr std::array<std::string_view, 3> kOrder = {"first", "second", "third"};

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  const std::uint64_t seed = seed_of(kName, number);
  Random random(seed);
  const std::string thing = draw_things(random)[0];
  const auto codes = draw_codes(random, kOrder.size(), kDigits);
  std::vector<Fact> facts;
  std::vector<std::string> answer;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const std::string sentence = "The " + std::string(kOrder[i]) + " code of the " + thing + " is";
    facts.push_back({sentence + " " + codes[i] + ".", spread(i, codes.size())});
    answer.push_back((i == 0 ? "" : ". " + sentence) + " " + codes[i]);
  }
  return {build_text(seed, tokens, count, kOpening, facts),
          {{.text = "\n\nQuestion: What are the three codes of the " + thing +
                    "?\nAnswer: The first code of the " + thing + " is",
            .answer = answer,
            .depth = facts[1].depth}}};
}

}  // namespace

Task multi_value_task() {
  return {kName, "three codes of one thing, all asked for", "recall", document, nullptr};
}

}  // namespace morphkv::eval

// Multi-key needles (RULER, Hsieh et al. 2024, arXiv 2404.06654): eight things have a code each;
// four of them are asked for, each on its own.
#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "multi-key";
constexpr std::string_view kOpening =
    "Some codes are hidden in the following text. Remember them: you will be asked for them at the "
    "end.";
constexpr int kDigits = 4;

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  const std::uint64_t seed = seed_of(kName, number);
  Random random(seed);
  const auto things = draw_things(random);
  const auto codes = draw_codes(random, things.size(), kDigits);
  std::vector<Fact> facts;
  for (std::size_t i = 0; i < things.size(); ++i) {
    facts.push_back({"Code " + things[i] + ": \"" + codes[i] + "\".",
                     spread(i, things.size())});
  }
  Document out{build_text(seed, tokens, count, kOpening, facts), {}};
  // Every second one; which, changes from document to document.
  for (std::size_t i = number % 2; i < things.size(); i += 2) {
    out.questions.push_back({.text = "\n\nQuestion: What is the code " + things[i] +
                                     "?\nAnswer: Code " + things[i] + ": \"",
                             .answer = {codes[i]},
                             .depth = facts[i].depth});
  }
  return out;
}

}  // namespace

Task multi_key_task() {
  return {kName, "the codes of eight things, four asked for", "recall", document, nullptr};
}

}  // namespace morphkv::eval

// Key-value retrieval (Liu et al. 2023, "Lost in the Middle", arXiv 2307.03172; RULER's multi-key
// needles with other keys as the haystack): lines "amber falcon: 4817" from the first to the last
// line of the document, with prose between them; four keys are asked for.
#include "all.h"
#include "build_text.h"
#include "words.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "key-value";
constexpr std::string_view kOpening =
    "Some keys with values are hidden in the following text. Remember them: you will be asked for them at the "
    "end.";
constexpr int kDigits = 4;
constexpr std::size_t kPairs = 8;
constexpr std::size_t kAsked = 4;

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  const std::uint64_t seed = seed_of(kName, number);
  Random random(seed);
  Deck adjectives(kAdjectives.size());
  Deck nouns(kNouns.size());
  const auto codes = draw_codes(random, kPairs, kDigits);
  std::vector<Fact> facts;
  Document out;
  for (std::size_t i = 0; i < kPairs; ++i) {
    const std::string key = std::string(kAdjectives[adjectives.deal(random)]) + " " +
                            std::string(kNouns[nouns.deal(random)]);
    facts.push_back({"{" + key + ": \"" + codes[i] + "\"}", spread(i, kPairs)});
    // One of each quarter; which, changes from document to document.
    constexpr std::size_t kPart = kPairs / kAsked;
    if (i % kPart == number % kPart) {
      out.questions.push_back({.text = "\n\nQuestion: What is the value of " + key +
                                       "?\nAnswer: {" + key + ": \"",
                               .answer = {codes[i]},
                               .depth = facts[i].depth});
    }
  }
  out.text = build_text(seed, tokens, count, kOpening, facts);
  return out;
}

}  // namespace

Task key_value_task() {
  return {kName, "sixteen keys with values, four asked for", "recall", document, nullptr};
}

}  // namespace morphkv::eval

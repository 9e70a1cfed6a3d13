// Multi-query needles (RULER, Hsieh et al. 2024, arXiv 2404.06654): eight things have a code each;
// one question asks for three of them. A part of the answer is a code with what leads to it.
#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "multi-query";
constexpr std::string_view kOpening =
    "Some codes are hidden in the following text. Remember them: you will be asked for them at the "
    "end.";
constexpr int kDigits = 4;
constexpr std::size_t kAsked = 3;

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  const std::uint64_t seed = seed_of(kName, number);
  Random random(seed);
  const auto things = draw_things(random);
  const auto codes = draw_codes(random, things.size(), kDigits);
  std::vector<Fact> facts;
  for (std::size_t i = 0; i < things.size(); ++i) {
    facts.push_back({"The code of the " + things[i] + " is " + codes[i] + ".",
                     spread(i, things.size())});
  }
  Question question;
  Deck deck(things.size());
  std::string asked;
  for (std::size_t i = 0; i < kAsked; ++i) {
    const std::size_t which = deck.deal(random);
    const std::string sentence = "The code of the " + things[which] + " is";
    if (i == 0) question.text = "?\nAnswer: " + sentence;
    question.answer.push_back((i == 0 ? "" : ". " + sentence) + " " + codes[which]);
    asked += (i == 0 ? "the " : i + 1 < kAsked ? ", the " : " and the ") + things[which];
    question.depth += facts[which].depth / static_cast<double>(kAsked);
  }
  question.text = "\n\nQuestion: What are the codes of " + asked + question.text;
  return {build_text(seed, tokens, count, kOpening, facts), {question}};
}

}  // namespace

Task multi_query_task() {
  return {kName, "the codes of eight things, three asked for at once", "recall", document, nullptr};
}

}  // namespace morphkv::eval

// Variable tracking (RULER, Hsieh et al. 2024, arXiv 2404.06654): variables that have a number,
// and others that have the value of one of them. Asked for one of the latter: where it comes from,
// then the number, each a part of the answer. As in RULER, an example shows how to answer.
#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "variable-tracking";
constexpr std::string_view kOpening =
    "Some variables are hidden in the following text. VAR QQQ = 5308. VAR RRR = VAR QQQ.";
constexpr std::string_view kExample =
    "\n\nQuestion: What is the value of VAR RRR?\nAnswer: VAR RRR = VAR QQQ. VAR QQQ = 5308.";
constexpr int kDigits = 4;
constexpr std::size_t kChains = 2;

// Different names of three letters; "QQQ" and "RRR" are the example's.
std::vector<std::string> draw_names(Random& random, std::size_t n) {
  Deck deck(16);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < n; ++i) {
    const char letter = static_cast<char>('A' + deck.deal(random));
    names.emplace_back(3, letter);
  }
  return names;
}

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  const std::uint64_t seed = seed_of(kName, number);
  Random random(seed);
  const auto names = draw_names(random, 2 * kChains);
  const auto codes = draw_codes(random, kChains, kDigits);
  Deck deck(kChains);
  std::vector<Fact> facts;
  Document out;
  for (std::size_t i = 0; i < kChains; ++i) {
    facts.push_back({"VAR " + names[i] + " = " + codes[i] + ".", spread(i, 2 * kChains)});
  }
  for (std::size_t i = 0; i < kChains; ++i) {
    const std::size_t from = deck.deal(random);
    const std::string& name = names[kChains + i];
    facts.push_back({"VAR " + name + " = VAR " + names[from] + ".", spread(kChains + i, 2 * kChains)});
    out.questions.push_back(
        {.text = std::string(kExample) + "\n\nQuestion: What is the value of VAR " + name +
                 "?\nAnswer: VAR " + name + " = VAR",
         .answer = {" " + names[from], ". VAR " + names[from] + " = " + codes[from]},
         .depth = (facts[from].depth + facts[kChains + i].depth) / 2});
  }
  out.text = build_text(seed, tokens, count, kOpening, facts);
  return out;
}

}  // namespace

Task variable_tracking_task() {
  return {kName, "a variable that has the value of another one", "recall", document, nullptr};
}

}  // namespace morphkv::eval

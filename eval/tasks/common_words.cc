// Common words (RULER, Hsieh et al. 2024, arXiv 2404.06654): a list of words in place of prose.
// Of four candidates one stands in it far more often than the others; which one?
#include "all.h"
#include "build_text.h"
#include "words.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "common-words";
constexpr std::size_t kCandidates = 4;
constexpr std::size_t kOften = 3;    // every third word is the common one
constexpr std::size_t kSeldom = 24;  // every 24th is one of the other candidates

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  Random random(seed_of(kName, number));
  Deck deck(kNouns.size());
  std::vector<std::string> candidates;
  for (std::size_t i = 0; i < kCandidates; ++i) {
    candidates.push_back(" " + std::string(kNouns[deck.deal(random)]));
  }
  Document out{"The list of words:", {}};
  Deck others(kCandidates - 1);
  std::size_t total = count(out.text);
  for (std::size_t i = 0; total < static_cast<std::size_t>(tokens); ++i) {
    std::string word;
    if (i % kOften == 0) {
      word = candidates[0];
    } else if (i % kSeldom == 1) {
      word = candidates[1 + others.deal(random)];
    } else {
      word = " " + std::string(kNouns[deck.deal(random)]);
    }
    out.text += word;
    total += count(word);
  }
  out.questions.push_back(
      {.text = "\n\nQuestion: Which word is the most common one in the list?\nAnswer: The most "
               "common word in the list is",
       .answer = {candidates[0]},
       .choices = candidates,
       .depth = 0.5});
  return out;
}

}  // namespace

Task common_words_task() {
  return {kName, "the commonest word of a long list", "recall", document, nullptr};
}

}  // namespace morphkv::eval

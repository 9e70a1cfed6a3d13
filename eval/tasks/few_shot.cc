// Many-shot classification (as in HELMET, Yen et al. 2024, arXiv 2410.02694): labelled sentences,
// then new ones. The labels are colours that have nothing to do with the sentences: what they mean
// can only be learnt from the rows. A sentence is about one thing, and things belong to a label.
#include <array>

#include "all.h"
#include "build_text.h"
#include "words.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "few-shot";
constexpr std::array<std::string_view, 4> kLabels = {" gold", " iron", " silk", " salt"};
constexpr std::size_t kThingsOfLabel = 2;
constexpr std::size_t kQuestions = 8;

constexpr std::array<std::string_view, 12> kSentences = {
    "We saw the",          "Where did you put the", "Nobody wanted to sell the", "She dreamt of the",
    "He wrote about the",  "Nobody asked for the",  "They spoke of the",         "You forgot the",
    "My uncle painted the", "We are fond of the",   "You can see the",           "Take a look at the"};

std::string row(std::string_view pattern, std::string_view thing) {
  return std::string(pattern) + " " + std::string(thing) + ":";
}

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  Random random(seed_of(kName, number));
  Deck nouns(kNouns.size());
  std::vector<std::string_view> things;
  while (things.size() < kLabels.size() * kThingsOfLabel) {
    things.push_back(kNouns[nouns.deal(random)]);
  }
  Deck deck(things.size());
  Deck patterns(kSentences.size());
  Document out;
  for (std::size_t total = 0; total < static_cast<std::size_t>(tokens);) {
    const std::size_t thing = deck.deal(random);
    const std::string line = row(kSentences[patterns.deal(random)], things[thing]) +
                             std::string(kLabels[thing % kLabels.size()]);
    out.text += (total == 0 ? "" : "\n") + line;
    total += count(line) + 1;
  }
  for (std::size_t i = 0; i < kQuestions; ++i) {
    const std::size_t thing = deck.deal(random);
    out.questions.push_back(
        {.text = "\n" + row(kSentences[patterns.deal(random)], things[thing]),
         .answer = {std::string(kLabels[thing % kLabels.size()])},
         .choices = {kLabels.begin(), kLabels.end()},
         .depth = 0.5});
  }
  return out;
}

}  // namespace

Task few_shot_task() {
  return {kName, "labels of new sentences, learnt from many labelled ones", "in-context", document,
          nullptr};
}

}  // namespace morphkv::eval

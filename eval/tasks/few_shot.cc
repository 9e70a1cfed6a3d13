// Many-shot classification (as in HELMET, Yen et al. 2024, arXiv 2410.02694): labelled sentences,
// then new ones, each about a thing of one of five sorts. What is to be answered, and with which
// words, is told by nothing but the rows.
#include <array>

#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "few-shot";
struct Sort {
  std::string_view label;
  std::array<std::string_view, 8> things;
};
constexpr std::array<Sort, 5> kSorts = {
    Sort{" animal", {"tiger", "rabbit", "horse", "eagle", "camel", "lion", "goat", "spider"}},
    Sort{" fruit", {"apple", "cherry", "lemon", "banana", "grape", "pear", "melon", "peach"}},
    Sort{" tool", {"hammer", "shovel", "drill", "wrench", "chisel", "saw", "axe", "rake"}},
    Sort{" music", {"violin", "piano", "flute", "guitar", "trumpet", "drum", "cello", "harp"}},
    Sort{" clothes", {"jacket", "shirt", "skirt", "coat", "sweater", "trousers", "dress", "scarf"}},
};
constexpr std::size_t kQuestions = 8;

constexpr std::array<std::string_view, 12> kSentences = {
    "We saw the",         "Where did you put the", "Nobody wanted to sell the",
    "She dreamt of the",  "He wrote about the",    "Nobody asked for the",
    "They spoke of the",  "You forgot the",        "My uncle painted the",
    "We are fond of the", "You can see the",       "Take a look at the"};

std::string row(std::string_view pattern, std::string_view thing) {
  return std::string(pattern) + " " + std::string(thing) + ":";
}

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  Random random(seed_of(kName, number));
  Deck sorts(kSorts.size());
  std::vector<Deck> things(kSorts.size(), Deck(kSorts[0].things.size()));
  Deck patterns(kSentences.size());
  const auto next_row = [&](const Sort*& sort) {
    const std::size_t which = sorts.deal(random);
    sort = &kSorts[which];
    return row(kSentences[patterns.deal(random)], sort->things[things[which].deal(random)]);
  };
  Document out;
  const Sort* sort = nullptr;
  for (std::size_t total = 0; total < static_cast<std::size_t>(tokens);) {
    std::string line = next_row(sort);
    line += sort->label;
    out.text += (total == 0 ? "" : "\n") + line;
    total += count(line) + 1;
  }
  std::vector<std::string> labels;
  for (const Sort& each : kSorts) labels.emplace_back(each.label);
  for (std::size_t i = 0; i < kQuestions; ++i) {
    const std::string line = next_row(sort);
    out.questions.push_back({.text = "\n" + line,
                             .answer = {std::string(sort->label)},
                             .choices = labels,
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

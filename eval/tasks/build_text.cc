#include "build_text.h"

#include <algorithm>
#include <array>
#include <stdexcept>

#include "../prose.h"
#include "morphkv/archive.h"

namespace morphkv::eval {
namespace {

constexpr std::array<std::string_view, kManyThings> kThings = {
    "blue locker", "garden gate", "wine cellar", "post box",
    "boat house",  "bank safe",   "school bell", "bicycle shed"};

}  // namespace

std::uint64_t seed_of(std::string_view name, std::uint64_t number) {
  std::string bytes(name);
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
  return checksum(bytes);
}

void require_tokens(std::string_view task, int tokens) {
  if (tokens >= kLeastTokens) return;
  throw std::invalid_argument("task " + std::string(task) + ": a document of " +
                              std::to_string(tokens) + " tokens has no room for its facts, the " +
                              "least is " + std::to_string(kLeastTokens) +
                              "; ask for longer documents");
}

std::string build_text(std::uint64_t seed, int tokens, const CountTokens& count,
                       std::string_view opening, const std::vector<Fact>& facts) {
  auto wanted = static_cast<std::size_t>(std::max(tokens, 0));
  wanted -= std::min(wanted, count(opening));
  for (const Fact& fact : facts) wanted -= std::min(wanted, count(fact.sentence));
  Prose prose(seed);
  Sentences sentences;
  std::vector<std::size_t> ends;  // tokens up to the end of each sentence
  for (std::size_t total = 0; total < wanted;) {
    if (!sentences.empty()) {
      sentences.emplace_back();
      ends.push_back(total += 1);
    }
    for (std::string& sentence : prose.paragraph()) {
      if (total >= wanted) break;
      ends.push_back(total += count(sentence));
      sentences.push_back(std::move(sentence));
    }
  }
  Sentences text;
  if (!opening.empty()) text = {std::string(opening), ""};
  std::size_t next = 0;
  for (std::size_t i = 0; i <= sentences.size(); ++i) {
    const double from = i == 0 ? 0.0 : static_cast<double>(ends[i - 1]);
    const double total = static_cast<double>(ends.back());
    while (next < facts.size() && facts[next].depth * total <= from) {
      text.push_back(facts[next++].sentence);
    }
    if (i < sentences.size()) text.push_back(std::move(sentences[i]));
  }
  return join(text);
}

std::vector<std::string> draw_codes(Random& random, std::size_t n, int digits) {
  std::vector<std::string> codes;
  while (codes.size() < n) {
    std::string code;
    while (static_cast<int>(code.size()) < digits) {
      code += static_cast<char>(code.empty() ? '1' + random.below(9) : '0' + random.below(10));
    }
    if (std::find(codes.begin(), codes.end(), code) == codes.end()) codes.push_back(code);
  }
  return codes;
}

std::vector<std::string> draw_things(Random& random) {
  Deck deck(kThings.size());
  std::vector<std::string> things;
  while (things.size() < kThings.size()) things.emplace_back(kThings[deck.deal(random)]);
  return things;
}

std::string code_of(std::string_view thing) { return "Code " + std::string(thing) + ": \""; }

Fact number_fact(const std::string& what, const std::string& number, double depth) {
  return {"The " + what + " is " + number + ".", depth};
}

Question number_question(const std::string& what, const std::string& number, double depth) {
  return {.text = "\n\nQuestion: What is the " + what + "?\nAnswer: The " + what + " is",
          .answer = {" " + number},
          .depth = depth};
}

}  // namespace morphkv::eval

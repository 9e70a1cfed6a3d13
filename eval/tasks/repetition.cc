// Repetition: a story that the model goes on with at temperature 0.8. A cache that loses what was
// told falls into loops: the score is the share of the text's runs of ten words that are new
// ("rep-n" of Welleck et al. 2019, arXiv 1908.04319, counted the other way).
#include <algorithm>
#include <cctype>
#include <set>
#include <sstream>

#include "../prose.h"
#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "repetition";
constexpr std::size_t kRun = 10;          // words
constexpr int kParagraphs = 3;            // of the prompt
constexpr int kGenerated = 800;           // tokens
constexpr std::size_t kLeastWords = 200;  // a text that ends earlier is scored for its length too

// Letters and digits in lower case; all else separates.
std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || byte >= 0x80) {
      word += static_cast<char>(std::tolower(byte));
    } else if (!word.empty()) {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  if (!word.empty()) words.push_back(word);
  return words;
}

std::map<std::string, double> judge(std::string_view generated) {
  const std::vector<std::string> words = words_of(generated);
  std::set<std::vector<std::string>> distinct;
  std::size_t runs = 0;
  for (auto begin = words.begin(); words.end() - begin >= static_cast<std::ptrdiff_t>(kRun);
       ++begin, ++runs) {
    distinct.insert({begin, begin + kRun});
  }
  const double share =
      runs == 0 ? 0.0 : static_cast<double>(distinct.size()) / static_cast<double>(runs);
  const double length =
      std::min(1.0, static_cast<double>(words.size()) / static_cast<double>(kLeastWords));
  return {{"score", share * length},
          {"distinct_runs", share},
          {"words", static_cast<double>(words.size())}};
}

Continuation continuation(std::uint64_t number) {
  Prose prose(seed_of(kName, number));
  Sentences text = {"A long story of a small harbour town and the people who live there.", ""};
  for (int i = 0; i < kParagraphs; ++i) {
    for (std::string& sentence : prose.paragraph()) text.push_back(std::move(sentence));
    text.emplace_back();
  }
  text.emplace_back("The next morning");
  return {.prompt = join(text), .tokens = kGenerated, .temperature = 0.8f, .judge = judge};
}

}  // namespace

Task repetition_task() {
  return {kName, "a free story: how much of it is not said twice", "long output", nullptr,
          continuation};
}

}  // namespace morphkv::eval

// Multi-key needles (RULER, Hsieh et al. 2024, arXiv 2404.06654): four things have a code each, and
// each of them is asked for.
#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "multi-key";
constexpr std::size_t kThings = 4;
constexpr int kDigits = 4;

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  const std::uint64_t seed = seed_of(kName, number);
  Random random(seed);
  auto things = draw_things(random);
  things.resize(kThings);
  const auto codes = draw_codes(random, things.size(), kDigits);
  std::vector<Fact> facts;
  for (std::size_t i = 0; i < things.size(); ++i) {
    facts.push_back({code_of(things[i]) + codes[i] + "\".", spread(i, things.size())});
  }
  Document out{build_text(seed, tokens, count, kCodesOpening, facts), {}};
  for (std::size_t i = 0; i < things.size(); ++i) {
    out.questions.push_back({.text = std::string(kCodesExample) +
                                     "\n\nQuestion: What is the code " + things[i] +
                                     "?\nAnswer: " + code_of(things[i]),
                             .answer = {codes[i]},
                             .depth = facts[i].depth});
  }
  return out;
}

}  // namespace

Task multi_key_task() {
  return {kName, "the codes of four things, each asked for", "recall", document, nullptr};
}

}  // namespace morphkv::eval

// Codes of four digits in prose that does not say that it has any: "The code of the blue locker is
// 4817." one-code: a single one, at another depth in each of 24 documents. eight-codes: eight of
// them, evenly spread. One is asked for, in each of eight documents another one.
#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kOneCode = "one-code";
constexpr std::string_view kEightCodes = "eight-codes";
constexpr std::uint64_t kDepths = 24;  // of a single code
constexpr int kDigits = 4;

Document document(std::string_view task, std::size_t n, std::uint64_t number, int tokens,
                  const CountTokens& count) {
  require_tokens(task, tokens);
  const std::uint64_t seed = seed_of(task, number);
  Random random(seed);
  const auto things = draw_things(random);
  const auto codes = draw_codes(random, n, kDigits);
  const std::size_t asked = number % n;
  std::vector<Fact> facts;
  Document out;
  for (std::size_t i = 0; i < n; ++i) {
    const std::string what = "code of the " + things[i];
    const double depth = n == 1 ? spread(number % kDepths, kDepths) : spread(i, n);
    facts.push_back(number_fact(what, codes[i], depth));
    if (i == asked) out.questions.push_back(number_question(what, codes[i], depth));
  }
  out.text = build_text(seed, tokens, count, "", facts);
  return out;
}

}  // namespace

Task one_code_task() {
  return {kOneCode, "a code of four digits that nothing announces", "recall",
          [](std::uint64_t number, int tokens, const CountTokens& count) {
            return document(kOneCode, 1, number, tokens, count);
          },
          nullptr};
}

Task eight_codes_task() {
  return {kEightCodes, "one of eight such codes", "recall",
          [](std::uint64_t number, int tokens, const CountTokens& count) {
            return document(kEightCodes, kManyThings, number, tokens, count);
          },
          nullptr};
}

}  // namespace morphkv::eval

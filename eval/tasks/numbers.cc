// One number in a text that says beforehand that there is one: passkey (Mohtashami & Jaggi 2023),
// five digits; number-string (the "numbers" of RULER's needles, Hsieh et al. 2024, arXiv
// 2404.06654), ten. The depth runs through the documents, from the very start to the very end in
// twelve steps.
#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kPasskey = "passkey";
constexpr std::string_view kNumberString = "number-string";
constexpr std::uint64_t kDepths = 12;

struct Hidden {
  std::string_view task;
  const char* what;
  int digits;
};

Document document(const Hidden& hidden, std::uint64_t number, int tokens,
                  const CountTokens& count) {
  require_tokens(hidden.task, tokens);
  const std::uint64_t seed = seed_of(hidden.task, number);
  Random random(seed);
  const std::string what = hidden.what;
  const std::string digits = draw_codes(random, 1, hidden.digits)[0];
  const double depth = static_cast<double>(number % kDepths) / static_cast<double>(kDepths - 1);
  const std::string opening = "A " + what +
                              " is hidden in the following text. Remember it: you will be asked "
                              "for it at the end.";
  return {build_text(seed, tokens, count, opening, {number_fact(what, digits, depth)}),
          {number_question(what, digits, depth)}};
}

}  // namespace

Task passkey_task() {
  return {kPasskey, "one number of five digits, stated once", "recall",
          [](std::uint64_t number, int tokens, const CountTokens& count) {
            return document({kPasskey, "pass key", 5}, number, tokens, count);
          },
          nullptr};
}

Task number_string_task() {
  return {kNumberString, "a string of ten digits, stated once", "recall",
          [](std::uint64_t number, int tokens, const CountTokens& count) {
            return document({kNumberString, "long number", 10}, number, tokens, count);
          },
          nullptr};
}

}  // namespace morphkv::eval

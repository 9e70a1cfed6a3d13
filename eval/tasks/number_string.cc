// Number string (the "numbers" of RULER's needles, Hsieh et al. 2024, arXiv 2404.06654): as
// passkey, but ten digits.
#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "number-string";
constexpr std::string_view kOpening =
    "A long number is hidden in the following text. Remember it: you will be asked for it at the "
    "end.";
constexpr std::uint64_t kDepths = 12;
constexpr int kDigits = 10;

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  const std::uint64_t seed = seed_of(kName, number);
  Random random(seed);
  const std::string digits = draw_codes(random, 1, kDigits)[0];
  const double depth = static_cast<double>(number % kDepths) / static_cast<double>(kDepths - 1);
  return {
      build_text(seed, tokens, count, kOpening, {{"The long number is " + digits + ".", depth}}),
      {{.text = "\n\nQuestion: What is the long number?\nAnswer: The long number is",
        .answer = {" " + digits},
        .depth = depth}}};
}

}  // namespace

Task number_string_task() {
  return {kName, "a string of ten digits, stated once", "recall", document, nullptr};
}

}  // namespace morphkv::eval

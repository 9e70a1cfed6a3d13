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

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  return one_number({kName, kOpening, "long number", 10}, number, tokens, count);
}

}  // namespace

Task number_string_task() {
  return {kName, "a string of ten digits, stated once", "recall", document, nullptr};
}

}  // namespace morphkv::eval

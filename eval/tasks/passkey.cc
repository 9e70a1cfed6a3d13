// Passkey (Mohtashami & Jaggi 2023): one number of five digits, stated once in prose. Its depth
// runs through the documents, from the very start to the very end in twelve steps.
#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "passkey";
constexpr std::string_view kOpening =
    "A pass key is hidden in the following text. Remember it: you will be asked for it at the end.";
constexpr std::uint64_t kDepths = 12;
constexpr int kDigits = 5;

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  const std::uint64_t seed = seed_of(kName, number);
  Random random(seed);
  const std::string key = draw_codes(random, 1, kDigits)[0];
  const double depth = static_cast<double>(number % kDepths) / static_cast<double>(kDepths - 1);
  return {build_text(seed, tokens, count, kOpening, {{"The pass key is " + key + ".", depth}}),
          {{.text = "\n\nQuestion: What is the pass key?\nAnswer: The pass key is",
            .answer = {" " + key},
            .depth = depth}}};
}

}  // namespace

Task passkey_task() {
  return {kName, "one number of five digits, stated once", "recall", document, nullptr};
}

}  // namespace morphkv::eval

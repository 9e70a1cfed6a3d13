// Passkey (Mohtashami & Jaggi 2023): one number of five digits, stated once in prose. Its depth
// runs through the documents, from the very start to the very end in twelve steps.
#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "passkey";
constexpr std::string_view kOpening =
    "A pass key is hidden in the following text. Remember it: you will be asked for it at the end.";

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  return one_number({kName, kOpening, "pass key", 5}, number, tokens, count);
}

}  // namespace

Task passkey_task() {
  return {kName, "one number of five digits, stated once", "recall", document, nullptr};
}

}  // namespace morphkv::eval

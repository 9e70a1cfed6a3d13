// Text as tokens. Files that are no model: cli_refusal_test.py.
#include "morphkv/llama_cpp/model_file.h"

#include <gtest/gtest.h>

#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::tokenize;
using llama_cpp::tokenize_continuation;
using Tokens = std::vector<llama_token>;

// With a space, or without, before each letter.
constexpr int kSpace = kFirstPiece, kA = kFirstPiece + 1, kB = kFirstPiece + 2,
              kSpaceA = kFirstPiece + 3, kSpaceB = kFirstPiece + 4;

llama_cpp::ModelPtr sentence_piece() {
  return make_tiny_model(
      {.bos = 1, .add_bos = true, .pieces = {"\u2581", "a", "b", "\u2581a", "\u2581b"}});
}

TEST(Tokenize, SentencePieceBeginsATextWithASpace) {
  const auto model = sentence_piece();
  EXPECT_EQ(tokenize(model.get(), "a b", false), (Tokens{1, kSpaceA, kSpaceB}));
  EXPECT_EQ(tokenize(model.get(), "a</s>", true), (Tokens{1, kSpaceA, 2}));
  EXPECT_EQ(tokenize(model.get(), "", false), Tokens{1});
}

// What is given in two parts is read as if it came in one.
TEST(Tokenize, AContinuationHasNoSpaceOfItsOwn) {
  const auto model = sentence_piece();
  const auto more = [&](const char* text, bool special = false) {
    return tokenize_continuation(model.get(), text, special);
  };
  EXPECT_EQ(more("b"), Tokens{kB});
  EXPECT_EQ(more(" b"), Tokens{kSpaceB});
  EXPECT_EQ(more("  b"), (Tokens{kSpace, kSpaceB}));
  EXPECT_EQ(more("\nb"), (Tokens{3 + '\n', kB}));
  EXPECT_EQ(more("ab"), (Tokens{kA, kB}));
  EXPECT_EQ(more("\u00e4"), (Tokens{3 + 0xC3, 3 + 0xA4}));
  EXPECT_EQ(more("</s>", true), Tokens{2});
  EXPECT_EQ(more(""), Tokens{});
}

TEST(Tokenize, AContinuationHasNoStartToken) {
  const auto whole = tokens_of(test_model(), "The lamp is lit.");
  const auto more = tokenize_continuation(test_model(), " At night it turns.");
  Tokens both = whole;
  both.insert(both.end(), more.begin(), more.end());
  EXPECT_EQ(both, tokens_of(test_model(), "The lamp is lit. At night it turns."));
}

}  // namespace
}  // namespace morphkv::test

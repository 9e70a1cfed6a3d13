#include "morphkv/archive.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace morphkv {
namespace {

constexpr FileKind kKind{{'t', 'e', 's', 't', 'k', 'i', 'n', 'd'}, 3, "test file"};

std::string refusal(std::string_view bytes) {
  try {
    static_cast<void>(unseal(kKind, bytes));
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(Archive, ValuesAndListsComeBackInOrder) {
  Writer writer;
  writer.value(7);
  writer.list(std::vector<float>{1.5f, -2.0f});
  writer.list(std::string());
  writer.value('x');
  Reader reader(writer.bytes());
  int number = 0;
  std::vector<float> floats;
  std::string text = "old";
  char last = 0;
  reader.value(number);
  reader.list(floats);
  reader.list(text);
  EXPECT_EQ(reader.left(), 1u);
  reader.value(last);
  EXPECT_EQ(number, 7);
  EXPECT_EQ(floats, (std::vector<float>{1.5f, -2.0f}));
  EXPECT_EQ(text, "");
  EXPECT_EQ(last, 'x');
  EXPECT_TRUE(reader.at_end());
  EXPECT_THROW(reader.value(last), std::invalid_argument);
}

TEST(Archive, AListLongerThanTheBytesIsRefusedBeforeItIsAllocated) {
  for (const std::uint64_t n : {std::uint64_t{2}, std::uint64_t{1} << 61, ~std::uint64_t{0}}) {
    Writer writer;
    writer.value(n);
    writer.value(1.0);
    Reader reader(writer.bytes());
    std::vector<double> list;
    EXPECT_THROW(reader.list(list), std::invalid_argument) << n;
  }
}

TEST(Archive, AnEnvelopeGivesItsBodyBackAndNothingElse) {
  const std::string whole = seal(kKind, "the body");
  EXPECT_EQ(unseal(kKind, whole), "the body");
  EXPECT_EQ(unseal(kKind, seal(kKind, "")), "");
  for (std::size_t i = 0; i < whole.size(); ++i) {
    EXPECT_NE(refusal(std::string_view(whole).substr(0, i)), "") << i;
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      EXPECT_NE(refusal(damaged), "") << i;
    }
  }
  EXPECT_NE(refusal(whole + "x"), "");
}

TEST(Archive, SaysWhatIsWrong) {
  FileKind other = kKind;
  other.magic[0] = 'x';
  EXPECT_EQ(refusal(seal(other, "body")), "it is no test file");
  other = kKind;
  other.version = 4;
  EXPECT_EQ(refusal(seal(other, "body")), "its version is 4, this program reads version 3");
  EXPECT_EQ(refusal(seal(kKind, "body").substr(0, 20)), "it ends too early");
}

}  // namespace
}  // namespace morphkv

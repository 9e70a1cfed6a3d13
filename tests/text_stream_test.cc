// The text of tokens as it comes out: whole UTF-8 characters only, whatever the pieces were, and
// U+FFFD for what cannot be UTF-8 (one for each maximal part, as the Unicode standard advises).
#include "morphkv/llama_cpp/text_stream.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace morphkv::llama_cpp {
namespace {

const std::string kBad = "\xEF\xBF\xBD";  // U+FFFD

// One character, by the bit layout of the encoding.
std::string encode(std::uint32_t c) {
  const auto byte = [](std::uint32_t bits) { return std::string(1, static_cast<char>(bits)); };
  const auto tail = [&](int shift) { return byte(0x80 | ((c >> shift) & 0x3F)); };
  if (c < 0x80) return byte(c);
  if (c < 0x800) return byte(0xC0 | (c >> 6)) + tail(0);
  if (c < 0x10000) return byte(0xE0 | (c >> 12)) + tail(6) + tail(0);
  return byte(0xF0 | (c >> 18)) + tail(12) + tail(6) + tail(0);
}

// What comes out when `pieces` go in, and that each part of it is whole characters.
std::string stream(const std::vector<std::string>& pieces) {
  TextStream text;
  std::string out;
  const auto add = [&](const std::string& part) {
    EXPECT_EQ(first_invalid_utf8(part), std::string_view::npos) << "broken output: " << part;
    out += part;
  };
  for (const std::string& piece : pieces) add(text.push(piece));
  add(text.finish());
  EXPECT_EQ(text.finish(), "") << "finish() leaves something behind";
  return out;
}

// The same for every way to cut `bytes` into two, and into single bytes.
void expect_stream(const std::string& bytes, const std::string& expected) {
  std::vector<std::string> singles;
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
    EXPECT_EQ(stream({bytes.substr(0, cut), bytes.substr(cut)}), expected) << "cut at " << cut;
    if (cut < bytes.size()) singles.push_back(bytes.substr(cut, 1));
  }
  EXPECT_EQ(stream(singles), expected) << "byte by byte";
}

TEST(TextStream, PassesAsciiThroughAtOnce) {
  TextStream text;
  EXPECT_EQ(text.push("Hello"), "Hello");
  EXPECT_EQ(text.push(""), "");
  EXPECT_EQ(text.push(std::string("a\0b\n", 4)), std::string("a\0b\n", 4));
  EXPECT_EQ(text.finish(), "");
}

TEST(TextStream, KeepsACutCharacterBackUntilItIsWhole) {
  TextStream text;
  EXPECT_EQ(text.push("caf\xC3"), "caf");
  EXPECT_EQ(text.push("\xA9!"), "\xC3\xA9!");
  EXPECT_EQ(text.push("\xF0\x9F"), "");
  EXPECT_EQ(text.push("\x98"), "");
  EXPECT_EQ(text.push("\x80 ok"), "\xF0\x9F\x98\x80 ok");
  EXPECT_EQ(text.finish(), "");
}

TEST(TextStream, GivesBackMultiByteTextForEverySplitIntoThree) {
  const std::string bytes = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";  // a, é, €, a smile, z
  for (std::size_t i = 0; i <= bytes.size(); ++i) {
    for (std::size_t j = i; j <= bytes.size(); ++j) {
      EXPECT_EQ(stream({bytes.substr(0, i), bytes.substr(i, j - i), bytes.substr(j)}), bytes)
          << "cuts at " << i << " and " << j;
    }
  }
}

TEST(TextStream, GivesBackEveryCharacterOfUnicode) {
  std::string all;
  for (std::uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    const std::string character = encode(c);
    ASSERT_EQ(first_invalid_utf8(character), std::string_view::npos) << "U+" << std::hex << c;
    all += character;
  }
  EXPECT_EQ(stream({all}), all);
}

TEST(TextStream, ReplacesSurrogates) {
  for (const std::uint32_t c : {0xD800u, 0xDBFFu, 0xDC00u, 0xDFFFu}) {
    expect_stream("a" + encode(c) + "b", "a" + kBad + kBad + kBad + "b");
  }
}

TEST(TextStream, ReplacesOverlongForms) {
  expect_stream("\xC0\x80", kBad + kBad);                        // NUL in two bytes
  expect_stream("\xC1\xBF", kBad + kBad);                        // DEL in two bytes
  expect_stream("\xE0\x80\x80", kBad + kBad + kBad);             // NUL in three
  expect_stream("\xE0\x9F\xBF", kBad + kBad + kBad);             // U+07FF in three
  expect_stream("\xF0\x80\x80\x80", kBad + kBad + kBad + kBad);  // NUL in four
  expect_stream("\xF0\x8F\xBF\xBF", kBad + kBad + kBad + kBad);  // U+FFFF in four
}

TEST(TextStream, ReplacesWhatLiesBeyondUnicode) {
  expect_stream("\xF4\x90\x80\x80", kBad + kBad + kBad + kBad);  // U+110000
  expect_stream("\xF5", kBad);
  expect_stream("\xF8\x88\x80\x80\x80", kBad + kBad + kBad + kBad + kBad);
  expect_stream("\xFE\xFF", kBad + kBad);
}

TEST(TextStream, ReplacesStrayContinuationBytes) {
  expect_stream("a\x80z", "a" + kBad + "z");
  expect_stream("\xBF\xBF", kBad + kBad);
}

TEST(TextStream, ReplacesACharacterThatSomethingElseInterruptsByOneSign) {
  expect_stream("\xC3z", kBad + "z");
  expect_stream("\xE2\x82z", kBad + "z");
  expect_stream("\xF0\x9F\x98\xC3\xA9", kBad + "\xC3\xA9");
  expect_stream("\xE2\x82\xE2\x82\xAC", kBad + "\xE2\x82\xAC");
  // The example of section 3.9 of the Unicode standard, table 3-8.
  expect_stream("\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64",
                "a" + kBad + kBad + kBad + "b" + kBad + "c" + kBad + kBad + "d");
}

TEST(TextStream, ReplacesACharacterThatIsCutAtTheEndByOneSign) {
  for (const std::string cut : {"\xC3", "\xE2", "\xE2\x82", "\xF0", "\xF0\x9F", "\xF0\x9F\x98"}) {
    expect_stream("ok" + cut, "ok" + kBad);
  }
}

TEST(TextStream, CanGoOnAfterFinish) {
  TextStream text;
  EXPECT_EQ(text.push("\xE2\x82"), "");
  EXPECT_EQ(text.finish(), kBad);
  EXPECT_EQ(text.push("\xAC"), kBad);  // not glued to what was cut before
  EXPECT_EQ(text.push("x"), "x");
}

TEST(TextStream, GivesTheSameForEverySplitOfRandomBytes) {
  std::mt19937 random(7);
  // Bytes around the limits of the encoding, so that near misses are common.
  const std::string bytes =
      "a\x7F\x80\x8F\x90\x9F\xA0\xBF\xC1\xC2\xDF\xE0\xE1\xED\xEF\xF0\xF1\xF4\xF5\xFF";
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = 0; i < 12; ++i) text += bytes[random() % bytes.size()];
    const std::string whole = stream({text});
    std::vector<std::string> pieces;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t n = 1 + random() % 3;
      pieces.push_back(text.substr(at, n));
      at += n;
    }
    EXPECT_EQ(stream(pieces), whole);
    EXPECT_EQ(whole == text, first_invalid_utf8(text) == std::string_view::npos);
  }
}

TEST(FirstInvalidUtf8, IsNposForValidText) {
  EXPECT_EQ(first_invalid_utf8(""), std::string_view::npos);
  EXPECT_EQ(first_invalid_utf8("plain"), std::string_view::npos);
  EXPECT_EQ(first_invalid_utf8("\xEF\xBB\xBF mark"), std::string_view::npos);
  EXPECT_EQ(first_invalid_utf8("\xF4\x8F\xBF\xBF"), std::string_view::npos);  // U+10FFFF
}

TEST(FirstInvalidUtf8, IsTheFirstByteOfTheFirstBrokenCharacter) {
  EXPECT_EQ(first_invalid_utf8("\xFF"), 0u);
  EXPECT_EQ(first_invalid_utf8("abc\x80"), 3u);
  EXPECT_EQ(first_invalid_utf8("\xC3\xA9\xC3"), 2u);    // cut at the end
  EXPECT_EQ(first_invalid_utf8("a\xE2\x82z\xFF"), 1u);  // not the byte that interrupts it
  EXPECT_EQ(first_invalid_utf8("a\xED\xA0\x80"), 1u);   // a surrogate
  EXPECT_EQ(first_invalid_utf8("\xC0\xAF"), 0u);        // an overlong slash
}

}  // namespace
}  // namespace morphkv::llama_cpp

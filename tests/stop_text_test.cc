// What is shown of a text that a stop text ends: never a byte of the stop text, never one byte less
// than there was before it, however the text is cut into pieces.
#include "morphkv/llama_cpp/stop_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace morphkv::llama_cpp {
namespace {

using Texts = std::vector<std::string>;

struct Shown {
  std::string text;
  bool stopped = false;
  bool operator==(const Shown&) const = default;
};

Shown show(const Texts& stops, const Texts& pieces) {
  StopText stop(stops);
  std::string text;
  for (const std::string& piece : pieces) text += stop.push(piece);
  const bool stopped = stop.stopped();
  text += stop.finish();
  EXPECT_EQ(stop.finish(), "") << "finish() leaves something behind";
  return {text, stopped};
}

// By the rule alone: the stop text that ends first, of several that end there the longest.
Shown expected(const Texts& stops, const std::string& text) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    const std::string_view before = std::string_view(text).substr(0, end);
    std::size_t longest = 0;
    for (const std::string& stop : stops) {
      if (before.ends_with(stop)) longest = std::max(longest, stop.size());
    }
    if (longest > 0) return {text.substr(0, end - longest), true};
  }
  return {text, false};
}

TEST(StopText, ShowsEverythingAtOnceWhenThereIsNothingToStopAt) {
  StopText stop({});
  EXPECT_EQ(stop.push("any text"), "any text");
  EXPECT_EQ(stop.finish(), "");
  EXPECT_FALSE(stop.stopped());
}

TEST(StopText, HoldsBackWhatMayBeTheBeginningAndNoMore) {
  StopText stop({"User:"});
  EXPECT_EQ(stop.push("Hello Us"), "Hello ");
  EXPECT_EQ(stop.push("e a key, U"), "Use a key, ");
  EXPECT_EQ(stop.push("Use"), "U");
  EXPECT_EQ(stop.push("r"), "");
  EXPECT_FALSE(stop.stopped());
  EXPECT_EQ(stop.push(": and more"), "");
  EXPECT_TRUE(stop.stopped());
  EXPECT_EQ(stop.push("User and nothing else"), "");
  EXPECT_EQ(stop.finish(), "");
}

TEST(StopText, GivesBackAtTheEndWhatWasHeldInVain) {
  EXPECT_EQ(show({"\n\nQ"}, {"one\n", "\n"}), (Shown{"one\n\n", false}));
}

TEST(StopText, FindsAStopTextThatOverlapsItself) {
  EXPECT_EQ(show({"aab"}, {"a", "a", "a", "b", "c"}), (Shown{"a", true}));
  EXPECT_EQ(show({"abab"}, {"aba", "abab"}), (Shown{"aba", true}));
}

TEST(StopText, OfSeveralTheFirstThatIsCompleteEndsTheText) {
  EXPECT_EQ(show({"abc", "b"}, {"xabc"}), (Shown{"xa", true}));
  EXPECT_EQ(show({"bc", "abc"}, {"xabc"}), (Shown{"x", true}));
}

TEST(StopText, NeverCutsACharacter) {
  StopText stop({"\xC3\xA9\xC3\xA9"});                     // two times U+00E9
  EXPECT_EQ(stop.push("a\xC3\xA8\xC3\xA9"), "a\xC3\xA8");  // U+00E8 begins with the same byte
  EXPECT_EQ(stop.push("b"),
            "\xC3\xA9"
            "b");
}

TEST(StopText, ShowsTheSameHoweverTheTextIsCut) {
  std::mt19937 random(7);
  const auto text_of = [&](std::size_t length) {
    std::string text;
    while (text.size() < length) text += static_cast<char>('a' + random() % 2);
    return text;
  };
  for (int round = 0; round < 2000; ++round) {
    Texts stops;
    for (std::size_t n = random() % 3; stops.size() <= n;)
      stops.push_back(text_of(3 + random() % 5));
    const std::string text = text_of(random() % 40);
    Texts pieces;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t n = 1 + random() % 6;
      pieces.push_back(text.substr(at, n));
      at += n;
    }
    EXPECT_EQ(show(stops, pieces), expected(stops, text)) << text << " without " << stops[0];
  }
}

TEST(StopText, RefusesAnEmptyStopText) { EXPECT_THROW(StopText({"a", ""}), std::invalid_argument); }

}  // namespace
}  // namespace morphkv::llama_cpp

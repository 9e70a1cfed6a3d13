// The limits of the configuration: each of them, from both sides, and what the refusal says.
#include "morphkv/config.h"

#include <gtest/gtest.h>

#include <climits>
#include <stdexcept>
#include <string>
#include <vector>

namespace morphkv {
namespace {

// The text that validate() throws, or "" when the configuration is legal.
std::string refusal_of(const CacheConfig& config) {
  try {
    validate(config);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

void expect_refusal(const CacheConfig& config, const std::vector<std::string>& parts) {
  const std::string text = refusal_of(config);
  ASSERT_FALSE(text.empty()) << "accepted, but should name " << parts.front();
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' lacks '" << part << "'";
  }
}

TEST(Config, HasTheDocumentedDefaultsAndTheyAreLegal) {
  const CacheConfig config;
  EXPECT_EQ(config.budget, 512);
  EXPECT_EQ(config.n_sink, 4);
  EXPECT_EQ(config.window, 8);
  EXPECT_EQ(config.recent, 0);
  EXPECT_EQ(config.pool, 1);
  EXPECT_EQ(config.fusion, Fusion::kMean);
  EXPECT_EQ(config.queries, QuerySource::kKeys);
  EXPECT_EQ(config.policy, "morphkv");
  EXPECT_EQ(refusal_of(config), "");
}

TEST(Config, RefusesABudgetBelowOneRow) {
  expect_refusal({.budget = 0}, {"budget 0", "below 1", "at least 1 row"});
  expect_refusal({.budget = -3}, {"budget -3", "below 1", "at least 1 row"});
}

TEST(Config, RefusesABudgetAboveTheLimit) {
  EXPECT_EQ(refusal_of({.budget = kMaxBudget}), "");
  expect_refusal({.budget = kMaxBudget + 1}, {"budget 16777217", "16777216", "lower the budget"});
}

TEST(Config, RefusesAWindowBelowOneToken) {
  EXPECT_EQ(refusal_of({.window = 1}), "");
  expect_refusal({.window = 0}, {"window 0", "below 1", "window must be >= 1"});
  expect_refusal({.window = -1}, {"window -1", "below 1"});
}

TEST(Config, RefusesAWindowAboveTheBudget) {
  expect_refusal({.budget = 16, .n_sink = 0, .window = 17},
                 {"window 17", "above", "budget 16", "lower the window", "raise the budget"});
}

TEST(Config, RefusesNegativeSinks) {
  EXPECT_EQ(refusal_of({.n_sink = 0}), "");
  expect_refusal({.n_sink = -1}, {"n_sink -1", "negative", "use 0"});
}

TEST(Config, RefusesSinksThatFillTheBudget) {
  expect_refusal({.budget = 16, .n_sink = 16, .window = 1},
                 {"n_sink 16", "not below", "budget 16", "lower n_sink", "raise the budget"});
  expect_refusal({.budget = 16, .n_sink = 17, .window = 1}, {"n_sink 17", "budget 16"});
}

TEST(Config, RefusesSinksAndWindowThatLeaveNoRowToEvict) {
  EXPECT_EQ(refusal_of({.budget = 13, .n_sink = 4, .window = 8}), "");
  expect_refusal({.budget = 12, .n_sink = 4, .window = 8},
                 {"n_sink 4", "window 8", "budget 12", "raise the budget to at least 13"});
}

TEST(Config, RefusesSinksAndRecentRowsThatLeaveNoRowToEvict) {
  EXPECT_EQ(refusal_of({.budget = 25, .n_sink = 4, .window = 8, .recent = 20}), "");
  expect_refusal({.budget = 24, .n_sink = 4, .window = 8, .recent = 20},
                 {"n_sink 4", "recent 20", "budget 24", "raise the budget to at least 25"});
}

TEST(Config, RefusesARecentTailShorterThanTheWindow) {
  EXPECT_EQ(refusal_of({.window = 8, .recent = 8}), "");
  EXPECT_EQ(refusal_of({.window = 8, .recent = 0}), "");
  expect_refusal({.window = 8, .recent = 7}, {"recent 7", "window 8", "raise recent or use 0"});
  expect_refusal({.recent = -1}, {"recent -1", "negative", "use 0"});
}

TEST(Config, RefusesAPoolThatIsNotOdd) {
  for (const int pool : {1, 3, 7, 15, INT_MAX}) EXPECT_EQ(refusal_of({.pool = pool}), "") << pool;
  for (const int pool : {0, 2, 8, -1, -3, INT_MIN, INT_MIN + 1}) {
    expect_refusal({.pool = pool}, {"pool " + std::to_string(pool), "odd", "at least 1", "use 1"});
  }
}

TEST(Config, RefusesAnUnknownPolicyAndListsTheKnownOnes) {
  for (const char* name :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random", "full"}) {
    EXPECT_EQ(refusal_of({.policy = name}), "") << name;
  }
  expect_refusal({.policy = "lru"},
                 {"policy 'lru'", "not known", "morphkv", "streaming", "random", "full"});
  expect_refusal({.policy = ""}, {"policy ''"});
  expect_refusal({.policy = "MorphKV"}, {"policy 'MorphKV'"});
}

TEST(Config, AcceptsEachLegalMinimum) {
  EXPECT_EQ(refusal_of({.budget = 2, .n_sink = 0, .window = 1}), "");
  EXPECT_EQ(refusal_of({.budget = 2, .n_sink = 0, .window = 1, .recent = 1, .pool = 1}), "");
  EXPECT_EQ(refusal_of({.budget = 3, .n_sink = 1, .window = 1}), "");
  // One row, which the window would protect.
  expect_refusal({.budget = 1, .n_sink = 0, .window = 1},
                 {"n_sink 0", "window 1", "budget 1", "at least 2"});
}

TEST(Config, AcceptsEachLegalMaximum) {
  EXPECT_EQ(refusal_of({.budget = kMaxBudget, .n_sink = kMaxBudget - 2, .window = 1}), "");
  EXPECT_EQ(refusal_of({.budget = kMaxBudget, .n_sink = 0, .window = kMaxBudget - 1}), "");
  EXPECT_EQ(refusal_of({.budget = kMaxBudget, .n_sink = 0, .window = 1, .recent = kMaxBudget - 1}),
            "");
}

// A sanitizer build sees an overflow on the way.
TEST(Config, RefusesTheExtremesWithoutOverflow) {
  expect_refusal({.budget = INT_MAX}, {"budget 2147483647", "16777216"});
  expect_refusal({.budget = INT_MIN}, {"budget -2147483648"});
  expect_refusal({.n_sink = INT_MAX}, {"n_sink 2147483647", "budget 512"});
  expect_refusal({.n_sink = INT_MIN}, {"n_sink -2147483648"});
  expect_refusal({.window = INT_MAX}, {"window 2147483647", "budget 512"});
  expect_refusal({.window = INT_MIN}, {"window -2147483648"});
  expect_refusal({.recent = INT_MAX}, {"n_sink 4", "recent 2147483647", "budget 512"});
  expect_refusal({.recent = INT_MIN}, {"recent -2147483648"});
  expect_refusal({.budget = kMaxBudget, .n_sink = kMaxBudget - 1, .recent = INT_MAX},
                 {"n_sink 16777215", "recent 2147483647", "budget 16777216"});
  expect_refusal({.budget = INT_MAX, .n_sink = INT_MAX, .window = INT_MAX, .recent = INT_MAX},
                 {"budget 2147483647"});
}

TEST(Config, ProtectsTheLongerOfWindowAndRecent) {
  EXPECT_EQ((CacheConfig{.window = 8, .recent = 0}).protected_tail(), 8);
  EXPECT_EQ((CacheConfig{.window = 8, .recent = 8}).protected_tail(), 8);
  EXPECT_EQ((CacheConfig{.window = 8, .recent = 9}).protected_tail(), 9);
}

TEST(Config, NamesItsChoicesAsTheFlagsDo) {
  EXPECT_EQ(to_string(QuerySource::kKeys), "keys");
  EXPECT_EQ(to_string(QuerySource::kAttention), "attention");
  EXPECT_EQ(to_string(Fusion::kMean), "mean");
  EXPECT_EQ(to_string(Fusion::kMax), "max");
}

}  // namespace
}  // namespace morphkv

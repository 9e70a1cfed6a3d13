#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "judge.h"
#include "morphkv/llama_cpp/evictor.h"

namespace morphkv::eval {
namespace {

// A model of four tokens that says the same whatever it is fed, one row after the other.
struct Script {
  std::vector<std::vector<float>> rows;
  std::vector<llama_token> fed = {};

  Judgement judge(const AskedTokens& asked) {
    return eval::judge(
        asked, [&] { return std::span<const float>(rows.at(fed.size())); },
        [&](llama_token token) { fed.push_back(token); });
  }
};

TEST(Odds, AreTheSoftmaxInDouble) {
  const std::vector<float> logits = {1.0f, 3.0f, 3.0f, -50.0f};
  const Odds odds = odds_of(logits);
  EXPECT_EQ(odds.likeliest, 1);  // the first of two
  EXPECT_NEAR(odds.log_sum, std::log(std::exp(1.0) + 2 * std::exp(3.0) + std::exp(-50.0)), 1e-12);
  EXPECT_NEAR(odds_of(std::vector<float>{1000.0f, 999.0f}).log_sum,
              1000.0 + std::log1p(std::exp(-1.0)), 1e-9);
  EXPECT_EQ(odds_of(std::vector<float>{-std::numeric_limits<float>::infinity(), 0.0f}).likeliest,
            1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(odds_of(std::vector<float>{0.0f, nan}), llama_cpp::EngineError);
}

TEST(Divergence, IsZeroOfOneselfAndHandCountedElse) {
  const std::vector<float> p = {0.0f, 0.0f};
  const std::vector<float> q = {std::log(3.0f), 0.0f};  // 3/4, 1/4
  EXPECT_EQ(divergence(p, odds_of(p), p, odds_of(p)), 0.0);
  EXPECT_NEAR(divergence(p, odds_of(p), q, odds_of(q)),
              0.5 * std::log(0.5 / 0.75) + 0.5 * std::log(0.5 / 0.25), 1e-7);
  const std::vector<float> impossible = {0.0f, -std::numeric_limits<float>::infinity()};
  EXPECT_NEAR(divergence(impossible, odds_of(impossible), p, odds_of(p)), std::log(2.0), 1e-9);
}

TEST(Judge, APartIsRightWhenEachOfItsTokensIsTheLikeliest) {
  const std::vector<float> says_0 = {2.0f, 1.0f, 0.0f, 0.0f};
  const std::vector<float> says_1 = {1.0f, 2.0f, 0.0f, 0.0f};
  Script script{{says_0, says_1, says_1}};
  const Judgement j = script.judge({.question = {}, .parts = {{0, 1}, {0}}, .choices = {}});
  EXPECT_EQ(j.score, 0.5);
  EXPECT_EQ(j.tokens, 3);
  EXPECT_EQ(j.tokens_right, 2);
  EXPECT_EQ(script.fed, (std::vector<llama_token>{0, 1}));  // nobody asks what follows the last
  const double sum = std::log(std::exp(2.0) + std::exp(1.0) + 2.0);
  EXPECT_NEAR(j.nll, ((sum - 2) + (sum - 2) + (sum - 1)) / 3, 1e-6);
}

TEST(Judge, AChoiceIsRightWhenItBeatsTheOtherChoicesWhateverElseIsLikelier) {
  const std::vector<float> row = {9.0f, 1.0f, 2.0f, 2.0f};
  EXPECT_EQ((Script{{row}}).judge({.question = {}, .parts = {{2}}, .choices = {1, 2}}).score, 1.0);
  EXPECT_EQ((Script{{row}}).judge({.question = {}, .parts = {{1}}, .choices = {1, 2}}).score, 0.0);
  EXPECT_EQ((Script{{row}}).judge({.question = {}, .parts = {{2}}, .choices = {2, 3}}).score,
            0.0);  // a tie
}

}  // namespace
}  // namespace morphkv::eval

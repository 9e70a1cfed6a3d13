// The choice of a token: what is refused, what is chosen, and how likely it was.
#include "morphkv/llama_cpp/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "model_support.h"
#include "morphkv/llama_cpp/evictor.h"
#include "tiny_model.h"

namespace morphkv::llama_cpp {
namespace {

constexpr int kVocab = 96;
constexpr int kEos = 5;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Only its vocabulary matters here.
const llama_model* model() {
  static const ModelPtr kModel = test::make_tiny_model({.n_vocab = kVocab, .eos = kEos});
  return kModel.get();
}

SamplingOptions greedy() { return {.temperature = 0.0f}; }

// The model's own distribution: nothing is cut off.
SamplingOptions plain(std::uint32_t seed) {
  return {.seed = seed, .temperature = 1.0f, .top_k = 0, .top_p = 1.0f, .min_p = 0.0f};
}

// Logits between -4 and 4, all different.
std::vector<float> some_logits(int n = kVocab) {
  std::vector<float> logits;
  for (int i = 0; i < n; ++i) logits.push_back(4.0f * std::sin(static_cast<float>(7 * i + 1)));
  return logits;
}

// Zero everywhere but for these tokens.
std::vector<float> logits_with(const std::vector<std::pair<int, float>>& raised) {
  std::vector<float> logits(kVocab, 0.0f);
  for (const auto& [token, logit] : raised) logits[static_cast<std::size_t>(token)] = logit;
  return logits;
}

std::vector<llama_token> choices(const SamplingOptions& options, const std::vector<float>& logits,
                                 int n, bool ignore_eos = false) {
  Sampler sampler(model(), options);
  std::vector<llama_token> tokens;
  for (int i = 0; i < n; ++i) tokens.push_back(sampler.choose(logits, ignore_eos));
  return tokens;
}

std::vector<double> softmax(const std::vector<float>& logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(logit - top);
  std::vector<double> out;
  for (const float logit : logits) out.push_back(std::exp(logit - top) / sum);
  return out;
}

TEST(SamplingOptions, ANumberOutOfItsRangeIsRefusedByName) {
  const struct {
    SamplingOptions options;
    const char* what;
  } cases[] = {
      {{.temperature = NAN}, "temperature is no finite number"},
      {{.temperature = kInfinity}, "temperature is no finite number"},
      {{.top_p = -0.5f}, "top-p -0.500000 is not in [0, 1]"},
      {{.top_p = 1.5f}, "top-p 1.500000 is not in [0, 1]"},
      {{.top_p = NAN}, "top-p nan is not in [0, 1]"},
      {{.min_p = -0.5f}, "min-p -0.500000 is not in [0, 1]"},
      {{.min_p = 2.0f}, "min-p 2.000000 is not in [0, 1]"},
      {{.min_p = NAN}, "min-p nan is not in [0, 1]"},
      {{.repeat_penalty = 0.0f}, "repeat penalty 0.000000 is not above 0: use 1 for none"},
      {{.repeat_penalty = -1.0f}, "repeat penalty -1.000000 is not above 0: use 1 for none"},
      {{.repeat_penalty = kInfinity}, "repeat penalty inf is not above 0: use 1 for none"},
      {{.repeat_penalty = NAN}, "repeat penalty nan is not above 0: use 1 for none"},
      {{.presence_penalty = NAN}, "a presence or frequency penalty is no finite number"},
      {{.frequency_penalty = -kInfinity}, "a presence or frequency penalty is no finite number"},
  };
  for (const auto& [options, what] : cases) {
    try {
      validate(options);
      ADD_FAILURE() << "not refused: " << what;
    } catch (const std::invalid_argument& error) {
      EXPECT_STREQ(error.what(), what);
    }
    EXPECT_THROW(Sampler(model(), options), std::invalid_argument) << what;
  }
}

TEST(SamplingOptions, TheLimitsThemselvesAreLegal) {
  EXPECT_NO_THROW(validate({}));
  for (const float share : {0.0f, 1.0f}) {
    EXPECT_NO_THROW(validate({.top_p = share, .min_p = share})) << share;
  }
  for (const float temperature : {-1.0f, 0.0f, 100.0f}) {
    EXPECT_NO_THROW(validate({.temperature = temperature})) << temperature;
  }
  EXPECT_NO_THROW(validate({.top_k = -1, .repeat_penalty = 0.01f}));
  EXPECT_NO_THROW(validate({.presence_penalty = -2.0f, .frequency_penalty = -2.0f}));
}

TEST(Sampler, AtTemperatureZeroOrBelowTheLikeliestTokenIsChosenWhateverElseIsSet) {
  const std::vector<float> logits = some_logits();
  const auto top =
      static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  for (const float temperature : {0.0f, -1.0f}) {
    for (const std::uint32_t seed : {1u, 2u, LLAMA_DEFAULT_SEED}) {
      const SamplingOptions options = {
          .seed = seed, .temperature = temperature, .top_k = 0, .top_p = 0.1f, .min_p = 0.9f};
      EXPECT_EQ(choices(options, logits, 3), std::vector<llama_token>(3, top));
    }
  }
}

TEST(Sampler, IgnoringTheEndNoTokenThatEndsTheTextIsChosen) {
  const std::vector<float> logits = logits_with({{kEos, 20.0f}, {7, 10.0f}});
  EXPECT_EQ(choices(greedy(), logits, 1), (std::vector<llama_token>{kEos}));
  EXPECT_EQ(choices(greedy(), logits, 1, true), (std::vector<llama_token>{7}));

  const std::vector<float> even = logits_with({{kEos, 3.0f}});  // the end in one of six
  const auto chosen = choices(plain(1), even, 500);
  EXPECT_GT(std::count(chosen.begin(), chosen.end(), kEos), 0);
  const auto ignoring = choices(plain(1), even, 500, true);
  EXPECT_EQ(std::count(ignoring.begin(), ignoring.end(), kEos), 0);
}

TEST(Sampler, TheEndCanBeIgnoredForOneTokenOnly) {
  const std::vector<float> logits = logits_with({{kEos, 20.0f}, {7, 10.0f}});
  Sampler sampler(model(), greedy());
  EXPECT_EQ(sampler.choose(logits, true), 7);
  EXPECT_EQ(sampler.choose(logits, false), kEos);
}

TEST(Sampler, ARepeatPenaltyDividesTheLogitOfTheLastTokensChosen) {
  const std::vector<float> logits = logits_with({{10, 3.0f}, {11, 2.5f}, {12, 1.8f}});
  SamplingOptions options = greedy();
  EXPECT_EQ(choices(options, logits, 3), (std::vector<llama_token>{10, 10, 10}));
  options.repeat_penalty = 1.5f;  // 3 / 1.5 = 2, 2.5 / 1.5 = 1.67, 1.8 / 1.5 = 1.2
  EXPECT_EQ(choices(options, logits, 4), (std::vector<llama_token>{10, 11, 10, 10}));
  options.repeat_last_n = 1;
  EXPECT_EQ(choices(options, logits, 4), (std::vector<llama_token>{10, 11, 10, 11}));
}

TEST(Sampler, APresencePenaltyCountsOnceAndAFrequencyPenaltyEachTime) {
  const std::vector<float> logits = logits_with({{10, 3.0f}, {11, 1.5f}});
  SamplingOptions options = greedy();
  options.presence_penalty = 1.0f;  // 10 stays at 2
  EXPECT_EQ(choices(options, logits, 4), (std::vector<llama_token>{10, 10, 10, 10}));
  options.presence_penalty = 0.0f;
  options.frequency_penalty = 1.0f;  // 10 falls to 2, 1
  EXPECT_EQ(choices(options, logits, 3), (std::vector<llama_token>{10, 10, 11}));
}

TEST(Sampler, ALogitThatIsNoNumberIsAnErrorOfTheEngineAndTheNextTokenCanBeChosen) {
  std::vector<float> broken = some_logits();
  broken[40] = NAN;
  for (const SamplingOptions& options : {greedy(), plain(1), SamplingOptions{}}) {
    Sampler sampler(model(), options);
    for (const bool ignore_eos : {false, true}) {
      try {
        sampler.choose(broken, ignore_eos);
        ADD_FAILURE() << "not refused";
      } catch (const EngineError& error) {
        EXPECT_STREQ(error.what(), "the model gave a logit that is no number");
      }
    }
    EXPECT_EQ(sampler.choose(logits_with({{9, 50.0f}}), false), 9);
  }
}

TEST(Sampler, ASeedGivesTheSameChoicesAgainAndAnotherSeedOthers) {
  const std::vector<float> logits = some_logits();
  EXPECT_EQ(choices(plain(42), logits, 50), choices(plain(42), logits, 50));
  EXPECT_NE(choices(plain(42), logits, 50), choices(plain(43), logits, 50));
}

TEST(Sampler, TokensComeAsOftenAsTheModelSaysAtTemperatureOne) {
  const std::vector<float> logits =
      logits_with({{10, 6.0f}, {11, 5.0f}, {12, 4.0f}});  // 58 %, 21 %, 8 %, the others 0.14 % each
  const std::vector<double> expected = softmax(logits);
  constexpr int kDraws = 4000;
  const auto chosen = choices(plain(7), logits, kDraws);
  for (const llama_token token : {10, 11, 12}) {
    const double share =
        static_cast<double>(std::count(chosen.begin(), chosen.end(), token)) / kDraws;
    // Four standard deviations of the share at most: 0.5 / sqrt(draws) each.
    EXPECT_NEAR(share, expected[static_cast<std::size_t>(token)], 4 * 0.5 / std::sqrt(kDraws))
        << token;
  }
}

TEST(Sampler, TopKTopPAndMinPLeaveOnlyTheLikeliestTokens) {
  const std::vector<float> logits = logits_with({{10, 6.0f}, {11, 5.0f}, {12, 4.0f}});
  const auto kinds = [&](SamplingOptions options) {
    const auto chosen = choices(options, logits, 300);
    return std::set<llama_token>(chosen.begin(), chosen.end());
  };
  SamplingOptions options = plain(3);
  EXPECT_GT(kinds(options).size(), 3u);
  options.top_k = 2;
  EXPECT_EQ(kinds(options), (std::set<llama_token>{10, 11}));
  options = plain(3);
  options.top_p = 0.8f;  // 58 + 21 % are less, with the next 8 % it is more
  EXPECT_EQ(kinds(options), (std::set<llama_token>{10, 11, 12}));
  options = plain(3);
  options.min_p = 0.2f;  // of the likeliest: e^-1 = 0.37 stays, e^-2 = 0.14 goes
  EXPECT_EQ(kinds(options), (std::set<llama_token>{10, 11}));
}

TEST(TokenProbability, IsTheSoftmaxOfTheLogitsAlsoWhereTheyAreLarge) {
  for (const float shift : {0.0f, 5000.0f, -5000.0f}) {
    std::vector<float> logits = some_logits(1000);
    for (float& logit : logits) logit += shift;
    const std::vector<double> expected = softmax(logits);
    double sum = 0.0;
    for (llama_token token = 0; token < 1000; ++token) {
      const TokenProbability found = probability_of(token, logits);
      EXPECT_EQ(found.token, token);
      // A float's rounding of a logarithm between -13 and 0.
      EXPECT_NEAR(found.logprob, std::log(expected[static_cast<std::size_t>(token)]), 2e-6);
      sum += std::exp(static_cast<double>(found.logprob));
    }
    EXPECT_NEAR(sum, 1.0, 1e-5) << shift;
  }
}

TEST(TokenProbability, AnImpossibleTokenHasTheLogarithmOfZero) {
  std::vector<float> logits = some_logits();
  logits[3] = -kInfinity;
  EXPECT_EQ(probability_of(3, logits).logprob, -kInfinity);
  EXPECT_NEAR(probability_of(4, logits).logprob, std::log(softmax(logits)[4]), 2e-6);
}

TEST(Likeliest, TokensComeInOrderOfTheirProbabilityAndEqualOnesByNumber) {
  const std::vector<float> logits = some_logits();
  const std::vector<double> expected = softmax(logits);
  const std::vector<TokenProbability> all = likeliest(kVocab, logits);
  ASSERT_EQ(all.size(), static_cast<std::size_t>(kVocab));
  std::set<llama_token> seen;
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_NEAR(all[i].logprob, std::log(expected[static_cast<std::size_t>(all[i].token)]), 2e-6);
    EXPECT_EQ(all[i].logprob, probability_of(all[i].token, logits).logprob);
    if (i > 0) {
      EXPECT_LE(all[i].logprob, all[i - 1].logprob);
    }
    seen.insert(all[i].token);
  }
  EXPECT_EQ(seen.size(), all.size());

  const std::vector<float> tied = logits_with({{50, 2.0f}, {20, 2.0f}, {30, 4.0f}});
  const std::vector<TokenProbability> few = likeliest(4, tied);
  ASSERT_EQ(few.size(), 4u);
  EXPECT_EQ(few[0].token, 30);
  EXPECT_EQ(few[1].token, 20);
  EXPECT_EQ(few[2].token, 50);
  EXPECT_EQ(few[3].token, 0);
  EXPECT_TRUE(likeliest(0, tied).empty());
}

}  // namespace
}  // namespace morphkv::llama_cpp

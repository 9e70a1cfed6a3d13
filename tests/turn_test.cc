// What is wrong with a turn is found before anything is read, and its text names the value, the
// limit and the fix.
#include "morphkv/llama_cpp/turn.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::llama_cpp {
namespace {

class TurnCheck : public testing::Test {
 protected:
  TurnCheck() : model_(test::make_tiny_model({.trained_length = 200})) {
    turn_.prompt = test::noise_tokens(50, 96);
    turn_.cache = test::small_cache();
  }
  std::string refusal(std::size_t before = 0) {
    try {
      check_turn(turn_, limits_, model_.get(), before);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  }
  void expect_refused(const std::vector<std::string>& words) {
    const std::string text = refusal();
    EXPECT_NE(text, "") << words.front();
    for (const std::string& word : words) EXPECT_NE(text.find(word), std::string::npos) << text;
  }

  ModelPtr model_;
  Turn turn_;
  TurnLimits limits_{.budget = 64, .guide_tokens = 20};
};

TEST_F(TurnCheck, FindsNothingWrongWithAnOrdinaryTurn) {
  EXPECT_EQ(refusal(), "");
  turn_.prompt = test::noise_tokens(200, 96);  // the trained length itself
  turn_.guides = {test::noise_tokens(20, 96)};
  turn_.question = 199;
  turn_.top_logprobs = 20;
  EXPECT_EQ(refusal(), "");
}

TEST_F(TurnCheck, RefusesARuleThatTheSlotHasNoRoomFor) {
  turn_.cache.budget = 65;
  expect_refused({"budget 65", "above 64", "lower it"});
  turn_.cache.budget = 12;
  turn_.cache.window = 8;
  expect_refused({"budget 12", "at least 13"});
  turn_.cache = test::small_cache("full");
  expect_refused({"policy 'full' evicts nothing", "strict"});
  limits_.evicts = false;
  EXPECT_EQ(refusal(), "");
}

TEST_F(TurnCheck, RefusesAModelThatCannotBeBounded) {
  model_ = test::make_tiny_model({.architecture = "mamba"});
  expect_refused({"cannot be bounded", "recurrent"});
}

TEST_F(TurnCheck, RefusesPromptsThatAreNone) {
  turn_.prompt.clear();
  expect_refused({"prompt is empty"});
  turn_.prompt = {1, 96};
  expect_refused({"token 96", "0 to 95"});
  turn_.prompt = {1, -1};
  expect_refused({"token -1"});
  turn_.prompt = {1, 2};
  turn_.question = 2;
  expect_refused({"question begins at token 2", "has 2", "below that"});
}

TEST_F(TurnCheck, RefusesGuidesThatAreEmptyOrTooLong) {
  turn_.guides = {{1, 2}, {}};
  expect_refused({"a guide is empty"});
  turn_.guides = {test::noise_tokens(21, 96)};
  expect_refused({"a guide has 21", "limit is 20", "shorten it"});
  turn_.guides.clear();
  turn_.guide = -1;
  expect_refused({"guide -1", "use 0"});
}

TEST_F(TurnCheck, RefusesNumbersOutOfRange) {
  turn_.top_logprobs = 21;
  expect_refused({"top_logprobs 21", "above 20"});
  turn_.top_logprobs = 0;
  turn_.sampling.top_p = 2.0f;
  expect_refused({"top-p"});
}

TEST_F(TurnCheck, RefusesWhatIsBeyondTheTrainedLengthUnlessThatIsAllowed) {
  turn_.prompt = test::noise_tokens(201, 96);
  expect_refused({"201 tokens", "trained for 200", "shorten it", "allow_past_training"});
  const std::string behind = refusal(150);
  EXPECT_NE(behind.find("51 tokens behind a session of 150 tokens"), std::string::npos) << behind;
  turn_.allow_past_training = true;
  EXPECT_EQ(refusal(), "");
}

TEST_F(TurnCheck, StrictRefusesWhatDoesNotFitIntoTheBudgetWithBothNumbers) {
  turn_.strict = true;
  turn_.prompt = test::noise_tokens(64, 96);
  EXPECT_EQ(refusal(), "");
  turn_.prompt = test::noise_tokens(65, 96);
  expect_refused({"65 tokens", "budget is 64", "strict"});
  try {
    check_turn(turn_, limits_, model_.get());
    FAIL() << "not refused";
  } catch (const TooLong& error) {
    EXPECT_EQ(error.tokens, 65);
    EXPECT_EQ(error.limit, 64);
  }
}

TEST_F(TurnCheck, NeedsNoWeights) {
  const std::string path = testing::TempDir() + "turn_test.gguf";
  test::write_tiny_model({.trained_length = 40}, path);
  model_ = load_model(path, {.vocab_only = true, .progress = {}});
  expect_refused({"50 tokens", "trained for 40"});
}

TEST(Turn, TakesItsRuleAndItsGuidesFromTheSettings) {
  const ModelPtr model = test::make_tiny_model({});
  const ResolvedSettings chat = Settings(find_profile("chat")).resolve();
  Turn turn;
  turn.use(chat, model.get());
  EXPECT_EQ(turn.cache, chat.cache);
  EXPECT_EQ(turn.prefill, Prefill::kGuided);
  ASSERT_EQ(turn.guides.size(), 1u);
  EXPECT_EQ(turn.guides[0], tokenize_continuation(model.get(), chat.guide_text));
  EXPECT_TRUE(turn.end_guides_too);
  // Texts stand in the place of the settings' own.
  turn.use(chat, model.get(), {"Where is it?", "Who has it?"});
  EXPECT_EQ(turn.guides.size(), 2u);
  EXPECT_FALSE(turn.end_guides_too);
  turn.use(Settings(find_profile("paper")).resolve(), model.get());
  EXPECT_TRUE(turn.guides.empty());
  EXPECT_EQ(turn.prefill, Prefill::kWhole);
}

}  // namespace
}  // namespace morphkv::llama_cpp

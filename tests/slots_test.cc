// Many texts at once: each slot answers as a session of its own would, and forgets nothing of its
// neighbours'.
#include "morphkv/llama_cpp/slots.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "model_support.h"
#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/llama_cpp/session.h"

namespace morphkv::llama_cpp {
namespace {

using test::notes_about;
using test::test_model;

constexpr int kBudget = 96;

Turn turn_of(std::vector<llama_token> prompt, int answer) {
  Turn turn;
  turn.prompt = std::move(prompt);
  turn.cache = default_profile().with_budget(kBudget);
  turn.sampling.temperature = 0.0f;
  turn.max_tokens = answer;
  turn.ignore_eos = true;
  return turn;
}

// The answers of some turns.
struct Answers {
  std::map<int, std::vector<llama_token>> tokens;
  std::map<int, FinishReason> ends;

  Slots::Handler handler(int key) {
    return {.on_token = [this, key](GeneratedToken t) { tokens[key].push_back(t.token); },
            .on_end = [this, key](FinishReason reason) { ends[key] = reason; },
            .on_error = [](const std::string& what) { ADD_FAILURE() << what; }};
  }
};

std::vector<llama_token> answer_alone(Slots& slots, int slot, Turn turn) {
  Answers answers;
  slots.begin(slot, std::move(turn), answers.handler(0));
  while (slots.step()) {
  }
  return answers.tokens[0];
}

SlotsOptions options(int n) {
  return {.slots = n, .budget = kBudget, .piece = 96, .batch_tokens = 64, .threads = 2};
}

TEST(Slots, AFreshTextInAUsedSlotIsAnsweredAsInAFreshProcess) {
  const Turn turn = turn_of(notes_about(20, "lamp"), 12);
  std::vector<llama_token> fresh;
  {
    Slots slots(test_model(), options(3));
    fresh = answer_alone(slots, 1, turn);
  }
  Slots slots(test_model(), options(3));
  answer_alone(slots, 1, turn_of(notes_about(31, "crane"), 20));
  EXPECT_EQ(answer_alone(slots, 1, turn), fresh);
  EXPECT_EQ(slots.stats(1).reused_tokens, 0);
  EXPECT_EQ(answer_alone(slots, 2, turn), fresh);
}

TEST(Slots, TextsThatRunTogetherAreAnsweredLikeEachAlone) {
  const std::vector<std::string> topics = {"lamp", "crane", "old ferry", "market"};
  Slots slots(test_model(), options(4));
  std::vector<std::vector<llama_token>> alone;
  for (std::size_t i = 0; i < topics.size(); ++i) {
    alone.push_back(answer_alone(slots, static_cast<int>(i),
                                 turn_of(notes_about(8 + 7 * static_cast<int>(i), topics[i]), 10)));
    slots.erase(static_cast<int>(i));
  }
  Answers answers;
  for (int i = 0; i < 4; ++i) {
    slots.begin(i, turn_of(notes_about(8 + 7 * i, topics[static_cast<std::size_t>(i)]), 10),
                answers.handler(i));
    slots.step();
  }
  while (slots.step()) {
    for (int i = 0; i < 4; ++i) EXPECT_LE(slots.stats(i).rows_kept, kBudget + 96);
  }
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(answers.tokens[i], alone[static_cast<std::size_t>(i)]) << i;
    EXPECT_EQ(answers.ends[i], FinishReason::kLength);
    EXPECT_LE(slots.stats(i).rows_kept, kBudget);
  }
}

// After the last piece other guides than the prompt's end still ask, and then the excess leaves.
TEST(Slots, TextsToLookForAskUntilThePromptIsDecidedAbout) {
  Slots slots(test_model(), options(2));
  Turn turn = turn_of(notes_about(30, "lamp"), 6);
  turn.guides = {tokenize(test_model(), "What is said about note 12?", false)};
  turn.end_guides_too = true;

  SessionOptions alone;
  alone.cache = turn.cache;
  alone.micro_batch = 96;
  alone.threads = 2;
  alone.max_tokens = 6;
  alone.ignore_eos = true;
  alone.sampling.temperature = 0.0f;
  Session session(test_model(), alone);
  std::vector<llama_token> expected;
  SessionCallbacks callbacks;
  callbacks.on_token = [&](llama_token token, std::string_view, double) {
    expected.push_back(token);
  };
  session.run(Prompt{.tokens = turn.prompt, .guides = turn.guides, .end_guides_too = true},
              callbacks);

  Answers answers;
  slots.begin(0, turn, answers.handler(0));
  while (answers.tokens[0].empty()) ASSERT_TRUE(slots.step());
  EXPECT_EQ(slots.stats(0).rows_kept, kBudget);
  while (slots.step()) {
  }
  EXPECT_EQ(answers.tokens[0], expected);
}

TEST(Slots, ATurnGoesOnFromAllThatTheSlotHasSeenAndOtherwiseFromNothing) {
  Slots slots(test_model(), options(2));
  const std::vector<llama_token> first = notes_about(20, "lamp");
  const std::vector<llama_token> answer = answer_alone(slots, 0, turn_of(first, 8));
  std::vector<llama_token> longer = first;
  longer.insert(longer.end(), answer.begin(), answer.end());
  longer.insert(longer.end(), answer.begin(), answer.end());
  EXPECT_EQ(slots.tokens_seen(0).size(), first.size() + 7);  // the last token asked nothing
  EXPECT_EQ(slots.reusable(0, turn_of(longer, 4)), static_cast<int>(first.size()) + 7);
  answer_alone(slots, 0, turn_of(longer, 4));
  EXPECT_EQ(slots.stats(0).reused_tokens, static_cast<int>(first.size()) + 7);
  EXPECT_EQ(slots.stats(0).tokens_seen, std::ssize(longer) + 3);

  Turn other_rule = turn_of(longer, 4);
  other_rule.cache.budget = kBudget - 8;
  EXPECT_EQ(slots.reusable(0, other_rule), 0);
  longer[3] += 1;
  EXPECT_EQ(slots.reusable(0, turn_of(longer, 4)), 0);
  EXPECT_EQ(slots.reusable(0, turn_of(first, 4)), 0);
  Turn strict = turn_of(first, 4);
  strict.strict = true;
  EXPECT_THROW(slots.check(strict), TooLong);
}

// "lamp" as two tokens, and again as the one that a tokenizer makes of it.
TEST(Slots, GeneratedTextThatComesBackInOtherTokensIsStillWhatWasSeen) {
  Slots slots(test_model(), options(1));
  const auto tokens = [](const std::string& text, bool special) {
    return tokenize(test_model(), text, special);
  };
  std::vector<llama_token> odd = tokens("The keeper lights the la", false);
  const std::vector<llama_token> end = tokens("mp", false);
  odd.insert(odd.end(), end.begin(), end.end());
  answer_alone(slots, 0, turn_of(odd, 1));
  ASSERT_EQ(slots.tokens_seen(0).size(), odd.size());

  const auto usual = tokens("The keeper lights the lamp<|im_end|> again and again.", true);
  ASSERT_FALSE(std::equal(odd.begin(), odd.end(), usual.begin()));
  Turn turn = turn_of(usual, 2);
  turn.question = usual.size() - 2;
  const int said_before = static_cast<int>(tokens("The keeper lights the lamp", false).size());
  EXPECT_EQ(slots.reusable(0, turn), said_before);
  answer_alone(slots, 0, turn);
  EXPECT_EQ(slots.stats(0).reused_tokens, std::ssize(odd));
  EXPECT_EQ(slots.tokens_seen(0).size(), odd.size() + usual.size() - said_before + 1);

  // Half a token of the prompt, another text, and the name of a token in its place.
  slots.erase(0);
  answer_alone(slots, 0, turn_of(tokens("The keeper lights the lamp<|im_end|>", true), 1));
  for (const char* other :
       {"The keeper lights the lamp<|im_end|> again", "The keeper lights the"}) {
    EXPECT_EQ(slots.reusable(0, turn_of(tokens(other, false), 1)), 0) << other;
  }
}

TEST(Slots, ATurnThatEndsEarlyTouchesNoOther) {
  Slots slots(test_model(), options(2));
  const std::vector<llama_token> alone =
      answer_alone(slots, 0, turn_of(notes_about(14, "lamp"), 12));
  slots.erase(0);
  for (const int steps : {1, 3, 12}) {
    Answers answers;
    slots.begin(1, turn_of(notes_about(30, "crane"), 50), answers.handler(1));
    slots.begin(0, turn_of(notes_about(14, "lamp"), 12), answers.handler(0));
    for (int i = 0; i < steps; ++i) slots.step();
    slots.end(1);
    EXPECT_FALSE(slots.stats(1).busy);
    while (slots.step()) {
    }
    EXPECT_EQ(answers.tokens[0], alone);
    EXPECT_FALSE(answers.ends.contains(1));
    slots.erase(0);
  }
}

TEST(Slots, StrictAnswersFillTheBudgetAndEvictNothing) {
  Slots slots(test_model(), options(1));
  Turn turn = turn_of(notes_about(3, "lamp"), -1);
  turn.strict = true;
  const auto prompt = std::ssize(turn.prompt);
  ASSERT_LT(prompt, kBudget);
  const std::vector<llama_token> answer = answer_alone(slots, 0, turn);
  EXPECT_EQ(std::ssize(answer), kBudget - prompt + 1);
  EXPECT_EQ(slots.stats(0).rows_evicted, 0);
  EXPECT_EQ(slots.stats(0).rows_kept, kBudget);
}

}  // namespace
}  // namespace morphkv::llama_cpp

// The engine behind the server: a queue, slots that are free again at once, and answers that no
// neighbour touches.
#include "engine_service.h"

#include <gtest/gtest.h>

#include <thread>

#include "model_support.h"
#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::server {
namespace {

using namespace std::chrono_literals;
using test::test_model;

constexpr int kBudget = 96;

Request request_of(int lines, const std::string& topic, int answer) {
  Request request;
  request.turn.prompt = test::notes_about(lines, topic);
  request.turn.cache = default_profile().with_budget(kBudget);
  request.turn.sampling.temperature = 0.0f;
  request.turn.max_tokens = answer;
  request.turn.ignore_eos = true;
  return request;
}

EngineServiceOptions options(int slots, int queue = 8) {
  return {
      .slots = {.slots = slots, .budget = kBudget, .piece = 96, .batch_tokens = 64, .threads = 2},
      .max_queue = queue};
}

struct Whole {
  std::string text;
  End end;
};

Whole wait_for(Answer& answer) {
  Whole whole;
  for (int i = 0; i < 6000; ++i) {
    const std::optional<Event> event = answer.next(50ms);
    if (!event) continue;
    if (const auto* delta = std::get_if<Delta>(&*event)) {
      whole.text += delta->text;
    } else if (const auto* end = std::get_if<End>(&*event)) {
      whole.end = *end;
      return whole;
    }
  }
  ADD_FAILURE() << "no end in five minutes";
  return whole;
}

Whole ask(EngineService& engine, Request request) {
  return wait_for(*engine.submit(std::move(request)));
}

bool becomes_idle(const EngineService& engine) {
  for (int i = 0; i < 200; ++i) {
    if (engine.idle()) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

TEST(EngineService, WhyItsSlotsCannotBeMadeReachesItsMaker) {
  EXPECT_THROW(EngineService(test_model(), options(0)), std::invalid_argument);
}

TEST(EngineService, AnswersMoreRequestsThanItHasSlotsEachAsAlone) {
  EngineService engine(test_model(), options(2));
  std::vector<std::string> alone;
  for (int i = 0; i < 5; ++i) alone.push_back(ask(engine, request_of(4 + 6 * i, "lamp", 8)).text);
  std::vector<std::unique_ptr<Answer>> answers;
  for (int i = 0; i < 5; ++i) answers.push_back(engine.submit(request_of(4 + 6 * i, "lamp", 8)));
  for (int i = 0; i < 5; ++i) {
    const Whole whole = wait_for(*answers[static_cast<std::size_t>(i)]);
    EXPECT_EQ(whole.text, alone[static_cast<std::size_t>(i)]);
    EXPECT_EQ(whole.end.reason, EndReason::kLength);
    EXPECT_EQ(whole.end.stats.generated_tokens, 8);
    EXPECT_LE(whole.end.stats.rows_kept, kBudget);
  }
  EXPECT_EQ(engine.counters().requests_finished, 10);
  EXPECT_EQ(engine.counters().tokens_generated, 80);
}

TEST(EngineService, RefusesWhatIsBeyondItsQueue) {
  EngineService engine(test_model(), options(1, 2));
  std::vector<std::unique_ptr<Answer>> answers;
  for (int i = 0; i < 3; ++i) answers.push_back(engine.submit(request_of(10, "lamp", 40)));
  std::this_thread::sleep_for(100ms);
  try {
    answers.push_back(engine.submit(request_of(10, "lamp", 40)));
    FAIL() << "the fourth request was taken";
  } catch (const QueueFull& error) {
    EXPECT_GE(error.retry_after_s, 1);
  }
  EXPECT_EQ(engine.counters().requests_refused, 1);
}

TEST(EngineService, AnAnswerThatNobodyWaitsForFreesItsSlotAndTouchesNoOther) {
  EngineService engine(test_model(), options(2));
  const std::string alone = ask(engine, request_of(12, "crane", 16)).text;
  auto leaving = engine.submit(request_of(60, "lamp", 500));
  auto staying = engine.submit(request_of(12, "crane", 16));
  std::this_thread::sleep_for(150ms);
  leaving.reset();
  EXPECT_EQ(wait_for(*staying).text, alone);
  EXPECT_TRUE(becomes_idle(engine));
  for (const SlotInfo& slot : engine.slots()) EXPECT_FALSE(slot.stats.busy) << slot.id;
  auto last = engine.submit(request_of(12, "crane", 500));
  std::this_thread::sleep_for(100ms);
  last.reset();
  EXPECT_TRUE(becomes_idle(engine));
  std::this_thread::sleep_for(100ms);
  for (const SlotInfo& slot : engine.slots()) EXPECT_FALSE(slot.stats.busy) << slot.id;
  EXPECT_EQ(engine.counters().requests_cancelled, 2);
}

TEST(EngineService, ARequestThatIsLateEndsAlsoWhileItWaits) {
  EngineService engine(test_model(), options(1));
  auto running = engine.submit(request_of(10, "lamp", 4000));
  Request hasty = request_of(4, "crane", 4);
  hasty.timeout = 200ms;
  const Whole late = ask(engine, std::move(hasty));
  EXPECT_EQ(late.end.reason, EndReason::kTimeout);
  EXPECT_EQ(late.text, "");
  running.reset();
  EXPECT_TRUE(becomes_idle(engine));
}

TEST(EngineService, StopTextsAreNoPartOfTheAnswer) {
  EngineService engine(test_model(), options(1));
  const std::string whole = ask(engine, request_of(6, "lamp", 24)).text;
  ASSERT_GT(whole.size(), 20u);
  Request stopping = request_of(6, "lamp", 24);
  stopping.stop = {whole.substr(10, 6)};
  const Whole cut = ask(engine, std::move(stopping));
  EXPECT_EQ(cut.end.reason, EndReason::kStopText);
  EXPECT_EQ(cut.text, whole.substr(0, whole.find(whole.substr(10, 6))));
}

TEST(EngineService, AContinuationFindsTheSlotThatHasSeenIt) {
  EngineService engine(test_model(), options(3));
  Request first = request_of(10, "lamp", 6);
  std::vector<llama_token> text = first.turn.prompt;
  auto answer = engine.submit(std::move(first));
  int told = -1;
  int slot = -1;
  while (slot < 0) {
    const std::optional<Event> event = answer->next(50ms);
    if (!event) continue;
    if (const auto* begun = std::get_if<Begun>(&*event)) told = begun->slot;
    if (const auto* delta = std::get_if<Delta>(&*event)) {
      for (const auto& token : delta->tokens) text.push_back(token.token);
    }
    if (const auto* end = std::get_if<End>(&*event)) slot = end->slot;
  }
  EXPECT_EQ(told, slot);
  ask(engine, request_of(9, "crane", 2));
  ask(engine, request_of(9, "market", 2));
  Request next = request_of(1, "lamp", 4);
  next.turn.prompt = text;
  next.turn.prompt.push_back(text[5]);
  const Whole whole = ask(engine, std::move(next));
  EXPECT_EQ(whole.end.slot, slot);
  EXPECT_EQ(whole.end.stats.reused_tokens, static_cast<int>(text.size()) - 1);
}

TEST(EngineService, WhatRunsEndsInPeaceWhileItDrains) {
  EngineService engine(test_model(), options(1));
  auto running = engine.submit(request_of(6, "lamp", 20));
  engine.drain();
  EXPECT_THROW(engine.submit(request_of(6, "lamp", 4)), Stopping);
  EXPECT_EQ(wait_for(*running).end.reason, EndReason::kLength);
  EXPECT_TRUE(becomes_idle(engine));
}

TEST(EngineService, APictureNamesTheRowsThatEachHeadHolds) {
  EngineService engine(test_model(), options(1));
  const Whole whole = ask(engine, request_of(20, "lamp", 3));
  const Picture picture = engine.picture(0, 50);
  EXPECT_EQ(picture.tokens_seen, whole.end.stats.tokens_seen);
  EXPECT_EQ(picture.first_token, picture.tokens_seen - 50);
  EXPECT_EQ(picture.pieces.size(), 50u);
  EXPECT_EQ(picture.layers.size(), 30u);
  EXPECT_EQ(picture.heads, 3);
  for (const auto& layer : picture.held) {
    for (const auto& head : layer) {
      ASSERT_FALSE(head.empty());
      EXPECT_GE(head.front(), picture.first_token);
      EXPECT_EQ(head.back(), picture.tokens_seen - 1);  // the last token is in the window
    }
  }
  EXPECT_THROW(engine.picture(1, 50), std::invalid_argument);
}

}  // namespace
}  // namespace morphkv::server

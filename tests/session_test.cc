// The session: how it ends, what it refuses, what it says and in which memory it does its work.
#include "morphkv/llama_cpp/session.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::ContextPtr;
using llama_cpp::FinishReason;
using llama_cpp::ModelPtr;
using llama_cpp::Prefill;
using llama_cpp::Session;
using llama_cpp::SessionCallbacks;
using llama_cpp::SessionOptions;
using llama_cpp::SessionResult;
using Tokens = std::vector<llama_token>;

constexpr int kVocab = 96;

// Greedy, one thread, a budget of 64.
SessionOptions small_session(int max_tokens) {
  SessionOptions options;
  options.cache = small_cache();
  options.sampling.temperature = 0.0f;
  options.max_tokens = max_tokens;
  options.threads = 1;
  options.micro_batch = 64;
  return options;
}

struct Answer {
  SessionResult result;
  Tokens tokens;
  std::string text;
  std::vector<std::string> notices;
  std::vector<int> progress;
};

// Runs and notes what the callbacks were told; `cancelled` may be empty.
Answer answer_of(Session& session, const Tokens& prompt, std::function<bool()> cancelled = {}) {
  Answer answer;
  SessionCallbacks callbacks;
  callbacks.on_notice = [&](std::string_view line) { answer.notices.emplace_back(line); };
  callbacks.on_prompt = [&](int done, int total, int) {
    EXPECT_EQ(total, static_cast<int>(prompt.size()));
    answer.progress.push_back(done);
  };
  callbacks.on_token = [&](llama_token token, std::string_view text, double ms) {
    EXPECT_GE(ms, 0.0);
    answer.tokens.push_back(token);
    answer.text += text;
  };
  callbacks.cancelled = std::move(cancelled);
  answer.result = session.run(prompt, callbacks);
  EXPECT_EQ(answer.result.generated_tokens, static_cast<int>(answer.tokens.size()));
  EXPECT_EQ(answer.result.cache.tokens_seen, session.evictor().offset());
  EXPECT_EQ(session.evictor().violations(), std::vector<std::string>{});
  return answer;
}

Answer answer_of(const llama_model* model, const SessionOptions& options, const Tokens& prompt) {
  Session session(model, options);
  return answer_of(session, prompt);
}

// What llama.cpp alone answers, greedily, when it is given the prompt in the same pieces.
Tokens plain_answer(llama_model* model, const Tokens& prompt, int piece, int n) {
  const ContextPtr context = plain_context(model, context_params(), 1024, piece);
  for (std::size_t done = 0; done < prompt.size(); done += static_cast<std::size_t>(piece)) {
    const auto size = std::min(static_cast<std::size_t>(piece), prompt.size() - done);
    EXPECT_EQ(decode(context.get(), std::span(prompt).subspan(done, size)), 0);
  }
  Tokens answer;
  while (static_cast<int>(answer.size()) < n) {
    answer.push_back(likeliest(logits_of(context.get())));
    EXPECT_EQ(decode(context.get(), {&answer.back(), 1}), 0);
  }
  return answer;
}

// --- How it ends
// ----------------------------------------------------------------------------------

TEST(Session, StopsWhenTheTrainedModelEndsItsAnswer) {
  const std::string chat =
      "<|im_start|>user\nWhat is the capital of France? Answer in one sentence.<|im_end|>\n"
      "<|im_start|>assistant\n";
  SessionOptions options = small_session(200);
  options.cache = CacheConfig{};
  const Answer answer =
      answer_of(test_model(), options, llama_cpp::tokenize(test_model(), chat, true));
  EXPECT_EQ(answer.result.finish_reason, FinishReason::kStop);
  EXPECT_LT(answer.result.generated_tokens, 60);
  EXPECT_NE(answer.text.find("Paris"), std::string::npos) << answer.text;
}

TEST(Session, StopsAtTheEndTokenWithoutCountingOrShowingItUnlessToldToIgnoreIt) {
  const Tokens prompt = noise_tokens(30, kVocab);
  const ModelPtr endless = make_tiny_model({});
  const Tokens answer = answer_of(endless.get(), small_session(40), prompt).tokens;
  ASSERT_EQ(answer.size(), 40u);
  const std::size_t at =
      static_cast<std::size_t>(std::find(answer.begin(), answer.end(), answer[8]) - answer.begin());

  const ModelPtr ends = make_tiny_model({.eos = answer[8]});
  const Answer stopped = answer_of(ends.get(), small_session(40), prompt);
  EXPECT_EQ(stopped.result.finish_reason, FinishReason::kStop);
  EXPECT_EQ(stopped.tokens, Tokens(answer.begin(), answer.begin() + static_cast<long>(at)));

  SessionOptions ignoring = small_session(40);
  ignoring.ignore_eos = true;
  const Answer went_on = answer_of(ends.get(), ignoring, prompt);
  EXPECT_EQ(went_on.result.finish_reason, FinishReason::kLength);
  EXPECT_EQ(went_on.tokens.size(), 40u);
  EXPECT_EQ(std::find(went_on.tokens.begin(), went_on.tokens.end(), answer[8]),
            went_on.tokens.end());
}

TEST(Session, TheLimitCountsGeneratedTokensWhateverThePromptsLength) {
  const ModelPtr model = make_tiny_model({});
  for (const int prompt : {1, 63, 64, 65, 500}) {
    for (const int limit : {0, 1, 7, 150}) {
      const Answer answer =
          answer_of(model.get(), small_session(limit), noise_tokens(prompt, kVocab));
      EXPECT_EQ(answer.result.finish_reason, FinishReason::kLength) << prompt << ' ' << limit;
      EXPECT_EQ(answer.result.generated_tokens, limit);
      EXPECT_EQ(answer.result.prompt_tokens, prompt);
      // The last token needs no successor, so it is not evaluated.
      EXPECT_EQ(answer.result.cache.tokens_seen, prompt + std::max(0, limit - 1));
      EXPECT_EQ(answer.result.cache.rows_kept,
                std::min<std::int64_t>(64, answer.result.cache.tokens_seen));
    }
  }
}

TEST(Session, EndsAtTheTrainedLengthUnlessItIsAllowedToGoPast) {
  const ModelPtr model = make_tiny_model({.trained_length = 100});
  for (const char* policy : {"morphkv", "full"}) {
    SCOPED_TRACE(policy);
    SessionOptions options = small_session(-1);
    options.cache.policy = policy;
    const Answer answer = answer_of(model.get(), options, noise_tokens(80, kVocab));
    EXPECT_EQ(answer.result.finish_reason, FinishReason::kTrainedLength);
    EXPECT_EQ(answer.result.cache.tokens_seen, 100);
    EXPECT_EQ(answer.result.generated_tokens, 21);  // the last one follows position 99

    options.max_tokens = 30;
    options.allow_past_training = true;
    const Answer past = answer_of(model.get(), options, noise_tokens(80, kVocab));
    EXPECT_EQ(past.result.finish_reason, FinishReason::kLength);
    EXPECT_EQ(past.result.generated_tokens, 30);
    EXPECT_EQ(Tokens(past.tokens.begin(), past.tokens.begin() + 21), answer.tokens);
  }
}

TEST(Session, APromptOfExactlyTheTrainedLengthGetsOneTokenAndALongerOneIsRefused) {
  const ModelPtr model = make_tiny_model({.trained_length = 100});
  const Answer answer = answer_of(model.get(), small_session(-1), noise_tokens(100, kVocab));
  EXPECT_EQ(answer.result.finish_reason, FinishReason::kTrainedLength);
  EXPECT_EQ(answer.result.generated_tokens, 1);
  Session session(model.get(), small_session(-1));
  try {
    answer_of(session, noise_tokens(101, kVocab));
    ADD_FAILURE() << "not refused";
  } catch (const std::invalid_argument& refusal) {
    const std::string reason = refusal.what();
    EXPECT_NE(reason.find("101"), std::string::npos) << reason;
    EXPECT_NE(reason.find("100"), std::string::npos) << reason;
    EXPECT_NE(reason.find("--allow-past-training"), std::string::npos) << reason;
  }
  SessionOptions past = small_session(3);
  past.allow_past_training = true;
  EXPECT_EQ(answer_of(model.get(), past, noise_tokens(101, kVocab)).tokens.size(), 3u);
}

TEST(Session, ThereIsAnEndEvenWithoutALimitOrATrainedLength) {
  const ModelPtr model = make_tiny_model({.n_layer = 1, .n_head = 1, .n_head_kv = 1});
  SessionOptions options = small_session(-1);
  options.allow_past_training = true;
  options.cache = {.budget = 16, .n_sink = 1, .window = 1, .policy = "streaming"};  // quick
  const Answer answer = answer_of(model.get(), options, noise_tokens(5, kVocab));
  EXPECT_EQ(answer.result.finish_reason, FinishReason::kLength);
  EXPECT_EQ(answer.result.generated_tokens, llama_cpp::kTokenCap);
}

// --- Interruptions
// --------------------------------------------------------------------------------

TEST(Session, ACancelAtAnyMomentEndsInGoodOrder) {
  const ModelPtr model = make_tiny_model({});
  const Tokens prompt = noise_tokens(200, kVocab);
  for (const Prefill prefill : {Prefill::kStream, Prefill::kWhole}) {
    SessionOptions options = small_session(10);
    options.prefill = prefill;
    int questions = 0;
    Session counted(model.get(), options);
    const Answer whole = answer_of(counted, prompt, [&] { return ++questions, false; });
    ASSERT_EQ(whole.tokens.size(), 10u);
    ASSERT_GT(questions, 500);
    int in_prompt = 0;
    int in_decode = 0;
    for (int moment = 1; moment < questions; moment += 23) {
      SCOPED_TRACE("question " + std::to_string(moment) + " of " + std::to_string(questions));
      Session session(model.get(), options);
      int asked = 0;
      const Answer cut = answer_of(session, prompt, [&] { return ++asked >= moment; });
      EXPECT_EQ(cut.result.finish_reason, FinishReason::kInterrupted);
      EXPECT_EQ(newest_label(session.context()), session.evictor().offset() - 1);
      EXPECT_LE(cut.result.prompt_tokens, 200);
      ASSERT_LE(cut.tokens.size(), whole.tokens.size());
      EXPECT_TRUE(std::equal(cut.tokens.begin(), cut.tokens.end(), whole.tokens.begin()));
      ++(cut.tokens.empty() ? in_prompt : in_decode);
    }
    EXPECT_GT(in_prompt, 5);
    EXPECT_GT(in_decode, 5);
  }
}

TEST(Session, ACancelOfTheTrainedModelTakesEffectWithinOnePieceOfThePrompt) {
  SessionOptions options = small_session(5);
  options.prefill = Prefill::kStream;
  bool cancel = false;
  Session session(test_model(), options);
  const Tokens prompt = prose_tokens(400);
  int done = 0;
  SessionCallbacks callbacks;
  callbacks.on_prompt = [&](int n, int, int) {
    done = n;
    cancel = n >= 128;
  };
  callbacks.cancelled = [&] { return cancel; };
  const SessionResult result = session.run(prompt, callbacks);
  EXPECT_EQ(result.finish_reason, FinishReason::kInterrupted);
  EXPECT_EQ(done, 128);
  EXPECT_EQ(result.prompt_tokens, 128);
  EXPECT_EQ(result.generated_tokens, 0);
  EXPECT_EQ(session.evictor().violations(), std::vector<std::string>{});
}

// --- What it answers
// ------------------------------------------------------------------------------

TEST(Session, PolicyFullGivesTheGreedyAnswerOfThePlainEngine) {
  SessionOptions options = small_session(40);
  options.cache.policy = "full";
  const Tokens prompt = prose_tokens(150);
  const Answer answer = answer_of(test_model(), options, prompt);
  EXPECT_EQ(answer.tokens, plain_answer(test_model(), prompt, 64, 40));
  EXPECT_EQ(answer.result.cache.rows_evicted, 0);
  EXPECT_EQ(answer.result.cache.kv_bytes_kept, answer.result.cache.kv_bytes_full);
}

TEST(Session, BelowTheBudgetEveryPolicyGivesTheGreedyAnswerOfThePlainEngine) {
  const ModelPtr model = make_tiny_model({});
  const Tokens prompt = noise_tokens(40, kVocab);
  const Tokens plain = plain_answer(model.get(), prompt, 64, 25);
  for (const char* policy :
       {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random"}) {
    for (const Prefill prefill : {Prefill::kStream, Prefill::kWhole}) {
      SessionOptions options = small_session(25);
      options.cache.policy = policy;
      options.prefill = prefill;
      EXPECT_EQ(answer_of(model.get(), options, prompt).tokens, plain) << policy;
    }
  }
}

TEST(Session, AnswersAreTheSameAsInADecodeLoopOfOnesOwn) {
  const ModelPtr model = make_tiny_model({});
  const Tokens prompt = noise_tokens(200, kVocab);
  Bounded bounded(model.get(), {});
  for (std::size_t done = 0; done < prompt.size(); done += 64) {
    bounded.feed(std::span(prompt).subspan(done, std::min<std::size_t>(64, 200 - done)));
  }
  SessionOptions options = small_session(60);
  options.prefill = Prefill::kStream;
  EXPECT_EQ(answer_of(model.get(), options, prompt).tokens, generate(bounded, 60));
}

TEST(Session, ASeedGivesTheSameAnswerAgainAndAnotherSeedAnotherAnswer) {
  const ModelPtr model = make_tiny_model({});
  const Tokens prompt = noise_tokens(100, kVocab);
  SessionOptions options = small_session(50);
  options.sampling = {.seed = 42, .temperature = 1.0f, .repeat_penalty = 1.1f};
  const Tokens first = answer_of(model.get(), options, prompt).tokens;
  EXPECT_EQ(answer_of(model.get(), options, prompt).tokens, first);
  options.sampling.seed = 43;
  EXPECT_NE(answer_of(model.get(), options, prompt).tokens, first);
}

// --- What it refuses
// ------------------------------------------------------------------------------

void expect_invalid(const std::function<void()>& attempt, const std::string& words) {
  try {
    attempt();
    ADD_FAILURE() << "not refused: " << words;
  } catch (const std::invalid_argument& refusal) {
    EXPECT_NE(std::string(refusal.what()).find(words), std::string::npos) << refusal.what();
  }
}

TEST(Session, WrongSettingsAndAnEmptyPromptAreRefused) {
  const ModelPtr model = make_tiny_model({});
  const auto with = [&](auto change) {
    return [&, change] {
      SessionOptions options = small_session(1);
      change(options);
      Session(model.get(), options);
    };
  };
  Session session(model.get(), small_session(1));
  expect_invalid([&] { session.run(std::span<const llama_token>{}, {}); }, "prompt is empty");
  expect_invalid(with([](auto& o) { o.micro_batch = 0; }), "micro-batch 0");
  expect_invalid(with([](auto& o) { o.threads = -1; }), "threads -1");
  expect_invalid(with([](auto& o) { o.sampling.repeat_penalty = 0.0f; }), "repeat penalty");
  expect_invalid(with([](auto& o) { o.sampling.temperature = NAN; }), "temperature");
  expect_invalid(with([](auto& o) { o.sampling.top_p = 1.5f; }), "top-p");
  expect_invalid(with([](auto& o) { o.sampling.min_p = -0.1f; }), "min-p");
  expect_invalid(with([](auto& o) { o.cache.budget = 12; }), "budget 12");
  expect_invalid(with([](auto& o) { o.cache.policy = "best"; }), "'best'");
}

TEST(Session, WhatCannotBeBoundedIsRefusedBeforeAnythingIsRead) {
  const ModelPtr mamba = make_tiny_model({.architecture = "mamba"});
  EXPECT_THROW(Session(mamba.get(), small_session(1)), llama_cpp::Unsupported);
}

// --- What it says
// ---------------------------------------------------------------------------------

TEST(Session, ProgressStartsAtZeroRisesByMicroBatchesAndEndsAtThePromptsLength) {
  const ModelPtr model = make_tiny_model({});
  SessionOptions options = small_session(1);
  options.prefill = Prefill::kStream;
  const Answer answer = answer_of(model.get(), options, noise_tokens(150, kVocab));
  EXPECT_EQ(answer.progress, (std::vector<int>{0, 64, 128, 150}));
  EXPECT_TRUE(answer.notices.empty());
}

TEST(Session, ALoweredMicroBatchIsSaidOnceAlsoWithAWholePrompt) {
  const ModelPtr model = make_tiny_model({});
  for (const Prefill prefill : {Prefill::kStream, Prefill::kWhole}) {
    SessionOptions options = small_session(10);
    options.micro_batch = 512;
    options.prefill = prefill;
    const Answer answer = answer_of(model.get(), options, noise_tokens(600, kVocab));
    EXPECT_EQ(answer.notices.size(), 1u);
    EXPECT_EQ(answer.result.finish_reason, FinishReason::kLength);
  }
}

TEST(Session, FinishReasonsHaveTheNamesOfTheRecord) {
  EXPECT_EQ(to_string(FinishReason::kStop), "stop");
  EXPECT_EQ(to_string(FinishReason::kLength), "length");
  EXPECT_EQ(to_string(FinishReason::kTrainedLength), "trained_length");
  EXPECT_EQ(to_string(FinishReason::kInterrupted), "interrupted");
}

TEST(SessionLimits, ACacheForMoreRowsThanCanBeNumberedIsRefused) {
  SessionOptions options;
  options.cache.policy = "full";
  options.max_tokens = std::numeric_limits<int>::max();
  options.allow_past_training = true;
  Session session(test_model(), options);
  EXPECT_THROW(session.run(tokens_of(test_model(), "Hello"), {}), std::invalid_argument);
}

}  // namespace
}  // namespace morphkv::test

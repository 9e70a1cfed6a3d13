// How a session reads a long prompt with guides: what it says it did, what it refuses, in which
// memory, and that a prompt within the budget knows no guide.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "model_support.h"
#include "morphkv/llama_cpp/session.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::FinishReason;
using llama_cpp::ModelPtr;
using llama_cpp::Prefill;
using llama_cpp::Prompt;
using llama_cpp::Session;
using llama_cpp::SessionCallbacks;
using llama_cpp::SessionOptions;
using llama_cpp::SessionResult;
using Tokens = std::vector<llama_token>;

constexpr int kVocab = 96;
constexpr std::size_t kCell = std::size_t{2} * 2 * 2 * 32 * 2;  // layers, K and V, heads, dim, f16

// Greedy, one thread, a budget of 64.
SessionOptions small_session(Prefill prefill, int max_tokens = 20) {
  SessionOptions options;
  options.cache = small_cache();
  options.prefill = prefill;
  options.sampling.temperature = 0.0f;
  options.max_tokens = max_tokens;
  options.threads = 1;
  options.micro_batch = 64;
  return options;
}

struct Answer {
  SessionResult result;
  Tokens tokens;
  std::vector<int> progress;
  std::vector<int> rows;
};

Answer answer_of(Session& session, const Prompt& prompt, std::function<bool()> cancelled = {}) {
  Answer answer;
  SessionCallbacks callbacks;
  callbacks.on_prompt = [&](int done, int total, int rows) {
    EXPECT_EQ(total, static_cast<int>(prompt.tokens.size()));
    answer.progress.push_back(done);
    answer.rows.push_back(rows);
  };
  callbacks.on_token = [&](llama_token token, std::string_view, double) {
    answer.tokens.push_back(token);
  };
  callbacks.cancelled = std::move(cancelled);
  answer.result = session.run(prompt, callbacks);
  EXPECT_EQ(session.evictor().violations(), std::vector<std::string>{});
  EXPECT_EQ(newest_label(session.context()), session.evictor().offset() - 1);
  return answer;
}

Answer answer_of(const llama_model* model, const SessionOptions& options, const Prompt& prompt) {
  Session session(model, options);
  return answer_of(session, prompt);
}

void expect_invalid(const std::function<void()>& attempt, const std::vector<std::string>& words) {
  try {
    attempt();
    ADD_FAILURE() << "not refused: " << words.front();
  } catch (const std::invalid_argument& refusal) {
    for (const std::string& word : words) {
      EXPECT_NE(std::string(refusal.what()).find(word), std::string::npos) << refusal.what();
    }
  }
}

// --- What it says it did
// --------------------------------------------------------------------------

TEST(SessionGuide, UpToTheBudgetNoGuideIsAskedAndAllIsAsWithAStream) {
  const ModelPtr model = make_tiny_model({});
  for (const int n : {1, 40, 64}) {
    const Tokens prompt = noise_tokens(n, kVocab);
    const Answer guided =
        answer_of(model.get(), small_session(Prefill::kGuided, 100), {.tokens = prompt});
    const Answer stream =
        answer_of(model.get(), small_session(Prefill::kStream, 100), {.tokens = prompt});
    EXPECT_EQ(guided.tokens, stream.tokens) << n;
    EXPECT_EQ(guided.progress, stream.progress) << n;
    EXPECT_EQ(guided.rows, stream.rows) << n;
    EXPECT_EQ(guided.result.prefill_mode, std::nullopt) << n;
    EXPECT_EQ(guided.result.guide_tokens, 0) << n;
    EXPECT_EQ(guided.result.guide_ms, 0.0) << n;
    EXPECT_EQ(guided.result.kv_bytes_peak, stream.result.kv_bytes_peak) << n;
  }
}

TEST(SessionGuide, TheResultSaysHowThePromptWasReadAndWhatTheGuideCost) {
  const ModelPtr model = make_tiny_model({});
  const Tokens prompt = noise_tokens(300, kVocab);
  const Answer guided = answer_of(model.get(), small_session(Prefill::kGuided), {.tokens = prompt});
  EXPECT_EQ(guided.result.prefill_mode, Prefill::kGuided);
  EXPECT_EQ(guided.result.guide_tokens, 8);  // an eighth of a micro-batch
  EXPECT_GT(guided.result.guide_ms, 0.0);
  EXPECT_LE(guided.result.guide_ms, guided.result.prefill_ms);
  EXPECT_EQ(guided.result.prompt_tokens, 300);
  EXPECT_EQ(guided.progress, (std::vector<int>{0, 56, 112, 168, 224, 280, 300}));
  EXPECT_EQ(guided.rows, (std::vector<int>{0, 56, 64, 64, 64, 64, 64}));

  for (const Prefill prefill : {Prefill::kStream, Prefill::kWhole}) {
    const Answer other = answer_of(model.get(), small_session(prefill), {.tokens = prompt});
    EXPECT_EQ(other.result.prefill_mode, prefill);
    EXPECT_EQ(other.result.guide_tokens, 0);
    EXPECT_EQ(other.result.guide_ms, 0.0);
  }
  SessionOptions streaming = small_session(Prefill::kGuided);
  streaming.cache.policy = "streaming";
  const Answer other = answer_of(model.get(), streaming, {.tokens = prompt});
  EXPECT_EQ(other.result.prefill_mode, Prefill::kStream);
  EXPECT_EQ(other.result.guide_tokens, 0);
  streaming.cache.policy = "full";
  EXPECT_EQ(answer_of(model.get(), streaming, {.tokens = prompt}).result.prefill_mode,
            std::nullopt);
}

// What a loop of one's own does with the evictor, in the pieces that the session is known to take.
Tokens by_hand(llama_model* model, const Tokens& prompt, const std::vector<std::size_t>& pieces,
               const std::vector<Tokens>& guides, int tail, int n) {
  Bounded bounded(model, {.call_tokens = 128, .guide_tokens = 64});
  std::size_t done = 0;
  std::vector<float> logits;
  for (const std::size_t piece : pieces) {
    const bool last = done + piece == prompt.size();
    EXPECT_EQ(decode(bounded.context(), std::span(prompt).subspan(done, piece)), 0);
    done += piece;
    logits = bounded.logits();
    bounded.evictor().hold(last ? tail : 0);
    const bool full = bounded.evictor().stats().rows_kept > 64;
    const std::vector<Tokens> own = {{prompt.end() - tail, prompt.end()}};
    if (full && !(last && guides.empty())) {
      for (const Tokens& guide : guides.empty() ? own : guides) {
        EXPECT_EQ(decode(bounded.context(), guide), 0);
        bounded.evictor().guide();
      }
    }
    bounded.evictor().evict();
  }
  EXPECT_EQ(done, prompt.size());
  Tokens tokens = {likeliest(logits)};
  while (static_cast<int>(tokens.size()) < n) {
    bounded.feed({&tokens.back(), 1});
    tokens.push_back(likeliest(bounded.logits()));
  }
  return tokens;
}

TEST(SessionGuide, AnswersAreTheSameAsInALoopOfOnesOwn) {
  const ModelPtr model = make_tiny_model({});
  const Tokens prompt = noise_tokens(300, kVocab);
  const std::vector<std::size_t> pieces = {56, 56, 56, 56, 56, 20};
  const Tokens guided =
      answer_of(model.get(), small_session(Prefill::kGuided, 60), {.tokens = prompt}).tokens;
  EXPECT_EQ(guided, by_hand(model.get(), prompt, pieces, {}, 8, 60));
  EXPECT_NE(guided,
            answer_of(model.get(), small_session(Prefill::kStream, 60), {.tokens = prompt}).tokens)
      << "the guide must matter, or this is no test";

  const std::vector<Tokens> guides = {noise_tokens(5, kVocab, 3), noise_tokens(8, kVocab, 4)};
  const Answer with_guides = answer_of(model.get(), small_session(Prefill::kGuided, 60),
                                       {.tokens = prompt, .guides = guides});
  EXPECT_EQ(with_guides.tokens, by_hand(model.get(), prompt, pieces, guides, 8, 60));
  EXPECT_EQ(with_guides.result.guide_tokens, 8 + 5 + 8);
}

TEST(SessionGuide, TheQuestionLimitsThePromptsOwnGuide) {
  const ModelPtr model = make_tiny_model({});
  const Tokens prompt = noise_tokens(300, kVocab);
  SessionOptions options = small_session(Prefill::kGuided);
  const auto guide_tokens = [&](std::size_t question) {
    return answer_of(model.get(), options, {.tokens = prompt, .question = question})
        .result.guide_tokens;
  };
  EXPECT_EQ(guide_tokens(0), 8);
  EXPECT_EQ(guide_tokens(292), 8);
  EXPECT_EQ(guide_tokens(295), 5);
  EXPECT_EQ(guide_tokens(299), 1);
  options.guide = 30;
  EXPECT_EQ(guide_tokens(0), 30);
  EXPECT_EQ(guide_tokens(280), 20);
  for (const std::size_t beyond : {std::size_t{300}, std::size_t{1000}}) {
    expect_invalid([&] { guide_tokens(beyond); }, {"question", std::to_string(beyond), "300"});
  }
}

// --- Long guides
// ----------------------------------------------------------------------------------

TEST(SessionGuide, AGuideLongerThanThePromptIsTheWholePrompt) {
  const ModelPtr model = make_tiny_model({});
  SessionOptions options = small_session(Prefill::kGuided);
  options.cache.budget = 20;  // a micro-batch of 32
  options.guide = 1000;
  const Answer answer = answer_of(model.get(), options, {.tokens = noise_tokens(25, kVocab)});
  EXPECT_EQ(answer.result.guide_tokens, 25);
  EXPECT_EQ(answer.progress, (std::vector<int>{0, 25}));
}

TEST(SessionGuide, ThePromptsEndIsCutToAMicroBatchAndStaysTogether) {
  const ModelPtr model = make_tiny_model({});
  SessionOptions options = small_session(Prefill::kGuided);
  options.guide = 1000;
  const Tokens prompt = noise_tokens(200, kVocab);
  const Answer answer = answer_of(model.get(), options, {.tokens = prompt});
  EXPECT_EQ(answer.result.guide_tokens, 64);
  EXPECT_EQ(answer.progress, (std::vector<int>{0, 32, 64, 96, 128, 136, 200}));
  EXPECT_EQ(answer.tokens, by_hand(model.get(), prompt, {32, 32, 32, 32, 8, 64}, {}, 64, 20));
}

TEST(SessionGuide, ALongTailAndLongGuidesTogetherFitIntoTheCells) {
  const ModelPtr model = make_tiny_model({});
  SessionOptions options = small_session(Prefill::kGuided);
  options.cache.budget = 160;  // 160 rows, a tail of 64 and a guide of 64: more than 256 cells
  options.guide = 1000;
  for (const int n : {161, 190, 224, 257}) {
    const Tokens prompt = noise_tokens(n, kVocab);
    for (const int guide : {1, 30, 64}) {
      const Answer answer = answer_of(
          model.get(), options,
          {.tokens = prompt, .guides = {noise_tokens(guide, kVocab, 3), noise_tokens(1, kVocab)}});
      EXPECT_EQ(answer.tokens.size(), 20u) << n << ' ' << guide;
      EXPECT_EQ(answer.result.guide_tokens, 64 + guide + 1);
    }
  }
}

// --- What it refuses
// ------------------------------------------------------------------------------

TEST(SessionGuide, EmptyAndOverlongGuidesAreRefusedBeforeAnythingIsRead) {
  const ModelPtr model = make_tiny_model({});
  const Tokens prompt = noise_tokens(300, kVocab);
  Session session(model.get(), small_session(Prefill::kGuided));
  const auto with = [&](Tokens guide) {
    return [&, guide] { session.run(Prompt{.tokens = prompt, .guides = {{1, 2}, guide}}, {}); };
  };
  expect_invalid(with({}), {"guide is empty"});
  expect_invalid(with(noise_tokens(65, kVocab)), {"a guide has 65", "the limit is 64"});
  EXPECT_EQ(session.context(), nullptr);
  SessionOptions negative = small_session(Prefill::kGuided);
  negative.guide = -1;
  expect_invalid([&] { Session(model.get(), negative); }, {"guide -1"});
}

// --- Interruptions
// --------------------------------------------------------------------------------

TEST(SessionGuide, ACancelAtAnyMomentOfReadingEndsInGoodOrder) {
  const ModelPtr model = make_tiny_model({});
  const Tokens prompt = noise_tokens(200, kVocab);
  for (const std::vector<Tokens>& guides :
       {std::vector<Tokens>{}, {noise_tokens(20, kVocab, 3), noise_tokens(40, kVocab, 4)}}) {
    int questions = 0;
    Session counted(model.get(), small_session(Prefill::kGuided, 0));
    answer_of(counted, {.tokens = prompt, .guides = guides}, [&] { return ++questions, false; });
    ASSERT_GT(questions, 200);
    for (int moment = 1; moment < questions; moment += 11) {
      SCOPED_TRACE("question " + std::to_string(moment) + " of " + std::to_string(questions));
      Session session(model.get(), small_session(Prefill::kGuided, 0));
      int asked = 0;
      const Answer cut = answer_of(session, {.tokens = prompt, .guides = guides},
                                   [&] { return ++asked >= moment; });
      ASSERT_EQ(cut.result.finish_reason, FinishReason::kInterrupted);
      EXPECT_EQ(cut.result.prompt_tokens, session.evictor().offset());
      EXPECT_LE(cut.result.prompt_tokens, 200);
      EXPECT_LE(cut.result.cache.rows_kept, 64);
    }
  }
}

// --- Memory
// ---------------------------------------------------------------------------------------

TEST(SessionGuide, TheUsualGuideNeedsNoMoreMemoryThanAStreamWhateverThePromptsLength) {
  const ModelPtr model = make_tiny_model({});
  const Tokens prompt = noise_tokens(2000, kVocab);
  EngineLog log;
  for (const int budget : {64, 192, 512}) {
    SessionOptions guided = small_session(Prefill::kGuided);
    guided.cache.budget = budget;
    guided.micro_batch = 512;
    SessionOptions stream = guided;
    stream.prefill = Prefill::kStream;
    const std::size_t bytes =
        answer_of(model.get(), stream, {.tokens = prompt}).result.kv_bytes_peak;
    for (const int n : {600, 2000}) {
      const auto result =
          answer_of(model.get(), guided,
                    {.tokens = std::span(prompt).first(static_cast<std::size_t>(n))})
              .result;
      EXPECT_EQ(result.kv_bytes_peak, bytes) << budget << ' ' << n;
      EXPECT_EQ(result.cache.kv_bytes_allocated, bytes) << budget << ' ' << n;
      EXPECT_EQ(result.cache.kv_bytes_kept, static_cast<std::size_t>(budget) * kCell);
    }
  }
  EXPECT_EQ(log.text(), "");
}

TEST(SessionGuide, ALongGuideCostsHalfAMicroBatchMore) {
  const ModelPtr model = make_tiny_model({});
  SessionOptions options = small_session(Prefill::kGuided);
  options.cache.budget = 512;
  options.micro_batch = 512;
  options.guide = 512;
  const auto result =
      answer_of(model.get(), options, {.tokens = noise_tokens(2000, kVocab)}).result;
  EXPECT_EQ(result.kv_bytes_peak, (512 + 512 + 256) * kCell);
}

// --- Other caches
// ---------------------------------------------------------------------------------

TEST(SessionGuide, QuantisedRowsStoredKeysAndSlidingWindowsAreReadWithGuides) {
  const ModelPtr llama = make_tiny_model({});
  const ModelPtr sliding =
      make_tiny_model({.architecture = "gemma3", .n_layer = 4, .sliding_window = 40});
  const Tokens prompt = noise_tokens(500, kVocab);
  for (const llama_model* model : {llama.get(), sliding.get()}) {
    for (const QuerySource queries : {QuerySource::kKeys, QuerySource::kAttention}) {
      SessionOptions options = small_session(Prefill::kGuided);
      options.cache.queries = queries;
      options.type_k = GGML_TYPE_Q8_0;
      options.type_v = GGML_TYPE_Q4_0;
      options.guide = 64;  // as long as a guide may be
      const Answer answer = answer_of(model, options, {.tokens = prompt});
      EXPECT_EQ(answer.tokens.size(), 20u);
      EXPECT_EQ(answer.result.cache.rows_kept, 64);
    }
  }
}

}  // namespace
}  // namespace morphkv::test

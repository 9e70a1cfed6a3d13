// The memory a session works in: constant at rest and while it reads, for texts of any length.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "model_support.h"
#include "morphkv/llama_cpp/session.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::EvictorStats;
using llama_cpp::FinishReason;
using llama_cpp::ModelPtr;
using llama_cpp::Prefill;
using llama_cpp::Session;
using llama_cpp::SessionCallbacks;
using llama_cpp::SessionOptions;
using llama_cpp::SessionResult;

// SmolLM2: layers x K and V x heads x dim x bytes of f16.
constexpr std::size_t kCellBytes = std::size_t{30} * 2 * 3 * 64 * 2;
constexpr std::size_t kKept = 512 * kCellBytes;
static_assert(kKept == 11'796'480);

// Field case 10: budget 512, micro-batch 512, a prompt of 5,000 tokens. Session checks every status
// of llama_decode().
TEST(SessionMemory, IsTheSameAfter600TokensAndAfterThousandsAndTheEngineNeverComplains) {
  SessionOptions options;
  options.cache.queries = QuerySource::kAttention;
  options.cache.pool = 7;
  options.sampling.temperature = 0.0f;
  options.ignore_eos = true;
  options.max_tokens = 200;
  options.threads = 1;
  Session session(test_model(), options);
  int looks = 0;
  const auto look = [&] {
    const EvictorStats stats = session.evictor().stats();
    EXPECT_EQ(stats.kv_bytes_allocated, 1024 * kCellBytes);
    if (stats.tokens_seen < 512) return;
    ++looks;
    EXPECT_EQ(stats.kv_bytes_kept, kKept) << stats.tokens_seen;
    EXPECT_EQ(stats.rows_kept, 512) << stats.tokens_seen;
    EXPECT_EQ(stats.rows_evicted, stats.tokens_seen - 512);
    EXPECT_EQ(stats.kv_bytes_full, static_cast<std::size_t>(stats.tokens_seen) * kCellBytes);
  };
  EngineLog log;
  SessionCallbacks callbacks;
  callbacks.on_prompt = [&](int, int, int) { look(); };
  callbacks.on_token = [&](llama_token, std::string_view, double) { look(); };
  const SessionResult result = session.run(prose_tokens(5000), callbacks);
  EXPECT_EQ(result.finish_reason, FinishReason::kLength);
  EXPECT_EQ(result.prompt_tokens, 5000);
  EXPECT_EQ(result.generated_tokens, 200);
  EXPECT_EQ(result.cache.tokens_seen, 5199);
  EXPECT_EQ(result.cache.kv_bytes_kept, kKept);
  EXPECT_EQ(result.kv_bytes_peak, 1024 * kCellBytes);
  EXPECT_GT(looks, 200);
  EXPECT_EQ(session.evictor().violations(), std::vector<std::string>{});
  EXPECT_EQ(log.text(), "");
}

SessionOptions whole_session() {
  SessionOptions options;
  options.cache = small_cache();
  options.prefill = Prefill::kWhole;
  options.sampling.temperature = 0.0f;
  options.ignore_eos = true;
  options.max_tokens = 20;
  options.threads = 1;
  options.micro_batch = 64;
  return options;
}

TEST(SessionMemory, AWholePromptTakesALargerCacheThatGoesBeforeTheSmallOneComes) {
  const ModelPtr model = make_tiny_model({});
  const std::size_t cell = std::size_t{2} * 2 * 2 * 32 * 2;
  Session session(model.get(), whole_session());
  EngineLog log(/*all=*/true);
  const SessionResult result = session.run(noise_tokens(1000, 96), {});
  EXPECT_EQ(result.kv_bytes_peak, 1024 * cell);
  EXPECT_EQ(result.cache.kv_bytes_allocated, 256 * cell);
  EXPECT_EQ(result.cache.rows_kept, 64);
  EXPECT_EQ(result.cache.rows_evicted, 1000 + 19 - 64);
  EXPECT_EQ(session.evictor().violations(), std::vector<std::string>{});

  // The engine logs when a cache is made and when its context goes.
  const auto large = log.text().find("1024 cells");
  const auto gone = log.text().find("~llama_context");
  const auto small = log.text().find("256 cells");
  ASSERT_NE(large, std::string::npos) << engine() << " logs other words";
  ASSERT_NE(gone, std::string::npos) << engine() << " logs other words";
  ASSERT_NE(small, std::string::npos) << engine() << " logs other words";
  EXPECT_LT(large, gone);
  EXPECT_LT(gone, small) << "both caches were there at once";
}

TEST(SessionMemory, AWholePromptOfTheTrainedModelIsCompressedOnceAndItsAnswerGoesOn) {
  SessionOptions options = whole_session();
  options.cache.pool = 7;
  Session session(test_model(), options);
  int evictions_while_reading = 0;
  SessionCallbacks callbacks;
  callbacks.on_prompt = [&](int done, int total, int) {
    if (done < total) evictions_while_reading += session.evictor().stats().rows_evicted > 0;
  };
  const SessionResult result = session.run(prose_tokens(350), callbacks);
  EXPECT_EQ(evictions_while_reading, 0);
  EXPECT_EQ(result.prompt_tokens, 350);
  EXPECT_EQ(result.generated_tokens, 20);
  EXPECT_EQ(result.kv_bytes_peak, 512 * kCellBytes);
  EXPECT_EQ(result.cache.kv_bytes_allocated, 256 * kCellBytes);
  EXPECT_EQ(result.cache.kv_bytes_kept, 64 * kCellBytes);
  EXPECT_EQ(session.evictor().violations(), std::vector<std::string>{});
}

TEST(SessionMemory, AWholePromptBelowTheBudgetNeedsNoSecondContext) {
  const ModelPtr model = make_tiny_model({});
  Session session(model.get(), whole_session());
  EngineLog log(/*all=*/true);
  const SessionResult result = session.run(noise_tokens(64, 96), {});
  EXPECT_EQ(result.kv_bytes_peak, result.cache.kv_bytes_allocated);
  EXPECT_EQ(log.text().find("~llama_context"), std::string::npos);
}

TEST(SessionMemory, AQuantisedSessionKeepsFewerBytes) {
  const ModelPtr model = make_tiny_model({});
  SessionOptions options = whole_session();
  options.type_k = GGML_TYPE_Q8_0;
  options.type_v = GGML_TYPE_Q4_0;
  for (const Prefill prefill : {Prefill::kStream, Prefill::kWhole}) {
    options.prefill = prefill;
    Session session(model.get(), options);
    const SessionResult result = session.run(noise_tokens(500, 96), {});
    EXPECT_EQ(result.generated_tokens, 20);
    EXPECT_EQ(result.cache.kv_bytes_kept, std::size_t{64} * 2 * 2 * (34 + 18));
    EXPECT_EQ(session.evictor().violations(), std::vector<std::string>{});
  }
}

}  // namespace
}  // namespace morphkv::test

// The evictor on a real model, seen from the outside: what it leaves alone, what it evicts, what it
// sets up. Which row lies where is the matter of evictor_rows_test.cc.
#include "morphkv/llama_cpp/evictor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kv_probe.h"
#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::ContextPtr;
using llama_cpp::EngineError;
using llama_cpp::Evictor;
using llama_cpp::ModelPtr;

// --- At or below the budget
// -----------------------------------------------------------------------

void expect_equals_plain_engine_up_to_the_budget(ggml_type type) {
  constexpr int kBudget = 250;
  CacheConfig cache = small_cache();
  cache.budget = kBudget;
  cache.pool = 7;
  Bounded bounded(test_model(),
                  {.cache = cache, .type_k = type, .type_v = type, .micro_batch = 128});
  llama_context_params params = context_params();
  params.type_k = type;
  params.type_v = type;
  const ContextPtr plain = plain_context(test_model(), params, 1024, 128);

  const auto prompt = prose_tokens(200);
  llama_token next = 0;
  const auto both = [&](std::span<const llama_token> tokens) {
    ASSERT_EQ(decode(plain.get(), tokens), 0);
    bounded.feed(tokens);
    const auto logits = bounded.logits();
    ASSERT_EQ(logits, logits_of(plain.get())) << "after " << bounded.evictor().offset();
    next = likeliest(logits);
  };
  both(std::span(prompt).first(128));
  both(std::span(prompt).subspan(128));
  while (bounded.evictor().offset() < kBudget && !testing::Test::HasFatalFailure()) {
    both(std::vector{next});
  }
  EXPECT_EQ(bounded.evictor().stats().rows_evicted, 0);
  EXPECT_EQ(bounded.evictor().stats().rows_kept, kBudget);
  EXPECT_EQ(bounded.evictor().stats().kv_bytes_kept, bounded.evictor().stats().kv_bytes_full);

  // Eviction comes after the call, so the token over the budget still sees everything; then one
  // row of each head leaves.
  both(std::vector{next});
  EXPECT_EQ(bounded.evictor().stats().rows_evicted, 1);
  for (const auto& layer : bounded.evictor().snapshot()) {
    for (const auto& head : layer.rows.heads) EXPECT_EQ(head.positions.size(), 250u);
  }
  ASSERT_EQ(decode(plain.get(), std::vector{next}), 0);
  bounded.feed(std::vector{next});
  EXPECT_NE(bounded.logits(), logits_of(plain.get()))
      << "an eviction must show, or this is no test";
}

TEST(Evictor, UpToTheBudgetLogitsEqualThePlainEnginesBitForBitAndOneMoreEvictsOne) {
  expect_equals_plain_engine_up_to_the_budget(GGML_TYPE_F16);
}

TEST(Evictor, UpToTheBudgetLogitsEqualThePlainEnginesBitForBitWithQ8Rows) {
  expect_equals_plain_engine_up_to_the_budget(GGML_TYPE_Q8_0);
}

TEST(Evictor, PolicyFullEvictsNothingAndIsBoundedByItsCells) {
  CacheConfig cache = small_cache("full");
  Bounded bounded(test_model(), {.cache = cache, .micro_batch = 64, .call_tokens = 200});
  const ContextPtr plain = plain_context(test_model(), context_params(), 512, 64);
  const auto text = prose_tokens(200);
  for (std::size_t done = 0; done < text.size(); done += 50) {
    const auto piece = std::span(text).subspan(done, 50);
    bounded.feed(piece);
    ASSERT_EQ(decode(plain.get(), piece), 0);
    ASSERT_EQ(bounded.logits(), logits_of(plain.get())) << done;
  }
  EXPECT_EQ(bounded.evictor().violations(), std::vector<std::string>{});
  EXPECT_EQ(bounded.evictor().stats().rows_kept, 200);
  EXPECT_EQ(bounded.evictor().stats().rows_evicted, 0);
}

// --- Freed rows
// -----------------------------------------------------------------------------------

std::vector<llama_token> generated(bool poison, int threads) {
  Bounded bounded(test_model(), {.poison_freed_rows = poison, .threads = threads});
  bounded.feed(prose_tokens(60));
  return generate(bounded, 300);
}

TEST(Evictor, PoisonInFreedRowsChangesNoTokenWithOneThread) {
  EXPECT_EQ(generated(true, 1), generated(false, 1));
}

TEST(Evictor, PoisonInFreedRowsChangesNoTokenWithFourThreads) {
  EXPECT_EQ(generated(true, 4), generated(false, 4));
}

TEST(Evictor, AFreedRowHoldsThePoisonAndNoRowHoldsNaN) {
  KvProbe probe;
  BoundOptions options{.poison_freed_rows = true};
  probe.install(options);
  Bounded bounded(test_model(), options);
  const auto text = prose_tokens(150);
  for (std::size_t done = 0; done < text.size(); done += 50) {
    bounded.feed(std::span(text).subspan(done, 50));
  }
  const auto held = bounded.evictor().snapshot().front().rows.heads.front().slots;
  int poisoned = 0;
  for (const auto& [index, layer] : probe.layers()) {
    for (const ggml_tensor* tensor : {layer.k, layer.v}) {
      const std::string bytes = KvProbe::whole(tensor);
      const auto* values = reinterpret_cast<const ggml_fp16_t*>(bytes.data());
      for (int cell = 0; cell < tensor->ne[1]; ++cell) {
        const bool is_held = std::find(held.begin(), held.end(), cell) != held.end();
        for (int i = 0; i < tensor->ne[0]; ++i) {
          const float value = ggml_fp16_to_fp32(values[cell * tensor->ne[0] + i]);
          ASSERT_TRUE(std::isfinite(value)) << tensor->name << ", cell " << cell;
          if (is_held) {
            ASSERT_LT(std::fabs(value), 3e4f) << tensor->name << ", cell " << cell;
          } else {
            ASSERT_TRUE(value == 3e4f || value == 0.0f) << tensor->name << ", cell " << cell;
          }
          poisoned += value == 3e4f ? 1 : 0;
        }
      }
    }
  }
  // 100 rows were evicted in all; cells that were used again hold rows, the others still poison.
  EXPECT_GE(poisoned, 30 * 2 * 192 * (114 - 64));
}

// --- What attach() sets up
// ------------------------------------------------------------------------

TEST(Evictor, AMicroBatchTooLargeForTheBudgetIsLoweredWithOneNotice) {
  const ModelPtr model = make_tiny_model({});
  Bounded bounded(model.get(), {.micro_batch = 512});
  EXPECT_EQ(llama_n_ubatch(bounded.context()), 64u);
  EXPECT_EQ(llama_n_batch(bounded.context()), 64u);
  EXPECT_NE(bounded.notice().find("512"), std::string::npos) << bounded.notice();
  EXPECT_NE(bounded.notice().find("64"), std::string::npos) << bounded.notice();
  EXPECT_EQ(bounded.notice().find('\n'), std::string::npos) << bounded.notice();
}

TEST(Evictor, AMicroBatchThatFitsIsLeftAloneWithoutANotice) {
  const ModelPtr model = make_tiny_model({});
  CacheConfig cache;
  Bounded bounded(model.get(), {.cache = cache, .micro_batch = 512});
  EXPECT_EQ(bounded.notice(), "");
  EXPECT_EQ(llama_n_ubatch(bounded.context()), 512u);
  EXPECT_EQ(llama_n_ctx(bounded.context()), 1024u);
}

TEST(Evictor, ABatchSmallerThanTheMicroBatchCountsAsTheMicroBatch) {
  const ModelPtr model = make_tiny_model({});
  Evictor evictor(model.get(), {});
  llama_context_params params = context_params();
  params.n_batch = 128;
  params.n_ubatch = 512;
  EXPECT_EQ(evictor.attach(params), "");
  EXPECT_EQ(params.n_ubatch, 128u);
  EXPECT_EQ(params.n_ctx, 768u);  // 512 + 128, rounded up to 256
}

TEST(Evictor, AllocatedBytesAreThoseOfTheBudgetAndOneCallRoundedUp) {
  const ModelPtr model = make_tiny_model({});
  const std::size_t cell_bytes =
      std::size_t{2} * 2 * 2 * 32 * 2;  // layers, K and V, heads, dim, f16
  CacheConfig cache;
  EXPECT_EQ(Bounded(model.get(), {.cache = cache, .micro_batch = 512})
                .evictor()
                .stats()
                .kv_bytes_allocated,
            1024 * cell_bytes);
  EXPECT_EQ(Bounded(model.get(), {.cache = cache, .micro_batch = 512, .call_tokens = 1000})
                .evictor()
                .stats()
                .kv_bytes_allocated,
            1536 * cell_bytes);
  EXPECT_EQ(Bounded(model.get(), {.cache = cache, .micro_batch = 64})
                .evictor()
                .stats()
                .kv_bytes_allocated,
            768 * cell_bytes);
}

struct UserCallback {
  int asked = 0;
  std::vector<std::string> shown;
  static bool call(ggml_tensor* node, bool ask, void* self) {
    auto& user = *static_cast<UserCallback*>(self);
    const bool wanted = node->op == GGML_OP_FLASH_ATTN_EXT || node->op == GGML_OP_GLU;
    if (!ask) user.shown.emplace_back(ggml_op_name(node->op));
    user.asked += ask ? 1 : 0;
    return ask ? wanted : true;
  }
};

TEST(Evictor, AUsersOwnEvalCallbackIsStillAskedAboutEachNodeAndShownThoseItWants) {
  const ModelPtr model = make_tiny_model({});
  // With streaming the evictor wants no attention node itself, with attention it wants the same.
  for (const char* policy : {"streaming", "morphkv"}) {
    UserCallback with;
    Bounded bounded(
        model.get(),
        {.cache = small_cache(policy), .cb_eval = UserCallback::call, .cb_eval_user_data = &with});
    UserCallback without;
    llama_context_params params = context_params();
    params.cb_eval = UserCallback::call;
    params.cb_eval_user_data = &without;
    const ContextPtr plain = plain_context(model.get(), params, 256, 64);
    with = {};
    const auto tokens = noise_tokens(10, 96);
    bounded.feed(tokens);
    ASSERT_EQ(decode(plain.get(), tokens), 0);
    EXPECT_GT(with.asked, 20) << policy;
    EXPECT_EQ(with.asked, without.asked) << policy;
    EXPECT_EQ(with.shown, without.shown) << policy;
    EXPECT_EQ(with.shown.size(), 4u) << policy;
    EXPECT_EQ(bounded.logits(), logits_of(plain.get())) << policy;
  }
}

// --- Small budgets and long texts
// -----------------------------------------------------------------

TEST(Evictor, TheSmallestLegalBudgetsNeverMeetAFullMemoryOrAnInconsistentPosition) {
  const ModelPtr model = make_tiny_model({});
  EngineLog log;
  for (const CacheConfig& limits :
       {CacheConfig{.budget = 2, .n_sink = 0, .window = 1},
        CacheConfig{.budget = 3, .n_sink = 1, .window = 1, .pool = 15},
        CacheConfig{.budget = 13, .n_sink = 4, .window = 8},
        CacheConfig{.budget = 13, .n_sink = 0, .window = 1, .recent = 12}}) {
    for (const char* policy :
         {"morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random"}) {
      for (const QuerySource queries : {QuerySource::kKeys, QuerySource::kAttention}) {
        CacheConfig cache = limits;
        cache.policy = policy;
        cache.queries = queries;
        WatchedStream stream(model.get(), {.cache = cache, .poison_freed_rows = true});
        EXPECT_EQ(llama_n_ubatch(stream.bounded().context()), 32u);
        const auto tokens = noise_tokens(200, 96);
        std::size_t fed = 0;
        for (const std::size_t piece : {32u, 1u, 1u, 31u, 2u, 1u, 32u, 32u, 5u, 1u, 1u, 30u}) {
          stream.feed(std::span(tokens).subspan(fed, piece));
          ASSERT_FALSE(HasFailure()) << policy << ' ' << cache.budget << ' ' << to_string(queries);
          fed += piece;
        }
      }
    }
  }
  EXPECT_EQ(log.text(), "");
}

// --- Moving to a smaller context
// ------------------------------------------------------------------

void expect_rows_survive_a_move(const CacheConfig& cache) {
  WatchedStream stream(test_model(),
                       {.cache = cache, .poison_freed_rows = true, .call_tokens = 300});
  const auto text = prose_tokens(400);
  for (std::size_t done = 0; done < 300; done += 60) {
    ASSERT_EQ(stream.feed_unevicted(std::span(text).subspan(done, 60)), 0);
  }
  stream.evict();
  EXPECT_EQ(stream.evictor().stats().rows_evicted, 300 - cache.budget);
  const auto large = stream.evictor().stats();
  stream.move(0);
  const auto small = stream.evictor().stats();
  EXPECT_EQ(large.kv_bytes_allocated, small.kv_bytes_allocated * 2);
  EXPECT_EQ(large.kv_bytes_kept, small.kv_bytes_kept);
  EXPECT_EQ(large.rows_evicted, small.rows_evicted);
  EXPECT_EQ(large.tokens_seen, small.tokens_seen);
  std::size_t fed = 300;
  for (const std::size_t piece : {1u, 1u, 20u, 1u, 64u, 1u}) {
    stream.feed(std::span(text).subspan(fed, piece));
    ASSERT_FALSE(testing::Test::HasFailure());
    fed += piece;
  }
  stream.move(300);  // and back
  stream.feed(std::span(text).subspan(fed, 7));
}

TEST(Evictor, RowsSurviveAMoveToASmallerContextByteForByteAndDecodingGoesOn) {
  expect_rows_survive_a_move(small_cache());
}

TEST(Evictor, RowsSurviveAMoveWithTheKeysPolicy) {
  expect_rows_survive_a_move(small_cache("morphkv", QuerySource::kKeys));
}

// --- Starting again
// -------------------------------------------------------------------------------

TEST(Evictor, AfterClearTheSameTextGivesTheSameLogitsAndRows) {
  const ModelPtr model = make_tiny_model({});
  Bounded bounded(model.get(), {});
  const auto text = noise_tokens(150, 96);
  std::vector<std::vector<float>> logits[2];
  for (auto& run : logits) {
    for (std::size_t done = 0; done < text.size(); done += 30) {
      bounded.feed(std::span(text).subspan(done, 30));
      run.push_back(bounded.logits());
    }
    EXPECT_EQ(bounded.evictor().stats().rows_evicted, 150 - 64);
    bounded.evictor().clear();
    EXPECT_EQ(bounded.evictor().offset(), 0);
    EXPECT_EQ(bounded.evictor().stats().rows_kept, 0);
    EXPECT_EQ(bounded.evictor().stats().rows_evicted, 0);
    EXPECT_EQ(newest_label(bounded.context()), -1);
  }
  EXPECT_EQ(logits[0], logits[1]);
}

TEST(Evictor, ANewContextStartsANewTextWithTheCountsAtZero) {
  const ModelPtr model = make_tiny_model({});
  Bounded bounded(model.get(), {});
  const auto text = noise_tokens(64, 96);
  bounded.feed(text);
  bounded.feed(text);
  bounded.make_context({});
  EXPECT_EQ(bounded.evictor().offset(), 0);
  EXPECT_EQ(bounded.evictor().stats().rows_evicted, 0);
  bounded.feed(text);
  expect_consistent(bounded, "in the new context");
}

TEST(Evictor, CallsBeforeBindAreErrorsThatSaySo) {
  const ModelPtr model = make_tiny_model({});
  Evictor evictor(model.get(), {});
  EXPECT_EQ(evictor.offset(), 0);
  EXPECT_EQ(evictor.stats().kv_bytes_allocated, 0u);
  EXPECT_TRUE(evictor.violations().empty());
  const auto expect_error = [](auto call) {
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const EngineError& error) {
      EXPECT_NE(std::string(error.what()).find("before bind()"), std::string::npos) << error.what();
    }
  };
  expect_error([&] { evictor.after_decode(); });
  expect_error([&] { evictor.clear(); });
  expect_error([&] { evictor.checkpoint(); });
}

TEST(Evictor, AMovedEvictorGoesOnAndLimitsAreCheckedAtTheDoor) {
  const ModelPtr model = make_tiny_model({});
  Evictor first(model.get(), {.cache = small_cache()});
  llama_context_params params = context_params();
  params.n_ubatch = 64;
  first.attach(params);
  Evictor evictor = std::move(first);
  const ContextPtr context(llama_init_from_model(model.get(), params));
  evictor.bind(context.get());
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(decode(context.get(), noise_tokens(64, 96)), 0);
    evictor.after_decode();
  }
  EXPECT_TRUE(evictor.violations().empty());
  EXPECT_EQ(evictor.stats().rows_evicted, 128);

  EXPECT_THROW(Evictor(model.get(), {.cache = {.budget = 8, .n_sink = 4, .window = 4}}),
               std::invalid_argument);
}

}  // namespace
}  // namespace morphkv::test

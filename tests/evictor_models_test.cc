// Which models and settings can be bounded, and the one line in which others are refused: on tiny
// models of many architectures.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kv_probe.h"
#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::ContextPtr;
using llama_cpp::Evictor;
using llama_cpp::ModelPtr;
using llama_cpp::Unsupported;

constexpr int kVocab = 96;

// 320 tokens in pieces of many sizes, each cell checked after each piece.
void expect_bounded(WatchedStream& stream) {
  const auto tokens = noise_tokens(320, kVocab);
  std::size_t fed = 0;
  for (const std::size_t piece : {50u, 14u, 1u, 1u, 64u, 30u, 1u, 1u, 1u, 64u, 7u, 1u, 64u, 20u}) {
    stream.feed(std::span(tokens).subspan(fed, piece));
    ASSERT_FALSE(testing::Test::HasFailure());
    fed += piece;
  }
  EXPECT_EQ(stream.evictor().stats().rows_evicted,
            static_cast<std::int64_t>(fed) - stream.evictor().config().budget);
}

void expect_bounded(const TinyModel& description, int layers_bounded) {
  const ModelPtr model = make_tiny_model(description);
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    SCOPED_TRACE(description.architecture + ", queries " + std::string(to_string(queries)));
    WatchedStream stream(model.get(),
                         {.cache = small_cache("morphkv", queries), .poison_freed_rows = true});
    EXPECT_EQ(stream.evictor().snapshot().size(), static_cast<std::size_t>(layers_bounded));
    expect_bounded(stream);
  }
}

// --- What works
// -----------------------------------------------------------------------------------

TEST(EvictorModels, ATinyLlamaWithGroupedQueriesIsBounded) { expect_bounded(TinyModel{}, 2); }

TEST(EvictorModels, HeadsOfTheirOwnAndOneHeadForAllAreBounded) {
  expect_bounded({.n_head = 4, .n_head_kv = 4}, 2);
  expect_bounded({.n_head = 4, .n_head_kv = 1}, 2);
}

TEST(EvictorModels, AHeadDimensionThatIsNoPowerOfTwoIsBounded) {
  expect_bounded({.head_dim = 40}, 2);
}

TEST(EvictorModels, ASoftCapOnTheAttentionLogitsIsBounded) {
  expect_bounded({.architecture = "gemma2", .n_layer = 2, .sliding_window = 32}, 1);
}

TEST(EvictorModels, OneLatentHeadWithoutValuesIsBounded) {
  expect_bounded({.architecture = "deepseek2", .mla = true}, 2);
}

TEST(EvictorModels, OneLatentHeadOfQ8RowsIsBounded) {
  const ModelPtr model = make_tiny_model({.architecture = "deepseek2", .mla = true});
  WatchedStream stream(
      model.get(), {.poison_freed_rows = true, .type_k = GGML_TYPE_Q8_0, .type_v = GGML_TYPE_Q8_0});
  expect_bounded(stream);
  const auto stats = stream.evictor().stats();
  EXPECT_EQ(stats.kv_bytes_kept, 64 * 2 * ggml_row_size(GGML_TYPE_Q8_0, 96));
}

// --- Sliding windows
// ------------------------------------------------------------------------------

// Layers 0 and 2 see a window of 40 tokens, layers 1 and 3 everything.
const TinyModel kSliding{.architecture = "gemma3", .n_layer = 4, .sliding_window = 40};

TEST(EvictorModels, WithASlidingWindowTheGlobalLayersAreBoundedAndTheOthersStayAsTheyAre) {
  expect_bounded(kSliding, 2);
  const ModelPtr model = make_tiny_model(kSliding);
  Bounded bounded(model.get(), {});
  std::vector<int> layers;
  for (const auto& layer : bounded.evictor().snapshot()) layers.push_back(layer.index);
  EXPECT_EQ(layers, (std::vector<int>{1, 3}));
}

// One row as numbers, K then V.
std::vector<float> floats_of(std::string_view row) {
  std::vector<float> values(row.size() / sizeof(ggml_fp16_t));
  ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(row.data()), values.data(),
                        static_cast<std::int64_t>(values.size()));
  return values;
}

float distance(const std::vector<float>& a, const std::vector<float>& b) {
  float most = 0.0f;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::fabs(a[i] - b[i]));
  return most;
}

// The rows of layer 1 are made from the output of layer 0, a sliding one, and from nothing that
// eviction touches: they must be those of the plain engine. (Cells in another order, so sums in
// another order: not bit for bit.) Those of layer 3 come from layer 1, which has lost rows.
TEST(EvictorModels, TheOutputOfASlidingLayerIsThatOfThePlainEngine) {
  const ModelPtr model = make_tiny_model(kSliding);
  BoundOptions options{.cache = small_cache("random")};
  options.cache.budget = 44;  // just enough for the window of 40 and 4 sinks
  WatchedStream stream(model.get(), options);
  KvProbe probe;
  llama_context_params params = context_params();
  params.cb_eval = KvProbe::callback;
  params.cb_eval_user_data = &probe;
  const ContextPtr plain = plain_context(model.get(), params, 512, 64);
  const auto tokens = noise_tokens(330, kVocab);
  for (std::size_t fed = 0; fed < tokens.size(); fed += fed < 220 ? 44 : 1) {
    const auto piece = std::span(tokens).subspan(fed, fed < 220 ? 44 : 1);
    stream.feed(piece);
    ASSERT_EQ(decode(plain.get(), piece), 0);
    ASSERT_FALSE(HasFailure());
  }
  const auto largest_distance = [&](int layer) {
    const ProbedLayer& of = probe.layer(layer);
    const std::string k = KvProbe::whole(of.k);
    const std::string v = KvProbe::whole(of.v);
    float most = 0.0f;
    for (std::size_t position = 0; position < tokens.size(); ++position) {
      for (std::size_t h = 0; h < 2; ++h) {
        // Nothing leaves the plain engine: position p lies in cell p.
        const std::size_t at = position * of.k->nb[1] + h * 64;
        const std::string row = k.substr(at, 64) + v.substr(at, 64);
        const auto& ours =
            stream.book().row(layer, static_cast<int>(h), static_cast<Position>(position));
        most = std::max(most, distance(floats_of(row), floats_of(ours)));
      }
    }
    return most;
  };
  EXPECT_LT(largest_distance(1), 0.05f);
  EXPECT_GT(largest_distance(3), 0.5f) << "eviction does not show, so this is no test";
}

TEST(EvictorModels, ASlidingModelMovesToASmallerContext) {
  const ModelPtr model = make_tiny_model(kSliding);
  WatchedStream stream(model.get(), {.poison_freed_rows = true, .call_tokens = 500});
  const auto tokens = noise_tokens(560, kVocab);
  for (std::size_t fed = 0; fed < 480; fed += 60) {
    ASSERT_EQ(stream.feed_unevicted(std::span(tokens).subspan(fed, 60)), 0);
  }
  stream.evict();
  stream.move(0);
  for (std::size_t fed = 480; fed < 560; fed += 16) {
    stream.feed(std::span(tokens).subspan(fed, 16));
    ASSERT_FALSE(HasFailure()) << fed;
  }
}

TEST(EvictorModels, KeptBytesOfASlidingModelCountTheCellsOfItsWindowsAsWell) {
  const ModelPtr model = make_tiny_model(kSliding);
  Bounded bounded(model.get(), {});
  const std::size_t row = std::size_t{2} * 2 * 32 * 2;  // K and V, heads, dim, f16
  bounded.feed(noise_tokens(50, kVocab));
  EXPECT_EQ(bounded.evictor().stats().kv_bytes_kept, 4 * 50 * row);
  for (int i = 0; i < 10; ++i) bounded.feed(noise_tokens(60, kVocab));
  EXPECT_EQ(bounded.evictor().stats().kv_bytes_kept, 2 * 64 * row + 2 * 256 * row);
  EXPECT_EQ(bounded.evictor().stats().kv_bytes_full, 4 * 650 * row);
}

// --- What is refused, and how
// ---------------------------------------------------------------------

// The reason, which is one line and contains `words`.
void expect_refusal(const std::function<void()>& attempt, std::vector<std::string> words) {
  try {
    attempt();
    ADD_FAILURE() << "not refused: " << words.front();
  } catch (const Unsupported& refusal) {
    const std::string reason = refusal.what();
    EXPECT_EQ(reason.find('\n'), std::string::npos) << reason;
    for (const std::string& word : words) {
      EXPECT_NE(reason.find(word), std::string::npos) << "'" << word << "' in: " << reason;
    }
  }
}

void expect_refused(const TinyModel& description, const std::vector<std::string>& words,
                    const BoundOptions& options = {}) {
  const ModelPtr model = make_tiny_model(description);
  expect_refusal([&] { Bounded(model.get(), options); }, words);
}

TEST(EvictorRefusals, ASlidingWindowLargerThanTheBudgetIsRefusedWithTheBudgetItNeeds) {
  TinyModel description = kSliding;
  description.sliding_window = 60;  // 64 - 4: the largest
  expect_bounded(description, 2);
  description.sliding_window = 61;
  expect_refused(description, {"sliding window of 61", "at least 65"});
}

TEST(EvictorRefusals, ARecurrentModelIsRefused) {
  expect_refused({.architecture = "mamba"}, {"recurrent"});
}

TEST(EvictorRefusals, AHybridModelIsRefused) {
  expect_refused({.architecture = "lfm2"}, {"hybrid"});
}

TEST(EvictorRefusals, AModelWithAlibiIsRefused) {
  expect_refused({.architecture = "bloom", .n_head_kv = 4}, {"ALiBi", llama_version()});
}

TEST(EvictorRefusals, AModelWhoseIndexerHasCellsOfItsOwnIsRefused) {
  expect_refused({.architecture = "deepseek32", .mla = true}, {"layer 0"});
}

TEST(EvictorRefusals, FlashAttentionSwitchedOffIsRefused) {
  const ModelPtr model = make_tiny_model({});
  Evictor evictor(model.get(), {});
  llama_context_params params = context_params();
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  expect_refusal([&] { evictor.attach(params); }, {"flash attention is off", "switch"});
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_AUTO;
  EXPECT_EQ(evictor.attach(params), "");
  EXPECT_EQ(params.flash_attn_type, LLAMA_FLASH_ATTN_TYPE_ENABLED);
}

TEST(EvictorRefusals, SeveralSequencesInOneContextAreRefused) {
  const ModelPtr model = make_tiny_model({});
  Evictor evictor(model.get(), {});
  llama_context_params params = context_params();
  params.n_seq_max = 2;
  expect_refusal([&] { evictor.attach(params); }, {"n_seq_max 2", "n_seq_max 1"});
}

TEST(EvictorRefusals, AHeadDimensionThatIsNoMultipleOfABlockIsRefusedForQuantisedRows) {
  const TinyModel description{.head_dim = 40};
  expect_refused(description, {"q8_0", "32", "40", "f16"}, {.type_k = GGML_TYPE_Q8_0});
  expect_refused(description, {"q4_0", "32", "40", "f16"}, {.type_v = GGML_TYPE_Q4_0});
  expect_bounded(description, 2);
}

TEST(EvictorRefusals, KeysThatTheEngineMustConvertFirstAreRefused) {
  expect_refused({}, {"layer 0", "flash attention"}, {.type_k = GGML_TYPE_F32});
}

TEST(EvictorRefusals, AContextThatIgnoredTheSettingsIsRefused) {
  const ModelPtr model = make_tiny_model({});
  Evictor evictor(model.get(), {});
  llama_context_params params = context_params();
  evictor.attach(params);
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const ContextPtr context(llama_init_from_model(model.get(), params));
  expect_refusal([&] { evictor.bind(context.get()); }, {"layer 0", "flash attention"});
  EXPECT_THROW(evictor.after_decode(), llama_cpp::EngineError);
}

TEST(EvictorRefusals, AContextThatTheEvictorWasNotAttachedToIsRefused) {
  const ModelPtr model = make_tiny_model({});
  Evictor evictor(model.get(), {});
  const ContextPtr context = plain_context(model.get(), context_params(), 1024, 64);
  expect_refusal([&] { evictor.bind(context.get()); }, {"cache_k_l"});
}

}  // namespace
}  // namespace morphkv::test

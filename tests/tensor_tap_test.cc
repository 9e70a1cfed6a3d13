// The tap by itself, in contexts of tiny models that nothing evicts from: which layers it finds,
// what it refuses, and what it notes of a call. The probe, which shares nothing with it, is the
// witness.
#include "tensor_tap.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kv_probe.h"
#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::llama_cpp {
namespace {

using test::context_params;
using test::KvProbe;
using test::make_tiny_model;
using test::noise_tokens;
using test::TinyModel;

constexpr int kCells = 256;
constexpr int kMicroBatch = 8;
using Cells = std::vector<std::int64_t>;
using Labels = std::vector<llama_pos>;

Cells counted(std::int64_t first, std::size_t n) {
  Cells cells(n);
  std::iota(cells.begin(), cells.end(), first);
  return cells;
}

// A context with a tap, and a probe that was there first.
class Tapped {
 public:
  explicit Tapped(const TinyModel& model, int sequences = 1, int n_cells = kCells)
      : model_(make_tiny_model(model)), sequences_(sequences) {
    params.cb_eval = KvProbe::callback;
    params.cb_eval_user_data = &probe;
    params.n_ctx = static_cast<std::uint32_t>(n_cells * sequences);
    params.n_batch = 64;
    params.n_ubatch = kMicroBatch;
    params.n_seq_max = static_cast<std::uint32_t>(sequences);
    params.kv_unified = false;
    params.swa_full = false;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  }

  // Makes the context and surveys its layers; returns what is wrong with them.
  std::string survey(int n_cells = kCells) { return survey(n_cells, sequences_); }
  std::string survey(int n_cells, int sequences) {
    tap.install(params);
    context_.reset(llama_init_from_model(model_.get(), params));
    tap.start_survey();
    decode(1);
    const std::string problem = tap.finish_survey(memory(), n_cells, sequences);
    llama_memory_clear(memory(), true);
    probe.forget();
    return problem;
  }

  void decode(int n) {
    ASSERT_EQ(test::decode(context_.get(), noise_tokens(n, 96)), 0) << test::engine();
    llama_synchronize(context_.get());
  }
  llama_context* context() { return context_.get(); }
  llama_memory_t memory() { return llama_get_memory(context_.get()); }

  // The queries that the tap holds are those of the last `n` of the first `tokens` that the probe
  // saw, to the last bit.
  void expect_queries(TensorTap& other, int tokens, int n) {
    for (std::size_t layer = 0; layer < other.layers().size(); ++layer) {
      const TappedLayer& shape = other.layers()[layer];
      for (int head = 0; head < shape.n_head_kv; ++head) {
        const QueriesView view = other.queries(0, layer, head, tokens);
        ASSERT_EQ(view.tokens, n) << "layer " << layer;
        EXPECT_EQ(view.group, shape.group);
        ASSERT_EQ(view.dim, shape.dim_k);
        for (int t = 0; t < n; ++t) {
          const auto& seen =
              probe.queries(shape.index).at(static_cast<std::size_t>(tokens - n + t));
          for (int g = 0; g < view.group; ++g) {
            const float* query = view.query(t, g);
            EXPECT_EQ(std::vector<double>(query, query + view.dim),
                      seen.at(static_cast<std::size_t>(head * view.group + g)))
                << "layer " << layer << ", head " << head << ", token " << t << " of " << n;
          }
        }
      }
    }
  }
  void expect_queries(int tokens, int n) { expect_queries(tap, tokens, n); }

  llama_context_params params = context_params();
  KvProbe probe{{0, 1}};
  TensorTap tap;

 private:
  ModelPtr model_;
  int sequences_;
  ContextPtr context_;  // after the tap and the probe: it calls them back
};

TEST(TensorTap, FindsTheTensorsAndTheShapeOfEachLayer) {
  Tapped tapped({.n_layer = 3, .n_head = 6, .n_head_kv = 2});
  ASSERT_EQ(tapped.survey(), "");
  ASSERT_EQ(tapped.tap.layers().size(), 3u);
  EXPECT_EQ(tapped.tap.all_layers().size(), 3u);
  for (int i = 0; i < 3; ++i) {
    const TappedLayer& layer = tapped.tap.layers()[static_cast<std::size_t>(i)];
    EXPECT_EQ(layer.index, i);
    EXPECT_EQ(layer.k, tapped.probe.layer(i).k);
    EXPECT_EQ(layer.v, tapped.probe.layer(i).v);
    EXPECT_EQ(layer.k->ne[1], kCells);
    EXPECT_EQ(layer.n_head_kv, 2);
    EXPECT_EQ(layer.group, 3);
    EXPECT_EQ(layer.dim_k, 32);
    EXPECT_EQ(layer.dim_v, 32);
    EXPECT_FLOAT_EQ(layer.scale, 1.0f / std::sqrt(32.0f));
    EXPECT_EQ(layer.softcap, 0.0f);
    EXPECT_EQ(layer.max_alibi_bias, 0.0f);
    EXPECT_EQ(layer.attention_nodes, 1);
  }
}

TEST(TensorTap, ReadsTheSoftCapAndKnowsOneLatentHeadByItsMissingV) {
  Tapped capped({.architecture = "gemma2", .sliding_window = 32}, 1, 1024);
  ASSERT_EQ(capped.survey(1024), "");
  EXPECT_EQ(capped.tap.layers().front().softcap, 1.0f);

  Tapped latent({.architecture = "deepseek2", .mla = true});
  ASSERT_EQ(latent.survey(), "");
  for (const TappedLayer& layer : latent.tap.layers()) {
    EXPECT_EQ(layer.v, nullptr);
    EXPECT_EQ(layer.n_head_kv, 1);
    EXPECT_EQ(layer.group, 4);
  }
}

TEST(TensorTap, LayersWithOtherCellsThanTheContextAreKnownButNotListenedTo) {
  Tapped tapped({.architecture = "gemma3", .n_layer = 4, .sliding_window = 32}, 1, 1024);
  ASSERT_EQ(tapped.survey(1024), "");
  ASSERT_EQ(tapped.tap.all_layers().size(), 4u);
  ASSERT_EQ(tapped.tap.layers().size(), 2u);
  EXPECT_EQ(tapped.tap.layers()[0].index, 1);
  EXPECT_EQ(tapped.tap.layers()[1].index, 3);
  EXPECT_EQ(tapped.tap.all_layers()[0].k->ne[1], 256);
}

TEST(TensorTap, SaysWhyAModelCannotBeListenedTo) {
  EXPECT_EQ(Tapped({}).survey(kCells + 1),
            "no K tensor named cache_k_l<layer> with 257 cells was found");
  EXPECT_EQ(Tapped({}).survey(kCells, 2), "layer 0 keeps 1 sequences apart, 2 are due");
  EXPECT_EQ(Tapped({.architecture = "bloom", .n_head_kv = 4}).survey(),
            "the model uses ALiBi, whose bias depends on the engine's positions");
  Tapped plain({});
  plain.params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  EXPECT_EQ(plain.survey(),
            "layer 0 has no flash attention operation with f32 queries that reads its keys");
}

TEST(TensorTap, NotesCellsAndLabelsOfACallInTheOrderOfItsTokens) {
  Tapped tapped({});
  ASSERT_EQ(tapped.survey(), "");
  EXPECT_EQ(tapped.tap.cells(0), Cells{}) << "the survey leaves nothing behind";
  tapped.decode(20);
  EXPECT_EQ(tapped.tap.cells(0), counted(0, 20));
  EXPECT_EQ(tapped.tap.labels(0).front(), 0);
  EXPECT_EQ(tapped.tap.labels(0).back(), 19);
  EXPECT_EQ(tapped.tap.first_micro_batch(0), kMicroBatch);
  tapped.decode(3);  // the same call of the rule, in another one of the engine
  EXPECT_EQ(tapped.tap.cells(0), counted(0, 23));
  EXPECT_EQ(tapped.tap.first_micro_batch(0), kMicroBatch);

  tapped.tap.clear_call(0);
  EXPECT_TRUE(tapped.tap.cells(0).empty());
  EXPECT_TRUE(tapped.tap.labels(0).empty());
  EXPECT_EQ(tapped.tap.first_micro_batch(0), 0);

  ASSERT_TRUE(llama_memory_seq_rm(tapped.memory(), 0, 4, 6));
  tapped.decode(3);
  EXPECT_EQ(tapped.tap.cells(0), (Cells{4, 5, 23})) << "freed cells come first";
  EXPECT_EQ(tapped.tap.labels(0), (Labels{23, 24, 25}));
  EXPECT_EQ(tapped.tap.first_micro_batch(0), 3);
}

TEST(TensorTap, TellsTheSequencesOfABatchApart) {
  Tapped tapped({}, 3);
  ASSERT_EQ(tapped.survey(), "");
  for (const llama_seq_id id : {0, 1, 2}) tapped.tap.keep_queries(id, id);

  const std::unique_ptr<llama_batch, void (*)(llama_batch*)> batch(
      new llama_batch(llama_batch_init(16, 0, 1)), [](llama_batch* b) {
        llama_batch_free(*b);
        delete b;
      });
  const auto add = [&](llama_seq_id sequence, int n) {
    for (int i = 0; i < n; ++i) {
      const int at = batch->n_tokens++;
      batch->token[at] = 10 * sequence + i;
      batch->pos[at] = i;
      batch->n_seq_id[at] = 1;
      batch->seq_id[at][0] = sequence;
      batch->logits[at] = 0;
    }
  };
  add(2, 5);
  add(0, 3);
  ASSERT_EQ(llama_decode(tapped.context(), *batch), 0) << test::engine();
  llama_synchronize(tapped.context());
  EXPECT_EQ(tapped.tap.cells(0), counted(0, 3));
  EXPECT_EQ(tapped.tap.labels(0), (Labels{0, 1, 2}));
  EXPECT_TRUE(tapped.tap.cells(1).empty());
  EXPECT_EQ(tapped.tap.cells(2), counted(0, 5));
  EXPECT_EQ(tapped.tap.labels(2), (Labels{0, 1, 2, 3, 4}));
  EXPECT_EQ(tapped.tap.queries(0, 0, 0, 3).tokens, 0);
  EXPECT_EQ(tapped.tap.queries(2, 0, 0, 5).tokens, 2);

  tapped.tap.clear_call(2);
  EXPECT_TRUE(tapped.tap.cells(2).empty());
  EXPECT_EQ(tapped.tap.cells(0), counted(0, 3)) << "another sequence's call goes on";
}

// A sequence alone and among others asks with the same queries.
TEST(TensorTap, CopiesEachSequencesQueriesFromItsOwnPartOfTheBatch) {
  Tapped tapped({}, 2);
  ASSERT_EQ(tapped.survey(), "");
  for (const llama_seq_id id : {0, 1}) tapped.tap.keep_queries(id, 4);
  const auto evaluate = [&](const std::vector<llama_seq_id>& sequences) {
    llama_memory_clear(tapped.memory(), true);
    for (const llama_seq_id id : {0, 1}) tapped.tap.clear_call(id);
    std::vector<llama_token> tokens;
    std::vector<llama_pos> positions;
    std::vector<llama_seq_id> ids;
    for (const llama_seq_id id : sequences) {
      for (int i = 0; i < 4; ++i) {
        tokens.push_back(20 + 30 * id + i);
        positions.push_back(i);
        ids.push_back(id);
      }
    }
    std::vector<std::int32_t> counts(tokens.size(), 1);
    std::vector<llama_seq_id*> each;
    for (llama_seq_id& id : ids) each.push_back(&id);
    llama_batch batch = llama_batch_get_one(tokens.data(), static_cast<int>(tokens.size()));
    batch.pos = positions.data();
    batch.n_seq_id = counts.data();
    batch.seq_id = each.data();
    EXPECT_EQ(llama_decode(tapped.context(), batch), 0) << test::engine();
    llama_synchronize(tapped.context());
  };
  evaluate({0});
  const auto first = tapped.tap.call(0).queries;
  evaluate({1});
  const auto second = tapped.tap.call(1).queries;
  evaluate({1, 0});
  ASSERT_EQ(first.size(), 2u);
  EXPECT_NE(first, second);
  const auto expect_near = [](const std::vector<std::vector<float>>& together,
                              const std::vector<std::vector<float>>& alone) {
    for (std::size_t layer = 0; layer < alone.size(); ++layer) {
      ASSERT_EQ(together[layer].size(), alone[layer].size());
      for (std::size_t i = 0; i < alone[layer].size(); ++i) {
        // Other sums of the same products, where the engine multiplies eight columns in place of
        // four; the queries are of the order of 1.
        ASSERT_NEAR(together[layer][i], alone[layer][i], 1e-4) << "layer " << layer;
      }
    }
  };
  expect_near(tapped.tap.call(0).queries, first);
  expect_near(tapped.tap.call(1).queries, second);
}

TEST(TensorTap, HoldsTheQueriesOfTheLastTokensOfTheWindow) {
  for (const int window : {1, 5, kMicroBatch, 13}) {  // 13: over a micro-batch's border
    Tapped tapped({.n_head = 6, .n_head_kv = 2});
    ASSERT_EQ(tapped.survey(), "");
    tapped.tap.keep_queries(0, window);
    tapped.decode(3);
    tapped.expect_queries(3, std::min(3, window));
    tapped.decode(18);
    tapped.expect_queries(21, window);
    tapped.tap.clear_call(0);
    tapped.probe.forget();
    tapped.decode(2);
    tapped.expect_queries(2, std::min(2, window));
  }
}

TEST(TensorTap, OfACallOfWhichFewerTokensCountTheLaterQueriesAreLeftOut) {
  Tapped tapped({});
  ASSERT_EQ(tapped.survey(), "");
  tapped.tap.keep_queries(0, 5);
  tapped.decode(20);
  tapped.expect_queries(18, 3);  // of 15 to 19, those below 18
  tapped.expect_queries(15, 0);
}

TEST(TensorTap, WithoutAWindowNoQueryIsAskedFor) {
  Tapped tapped({});
  ASSERT_EQ(tapped.survey(), "");
  tapped.decode(6);
  EXPECT_EQ(tapped.tap.cells(0).size(), 6u);
  EXPECT_EQ(tapped.tap.queries(0, 0, 0, 6).tokens, 0);
  EXPECT_TRUE(tapped.tap.call(0).queries[0].empty());
}

TEST(TensorTap, ACallGoesOnInAnotherTapAlsoWithASmallerWindow) {
  Tapped tapped({});
  ASSERT_EQ(tapped.survey(), "");
  tapped.tap.keep_queries(0, 7);
  tapped.decode(19);
  const TensorTap::Call call = tapped.tap.call(0);
  EXPECT_EQ(call.cells, counted(0, 19));
  EXPECT_EQ(call.labels, tapped.tap.labels(0));
  EXPECT_EQ(call.first_micro_batch, kMicroBatch);
  EXPECT_EQ(call.window, 7);

  for (const int window : {7, 4}) {
    Tapped other({});
    ASSERT_EQ(other.survey(), "");
    other.tap.keep_queries(0, window);
    other.decode(2);  // of a call that is over then
    other.tap.go_on(0, call);
    EXPECT_EQ(other.tap.cells(0), call.cells);
    EXPECT_EQ(other.tap.labels(0), call.labels);
    EXPECT_EQ(other.tap.first_micro_batch(0), kMicroBatch);
    tapped.expect_queries(other.tap, 19, window);
  }
}

// --- The callback that was there first -----------------------------------------------------------

struct Listener {
  bool wants_attention = false;
  int asked = 0;
  int shown = 0;

  static bool callback(ggml_tensor* node, bool ask, void* self) {
    auto& listener = *static_cast<Listener*>(self);
    if (!ask) {
      EXPECT_EQ(node->op, GGML_OP_FLASH_ATTN_EXT);
      ++listener.shown;
      return true;
    }
    ++listener.asked;
    return listener.wants_attention && node->op == GGML_OP_FLASH_ATTN_EXT;
  }
};

TEST(TensorTap, AUsersCallbackIsAskedAboutEachNodeAndShownOnlyThoseItWants) {
  for (const bool wants_attention : {false, true}) {
    Listener listener{.wants_attention = wants_attention};
    Tapped tapped({});
    tapped.params.cb_eval = Listener::callback;
    tapped.params.cb_eval_user_data = &listener;
    tapped.tap.install(tapped.params);
    ASSERT_EQ(tapped.survey(), "");  // installs it again, which must not make it its own user
    tapped.tap.keep_queries(0, 4);
    listener.asked = listener.shown = 0;
    tapped.decode(1);
    EXPECT_GT(listener.asked, 2);
    EXPECT_EQ(listener.shown, wants_attention ? 2 : 0);
    EXPECT_EQ(tapped.tap.cells(0).size(), 1u);
    EXPECT_EQ(tapped.tap.queries(0, 0, 0, 1).tokens, 1);
  }
}

}  // namespace
}  // namespace morphkv::llama_cpp

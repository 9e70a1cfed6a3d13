// What the integration relies on in llama.cpp: names, shapes, operations and the behaviour of a few
// calls, none of which its API promises. When one of these fails after an upgrade, tensor_tap,
// kv_store and evictor need a look before anything else is believed.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "kv_probe.h"
#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::ContextPtr;
using llama_cpp::ModelPtr;

constexpr int kLayers = 30;
constexpr int kHeads = 9;
constexpr int kKvHeads = 3;
constexpr int kDim = 64;

// Copies of the nodes that matter, as the callback is shown them.
class GraphRecorder {
 public:
  struct Attention {
    ggml_tensor node, q, k, v;
    ggml_tensor* k_root;
    ggml_tensor* v_root;
  };
  struct Store {
    ggml_tensor node, indices;
    std::vector<std::int64_t> cells;
  };

  void install(llama_context_params& params) {
    params.cb_eval = [](ggml_tensor* node, bool ask, void* self) {
      return static_cast<GraphRecorder*>(self)->on_node(node, ask);
    };
    params.cb_eval_user_data = this;
  }

  std::map<std::string, std::vector<Store>> stores;          // by the tensor written to
  std::map<std::string, std::vector<Attention>> attentions;  // by the K tensor
  std::map<std::string, ggml_tensor*> roots;
  std::vector<std::pair<std::string, bool>> calls;  // node and `ask` of those asked for

 private:
  bool on_node(ggml_tensor* node, bool ask) {
    const bool stores_rows = node->op == GGML_OP_SET_ROWS && node->view_src != nullptr;
    const bool attends = node->op == GGML_OP_FLASH_ATTN_EXT;
    if (!stores_rows && !attends) return !ask;
    calls.emplace_back(node->name, ask);
    if (ask) return true;
    if (stores_rows) {
      Store store{*node, *node->src[1], {}};
      store.cells.resize(static_cast<std::size_t>(ggml_nelements(node->src[1])));
      if (node->src[1]->type == GGML_TYPE_I64) {
        ggml_backend_tensor_get(node->src[1], store.cells.data(), 0, ggml_nbytes(node->src[1]));
      }
      stores[node->view_src->name].push_back(store);
      roots[node->view_src->name] = node->view_src;
    } else {
      attentions[node->src[1]->view_src->name].push_back({*node, *node->src[0], *node->src[1],
                                                          *node->src[2], node->src[1]->view_src,
                                                          node->src[2]->view_src});
    }
    return true;
  }
};

float float_param(const ggml_tensor& node, int i) {
  float value;
  std::memcpy(&value, node.op_params + i, sizeof(value));
  return value;
}

std::string k_name(int layer) { return "cache_k_l" + std::to_string(layer); }
std::string v_name(int layer) { return "cache_v_l" + std::to_string(layer); }

struct Recorded {
  GraphRecorder graph;
  ContextPtr context;
};

// `tokens` evaluated in one call.
std::unique_ptr<Recorded> evaluate(llama_model* model, std::span<const llama_token> tokens,
                                   int n_ctx = 256, ggml_type type_k = GGML_TYPE_F16,
                                   ggml_type type_v = GGML_TYPE_F16) {
  auto recorded = std::make_unique<Recorded>();
  llama_context_params params = context_params();
  params.type_k = type_k;
  params.type_v = type_v;
  recorded->graph.install(params);
  recorded->context = plain_context(model, params, n_ctx, 64);
  EXPECT_EQ(decode(recorded->context.get(), tokens), 0) << engine();
  llama_synchronize(recorded->context.get());
  return recorded;
}

TEST(LlamaContract, EachLayerHasOneKAndOneVTensorOfTheExpectedNameAndShape) {
  const auto run = evaluate(test_model(), prose_tokens(5), 300);
  EXPECT_EQ(llama_n_ctx_seq(run->context.get()), 512u)
      << "n_ctx is no longer rounded up to 256, " << engine();
  EXPECT_EQ(run->graph.roots.size(), 2u * kLayers)
      << "other tensors than K and V are written by row, " << engine();
  for (int layer = 0; layer < kLayers; ++layer) {
    for (const std::string& name : {k_name(layer), v_name(layer)}) {
      ASSERT_TRUE(run->graph.roots.contains(name)) << "no tensor " << name << ' ' << engine();
      const ggml_tensor* tensor = run->graph.roots[name];
      EXPECT_EQ(tensor->type, GGML_TYPE_F16) << name << ' ' << engine();
      EXPECT_EQ(tensor->ne[0], kKvHeads * kDim) << name << ' ' << engine();
      EXPECT_EQ(tensor->ne[1], 512) << name << ": cells, " << engine();
      EXPECT_EQ(tensor->ne[2], 1) << name << ": streams, " << engine();
      EXPECT_EQ(tensor->nb[1], kKvHeads * kDim * sizeof(ggml_fp16_t)) << name << ' ' << engine();
      EXPECT_TRUE(ggml_is_contiguous(tensor)) << name << ' ' << engine();
    }
  }
}

TEST(LlamaContract, RowsAreStoredWithSetRowsAndTheSameI64CellIndicesInEveryLayer) {
  const auto run = evaluate(test_model(), prose_tokens(5));
  for (int layer = 0; layer < kLayers; ++layer) {
    for (const std::string& name : {k_name(layer), v_name(layer)}) {
      const auto& stores = run->graph.stores[name];
      ASSERT_EQ(stores.size(), 1u) << "SET_ROWS into " << name << ' ' << engine();
      EXPECT_EQ(stores[0].indices.type, GGML_TYPE_I64) << name << ' ' << engine();
      EXPECT_EQ(stores[0].indices.ne[0], 5) << name << ' ' << engine();
      EXPECT_EQ(stores[0].cells, (std::vector<std::int64_t>{0, 1, 2, 3, 4}))
          << name << ": cells of the first tokens, " << engine();
    }
  }
}

TEST(LlamaContract, AttentionIsOneFlashAttentionNodePerLayerWithF32QueriesAndViewsOfTheCache) {
  const auto run = evaluate(test_model(), prose_tokens(5));
  EXPECT_EQ(run->graph.attentions.size(), static_cast<std::size_t>(kLayers)) << engine();
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string name = k_name(layer);
    ASSERT_EQ(run->graph.attentions[name].size(), 1u) << "attention to " << name << ' ' << engine();
    const auto& a = run->graph.attentions[name].front();
    EXPECT_EQ(a.q.type, GGML_TYPE_F32) << name << ' ' << engine();
    EXPECT_EQ(a.q.ne[0], kDim) << name << ": Q [dim, token, head], " << engine();
    EXPECT_EQ(a.q.ne[1], 5) << name << ": Q [dim, token, head], " << engine();
    EXPECT_EQ(a.q.ne[2], kHeads) << name << ": Q [dim, token, head], " << engine();
    EXPECT_EQ(a.q.nb[0], sizeof(float)) << name << ": Q rows are contiguous, " << engine();
    EXPECT_EQ(a.k.ne[0], kDim) << name << ": K [dim, cell, head], " << engine();
    EXPECT_GE(a.k.ne[1], 5) << name << ": K [dim, cell, head], " << engine();
    EXPECT_EQ(a.k.ne[2], kKvHeads) << name << ": K [dim, cell, head], " << engine();
    EXPECT_EQ(a.v.ne[0], kDim) << name << ": V [dim, cell, head], " << engine();
    EXPECT_EQ(a.v.ne[2], kKvHeads) << name << ": V [dim, cell, head], " << engine();
    EXPECT_EQ(a.k_root, run->graph.roots[name]) << name << ' ' << engine();
    EXPECT_EQ(a.v_root, run->graph.roots[v_name(layer)]) << name << ' ' << engine();
    // A head's slice of a cell: this is the address that kv_store computes.
    EXPECT_EQ(a.k.data, a.k_root->data) << name << ' ' << engine();
    EXPECT_EQ(a.k.nb[1], a.k_root->nb[1]) << name << ": from cell to cell, " << engine();
    EXPECT_EQ(a.k.nb[2], kDim * sizeof(ggml_fp16_t)) << name << ": from head to head, " << engine();
    EXPECT_EQ(a.v.nb[1], a.v_root->nb[1]) << name << ": from cell to cell, " << engine();
    EXPECT_EQ(a.v.nb[2], kDim * sizeof(ggml_fp16_t)) << name << ": from head to head, " << engine();
    EXPECT_EQ(float_param(a.node, 0), 0.125f) << name << ": scale, " << engine();
    EXPECT_EQ(float_param(a.node, 1), 0.0f) << name << ": ALiBi, " << engine();
    EXPECT_EQ(float_param(a.node, 2), 0.0f) << name << ": soft cap, " << engine();
  }
}

TEST(LlamaContract, QuantisedTensorsAreAttendedToInPlaceAndAHeadIsWholeBlocks) {
  const auto run = evaluate(test_model(), prose_tokens(5), 256, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0);
  for (int layer = 0; layer < kLayers; ++layer) {
    ASSERT_EQ(run->graph.attentions[k_name(layer)].size(), 1u) << engine();
    const auto& a = run->graph.attentions[k_name(layer)].front();
    EXPECT_EQ(a.k_root->type, GGML_TYPE_Q8_0) << engine();
    EXPECT_EQ(a.v_root->type, GGML_TYPE_Q4_0) << engine();
    EXPECT_EQ(a.q.type, GGML_TYPE_F32) << engine();
    EXPECT_EQ(a.k.nb[2], ggml_row_size(GGML_TYPE_Q8_0, kDim)) << engine();
    EXPECT_EQ(a.v.nb[2], ggml_row_size(GGML_TYPE_Q4_0, kDim)) << engine();
  }
}

TEST(LlamaContract, TheCallbackSeesEachNodeTwiceFirstAskingThenWithItsData) {
  const auto run = evaluate(test_model(), prose_tokens(1));
  const auto& calls = run->graph.calls;
  ASSERT_EQ(calls.size(), 2u * 3u * kLayers) << "K, V and attention of each layer, " << engine();
  for (std::size_t i = 0; i < calls.size(); i += 2) {
    EXPECT_TRUE(calls[i].second) << calls[i].first << ' ' << engine();
    EXPECT_FALSE(calls[i + 1].second) << calls[i].first << ' ' << engine();
    EXPECT_EQ(calls[i].first, calls[i + 1].first) << engine();
  }
}

TEST(LlamaContract, ACallOfSeveralMicroBatchesShowsEachOfThem) {
  GraphRecorder graph;
  llama_context_params params = context_params();
  graph.install(params);
  params.n_ctx = 256;
  params.n_batch = 100;
  params.n_ubatch = 40;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  const ModelPtr model = make_tiny_model({});
  const ContextPtr context(llama_init_from_model(model.get(), params));
  ASSERT_EQ(decode(context.get(), noise_tokens(100, 96)), 0) << engine();
  const auto& stores = graph.stores[k_name(0)];
  ASSERT_EQ(stores.size(), 3u) << engine();
  EXPECT_EQ(stores[0].cells.size(), 40u) << engine();
  EXPECT_EQ(stores[2].cells.size(), 20u) << engine();
  EXPECT_EQ(stores[2].cells.back(), 99) << engine();
}

TEST(LlamaContract, ALabelRangeInTheMiddleCanBeRemovedAndItsCellsAreUsedAgain) {
  const ModelPtr model = make_tiny_model({});
  const auto run = evaluate(model.get(), noise_tokens(20, 96));
  llama_context* context = run->context.get();
  ASSERT_TRUE(llama_memory_seq_rm(llama_get_memory(context), 0, 4, 9)) << engine();
  EXPECT_EQ(oldest_label(context), 0) << engine();
  EXPECT_EQ(newest_label(context), 19) << engine();

  ASSERT_EQ(decode(context, noise_tokens(3, 96)), 0) << engine();
  EXPECT_EQ(newest_label(context), 22) << "positions continue at seq_pos_max + 1, " << engine();
  EXPECT_EQ(run->graph.stores[k_name(0)].back().cells, (std::vector<std::int64_t>{4, 5, 6}))
      << "the cells that were freed come first, " << engine();
}

TEST(LlamaContract, APositionThatDoesNotFollowIsRefusedAndChangesNothing) {
  const ModelPtr model = make_tiny_model({});
  const auto run = evaluate(model.get(), noise_tokens(20, 96));
  llama_token token = 1;
  llama_pos position = 25;
  llama_batch batch = llama_batch_get_one(&token, 1);
  batch.pos = &position;
  EXPECT_EQ(llama_decode(run->context.get(), batch), -1) << engine();
  EXPECT_EQ(newest_label(run->context.get()), 19) << engine();
  position = 20;
  EXPECT_EQ(llama_decode(run->context.get(), batch), 0) << engine();
  EXPECT_EQ(newest_label(run->context.get()), 20) << engine();
}

TEST(LlamaContract, AFullMemoryGivesStatusOneAndChangesNothing) {
  const ModelPtr model = make_tiny_model({});
  const auto run = evaluate(model.get(), noise_tokens(60, 96));
  for (int i = 0; i < 3; ++i) ASSERT_EQ(decode(run->context.get(), noise_tokens(60, 96)), 0);
  EXPECT_EQ(decode(run->context.get(), noise_tokens(60, 96)), 1) << engine();
  EXPECT_EQ(newest_label(run->context.get()), 239) << engine();
}

TEST(LlamaContract, AnAbortedCallKeepsItsWholeMicroBatchesAndGivesStatusTwo) {
  const ModelPtr model = make_tiny_model({});
  llama_context_params params = context_params();
  params.n_ctx = 256;
  params.n_batch = 100;
  params.n_ubatch = 20;
  int seen = 0;  // micro-batches that have begun
  params.cb_eval_user_data = &seen;
  params.cb_eval = [](ggml_tensor* node, bool ask, void* data) {
    if (node->op != GGML_OP_SET_ROWS || node->view_src == nullptr ||
        std::string(node->view_src->name) != k_name(1)) {
      return !ask;
    }
    if (!ask) ++*static_cast<int*>(data);
    return true;
  };
  params.abort_callback_data = &seen;
  params.abort_callback = [](void* data) { return *static_cast<int*>(data) == 3; };
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  const ContextPtr context(llama_init_from_model(model.get(), params));
  EXPECT_EQ(decode(context.get(), noise_tokens(100, 96)), 2) << engine();
  EXPECT_EQ(newest_label(context.get()), 39) << engine();
}

TEST(LlamaContract, AStateThatIsMovedPutsTheCellsInUseFirstInTheirOrder) {
  const ModelPtr model = make_tiny_model({});
  const auto from = evaluate(model.get(), noise_tokens(60, 96), 1024);
  llama_memory_seq_rm(llama_get_memory(from->context.get()), 0, 4, 30);
  ASSERT_EQ(decode(from->context.get(), noise_tokens(7, 96)), 0);  // labels 60-66 in cells 4-10
  std::vector<std::uint8_t> state(llama_state_seq_get_size(from->context.get(), 0));
  ASSERT_EQ(llama_state_seq_get_data(from->context.get(), state.data(), state.size(), 0),
            state.size())
      << engine();

  const auto to = evaluate(model.get(), noise_tokens(1, 96));
  llama_memory_clear(llama_get_memory(to->context.get()), true);
  ASSERT_EQ(llama_state_seq_set_data(to->context.get(), state.data(), state.size(), 0),
            state.size())
      << engine();
  EXPECT_EQ(oldest_label(to->context.get()), 0) << engine();
  EXPECT_EQ(newest_label(to->context.get()), 66) << engine();

  std::vector<std::size_t> in_use;
  for (std::size_t cell = 0; cell < 60; ++cell) {
    if (cell <= 10 || cell >= 30) in_use.push_back(cell);
  }
  for (int layer = 0; layer < 2; ++layer) {
    for (const std::string& name : {k_name(layer), v_name(layer)}) {
      const std::string before = KvProbe::whole(from->graph.roots[name]);
      const std::string after = KvProbe::whole(to->graph.roots[name]);
      const std::size_t row = from->graph.roots[name]->nb[1];
      for (std::size_t i = 0; i < in_use.size(); ++i) {
        ASSERT_EQ(before.substr(in_use[i] * row, row), after.substr(i * row, row))
            << name << ": cell " << in_use[i] << " should have become cell " << i << ' '
            << engine();
      }
    }
  }
}

TEST(LlamaContract, TheSoftCapAndTheAlibiBiasStandInTheAttentionNode) {
  const ModelPtr gemma2 = make_tiny_model({.architecture = "gemma2", .sliding_window = 32});
  const auto capped = evaluate(gemma2.get(), noise_tokens(3, 96));
  ASSERT_EQ(capped->graph.attentions[k_name(1)].size(), 1u) << engine();
  EXPECT_EQ(float_param(capped->graph.attentions[k_name(1)].front().node, 2), 1.0f) << engine();
  EXPECT_EQ(float_param(capped->graph.attentions[k_name(1)].front().node, 0), 1.0f) << engine();

  const ModelPtr bloom = make_tiny_model({.architecture = "bloom", .n_head_kv = 4});
  const auto biased = evaluate(bloom.get(), noise_tokens(3, 96));
  ASSERT_EQ(biased->graph.attentions[k_name(1)].size(), 1u) << engine();
  EXPECT_EQ(float_param(biased->graph.attentions[k_name(1)].front().node, 1), 8.0f) << engine();
}

TEST(LlamaContract, SlidingWindowLayersHaveTheirOwnSmallerCellsRoundedUpTo256) {
  const ModelPtr model =
      make_tiny_model({.architecture = "gemma3", .n_layer = 2, .sliding_window = 32});
  EXPECT_EQ(llama_model_n_swa(model.get()), 32) << engine();
  llama_context_params params = context_params();
  GraphRecorder graph;
  graph.install(params);
  params.swa_full = false;
  const ContextPtr context = plain_context(model.get(), params, 1024, 64);
  ASSERT_EQ(decode(context.get(), noise_tokens(3, 96)), 0);
  EXPECT_EQ(graph.roots[k_name(0)]->ne[1], 256) << "window + micro-batch, " << engine();
  EXPECT_EQ(graph.roots[k_name(1)]->ne[1], 1024) << engine();
}

TEST(LlamaContract, WithOneLatentHeadVIsAViewOfK) {
  const ModelPtr model = make_tiny_model({.architecture = "deepseek2", .mla = true});
  const auto run = evaluate(model.get(), noise_tokens(3, 96));
  EXPECT_FALSE(run->graph.roots.contains(v_name(0))) << engine();
  ASSERT_EQ(run->graph.attentions[k_name(0)].size(), 1u) << engine();
  const auto& a = run->graph.attentions[k_name(0)].front();
  EXPECT_EQ(a.k.ne[2], 1) << engine();
  EXPECT_EQ(a.q.ne[2], 4) << engine();
  EXPECT_EQ(a.v_root, a.k_root) << engine();
}

TEST(LlamaContract, TheModelSaysWhetherItIsRecurrentAndHowFarItLooks) {
  EXPECT_FALSE(llama_model_is_recurrent(test_model())) << engine();
  EXPECT_FALSE(llama_model_is_hybrid(test_model())) << engine();
  EXPECT_EQ(llama_model_n_swa(test_model()), 0) << engine();
  EXPECT_EQ(llama_model_n_ctx_train(test_model()), 8192) << engine();
  const ModelPtr mamba = make_tiny_model({.architecture = "mamba"});
  EXPECT_TRUE(llama_model_is_recurrent(mamba.get())) << engine();
}

}  // namespace
}  // namespace morphkv::test

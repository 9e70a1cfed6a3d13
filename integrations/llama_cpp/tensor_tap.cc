#include "tensor_tap.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace morphkv::llama_cpp {
namespace {

// The layer number in a cache tensor's name, or -1: "cache_k_l12" -> 12.
int cache_layer(const ggml_tensor* tensor, const char* format) {
  int layer = -1;
  int end = 0;
  if (tensor == nullptr || std::sscanf(tensor->name, format, &layer, &end) != 1) return -1;
  return layer;
}

int k_layer(const ggml_tensor* tensor) { return cache_layer(tensor, "cache_k_l%d%n"); }
int v_layer(const ggml_tensor* tensor) { return cache_layer(tensor, "cache_v_l%d%n"); }

float float_param(const ggml_tensor* node, int i) {
  float value;
  std::memcpy(&value, node->op_params + i, sizeof(value));
  return value;
}

}  // namespace

void TensorTap::install(llama_context_params& params) {
  if (params.cb_eval != callback || params.cb_eval_user_data != this) {
    user_callback_ = params.cb_eval;
    user_data_ = params.cb_eval_user_data;
  }
  params.cb_eval = callback;
  params.cb_eval_user_data = this;
}

void TensorTap::start_survey() {
  surveying_ = true;
  surveyed_.clear();
}

std::string TensorTap::finish_survey(llama_memory_t memory, int n_cells, int sequences) {
  surveying_ = false;
  memory_ = memory;
  layers_.clear();
  std::sort(surveyed_.begin(), surveyed_.end(),
            [](const TappedLayer& a, const TappedLayer& b) { return a.index < b.index; });
  for (const TappedLayer& layer : surveyed_) {
    const std::string name = "layer " + std::to_string(layer.index);
    if (layer.attention_nodes == 0)
      return name + " has no flash attention operation with f32 queries that reads its keys";
    if (layer.attention_nodes > 1) return name + " shares its keys with another layer";
    if (layer.k->ne[2] != sequences) {
      return name + " keeps " + std::to_string(layer.k->ne[2]) + " sequences apart, " +
             std::to_string(sequences) + " are due";
    }
    if (layer.max_alibi_bias > 0.0f)
      return "the model uses ALiBi, whose bias depends on the engine's positions";
    if (layer.k->ne[1] == n_cells) layers_.push_back(layer);
  }
  if (layers_.empty())
    return "no K tensor named cache_k_l<layer> with " + std::to_string(n_cells) +
           " cells was found";
  calls_.resize(static_cast<std::size_t>(sequences));
  for (int id = 0; id < sequences; ++id) keep_queries(id, call_of(id).window);
  return "";
}

void TensorTap::keep_queries(llama_seq_id sequence, int window) {
  SequenceCall& call = call_of(sequence);
  call.window = window;
  copies_queries_ =
      std::ranges::any_of(calls_, [](const SequenceCall& each) { return each.window > 0; });
  call.rings.assign(layers_.size(), {});
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const std::size_t floats = static_cast<std::size_t>(window) * token_floats(i);
    call.rings[i].data.resize(floats);
    call.rings[i].ordered.resize(floats);
  }
  clear_call(sequence);
}

std::size_t TensorTap::token_floats(std::size_t layer) const {
  const TappedLayer& shape = layers_[layer];
  return static_cast<std::size_t>(shape.n_head_kv) *
         static_cast<std::size_t>(shape.group * shape.dim_k);
}

QueriesView TensorTap::queries(llama_seq_id sequence, std::size_t layer, int head, int tokens) {
  const TappedLayer& shape = layers_[layer];
  const int window = call_of(sequence).window;
  QueryRing& ring = call_of(sequence).rings[layer];
  const std::size_t floats = token_floats(layer);
  const std::int64_t last = std::min<std::int64_t>(ring.seen, tokens);
  const std::int64_t first = std::max<std::int64_t>(0, std::max(last, ring.seen) - window);
  if (head == 0) {
    for (std::int64_t t = first; t < last; ++t) {
      std::copy_n(ring.data.begin() + static_cast<std::ptrdiff_t>((t % window) * floats), floats,
                  ring.ordered.begin() + static_cast<std::ptrdiff_t>((t - first) * floats));
    }
  }
  return {.data = ring.ordered.data() + static_cast<std::size_t>(head * shape.group * shape.dim_k),
          .token_stride = static_cast<std::int64_t>(floats),
          .group_stride = shape.dim_k,
          .tokens = static_cast<int>(std::max<std::int64_t>(0, last - first)),
          .group = shape.group,
          .dim = shape.dim_k};
}

void TensorTap::clear_call(llama_seq_id sequence) {
  SequenceCall& call = call_of(sequence);
  call.cells.clear();
  call.labels.clear();
  call.first_micro_batch = 0;
  for (QueryRing& ring : call.rings) ring.seen = 0;
}

TensorTap::Call TensorTap::call(llama_seq_id sequence) const {
  const SequenceCall& own = call_of(sequence);
  Call call{own.cells, own.labels, own.first_micro_batch, own.window, {}};
  for (std::size_t i = 0; i < own.rings.size(); ++i) {
    const QueryRing& ring = own.rings[i];
    const auto floats = static_cast<std::ptrdiff_t>(token_floats(i));
    std::vector<float>& queries = call.queries.emplace_back();
    for (std::int64_t t = std::max<std::int64_t>(0, ring.seen - own.window); t < ring.seen; ++t) {
      const auto query = ring.data.begin() + (t % own.window) * floats;
      queries.insert(queries.end(), query, query + floats);
    }
  }
  return call;
}

void TensorTap::go_on(llama_seq_id sequence, const Call& call) {
  SequenceCall& own = call_of(sequence);
  own.cells = call.cells;
  own.labels = call.labels;
  own.first_micro_batch = call.first_micro_batch;
  for (std::size_t i = 0; i < own.rings.size() && own.window > 0; ++i) {
    const auto floats = static_cast<std::ptrdiff_t>(token_floats(i));
    const auto tokens = static_cast<std::int64_t>(own.cells.size());
    const auto kept = std::ssize(call.queries[i]) / floats;
    for (std::int64_t k = std::max<std::int64_t>(0, kept - own.window); k < kept; ++k) {
      std::copy_n(call.queries[i].begin() + k * floats, floats,
                  own.rings[i].data.begin() + ((tokens - kept + k) % own.window) * floats);
    }
    own.rings[i].seen = tokens;
  }
}

bool TensorTap::callback(ggml_tensor* node, bool ask, void* self) {
  return static_cast<TensorTap*>(self)->on_node(node, ask);
}

bool TensorTap::on_node(ggml_tensor* node, bool ask) {
  if (ask) {
    if (surveying_) survey(node);
    user_asked_ = user_callback_ != nullptr && user_callback_(node, true, user_data_);
    return user_asked_ || wants(node);
  }
  if (wants(node)) {
    if (node->op == GGML_OP_SET_ROWS) {
      note_cells(node);
    } else {
      copy_queries(node);
    }
  }
  return user_asked_ ? user_callback_(node, false, user_data_) : true;
}

bool TensorTap::wants(const ggml_tensor* node) const {
  if (surveying_ || layers_.empty()) return false;
  if (node->op == GGML_OP_SET_ROWS) {
    return node->view_src == layers_.front().k;  // all layers write to the same cells
  }
  return copies_queries_ && node->op == GGML_OP_FLASH_ATTN_EXT &&
         layer_of(node->src[1]->view_src) >= 0;
}

void TensorTap::survey(ggml_tensor* node) {
  if (node->op == GGML_OP_SET_ROWS && node->src[1]->type == GGML_TYPE_I64) {
    if (const int index = k_layer(node->view_src); index >= 0) {
      surveyed_.push_back({.index = index, .k = node->view_src});
    }
  }
  if (node->op != GGML_OP_FLASH_ATTN_EXT) return;
  const ggml_tensor* q = node->src[0];
  const ggml_tensor* k = node->src[1];
  const ggml_tensor* v = node->src[2];
  for (TappedLayer& layer : surveyed_) {
    if (layer.k != k->view_src || q->type != GGML_TYPE_F32) continue;
    ++layer.attention_nodes;
    layer.v = v_layer(v->view_src) == layer.index ? v->view_src : nullptr;
    layer.dim_k = static_cast<int>(k->ne[0]);
    layer.dim_v = static_cast<int>(v->ne[0]);
    layer.n_head_kv = static_cast<int>(k->ne[2]);
    layer.group = static_cast<int>(q->ne[2] / k->ne[2]);
    layer.scale = float_param(node, 0);
    layer.max_alibi_bias = float_param(node, 1);
    layer.softcap = float_param(node, 2);
  }
}

// A cell's index counts through all sequences; the tokens of one stand together.
void TensorTap::note_cells(const ggml_tensor* node) {
  const ggml_tensor* indices = node->src[1];
  const std::int64_t n_cells = layers_.front().k->ne[1];
  indices_.resize(static_cast<std::size_t>(indices->ne[0]));
  ggml_backend_tensor_get(indices, indices_.data(), 0, ggml_nbytes(indices));
  parts_.clear();
  for (const std::int64_t index : indices_) {
    const auto sequence = static_cast<llama_seq_id>(index / n_cells);
    if (parts_.empty() || parts_.back().sequence != sequence) parts_.push_back({sequence, 0});
    ++parts_.back().tokens;
    call_of(sequence).cells.push_back(index % n_cells);
  }
  // The tokens of a micro-batch have consecutive labels, in the memory since before its graph runs.
  for (const Part& part : parts_) {
    SequenceCall& call = call_of(part.sequence);
    const llama_pos end = llama_memory_seq_pos_max(memory_, part.sequence) + 1;
    if (call.labels.empty()) call.first_micro_batch = part.tokens;
    for (int n = part.tokens; n > 0; --n) call.labels.push_back(end - n);
  }
}

void TensorTap::copy_queries(const ggml_tensor* node) {
  // Q is [dim, token, head, sequence], a permuted view: strides come from nb[].
  const ggml_tensor* q = node->src[0];
  const auto i = static_cast<std::size_t>(layer_of(node->src[1]->view_src));
  const std::byte* data = static_cast<const std::byte*>(q->data);
  if (!ggml_backend_buffer_is_host(q->buffer)) {
    const ggml_tensor* base = q->view_src != nullptr ? q->view_src : q;
    staging_.resize(ggml_nbytes(base));
    ggml_backend_tensor_get(base, staging_.data(), 0, staging_.size());
    data = staging_.data() + q->view_offs;
  }
  for (const Part& part : parts_) {
    SequenceCall& call = call_of(part.sequence);
    QueryRing& ring = call.rings[i];
    for (std::int64_t t = std::max(0, part.tokens - call.window); t < part.tokens; ++t) {
      float* out = ring.data.data() +
                   static_cast<std::size_t>(((ring.seen + t) % call.window) * q->ne[2] * q->ne[0]);
      for (std::int64_t h = 0; h < q->ne[2]; ++h, out += q->ne[0]) {
        std::memcpy(out, data + t * q->nb[1] + h * q->nb[2],
                    static_cast<std::size_t>(q->ne[0]) * sizeof(float));
      }
    }
    ring.seen += part.tokens;
    data += q->nb[3];
  }
}

int TensorTap::layer_of(const ggml_tensor* k) const {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].k == k) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace morphkv::llama_cpp

// Watches a llama.cpp context through an eval callback of its own and reads the K and V tensors. It
// shares nothing with the library's tensor tap: tests hold the library's books against what they
// see here. For contexts in host memory.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model_support.h"

namespace morphkv::test {

// What one attention layer of the engine looks like, as its last graph showed.
struct ProbedLayer {
  ggml_tensor* k = nullptr;  // [n_heads * dim_k, cells]
  ggml_tensor* v = nullptr;  // [n_heads * dim_v, cells]; null with one latent head
  int n_heads = 0;
  int dim_k = 0;
  int dim_v = 0;
  float scale = 0.0f;
  float softcap = 0.0f;
};

class KvProbe {
 public:
  // The queries of these layers are kept as well.
  explicit KvProbe(std::set<int> query_layers = {}) : query_layers_(std::move(query_layers)) {}
  KvProbe(const KvProbe&) = delete;
  KvProbe& operator=(const KvProbe&) = delete;

  // Sets `options` up to call the probe. It must outlive the context.
  void install(BoundOptions& options) {
    options.cb_eval = callback;
    options.cb_eval_user_data = this;
  }
  static bool callback(ggml_tensor* node, bool ask, void* self) {
    return static_cast<KvProbe*>(self)->on_node(node, ask);
  }

  const std::map<int, ProbedLayer>& layers() const { return layers_; }
  const ProbedLayer& layer(int index) const { return layers_.at(index); }
  // Cells that a layer's tokens were written to since forget().
  const std::vector<std::int64_t>& cells(int index) const { return cells_.at(index); }
  // [token][query head][dim] since forget(), of the layers asked for.
  using Query = std::vector<std::vector<double>>;
  const std::vector<Query>& queries(int index) const { return queries_.at(index); }
  // Cells that the engine's mask showed to the last token of its last micro-batch, ascending.
  const std::vector<int>& visible(int index) const { return visible_.at(index); }
  void forget() {
    for (auto& [index, cells] : cells_) cells.clear();
    for (auto& [index, queries] : queries_) queries.clear();
  }
  // Overwrites the cells noted after the first `kept`, which an aborted call has given back: when
  // their tokens come again, the same rows would stand in two places.
  void erase_cells_after(std::size_t kept) const {
    for (const auto& [index, cells] : cells_) {
      for (ggml_tensor* tensor : {layers_.at(index).k, layers_.at(index).v}) {
        if (tensor == nullptr) continue;
        const std::string zero(tensor->nb[1], '\0');
        for (std::size_t i = kept; i < cells.size(); ++i) {
          ggml_backend_tensor_set(tensor, zero.data(),
                                  static_cast<std::size_t>(cells[i]) * tensor->nb[1], zero.size());
        }
      }
    }
  }
  // For a new context: its tensors are others.
  void forget_tensors() {
    forget();
    layers_.clear();
  }

  static std::string whole(const ggml_tensor* tensor) {
    std::string bytes(ggml_nbytes(tensor), '\0');
    ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
    return bytes;
  }

 private:
  static int number(const ggml_tensor* tensor, const char* format) {
    int index = -1;
    return tensor != nullptr && std::sscanf(tensor->name, format, &index) == 1 ? index : -1;
  }

  bool on_node(ggml_tensor* node, bool ask) {
    if (node->op == GGML_OP_SET_ROWS) {
      const int index = number(node->view_src, "cache_k_l%d");
      if (index < 0) return !ask;
      if (!ask) note_cells(index, node);
      return true;
    }
    if (node->op == GGML_OP_FLASH_ATTN_EXT) {
      const int index = number(node->src[1]->view_src, "cache_k_l%d");
      if (index < 0) return !ask;
      if (!ask) note_attention(index, node);
      return true;
    }
    return !ask;
  }

  void note_cells(int index, const ggml_tensor* node) {
    auto& cells = cells_[index];
    const ggml_tensor* indices = node->src[1];
    const std::size_t first = cells.size();
    cells.resize(first + static_cast<std::size_t>(indices->ne[0]));
    ggml_backend_tensor_get(indices, cells.data() + first, 0, ggml_nbytes(indices));
  }

  void note_attention(int index, const ggml_tensor* node) {
    const ggml_tensor* q = node->src[0];
    ProbedLayer& layer = layers_[index];
    layer.k = node->src[1]->view_src;
    layer.v = node->src[2]->view_src == layer.k ? nullptr : node->src[2]->view_src;
    layer.dim_k = static_cast<int>(node->src[1]->ne[0]);
    layer.n_heads = static_cast<int>(node->src[1]->ne[2]);
    layer.dim_v = static_cast<int>(node->src[2]->ne[0]);
    std::memcpy(&layer.scale, node->op_params, sizeof(float));
    std::memcpy(&layer.softcap, node->op_params + 2, sizeof(float));
    note_mask(index, node->src[3], q->ne[1] - 1);
    if (!query_layers_.contains(index)) return;
    auto& queries = queries_[index];
    for (std::int64_t t = 0; t < q->ne[1]; ++t) {
      Query& query = queries.emplace_back();
      for (std::int64_t h = 0; h < q->ne[2]; ++h) {
        const auto* values = reinterpret_cast<const float*>(static_cast<const char*>(q->data) +
                                                            t * q->nb[1] + h * q->nb[2]);
        query.emplace_back(values, values + q->ne[0]);
      }
    }
  }

  void note_mask(int index, const ggml_tensor* mask, std::int64_t token) {
    const auto* row = reinterpret_cast<const ggml_fp16_t*>(static_cast<const char*>(mask->data) +
                                                           token * mask->nb[1]);
    auto& visible = visible_[index];
    visible.clear();
    for (std::int64_t cell = 0; cell < mask->ne[0]; ++cell) {
      if (ggml_fp16_to_fp32(row[cell]) == 0.0f) visible.push_back(static_cast<int>(cell));
    }
  }

  std::set<int> query_layers_;
  std::map<int, ProbedLayer> layers_;
  std::map<int, std::vector<std::int64_t>> cells_;
  std::map<int, std::vector<Query>> queries_;
  std::map<int, std::vector<int>> visible_;
};

// A side store of the K and V row of every token ever written, by layer, head and position, and the
// comparison with what an evictor says it holds.
class RowBook {
 public:
  RowBook(const KvProbe& probe, const llama_cpp::Evictor& evictor) : probe_(probe) {
    for (const auto& layer : evictor.snapshot()) {
      layers_[layer.index].resize(layer.rows.heads.size());
    }
  }

  // After llama_decode() and before after_decode(): the first `tokens` of the cells that the probe
  // saw hold the rows of first, first + 1, ...
  void record(Position first, std::size_t tokens) {
    for (auto& [index, heads] : layers_) {
      const auto cells = std::span(probe_.cells(index)).first(tokens);
      const Rows rows(probe_.layer(index));
      for (std::size_t h = 0; h < heads.size(); ++h) {
        for (std::size_t i = 0; i < cells.size(); ++i) {
          const auto position = first + static_cast<Position>(i);
          const std::string row(rows.row(static_cast<int>(h), static_cast<int>(cells[i])));
          heads[h].position_of[row] = position;
          heads[h].row_of[position] = row;
        }
      }
    }
  }

  // Every row that the evictor says it holds is there bit for bit, and the tensors hold no other
  // row ever written. The latter needs poison_freed_rows, else rows stay where they were.
  void expect_matches(const llama_cpp::Evictor& evictor, const std::string& when,
                      bool freed_rows_are_poisoned) const {
    for (const auto& layer : evictor.snapshot()) {
      const Rows rows(probe_.layer(layer.index));
      for (std::size_t h = 0; h < layer.rows.heads.size(); ++h) {
        const auto& held = layer.rows.heads[h];
        const Head& book = layers_.at(layer.index)[h];
        const std::string where =
            when + ", layer " + std::to_string(layer.index) + ", head " + std::to_string(h);
        ASSERT_EQ(book.position_of.size(), book.row_of.size())
            << where << ": two tokens have the same row, so this test cannot tell them apart";
        std::map<int, Position> said;
        for (std::size_t rank = 0; rank < held.slots.size(); ++rank) {
          const int slot = held.slots[rank];
          const Position position = held.positions[rank];
          said[slot] = position;
          ASSERT_EQ(rows.row(static_cast<int>(h), slot), book.row_of.at(position))
              << where << ": cell " << slot << " does not hold the row of position " << position
              << " but " << book.describe(rows.row(static_cast<int>(h), slot));
        }
        if (!freed_rows_are_poisoned) continue;
        std::map<int, Position> found;
        for (int cell = 0; cell < layer.rows.max_slots; ++cell) {
          const auto at = book.position_of.find(std::string(rows.row(static_cast<int>(h), cell)));
          if (at != book.position_of.end()) found[cell] = at->second;
        }
        ASSERT_EQ(found, said) << where;
      }
    }
  }

  // The row of one token, as it was written. [bytes of K, bytes of V]
  const std::string& row(int layer, int head, Position position) const {
    return layers_.at(layer)[static_cast<std::size_t>(head)].row_of.at(position);
  }

 private:
  // Both tensors of a layer as they are now.
  class Rows {
   public:
    explicit Rows(const ProbedLayer& layer)
        : k_(KvProbe::whole(layer.k)),
          k_row_(layer.k->nb[1]),
          k_head_(ggml_row_size(layer.k->type, layer.dim_k)) {
      if (layer.v == nullptr) return;
      v_ = KvProbe::whole(layer.v);
      v_row_ = layer.v->nb[1];
      v_head_ = ggml_row_size(layer.v->type, layer.dim_v);
    }
    // Valid until the next call.
    std::string_view row(int head, int cell) const {
      const auto c = static_cast<std::size_t>(cell);
      const auto h = static_cast<std::size_t>(head);
      buffer_.assign(k_, c * k_row_ + h * k_head_, k_head_);
      if (v_head_ > 0) buffer_.append(v_, c * v_row_ + h * v_head_, v_head_);
      return buffer_;
    }

   private:
    std::string k_;
    std::string v_;
    std::size_t k_row_;
    std::size_t k_head_;
    std::size_t v_row_ = 0;
    std::size_t v_head_ = 0;
    mutable std::string buffer_;
  };

  struct Head {
    std::unordered_map<std::string, Position> position_of;
    std::map<Position, std::string> row_of;
    std::string describe(std::string_view row) const {
      const auto at = position_of.find(std::string(row));
      return at == position_of.end() ? "no row ever written"
                                     : "that of position " + std::to_string(at->second);
    }
  };

  const KvProbe& probe_;
  std::map<int, std::vector<Head>> layers_;
};

// A bounded context under the eyes of a probe: each piece that is fed is checked.
class WatchedStream {
 public:
  WatchedStream(llama_model* model, BoundOptions options, std::set<int> query_layers = {})
      : probe_(std::move(query_layers)),
        options_(watched(options)),
        bounded_(model, options_),
        book_(probe_, bounded_.evictor()) {
    probe_.forget();
  }

  void feed(std::span<const llama_token> tokens) {
    ASSERT_EQ(try_feed(tokens), 0) << "llama_decode, " << engine();
  }

  // The same with a call that may fail. Returns the status of llama_decode().
  int try_feed(std::span<const llama_token> tokens) {
    const int status = feed_unevicted(tokens);
    evict();
    return status;
  }

  // llama_decode() alone; several of these and one evict() are one call of the rule.
  int feed_unevicted(std::span<const llama_token> tokens) {
    const auto before = bounded_.evictor().snapshot();
    const auto evaluated = probe_.cells(before.front().index).size();
    const int status = decode(bounded_.context(), tokens);
    const Position first = bounded_.evictor().offset();
    kept_ = static_cast<std::size_t>(newest_label(bounded_.context()) + 1 - first);
    if (status == 0) {
      EXPECT_EQ(kept_, evaluated + tokens.size());
      for (const auto& layer : before) expect_sees(layer, first);
    }
    return status;
  }

  // The tokens that the engine kept enter the book, the evictor has its turn.
  void evict() {
    book_.record(bounded_.evictor().offset(), kept_);
    probe_.erase_cells_after(kept_);
    bounded_.evictor().after_decode();
    probe_.forget();
    kept_ = 0;
    check("after token " + std::to_string(bounded_.evictor().offset() - 1));
  }

  // To a context with room for calls of `call_tokens`, as the session does after a whole prompt.
  void move(int call_tokens) {
    const auto rows = bounded_.evictor().checkpoint();
    bounded_.drop_context();
    probe_.forget_tensors();
    options_.call_tokens = call_tokens;
    bounded_.make_context(options_);
    probe_.forget();
    bounded_.evictor().restore(rows);
    check("after moving to another context");
  }

  void check(const std::string& when) {
    expect_consistent(bounded_, when);
    book_.expect_matches(bounded_.evictor(), when, options_.poison_freed_rows);
  }

  KvProbe& probe() { return probe_; }
  Bounded& bounded() { return bounded_; }
  RowBook& book() { return book_; }
  llama_cpp::Evictor& evictor() { return bounded_.evictor(); }

 private:
  BoundOptions& watched(BoundOptions& options) {
    probe_.install(options);
    return options;
  }
  // The last token saw the rows held before the call and those of the call, and nothing else.
  void expect_sees(const llama_cpp::BoundLayer& before, Position first) const {
    std::vector<int> expected = before.rows.heads.front().slots;
    for (const std::int64_t cell : probe_.cells(before.index)) {
      expected.push_back(static_cast<int>(cell));
    }
    std::sort(expected.begin(), expected.end());
    ASSERT_EQ(probe_.visible(before.index), expected)
        << "layer " << before.index << ", call at token " << first << ", " << engine();
  }

  KvProbe probe_;
  BoundOptions options_;
  Bounded bounded_;
  RowBook book_;
  std::size_t kept_ = 0;  // tokens evaluated since the last evict() that the engine has kept
};

}  // namespace morphkv::test

#include "kv_store.h"

#include <ggml-backend.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

namespace morphkv::llama_cpp {
namespace {

std::optional<DType> plain_dtype(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F16:
      return DType::kF16;
    case GGML_TYPE_BF16:
      return DType::kBF16;
    case GGML_TYPE_F32:
      return DType::kF32;
    default:
      return std::nullopt;
  }
}

bool can_convert(ggml_type type) {
  const ggml_type_traits* traits = ggml_get_type_traits(type);
  return type == GGML_TYPE_F32 ||
         (traits->to_float != nullptr && traits->from_float_ref != nullptr);
}

}  // namespace

KvStore::KvStore(const TappedLayer& layer, int sequence)
    : k_{layer.k, ggml_row_size(layer.k->type, layer.dim_k),
         static_cast<std::size_t>(sequence) * layer.k->nb[2]},
      v_{layer.v},
      host_(ggml_backend_buffer_is_host(layer.k->buffer) &&
            (layer.v == nullptr || ggml_backend_buffer_is_host(layer.v->buffer))),
      n_head_kv_(layer.n_head_kv),
      dim_k_(layer.dim_k) {
  if (layer.v == nullptr) return;
  v_.head_bytes = ggml_row_size(layer.v->type, layer.dim_v);
  v_.begin = static_cast<std::size_t>(sequence) * layer.v->nb[2];
}

std::string KvStore::unsupported(const TappedLayer& layer) {
  const auto check = [&](const ggml_tensor* tensor, int dim, const char* what) -> std::string {
    if (tensor == nullptr) return "";
    const std::string name = std::string(what) + " of layer " + std::to_string(layer.index);
    if (tensor->ne[0] != static_cast<std::int64_t>(layer.n_head_kv) * dim) {
      return name + ": " + std::to_string(tensor->ne[0]) + " values per cell are not " +
             std::to_string(layer.n_head_kv) + " heads of " + std::to_string(dim);
    }
    if (dim % ggml_blck_size(tensor->type) != 0) {
      return name + ": head dimension " + std::to_string(dim) + " is no multiple of the block of " +
             std::to_string(ggml_blck_size(tensor->type)) + " of type " +
             ggml_type_name(tensor->type);
    }
    if (!can_convert(tensor->type)) {
      return name + ": type " + ggml_type_name(tensor->type) + " cannot be converted to float";
    }
    return "";
  };
  const std::string k = check(layer.k, layer.dim_k, "K");
  return k.empty() ? check(layer.v, layer.dim_v, "V") : k;
}

std::span<const RowsView> KvStore::keys(std::span<const int> cells, KvScratch& scratch) const {
  const auto dtype = plain_dtype(k_.tensor->type);
  scratch.views.clear();
  const std::byte* base = static_cast<const std::byte*>(k_.tensor->data) + k_.begin;
  if (!host_) {
    const int limit = 1 + *std::max_element(cells.begin(), cells.end());
    const std::size_t bytes = static_cast<std::size_t>(limit) * k_.tensor->nb[1];
    scratch.bytes.resize(std::max(scratch.bytes.size(), bytes));
    ggml_backend_tensor_get(k_.tensor, scratch.bytes.data(), k_.begin, bytes);
    base = scratch.bytes.data();
  }
  if (dtype) {
    for (int h = 0; h < n_head_kv_; ++h) {
      scratch.views.push_back({.data = base + k_.offset(h, 0) - k_.begin,
                               .dtype = *dtype,
                               .slot_stride = static_cast<std::int64_t>(k_.tensor->nb[1]),
                               .dim = dim_k_});
    }
    return scratch.views;
  }
  const ggml_to_float_t to_float = ggml_get_type_traits(k_.tensor->type)->to_float;
  const auto head_floats = static_cast<std::size_t>(k_.tensor->ne[1]) * dim_k_;
  scratch.keys.resize(std::max(scratch.keys.size(), head_floats * n_head_kv_));
  for (int h = 0; h < n_head_kv_; ++h) {
    float* out = scratch.keys.data() + static_cast<std::size_t>(h) * head_floats;
    for (const int cell : cells) {
      to_float(base + k_.offset(h, cell) - k_.begin, out + static_cast<std::size_t>(cell) * dim_k_,
               dim_k_);
    }
    scratch.views.push_back({.data = reinterpret_cast<const std::byte*>(out),
                             .dtype = DType::kF32,
                             .slot_stride = static_cast<std::int64_t>(sizeof(float)) * dim_k_,
                             .dim = dim_k_});
  }
  return scratch.views;
}

void KvStore::apply(int head, std::span<const RowMove> moves, KvScratch& scratch) const {
  for (const Slice& slice : {k_, v_}) {
    if (slice.tensor == nullptr) continue;
    scratch.bytes.resize(std::max(scratch.bytes.size(), slice.head_bytes));
    for (const RowMove& move : moves) {
      read(slice, slice.offset(head, move.from), slice.head_bytes, scratch.bytes.data());
      write(slice, slice.offset(head, move.to), slice.head_bytes, scratch.bytes.data());
    }
  }
}

void KvStore::poison(std::span<const int> cells, float value, KvScratch& scratch) const {
  for (const Slice& slice : {k_, v_}) {
    if (slice.tensor == nullptr) continue;
    const auto values = static_cast<std::size_t>(slice.tensor->ne[0]);
    const std::vector<float> row(values, value);
    const std::size_t bytes = ggml_row_size(slice.tensor->type, slice.tensor->ne[0]);
    scratch.bytes.resize(std::max(scratch.bytes.size(), bytes));
    if (slice.tensor->type == GGML_TYPE_F32) {
      std::memcpy(scratch.bytes.data(), row.data(), bytes);
    } else {
      ggml_get_type_traits(slice.tensor->type)
          ->from_float_ref(row.data(), scratch.bytes.data(), static_cast<std::int64_t>(values));
    }
    for (const int cell : cells) write(slice, slice.offset(0, cell), bytes, scratch.bytes.data());
  }
}

std::size_t KvStore::row_bytes() const { return k_.head_bytes + v_.head_bytes; }

std::size_t KvStore::allocated_bytes() const {
  return ggml_nbytes(k_.tensor) + (v_.tensor != nullptr ? ggml_nbytes(v_.tensor) : 0);
}

void KvStore::read(const Slice& slice, std::size_t offset, std::size_t bytes,
                   std::byte* out) const {
  if (host_) {
    std::memcpy(out, static_cast<const std::byte*>(slice.tensor->data) + offset, bytes);
  } else {
    ggml_backend_tensor_get(slice.tensor, out, offset, bytes);
  }
}

void KvStore::write(const Slice& slice, std::size_t offset, std::size_t bytes,
                    const std::byte* in) const {
  if (host_) {
    std::memcpy(static_cast<std::byte*>(slice.tensor->data) + offset, in, bytes);
  } else {
    ggml_backend_tensor_set(slice.tensor, in, offset, bytes);
  }
}

}  // namespace morphkv::llama_cpp

// Strided, non-owning views of key and query rows. Shapes are written in brackets, outermost axis
// first. Views do not check their memory; whoever makes one guarantees that it stays valid while it
// is used.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace morphkv {

// kF64 only comes in from outside (ArrayView); rows are never stored so.
enum class DType : std::uint8_t { kF16, kBF16, kF32, kF64 };

// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
}

// Somebody's array: [batch, head, token, dim] with any strides, negative and zero ones included.
struct ArrayView {
  const std::byte* data = nullptr;
  DType dtype = DType::kF16;
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> strides{};  // bytes

  // One array without gaps.
  static ArrayView contiguous(const void* data, DType dtype, std::array<std::int64_t, 4> shape) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    return {
        static_cast<const std::byte*>(data),
        dtype,
        shape,
        {shape[1] * shape[2] * shape[3] * size, shape[2] * shape[3] * size, shape[3] * size, size}};
  }
};

// Keys or values of one KV head: [slot, dim], the elements of a row contiguous.
struct RowsView {
  const std::byte* data = nullptr;
  DType dtype = DType::kF16;
  std::int64_t slot_stride = 0;  // bytes from one slot to the next
  int dim = 0;                   // D

  const std::byte* row(int slot) const { return data + slot * slot_stride; }
};

// Queries of the group that reads one KV head, oldest token first: [token, group, dim], float.
struct QueriesView {
  const float* data = nullptr;
  std::int64_t token_stride = 0;  // elements from one token to the next
  std::int64_t group_stride = 0;  // elements from one query head to the next
  int tokens = 0;
  int group = 0;  // G, query heads per KV head
  int dim = 0;    // D

  const float* query(int token, int g) const {
    return data + token * token_stride + g * group_stride;
  }
};

// The rows that a call brings to one head.
struct NewRows {
  std::span<const int> slots;  // [token] where they lie
  RowsView keys;               // [slot, dim] all rows of the head, old and new
  QueriesView queries;         // [token, group, dim] of the last queries.tokens tokens of the call
  float scale = 1.0f;          // of query . key in the model's attention
  float softcap = 0.0f;        // soft cap of the model's attention logits, 0 = none
};

}  // namespace morphkv

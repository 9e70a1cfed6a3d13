// Inputs of the tests: the generator of the field cases, random rows, half-precision conversions,
// streams of tokens, and rows stored with the strides that a host may have. Knows nothing of the
// rule.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <numbers>
#include <span>
#include <utility>
#include <vector>

#include "morphkv/tensor_view.h"

namespace morphkv::test {

// ---------------------------------------------------------------- numbers

// Nearest float16, ties to even; what is beyond its range saturates at 65504.
inline std::uint16_t to_f16(double value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const double size = std::fabs(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7E00);
  if (size >= 65504.0) return static_cast<std::uint16_t>(sign | 0x7BFF);
  // Subnormals share the exponent of the least normal number.
  const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  // `units` is 1024 .. 2048 for normal numbers; a carry moves into the exponent by itself.
  const int bits = units < 1024 ? units : (exponent + 15) * 1024 + (units - 1024);
  return static_cast<std::uint16_t>(sign | bits);
}

inline float from_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) {
    return fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : sign * std::numeric_limits<float>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

// Nearest bfloat16, ties to even. Not for NaN.
inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float from_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// What is left of `value` once it is stored as `dtype`.
inline float stored_as(DType dtype, float value) {
  switch (dtype) {
    case DType::kF16:
      return from_f16(to_f16(value));
    case DType::kBF16:
      return from_bf16(to_bf16(value));
    case DType::kF32:
    case DType::kF64:
      break;
  }
  return value;
}

// SplitMix64 (Steele et al., OOPSLA 2014): cheap to make, the same with every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  int between(int low, int high) {                                          // both included
    return low + static_cast<int>(uniform() * (high - low + 1.0));
  }
  bool coin() { return between(0, 1) == 1; }
  // Box and Muller's.
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int>(choices.size()) - 1)];
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (int i = static_cast<int>(values.size()) - 1; i > 0; --i) {
      std::swap(values[static_cast<std::size_t>(i)],
                values[static_cast<std::size_t>(between(0, i))]);
    }
  }

 private:
  std::uint64_t bits() {
    std::uint64_t x = state_ += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }

  std::uint64_t state_;
};

// ---------------------------------------------------------------- streams

// What the tokens of one layer bring, one after the other.
struct Stream {
  int tokens = 0;
  int heads = 0;
  int group = 0;  // 0: no queries
  int dim = 0;
  std::vector<float> keys = {};         // [token, head, dim]
  std::vector<float> queries = {};      // per head and in any order of axes, see the strides
  std::int64_t query_head_stride = 0;   // elements
  std::int64_t query_token_stride = 0;  // elements
  std::int64_t query_group_stride = 0;  // elements

  std::span<float> key(int token, int head) {
    return std::span(keys).subspan(key_offset(token, head), static_cast<std::size_t>(dim));
  }
  std::span<const float> key(int token, int head) const {
    return std::span(keys).subspan(key_offset(token, head), static_cast<std::size_t>(dim));
  }
  const float* query_data(int token, int head) const {
    return queries.data() + head * query_head_stride + token * query_token_stride;
  }
  std::span<const float> query(int token, int head, int g) const {
    return {query_data(token, head) + g * query_group_stride, static_cast<std::size_t>(dim)};
  }

 private:
  std::size_t key_offset(int token, int head) const {
    return (static_cast<std::size_t>(token) * static_cast<std::size_t>(heads) +
            static_cast<std::size_t>(head)) *
           static_cast<std::size_t>(dim);
  }
};

// GEN(T, H, D) of the field cases; exact in float16.
inline Stream gen_stream(int tokens, int heads, int dim) {
  Stream stream{.tokens = tokens, .heads = heads, .dim = dim};
  std::uint64_t x = 1;
  for (int i = 0; i < tokens * heads * dim; ++i) {
    x = (1103515245 * x + 12345) & 0x7FFFFFFF;
    stream.keys.push_back(static_cast<float>((x >> 16) & 255) / 128.0f - 1.0f);
  }
  return stream;
}

struct StreamShape {
  int tokens = 100;
  int heads = 1;
  int group = 0;
  int dim = 16;
  DType dtype = DType::kF16;
  double spread = 1.0;  // standard deviation of every number
};

// Normal numbers, exact in shape.dtype; the queries lie [token, head, group, dim] or [head, group,
// token, dim].
inline Stream random_stream(const StreamShape& shape, Random& random) {
  Stream stream{
      .tokens = shape.tokens, .heads = shape.heads, .group = shape.group, .dim = shape.dim};
  const auto n_keys = static_cast<std::size_t>(shape.tokens) * shape.heads * shape.dim;
  for (std::size_t i = 0; i < n_keys; ++i) {
    stream.keys.push_back(
        stored_as(shape.dtype, static_cast<float>(shape.spread * random.normal())));
  }
  for (std::size_t i = 0; i < n_keys * static_cast<std::size_t>(shape.group); ++i) {
    stream.queries.push_back(static_cast<float>(shape.spread * random.normal()));
  }
  if (random.coin()) {
    stream.query_group_stride = shape.dim;
    stream.query_head_stride = std::int64_t{shape.group} * shape.dim;
    stream.query_token_stride = stream.query_head_stride * shape.heads;
  } else {
    stream.query_token_stride = shape.dim;
    stream.query_group_stride = std::int64_t{shape.tokens} * shape.dim;
    stream.query_head_stride = stream.query_group_stride * shape.group;
  }
  return stream;
}

// ---------------------------------------------------------------- stored rows

// What a debug build writes into freed rows (field case 5).
inline constexpr float kPoison = 3e4f;

struct StoreLayout {
  DType dtype = DType::kF16;
  int gap = 0;            // elements between two rows; they hold NaN, so that reading them shows
  bool reversed = false;  // slot 0 lies last
};

// The rows of one head as a host holds them: [slot, dim]. Nothing lies behind the last one, so that
// a sanitizer sees a read beyond it. Rows never written hold kPoison.
class StoredRows {
 public:
  StoredRows(StoreLayout layout, int slots, int dim)
      : layout_(layout),
        slots_(slots),
        dim_(dim),
        bytes_(size_of(layout.dtype) *
               (static_cast<std::size_t>(slots - 1) * static_cast<std::size_t>(dim + layout.gap) +
                static_cast<std::size_t>(dim))) {
    const std::size_t elements = bytes_.size() / size_of(layout.dtype);
    for (std::size_t i = 0; i < elements; ++i) store_nan(i);
    for (int slot = 0; slot < slots; ++slot) fill(slot, kPoison);
  }

  RowsView view() const {
    const std::int64_t stride =
        static_cast<std::int64_t>(size_of(layout_.dtype)) * (dim_ + layout_.gap);
    return {.data = bytes_.data() + (layout_.reversed ? stride * (slots_ - 1) : 0),
            .dtype = layout_.dtype,
            .slot_stride = layout_.reversed ? -stride : stride,
            .dim = dim_};
  }

  void set(int slot, std::span<const float> row) {
    for (int d = 0; d < dim_; ++d) store(element(slot, d), row[static_cast<std::size_t>(d)]);
  }
  void fill(int slot, float value) {
    for (int d = 0; d < dim_; ++d) store(element(slot, d), value);
  }
  void copy(int from, int to) { set(to, get(from)); }

  std::vector<float> get(int slot) const {
    std::vector<float> row;
    for (int d = 0; d < dim_; ++d) row.push_back(load(element(slot, d)));
    return row;
  }

 private:
  std::size_t element(int slot, int d) const {
    const int place = layout_.reversed ? slots_ - 1 - slot : slot;
    return static_cast<std::size_t>(place) * static_cast<std::size_t>(dim_ + layout_.gap) +
           static_cast<std::size_t>(d);
  }
  void store(std::size_t i, float value) {
    if (layout_.dtype == DType::kF32) {
      std::memcpy(bytes_.data() + 4 * i, &value, 4);
    } else {
      const std::uint16_t half = layout_.dtype == DType::kF16 ? to_f16(value) : to_bf16(value);
      std::memcpy(bytes_.data() + 2 * i, &half, 2);
    }
  }
  void store_nan(std::size_t i) {
    const std::uint64_t nan = 0x7FC07FC07FC07FC0;  // NaN as float, each quarter as bfloat16
    const std::uint16_t nan_f16 = 0x7E00;
    if (layout_.dtype == DType::kF16) {
      std::memcpy(bytes_.data() + 2 * i, &nan_f16, 2);
    } else {
      std::memcpy(bytes_.data() + size_of(layout_.dtype) * i, &nan, size_of(layout_.dtype));
    }
  }
  float load(std::size_t i) const {
    if (layout_.dtype == DType::kF32) {
      float value;
      std::memcpy(&value, bytes_.data() + 4 * i, 4);
      return value;
    }
    std::uint16_t half;
    std::memcpy(&half, bytes_.data() + 2 * i, 2);
    return layout_.dtype == DType::kF16 ? from_f16(half) : from_bf16(half);
  }

  StoreLayout layout_;
  int slots_;
  int dim_;
  std::vector<std::byte> bytes_;
};

}  // namespace morphkv::test

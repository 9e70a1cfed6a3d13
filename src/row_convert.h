// From a caller's array to stored rows: any strides and float type in, fp16 or bf16 out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "morphkv/tensor_view.h"

namespace morphkv {

// Largest finite fp16.
inline constexpr float kMaxF16 = 65504.0f;

// Rounds to nearest, ties to even. Beyond the range: infinity.
std::uint16_t to_f16(float value);
std::uint16_t to_bf16(float value);
// To float so that a second rounding gives what rounding `value` once would have given (round to
// odd).
float to_float_odd(double value);

struct RowReport {
  bool has_nan = false;
  // Values beyond the range of the stored type, infinities included, stored as its largest.
  std::int64_t saturated = 0;
};

// Writes tokens [0, S) of one (batch, head) of `array` to out [token, dim], stored as `stored`
// (kF16 or kBF16). On NaN it stops early; `out` then holds nothing of use.
RowReport write_rows(const ArrayView& array, std::int64_t batch, std::int64_t head, DType stored,
                     std::uint16_t* out);

// Whether rows stored as `stored` hold neither NaN nor infinity, as all that write_rows() wrote.
bool all_finite(std::span<const std::uint16_t> rows, DType stored);

// One token's vector of `head` to floats; false on NaN.
bool read_floats(const ArrayView& array, std::int64_t batch, std::int64_t head, std::int64_t token,
                 float* out);

}  // namespace morphkv

// fp16 and bf16 numbers of a stored row as floats, for the examples. An engine has its own.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "morphkv/tensor_view.h"

// Number `d` of a row.
inline float element(const std::byte* row, std::int64_t d, morphkv::DType dtype) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, row + 2 * d, sizeof bits);
  if (dtype == morphkv::DType::kBF16) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                   : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

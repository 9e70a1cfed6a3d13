#include "row_convert.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace morphkv {
namespace {

constexpr std::uint16_t kF16Infinity = 0x7C00;
constexpr std::uint16_t kBF16Infinity = 0x7F80;

constexpr std::uint16_t infinity_of(DType stored) {
  return stored == DType::kF16 ? kF16Infinity : kBF16Infinity;
}

bool is_nan(std::uint16_t bits, std::uint16_t infinity) { return (bits & 0x7FFF) > infinity; }

// A finite value for one that is not NaN; counts what had to be cut. The largest finite number
// stands just before infinity.
std::uint16_t saturate(std::uint16_t half, std::uint16_t infinity, std::int64_t& saturated) {
  if ((half & 0x7FFF) != infinity) return half;
  ++saturated;
  return static_cast<std::uint16_t>(half - 1);
}

template <typename T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// One element as float, and whether it is NaN. bf16 and fp16 go through float exactly.
float element(const std::byte* p, DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(p)) << 16);
    case DType::kF32:
      return load<float>(p);
    case DType::kF64:
      return to_float_odd(load<double>(p));
    case DType::kF16:
      break;
  }
  const std::uint16_t half = load<std::uint16_t>(p);
  const int exponent = (half >> 10) & 31;
  const auto mantissa = static_cast<float>(half & 0x3FF);
  float magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0f + mantissa, exponent - 25);
  if (exponent == 31) magnitude = (half & 0x3FF) != 0 ? std::nanf("") : INFINITY;
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

// A row that is stored in the type that it comes in: bits are kept.
bool copy_same(const std::byte* in, std::int64_t stride, std::int64_t dim, DType stored,
               std::uint16_t* out, RowReport& report) {
  const std::uint16_t infinity = infinity_of(stored);
  bool nan = false;
  for (std::int64_t d = 0; d < dim; ++d) {
    out[d] = load<std::uint16_t>(in + d * stride);
    nan |= is_nan(out[d], infinity);
  }
  for (std::int64_t d = 0; d < dim; ++d) out[d] = saturate(out[d], infinity, report.saturated);
  return !nan;
}

bool convert(const std::byte* in, std::int64_t stride, std::int64_t dim, DType from, DType stored,
             std::uint16_t* out, RowReport& report) {
  for (std::int64_t d = 0; d < dim; ++d) {
    const float value = element(in + d * stride, from);
    if (std::isnan(value)) return false;
    const std::uint16_t half = stored == DType::kF16 ? to_f16(value) : to_bf16(value);
    out[d] = saturate(half, infinity_of(stored), report.saturated);
  }
  return true;
}

}  // namespace

std::uint16_t to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000);
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7E00;         // NaN
  if (magnitude >= 0x47800000) return sign | kF16Infinity;  // 65536 and more
  if (magnitude < 0x38800000) {                             // subnormal: units of 2^-24
    return sign |
           static_cast<std::uint16_t>(std::nearbyintf(std::bit_cast<float>(magnitude) * 0x1p24f));
  }
  // Rebias the exponent by 127 - 15, round the 13 bits that go; a carry runs into the exponent as
  // it should.
  const std::uint32_t rebased = magnitude - (112u << 23);
  return sign | static_cast<std::uint16_t>((rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13);
}

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000)
    return static_cast<std::uint16_t>((bits >> 16) | 0x40);  // NaN stays one
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float to_float_odd(double value) {
  auto nearest = static_cast<float>(value);
  if (std::isnan(value) || static_cast<double>(nearest) == value) return nearest;
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value))
    nearest = std::nextafterf(nearest, 0.0f);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(nearest) | 1u);
}

RowReport write_rows(const ArrayView& array, std::int64_t batch, std::int64_t head, DType stored,
                     std::uint16_t* out) {
  RowReport report;
  const std::int64_t tokens = array.shape[2];
  const std::int64_t dim = array.shape[3];
  const std::byte* base = array.data + batch * array.strides[0] + head * array.strides[1];
  for (std::int64_t t = 0; t < tokens && !report.has_nan; ++t, out += dim) {
    const std::byte* row = base + t * array.strides[2];
    const bool good = array.dtype == stored
                          ? copy_same(row, array.strides[3], dim, stored, out, report)
                          : convert(row, array.strides[3], dim, array.dtype, stored, out, report);
    report.has_nan = !good;
  }
  return report;
}

bool all_finite(std::span<const std::uint16_t> rows, DType stored) {
  const std::uint16_t infinity = infinity_of(stored);
  return std::all_of(rows.begin(), rows.end(),
                     [&](std::uint16_t half) { return (half & 0x7FFF) < infinity; });
}

bool read_floats(const ArrayView& array, std::int64_t batch, std::int64_t head, std::int64_t token,
                 float* out) {
  const std::byte* in =
      array.data + batch * array.strides[0] + head * array.strides[1] + token * array.strides[2];
  bool good = true;
  for (std::int64_t d = 0; d < array.shape[3]; ++d) {
    out[d] = element(in + d * array.strides[3], array.dtype);
    good = good && !std::isnan(out[d]);
  }
  return good;
}

}  // namespace morphkv

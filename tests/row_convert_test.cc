// Conversions to stored numbers, against exact arithmetic in double.
#include "row_convert.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "cache_harness.h"

namespace morphkv {
namespace {

using test::HostArray;
using test::Random;
using test::Tensor;

// Magnitude of fp16 bits, the number after the largest included.
double f16_magnitude(int bits) {
  return bits < 1024 ? bits * 0x1p-24 : std::ldexp(1024 + bits % 1024, bits / 1024 - 25);
}
double bf16_magnitude(int bits) {
  return bits == 0x7F80 ? 0x1p128 : std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

TEST(RowConvert, RoundsToTheNearestFp16AndTiesToEven) {
  for (int bits = 0; bits <= 0x7BFF; ++bits) {
    const double here = f16_magnitude(bits);
    const double middle = (here + f16_magnitude(bits + 1)) / 2;  // exact in float
    const int even = bits % 2 == 0 ? bits : bits + 1;
    const auto f = static_cast<float>(middle);
    ASSERT_EQ(to_f16(static_cast<float>(here)), bits);
    ASSERT_EQ(to_f16(f), even) << here;
    ASSERT_EQ(to_f16(std::nextafterf(f, 0.0f)), bits) << here;
    ASSERT_EQ(to_f16(std::nextafterf(f, INFINITY)), bits + 1) << here;
    ASSERT_EQ(to_f16(-f), 0x8000 | even) << here;
  }
  EXPECT_EQ(to_f16(INFINITY), 0x7C00);
  EXPECT_EQ(to_f16(1e30f), 0x7C00);
  EXPECT_EQ(to_f16(-0.0f), 0x8000);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(RowConvert, RoundsToTheNearestBf16AndTiesToEven) {
  for (int bits = 0; bits < 0x7F80; ++bits) {
    const double middle = (bf16_magnitude(bits) + bf16_magnitude(bits + 1)) / 2;
    const int even = bits % 2 == 0 ? bits : bits + 1;
    const auto f = static_cast<float>(middle);
    ASSERT_EQ(to_bf16(static_cast<float>(bf16_magnitude(bits))), bits);
    ASSERT_EQ(to_bf16(f), even);
    ASSERT_EQ(to_bf16(std::nextafterf(f, 0.0f)), bits);
    ASSERT_EQ(to_bf16(std::nextafterf(f, INFINITY)), bits + 1);
    ASSERT_EQ(to_bf16(-f), 0x8000 | even);
  }
  EXPECT_EQ(to_bf16(-INFINITY), 0xFF80);
}

// A double a hair beyond the middle of two stored numbers: through the nearest float it would be
// taken for the middle.
TEST(RowConvert, RoundsADoubleOnce) {
  for (int bits = 0; bits <= 0x7BFF; ++bits) {
    const double middle = (f16_magnitude(bits) + f16_magnitude(bits + 1)) / 2;
    for (const double hair : {1e-12, -1e-12}) {
      const int expected = hair > 0 ? bits + 1 : bits;
      ASSERT_EQ(to_f16(to_float_odd(middle * (1 + hair))), expected) << bits;
      ASSERT_EQ(to_f16(to_float_odd(-middle * (1 + hair))), 0x8000 | expected) << bits;
    }
  }
  for (int bits = 0x0080; bits < 0x7F7F; ++bits) {
    const double middle = (bf16_magnitude(bits) + bf16_magnitude(bits + 1)) / 2;
    ASSERT_EQ(to_bf16(to_float_odd(middle * (1 + 1e-12))), bits + 1) << bits;
    ASSERT_EQ(to_bf16(to_float_odd(middle * (1 - 1e-12))), bits) << bits;
  }
  EXPECT_EQ(to_float_odd(0.5), 0.5f);
  EXPECT_TRUE(std::isnan(to_float_odd(std::nan(""))));
  EXPECT_EQ(to_f16(to_float_odd(1e300)), 0x7C00);
  EXPECT_EQ(to_f16(to_float_odd(1e-300)), 0);
}

TEST(RowConvert, WritesRowsOfEveryTypeAndLayout) {
  Random random(51);
  for (int run = 0; run < 200; ++run) {
    const Tensor tensor = test::random_tensor(
        {random.between(1, 2), random.between(1, 3), random.between(1, 5), random.between(1, 33)},
        random, random.pick({1e-6, 1.0, 2e4}));
    const DType in = random.pick({DType::kF16, DType::kBF16, DType::kF32, DType::kF64});
    const DType stored = random.pick({DType::kF16, DType::kBF16});
    const HostArray array(tensor, in, test::any_layout(random));
    const auto [batch, heads, tokens, dim] = tensor.shape;
    std::vector<std::uint16_t> out(static_cast<std::size_t>(tokens * dim));
    std::vector<float> floats(static_cast<std::size_t>(dim));
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        ASSERT_FALSE(write_rows(array.view(), b, h, stored, out.data()).has_nan);
        for (std::int64_t t = 0; t < tokens; ++t) {
          ASSERT_TRUE(read_floats(array.view(), b, h, t, floats.data()));
          for (std::int64_t d = 0; d < dim; ++d) {
            double number = tensor.at(b, h, t, d);
            if (in == DType::kF16) number = test::from_f16(test::to_f16(number));
            if (in == DType::kBF16) {
              number = test::from_bf16(test::to_bf16(static_cast<float>(number)));
            }
            const auto i = static_cast<std::size_t>(t * dim + d);
            ASSERT_EQ(out[i],
                      stored == DType::kF16
                          ? test::to_f16(in == DType::kF32 ? static_cast<float>(number) : number)
                          : to_bf16(to_float_odd(in == DType::kF32 ? static_cast<float>(number)
                                                                   : number)));
            ASSERT_NEAR(floats[static_cast<std::size_t>(d)], number, 1e-6 * std::fabs(number));
          }
        }
      }
    }
  }
}

TEST(RowConvert, CountsWhatIsBeyondTheRangeAndStoresTheLargest) {
  const float row[] = {65519.996f, 65520, -1e9f, INFINITY, -INFINITY, 3.4e38f, 0};
  const auto array = ArrayView::contiguous(row, DType::kF32, {1, 1, 1, 7});
  std::uint16_t out[7];
  EXPECT_EQ(write_rows(array, 0, 0, DType::kF16, out).saturated, 5);
  EXPECT_EQ(std::vector<std::uint16_t>(out, out + 7),
            (std::vector<std::uint16_t>{0x7BFF, 0x7BFF, 0xFBFF, 0x7BFF, 0xFBFF, 0x7BFF, 0}));
  EXPECT_TRUE(all_finite(out, DType::kF16));
  EXPECT_EQ(write_rows(array, 0, 0, DType::kBF16, out).saturated, 3);  // 3.4e38 rounds up
  EXPECT_EQ(out[3], 0x7F7F);
  EXPECT_EQ(out[4], 0xFF7F);
  EXPECT_EQ(out[5], 0x7F7F);
  EXPECT_TRUE(all_finite(out, DType::kBF16));
  const std::uint16_t infinite[] = {0x3C00, 0xFC00};
  EXPECT_FALSE(all_finite(infinite, DType::kF16));
  EXPECT_TRUE(all_finite(infinite, DType::kBF16));
}

TEST(RowConvert, FindsNaNOfEveryTypeWhereverItIs) {
  Random random(52);
  const Tensor tensor = test::random_tensor({1, 2, 3, 5}, random);
  for (const DType in : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const DType stored : {DType::kF16, DType::kBF16}) {
      for (std::int64_t t = 0; t < 3; ++t) {
        for (std::int64_t d = 0; d < 5; ++d) {
          const HostArray array(tensor, in);
          const auto& view = array.view();
          auto* at = const_cast<std::byte*>(view.data) + view.strides[1] + t * view.strides[2] +
                     d * view.strides[3];
          std::fill_n(at, size_of(in), std::byte{0xFF});
          std::vector<std::uint16_t> out(15);
          std::vector<float> floats(5);
          EXPECT_FALSE(write_rows(view, 0, 0, stored, out.data()).has_nan);
          EXPECT_TRUE(write_rows(view, 0, 1, stored, out.data()).has_nan);
          EXPECT_FALSE(read_floats(view, 0, 1, t, floats.data()));
          EXPECT_TRUE(read_floats(view, 0, 0, t, floats.data()));
        }
      }
    }
  }
}

}  // namespace
}  // namespace morphkv

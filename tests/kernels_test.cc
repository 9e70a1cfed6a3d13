// The vector loops against scalar double references, on every CPU target that this machine has.
// Arrays end at a page that cannot be touched, so that a test which reads or writes further dies;
// their starts are therefore aligned to the element and no more.
#include "kernels/kernels.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "generators.h"
#include "highway_targets.h"

namespace morphkv::kernels {
namespace {

using test::OnlyTarget;
using test::Random;
using test::targets_here;

constexpr DType kDTypes[] = {DType::kF16, DType::kBF16, DType::kF32};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Largest relative error of one rounding to float.
constexpr double kRounding = 0x1p-24;

// ---------------------------------------------------------------- targets

template <class Body>
void on_every_target(const Body& body) {
  for (const std::int64_t target : targets_here()) {
    const OnlyTarget only(target);
    SCOPED_TRACE(hwy::TargetName(target));
    ASSERT_STREQ(target_name(), hwy::TargetName(target));
    body();
    if (testing::Test::HasFatalFailure()) return;
  }
}

// ---------------------------------------------------------------- arrays

// An array that ends where an untouchable page begins.
template <class T>
class GuardedArray {
 public:
  explicit GuardedArray(int count) : size_(static_cast<std::size_t>(count)) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t used = (size_ * sizeof(T) + page - 1) / page * page;
    mapped_ = used + page;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    std::byte* end = static_cast<std::byte*>(base_) + used;
    if (mprotect(end, page, PROT_NONE) != 0) throw std::bad_alloc();
    data_ = reinterpret_cast<T*>(end - size_ * sizeof(T));
  }
  GuardedArray(const GuardedArray&) = delete;
  GuardedArray& operator=(const GuardedArray&) = delete;
  ~GuardedArray() { munmap(base_, mapped_); }

  T* data() const { return data_; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  T& operator[](int i) const { return data_[i]; }

 private:
  std::size_t size_;
  std::size_t mapped_;
  void* base_;
  T* data_;
};
using Floats = GuardedArray<float>;

void fill_normal(const Floats& x, double spread, Random& random) {
  for (float& value : x) value = static_cast<float>(spread * random.normal());
}

// Around the widths of the vectors, 1 to 16 floats, and of the loops that take several.
std::vector<int> lengths() {
  std::vector<int> result(70);
  std::iota(result.begin(), result.end(), 1);
  result.insert(result.end(), {127, 128, 129, 130, 255, 256, 257});
  return result;
}

void store(DType dtype, float value, std::byte* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, &value, 4);
  } else {
    const std::uint16_t half = dtype == DType::kF16 ? test::to_f16(value) : test::to_bf16(value);
    std::memcpy(to, &half, 2);
  }
}

// Rows of normal numbers. Between them lie bytes that are NaN or huge in every dtype, so that a
// product that takes one in shows; the last row ends at the untouchable page.
class Rows {
 public:
  Rows(DType dtype, int slots, int dim, int gap, Random& random)
      : dtype_(dtype),
        dim_(dim),
        stride_((dim + gap) * static_cast<int>(size_of(dtype))),
        bytes_((slots - 1) * stride_ + dim * static_cast<int>(size_of(dtype))),
        values_(static_cast<std::size_t>(slots * dim)) {
    std::memset(bytes_.data(), 0x7F, static_cast<std::size_t>(bytes_.end() - bytes_.begin()));
    for (int slot = 0; slot < slots; ++slot) {
      for (int d = 0; d < dim; ++d) set(slot, d, static_cast<float>(2.0 * random.normal()));
    }
  }

  void set(int slot, int d, float value) {
    values_.at(slot * dim_ + d) = test::stored_as(dtype_, value);
    store(dtype_, value, bytes_.data() + slot * stride_ + d * static_cast<int>(size_of(dtype_)));
  }
  const float* values(int slot) const { return values_.data() + slot * dim_; }
  RowsView view() const { return {bytes_.data(), dtype_, stride_, dim_}; }

 private:
  DType dtype_;
  int dim_;
  int stride_;  // bytes
  GuardedArray<std::byte> bytes_;
  std::vector<float> values_;  // [slot, dim] as stored
};

// One query, and slots [first, last); tests change what they are about.
DotRowsArgs dot_args(const float* query, const Rows& rows, int first, int last, float* out) {
  return {.queries = query,
          .query_stride = rows.view().dim,
          .n_queries = 1,
          .rows = rows.view(),
          .first_slot = first,
          .last_slot = last,
          .scale = 0.3f,
          .out = out,
          .out_stride = last};
}

float dot_one(const float* query, const Rows& rows, int slot) {
  float out[16] = {};
  dot_rows(dot_args(query, rows, slot, slot + 1, out));
  return out[slot];
}

// Each of dim products, dim sums and the scaling rounds once, by at most 2^-24 of the sum of the
// products' sizes, in whatever order they are added; the constant is for products below 2^-126.
void expect_dot(float got, const float* query, const float* row, int dim, float scale) {
  double want = 0.0;
  double size = 0.0;
  for (int d = 0; d < dim; ++d) {
    const double product = static_cast<double>(query[d]) * row[d];
    want += product;
    size += std::fabs(product);
  }
  const double tolerance = (dim + 2) * kRounding * size * std::fabs(scale) + 1e-37;
  ASSERT_NEAR(got, scale * want, tolerance) << "dim " << dim;
}

// ---------------------------------------------------------------- dispatch

TEST(Kernels, TargetNameFollowsTheTargetAndIsTheBestOneByDefault) {
  std::vector<std::string> names;
  on_every_target([&] { names.emplace_back(target_name()); });
  ASSERT_EQ(names.size(), targets_here().size());
  EXPECT_EQ(target_name(), names.front());
  std::ranges::sort(names);
  EXPECT_EQ(std::ranges::adjacent_find(names), names.end());
}

// ---------------------------------------------------------------- dot_rows

constexpr float kUntouched = -12345.0f;

// Slots [first, last) and `n_queries`; entries of out that are not asked for must stay.
void check_dot_rows(const Rows& rows, int first, int last, int n_queries, Random& random) {
  constexpr int kColumns = 13;
  constexpr float kScale = -0.37f;
  const int dim = rows.view().dim;
  const int query_stride = dim + 1;
  const Floats queries((n_queries - 1) * query_stride + dim);
  const Floats out(n_queries * kColumns);
  fill_normal(queries, 2.0, random);
  std::ranges::fill(out, kUntouched);
  DotRowsArgs args = dot_args(queries.data(), rows, first, last, out.data());
  args.query_stride = query_stride;
  args.n_queries = n_queries;
  args.scale = kScale;
  args.out_stride = kColumns;
  dot_rows(args);
  for (int q = 0; q < n_queries; ++q) {
    for (int column = 0; column < kColumns; ++column) {
      if (testing::Test::HasFatalFailure()) return;
      const float got = out[q * kColumns + column];
      if (column < first || column >= last) {
        ASSERT_EQ(got, kUntouched) << "query " << q << ", slot " << column;
      } else {
        expect_dot(got, queries.data() + q * query_stride, rows.values(column), dim, kScale);
      }
    }
  }
}

TEST(Kernels, DotRowsMatchesADoubleReferenceAtEveryLength) {
  on_every_target([] {
    Random random(1);
    for (const DType dtype : kDTypes) {
      for (const int dim : lengths()) {
        const Rows rows(dtype, 12, dim, 3, random);
        for (int n_queries = 1; n_queries <= 9; ++n_queries) {
          check_dot_rows(rows, 2, 9, n_queries, random);
        }
      }
    }
  });
}

TEST(Kernels, DotRowsTakesAnyNumberOfSlots) {
  on_every_target([] {
    Random random(2);
    const Rows rows(DType::kF16, 12, 67, 0, random);
    for (int first = 0; first <= 12; ++first) {
      for (int last = first; last <= 12; ++last) check_dot_rows(rows, first, last, 3, random);
    }
  });
}

TEST(Kernels, DotRowsGivesAPairTheSameBitsWhateverElseIsInTheCall) {
  on_every_target([] {
    Random random(4);
    for (const int dim : {1, 17, 64, 80, 129}) {
      const Rows rows(DType::kF16, 10, dim, 0, random);
      const Floats queries(9 * dim);
      fill_normal(queries, 2.0, random);
      for (int n_queries = 1; n_queries <= 9; ++n_queries) {
        const Floats out(n_queries * 10);
        const int first = random.between(0, 9);
        DotRowsArgs args = dot_args(queries.data(), rows, first, 10, out.data());
        args.n_queries = n_queries;
        dot_rows(args);
        for (int i = 0; i < n_queries * 10; ++i) {
          if (i % 10 < first) continue;
          const float alone = dot_one(queries.data() + i / 10 * dim, rows, i % 10);
          ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::bit_cast<std::uint32_t>(alone))
              << "dim " << dim << ", queries " << n_queries << ", pair " << i;
        }
      }
    }
  });
}

TEST(Kernels, DotRowsGivesTheSameBitsWithQueryAndRowExchanged) {
  on_every_target([] {
    Random random(5);
    for (const DType dtype : kDTypes) {
      for (const int dim : lengths()) {
        const Rows rows(dtype, 2, dim, 1, random);
        const float ab = dot_one(rows.values(0), rows, 1);
        const float ba = dot_one(rows.values(1), rows, 0);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(ab), std::bit_cast<std::uint32_t>(ba)) << dim;
      }
    }
  });
}

TEST(Kernels, DotRowsKeepsTheLargestAndTheSmallestHalves) {
  on_every_target([] {
    Random random(6);
    for (const float extreme : {65504.0f, -65504.0f, 0x1p-14f, 1023 * 0x1p-24f, 0x1p-24f}) {
      for (const int dim : {1, 7, 64, 131}) {
        Rows rows(DType::kF16, 1, dim, 0, random);
        for (int d = 0; d < dim; ++d) rows.set(0, d, extreme);
        ASSERT_EQ(rows.values(0)[0], extreme);
        const float* row = rows.values(0);
        expect_dot(dot_one(row, rows, 0), row, row, dim, 0.3f);
        const std::vector<float> ones(static_cast<std::size_t>(dim), 1.0f);
        float sum = 0.0f;
        DotRowsArgs args = dot_args(ones.data(), rows, 0, 1, &sum);
        args.scale = 1.0f;
        dot_rows(args);
        // Eight significant bits of dim and eleven of the half fit a float, so no sum rounds.
        EXPECT_EQ(sum, static_cast<float>(dim) * extreme);
      }
    }
  });
}

TEST(Kernels, DotRowsReadsNothingBeyondItsLastRow) {
  on_every_target([] {
    Random random(7);
    for (const DType dtype : kDTypes) {
      for (const int dim : lengths()) {
        for (const int slots : {1, 4, 6}) {
          const Rows rows(dtype, slots, dim, 0, random);
          check_dot_rows(rows, slots - 1, slots, 2, random);
          check_dot_rows(rows, 0, slots, 2, random);
        }
      }
    }
  });
}

// ---------------------------------------------------------------- one array

TEST(Kernels, MaxOfFindsTheLargestAtEveryPlaceOfEveryLength) {
  on_every_target([] {
    for (const int n : lengths()) {
      const Floats x(n);
      for (int i = 0; i < n; ++i) x[i] = -2.0f - static_cast<float>(i % 5);
      for (int i = 0; i < n; ++i) {
        const float before = x[i];
        x[i] = -1.5f;
        ASSERT_EQ(max_of(x.data(), n), -1.5f) << "place " << i << " of " << n;
        x[i] = before;
      }
    }
  });
}

TEST(Kernels, MaxOfNothingAndOfNothingHeldIsMinusInfinity) {
  on_every_target([] {
    const Floats x(37);
    std::ranges::fill(x, -kInfinity);
    EXPECT_EQ(max_of(x.data(), 0), -kInfinity);
    EXPECT_EQ(max_of(x.data(), 37), -kInfinity);
  });
}

TEST(Kernels, LeastOfFindsTheLeastAtEveryPlaceOfEveryLength) {
  on_every_target([] {
    for (const int n : lengths()) {
      const Floats x(n);
      for (int i = 0; i < n; ++i) x[i] = 2.0f + static_cast<float>(i % 5);
      for (int i = 0; i < n; ++i) {
        const float before = x[i];
        x[i] = 1.5f;
        ASSERT_EQ(least_of(x.data(), n), 1.5f) << "place " << i << " of " << n;
        x[i] = std::numeric_limits<float>::quiet_NaN();
        ASSERT_EQ(least_of(x.data(), n), -kInfinity) << "place " << i << " of " << n;
        x[i] = before;
      }
    }
    EXPECT_EQ(least_of(nullptr, 0), kInfinity);
  });
}

TEST(Kernels, IndexOfFindsTheFirstPlaceOfAValue) {
  on_every_target([] {
    for (const int n : lengths()) {
      const GuardedArray<int> x(n);
      for (int i = 0; i < n; ++i) x[i] = i < n / 2 ? -i : -n / 2;
      for (int i = 0; i < n; ++i) {
        const int value = std::max(-i, -n / 2);
        ASSERT_EQ(index_of(value, x.data(), n), -value) << "length " << n;
      }
      EXPECT_EQ(index_of(1, x.data(), n), n);
    }
  });
}

TEST(Kernels, FirstLeastFindsTheFirstOfEqualValuesAtEveryPlaceOfEveryLength) {
  on_every_target([] {
    for (const int n : lengths()) {
      if (n == 0) continue;
      const Floats x(n);
      for (int i = 0; i < n; ++i) {
        for (int j = 0; j < n; ++j) x[j] = j < i ? 2.0f : j % 3 == i % 3 ? 1.0f : 3.0f;
        ASSERT_EQ(first_least(x.data(), n), i) << "length " << n;
      }
    }
  });
}

TEST(Kernels, FirstLeastTakesNanAndMinusInfinityForTheLeast) {
  on_every_target([] {
    const Floats x(37);
    std::ranges::fill(x, kInfinity);
    EXPECT_EQ(first_least(x.data(), 37), 0);
    x[30] = -1e30f;
    EXPECT_EQ(first_least(x.data(), 37), 30);
    x[34] = -kInfinity;
    EXPECT_EQ(first_least(x.data(), 37), 34);
    x[20] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(first_least(x.data(), 37), 20);
  });
}

// 1e-6 is what the header promises.
void expect_sum(const Floats& x, int n) {
  const double want = std::accumulate(x.begin(), x.end(), 0.0);
  ASSERT_NEAR(sum_of(x.data(), n), want, 1e-6 * want) << n;
}

TEST(Kernels, SumOfMatchesADoubleReferenceAtEveryLength) {
  on_every_target([] {
    Random random(8);
    EXPECT_EQ(sum_of(nullptr, 0), 0.0f);
    for (const int n : lengths()) {
      const Floats x(n);
      for (float& value : x) value = static_cast<float>(random.uniform());
      expect_sum(x, n);
    }
  });
}

// Added to a float one by one, each of the small values would be lost.
TEST(Kernels, SumOfKeepsSmallValuesBesideLargeOnes) {
  on_every_target([] {
    constexpr int kLargest = 65536;
    const Floats x(kLargest);
    std::ranges::fill(x, 0x1p-25f);
    for (int i = 0; i < 64; ++i) x[i] = 1.0f / 64.0f;
    expect_sum(x, kLargest);
  });
}

TEST(Kernels, ExpShiftedIsWithinTwoMillionthsDownTo1e37) {
  on_every_target([] {
    constexpr int kCount = 4001;
    Random random(9);
    for (const float reference : {0.0f, 3.7f, -41.3f, 25.2345f, -0.001f, 1000.5f}) {
      const Floats x(kCount);
      const Floats out(kCount);
      for (float& value : x) {
        value = reference + static_cast<float>(-86.0 + 106.0 * random.uniform());
      }
      exp_shifted(x.data(), kCount, reference, out.data());
      for (int i = 0; i < kCount; ++i) {
        const double want = std::exp(static_cast<double>(x[i]) - reference);
        if (want < 1e-37) continue;
        ASSERT_NEAR(out[i], want, 2e-6 * want) << x[i] << " - " << reference;
      }
    }
  });
}

TEST(Kernels, ExpShiftedGoesToZeroFarBelowTheReference) {
  on_every_target([] {
    for (const float reference : {0.0f, -3.0f, 60.0f}) {
      const std::vector<float> below = {87.5f,  88.0f,  95.0f, 103.0f, 103.9f, 104.0f,
                                        105.0f, 200.0f, 1e4f,  1e30f,  FLT_MAX};
      for (const float distance : below) {
        const float x = reference - distance;
        float out = kUntouched;
        exp_shifted(&x, 1, reference, &out);
        EXPECT_GE(out, 0.0f) << distance;
        EXPECT_LE(out, 1.2e-38f) << distance;
      }
    }
  });
}

TEST(Kernels, ExpShiftedIsExactAtTheReferenceAndAtMinusInfinity) {
  on_every_target([] {
    for (const float reference : {0.0f, 0.1f, -7.3f, 1234.567f, -1e20f, FLT_MAX}) {
      const Floats x(37);
      const Floats out(37);
      for (int i = 0; i < 37; ++i) x[i] = i % 3 == 0 ? -kInfinity : reference;
      exp_shifted(x.data(), 37, reference, out.data());
      for (int i = 0; i < 37; ++i) EXPECT_EQ(out[i], i % 3 == 0 ? 0.0f : 1.0f) << reference;
    }
  });
}

TEST(Kernels, ExpShiftedGivesTheSameBitsInPlaceAndAtEveryPlaceOfEveryLength) {
  on_every_target([] {
    Random random(10);
    for (const int n : lengths()) {
      const Floats x(n);
      const Floats out(n);
      fill_normal(x, 5.0, random);
      exp_shifted(x.data(), n, 1.25f, out.data());
      for (int i = 0; i < n; ++i) {
        float alone = kUntouched;
        exp_shifted(&x[i], 1, 1.25f, &alone);
        ASSERT_EQ(out[i], alone) << "place " << i << " of " << n;
      }
      exp_shifted(x.data(), n, 1.25f, x.data());
      ASSERT_TRUE(std::ranges::equal(x, out)) << n;
    }
  });
}

TEST(Kernels, ExpShiftedGivesTheSumOfItsResults) {
  on_every_target([] {
    Random random(15);
    for (const int n : lengths()) {
      const Floats x(n);
      const Floats out(n);
      fill_normal(x, 5.0, random);
      const double sum = exp_shifted(x.data(), n, 1.25f, out.data());
      const double want = std::accumulate(out.begin(), out.end(), 0.0);
      // So exact that a row's weight can be taken back out of it, however large it was.
      ASSERT_NEAR(sum, want, 1e-15 * (n + 1) * want) << n;
    }
  });
}

TEST(Kernels, ExpShiftedTakesAReferenceForEach) {
  on_every_target([] {
    Random random(14);
    for (const int n : lengths()) {
      const Floats x(n);
      const Floats references(n);
      const Floats out(n);
      fill_normal(x, 5.0, random);
      fill_normal(references, 5.0, random);
      exp_shifted(x.data(), n, references.data(), out.data());
      for (int i = 0; i < n; ++i) {
        float alone = kUntouched;
        exp_shifted(&x[i], 1, references[i], &alone);
        ASSERT_EQ(out[i], alone) << "place " << i << " of " << n;
      }
      exp_shifted(x.data(), n, references.data(), x.data());
      ASSERT_TRUE(std::ranges::equal(x, out)) << n;
    }
  });
}

// Holds update(rows, n, acc) against fold(old, factor * x) in double, row after row. Each product
// and each fold rounds once.
template <class Update, class Fold>
void check_scaled(const Update& update, const Fold& fold) {
  Random random(11);
  for (const int n : lengths()) {
    for (const int rows : {0, 1, 2, 9}) {
      const int stride = n + 3;
      const Floats x(std::max(1, rows * stride - 3));
      const Floats acc(n);
      const Floats factors(std::max(1, rows));
      fill_normal(x, 1.0, random);
      fill_normal(acc, 1.0, random);
      fill_normal(factors, 1.0, random);
      std::vector<double> want(acc.begin(), acc.end());
      std::vector<double> size(want.size(), 0.0);
      for (int i = 0; i < n; ++i) {
        size.at(i) = std::fabs(want.at(i));
        for (int r = 0; r < rows; ++r) {
          const double product = static_cast<double>(factors[r]) * x[r * stride + i];
          want.at(i) = fold(want.at(i), product);
          size.at(i) += std::fabs(product);
        }
      }
      update({x.data(), stride, factors.data(), rows}, n, acc.data());
      for (int i = 0; i < n; ++i) {
        ASSERT_NEAR(acc[i], want.at(i), (rows + 1) * kRounding * size.at(i))
            << "place " << i << " of " << n << ", rows " << rows;
      }
    }
  }
}

TEST(Kernels, AddScaledMatchesADoubleReferenceAtEveryLength) {
  on_every_target([] {
    check_scaled([](const ScaledRows& rows, int n, float* acc) { add_scaled(rows, n, acc); },
                 [](double old, double product) { return old + product; });
  });
}

TEST(Kernels, MaxScaledMatchesADoubleReferenceAtEveryLength) {
  on_every_target([] {
    check_scaled([](const ScaledRows& rows, int n, float* acc) { max_scaled(rows, n, acc); },
                 [](double old, double product) { return std::max(old, product); });
  });
}

TEST(Kernels, MaxOfNeighboursIsThePlainMaximumAtEveryLengthAndReach) {
  on_every_target([] {
    Random random(12);
    for (const int n : lengths()) {
      const Floats x(n);
      fill_normal(x, 1.0, random);
      if (random.coin()) x[random.between(0, n - 1)] = std::numeric_limits<float>::quiet_NaN();
      for (const int reach : {0, 1, 2, 3, 5, 7, 15, n}) {
        const Floats scratch(n + 2 * reach);
        const Floats out(n);
        max_of_neighbours(x.data(), n, reach, scratch.data(), out.data());
        for (int i = 0; i < n; ++i) {
          float want = -kInfinity;
          for (int j = std::max(0, i - reach); j <= std::min(n - 1, i + reach); ++j)
            want = x[j] > want ? x[j] : want;
          ASSERT_EQ(out[i], want) << "place " << i << " of " << n << ", reach " << reach;
        }
        const Floats in_place(n);
        std::ranges::copy(x, in_place.begin());
        max_of_neighbours(in_place.data(), n, reach, scratch.data(), in_place.data());
        ASSERT_TRUE(std::ranges::equal(in_place, out));
      }
    }
  });
}

// ---------------------------------------------------------------- to_float

TEST(Kernels, ToFloatIsExactForEveryFiniteHalf) {
  on_every_target([] {
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      const int exponent_mask = dtype == DType::kF16 ? 0x7C00 : 0x7F80;
      std::vector<std::uint16_t> halves;
      for (int bits = 0; bits <= 0xFFFF; ++bits) {
        if ((bits & exponent_mask) != exponent_mask) {
          halves.push_back(static_cast<std::uint16_t>(bits));
        }
      }
      std::vector<float> out(halves.size());
      to_float(reinterpret_cast<const std::byte*>(halves.data()), dtype,
               static_cast<int>(halves.size()), out.data());
      for (std::size_t i = 0; i < halves.size(); ++i) {
        const float want =
            dtype == DType::kF16 ? test::from_f16(halves[i]) : test::from_bf16(halves[i]);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::bit_cast<std::uint32_t>(want))
            << "half " << halves[i];
      }
    }
  });
}

TEST(Kernels, ToFloatConvertsEveryLengthOfEveryDType) {
  on_every_target([] {
    Random random(13);
    for (const DType dtype : kDTypes) {
      for (const int n : lengths()) {
        const Rows rows(dtype, 1, n, 0, random);
        const Floats out(n);
        to_float(rows.view().row(0), dtype, n, out.data());
        ASSERT_TRUE(std::equal(out.begin(), out.end(), rows.values(0))) << n;
      }
    }
  });
}

}  // namespace
}  // namespace morphkv::kernels

// Bodies of the vector loops, compiled once per CPU target by Highway and chosen at run time.
// Knows nothing of heads, windows or policies: callers bring rows, and the shapes are in kernels.h.
#include "kernels/kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

// Tiles are arrays of vectors, which targets with vectors of unknown size do not allow.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/kernels.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which sets up the target that these are compiled for.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace morphkv::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Vec = hn::Vec<Floats>;

// Rows that one tile multiplies together: independent sums hide the latency of the multiply-add.
constexpr int kTileRows = 4;
// Queries that share the conversion of a tile's rows. AVX2 has too few registers for 16 sums; older
// targets too, but they convert f16 in software and gain by doing it less often.
constexpr int kTileQueries = HWY_TARGET == HWY_AVX2 ? 2 : 4;

// GCC keeps an array of vectors in registers only if the loops over it are gone early enough.
#define MORPHKV_UNROLL _Pragma("GCC unroll 4")

// ------------------------------------------------------------------ loads

template <class T>
HWY_INLINE Vec load(const T* p) {
  const hn::Rebind<T, Floats> d;
  return hn::PromoteTo(Floats(), hn::LoadU(d, p));
}
HWY_INLINE Vec load(const float* p) { return hn::LoadU(Floats(), p); }

// The first `count` elements, zero beyond. Reads nothing past them, unlike a masked load on SSE4.
template <class T>
HWY_INLINE Vec load_first(const T* p, std::size_t count) {
  HWY_ALIGN T lanes[hn::MaxLanes(Floats())] = {};
  std::memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}

// Calls body(x + i, inout + i) for whole vectors. The last one may overlap the one before: it is
// made first, from what was there, and stored at the end. Less than a vector is padded.
template <class Body>
HWY_INLINE void for_each_vector(const float* x, std::size_t n, float* inout, const Body& body) {
  constexpr std::size_t kLanes = hn::MaxLanes(Floats());
  HWY_ALIGN float last[kLanes] = {};
  if (n < kLanes) {
    HWY_ALIGN float padded[kLanes] = {};
    std::memcpy(padded, x, n * sizeof(float));
    std::memcpy(last, inout, n * sizeof(float));
    body(padded, last);
    std::memcpy(inout, last, n * sizeof(float));
    return;
  }
  std::memcpy(last, inout + n - kLanes, sizeof(last));
  body(x + n - kLanes, last);
  for (std::size_t i = 0; i + kLanes < n; i += kLanes) body(x + i, inout + i);
  std::memcpy(inout + n - kLanes, last, sizeof(last));
}

// ------------------------------------------------------------------ dot_rows

// sums[r] = scale * (all lanes of v[r]). Each sum takes the same tree, whatever its place r.
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void store_sums(const Vec (&v)[kTileRows], float scale, float* sums) {
  for (int r = 0; r < kTileRows; ++r) sums[r] = scale * hn::GetLane(v[r]);
}
#else
template <class D>
HWY_INLINE auto fold_to_four_lanes(D, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return fold_to_four_lanes(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// [a b] in 32-bit pairs, then [a b c d] in each block: a transpose that adds as it goes.
HWY_INLINE void store_sums(const Vec (&v)[kTileRows], float scale, float* sums) {
  const Floats d;
  const hn::RepartitionToWide<Floats> pairs;
  const auto ab = hn::BitCast(
      pairs, hn::Add(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1])));
  const auto cd = hn::BitCast(
      pairs, hn::Add(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3])));
  const Vec abcd = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, ab, cd)),
                           hn::BitCast(d, hn::InterleaveUpper(pairs, ab, cd)));
  const hn::FixedTag<float, 4> four;
  hn::StoreU(hn::Mul(fold_to_four_lanes(d, abcd), hn::Set(four, scale)), four, sums);
}
#endif

// What a tile reads, and where its sums go.
template <class T>
struct Tile {
  const T* rows[kTileRows];  // [row, dim]; a short tile repeats its last row
  int first;                 // column of the first row in out
  int count;                 // of rows
};

// out[q, first + r] for kQueries queries from first_query on. One running sum per pair, so that a
// product does not depend on how many queries or rows share its tile.
template <int kQueries, class T>
HWY_INLINE void dot_tile(const DotRowsArgs& args, const Tile<T>& tile, int first_query) {
  constexpr std::size_t kLanes = hn::MaxLanes(Floats());
  const std::size_t dim = static_cast<std::size_t>(args.rows.dim);
  const float* queries = args.queries + first_query * args.query_stride;
  Vec sums[kQueries][kTileRows];
  MORPHKV_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    MORPHKV_UNROLL
    for (int r = 0; r < kTileRows; ++r) sums[q][r] = hn::Zero(Floats());
  }

  const auto step = [&](const auto& load_at) HWY_ATTR {
    Vec rows[kTileRows];
    MORPHKV_UNROLL
    for (int r = 0; r < kTileRows; ++r) rows[r] = load_at(tile.rows[r]);
    MORPHKV_UNROLL
    for (int q = 0; q < kQueries; ++q) {
      const Vec query = load_at(queries + q * args.query_stride);
      MORPHKV_UNROLL
      for (int r = 0; r < kTileRows; ++r) sums[q][r] = hn::MulAdd(rows[r], query, sums[q][r]);
    }
  };
  std::size_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    step([i](const auto* p) HWY_ATTR { return load(p + i); });
  }
  if (i < dim) step([i, dim](const auto* p) HWY_ATTR { return load_first(p + i, dim - i); });

  MORPHKV_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    float* out = args.out + (first_query + q) * args.out_stride + tile.first;
    if (tile.count == kTileRows) {
      store_sums(sums[q], args.scale, out);
    } else {
      float products[kTileRows];
      store_sums(sums[q], args.scale, products);
      std::copy_n(products, tile.count, out);
    }
  }
}

template <class T>
HWY_INLINE Tile<T> tile_at(const DotRowsArgs& args, int first) {
  Tile<T> tile;
  tile.first = first;
  tile.count = std::min(kTileRows, args.last_slot - first);
  MORPHKV_UNROLL
  for (int r = 0; r < kTileRows; ++r) {
    const int slot = std::min(first + r, args.last_slot - 1);
    tile.rows[r] = reinterpret_cast<const T*>(args.rows.row(slot));
  }
  return tile;
}

template <class T>
HWY_INLINE void dot_rows_of(const DotRowsArgs& args) {
  for (int i = args.first_slot; i < args.last_slot; i += kTileRows) {
    const Tile<T> tile = tile_at<T>(args, i);
    int q = 0;
    for (; q + kTileQueries <= args.n_queries; q += kTileQueries) {
      dot_tile<kTileQueries>(args, tile, q);
    }
    const int left = args.n_queries - q;
    if (left == 1) dot_tile<1>(args, tile, q);
    if constexpr (kTileQueries > 2) {
      if (left == 2) dot_tile<2>(args, tile, q);
      if (left == 3) dot_tile<3>(args, tile, q);
    }
  }
}

void dot_rows(const DotRowsArgs& args) {
  switch (args.rows.dtype) {
    case DType::kF16:
      return dot_rows_of<hwy::float16_t>(args);
    case DType::kBF16:
      return dot_rows_of<hwy::bfloat16_t>(args);
    case DType::kF32:
      return dot_rows_of<float>(args);
    case DType::kF64:
      break;  // never stored
  }
}

// ------------------------------------------------------------------ one array

float max_of(const float* x, int n) {
  const Floats d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  Vec largest = hn::Set(d, -std::numeric_limits<float>::infinity());
  int i = 0;
  for (; i + lanes <= n; i += lanes) largest = hn::Max(largest, hn::LoadU(d, x + i));
  // Not MaxOfLanes: the emulated one of Highway 1.0.3 gives -FLT_MAX where all are -infinity.
  HWY_ALIGN float of_lane[hn::MaxLanes(Floats())];
  hn::Store(largest, d, of_lane);
  float result = *std::max_element(of_lane, of_lane + lanes);
  for (; i < n; ++i) result = std::max(result, x[i]);
  return result;
}

// NaN counts as -infinity.
HWY_INLINE Vec comparable(Vec v) {
  const Floats d;
  return hn::IfThenElse(hn::Eq(v, v), v, hn::Set(d, -std::numeric_limits<float>::infinity()));
}

float least_of(const float* x, int n) {
  const Floats d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  HWY_ALIGN float tail[hn::MaxLanes(Floats())];
  std::fill_n(tail, lanes, std::numeric_limits<float>::infinity());
  const int whole = n - n % lanes;
  std::copy_n(x + whole, n % lanes, tail);
  Vec least = comparable(hn::Load(d, tail));
  for (int i = 0; i < whole; i += lanes) least = hn::Min(least, comparable(hn::LoadU(d, x + i)));
  HWY_ALIGN float of_lane[hn::MaxLanes(Floats())];
  hn::Store(least, d, of_lane);
  return *std::min_element(of_lane, of_lane + lanes);
}

int first_least(const float* x, int n) {
  const Floats d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const float least = least_of(x, n);
  const Vec wanted = hn::Set(d, least);
  int i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto first = hn::FindFirstTrue(d, hn::Eq(comparable(hn::LoadU(d, x + i)), wanted));
    if (first >= 0) return i + static_cast<int>(first);
  }
  while (x[i] > least) ++i;  // NaN is not above
  return i;
}

int index_of(int value, const int* x, int n) {
  const hn::RebindToSigned<Floats> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto wanted = hn::Set(d, value);
  int i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto first = hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, x + i), wanted));
    if (first >= 0) return i + static_cast<int>(first);
  }
  while (i < n && x[i] != value) ++i;
  return i;
}

// Eight floats to a lane, as a tree of three roundings, then on in double: the length does not
// matter.
float sum_of(const float* x, int n) {
  const Floats d;
  const hn::ScalableTag<double> wide;
  const hn::Rebind<float, decltype(wide)> half;
  constexpr int kBlock = 8;
  const int lanes = static_cast<int>(hn::Lanes(d));
  auto sum = hn::Zero(wide);
  HWY_ALIGN float lane_sums[hn::MaxLanes(Floats())];
  int i = 0;
  for (; i + kBlock * lanes <= n; i += kBlock * lanes) {
    const auto pair = [&](int k) HWY_ATTR {
      return hn::Add(hn::LoadU(d, x + i + k * lanes), hn::LoadU(d, x + i + (k + 1) * lanes));
    };
    hn::Store(hn::Add(hn::Add(pair(0), pair(2)), hn::Add(pair(4), pair(6))), d, lane_sums);
    for (int part = 0; part < lanes; part += static_cast<int>(hn::Lanes(wide)))
      sum = hn::Add(sum, hn::PromoteTo(wide, hn::Load(half, lane_sums + part)));
  }
  for (; i + static_cast<int>(hn::Lanes(wide)) <= n; i += static_cast<int>(hn::Lanes(wide)))
    sum = hn::Add(sum, hn::PromoteTo(wide, hn::LoadU(half, x + i)));
  double result = hn::GetLane(hn::SumOfLanes(wide, sum));
  for (; i < n; ++i) result += x[i];
  return static_cast<float>(result);
}

// exp(s) = 2^q * exp(r) with |r| <= log(2) / 2. The difference alone loses up to 4e-6 for far
// inputs, so what its rounding dropped (Knuth's two-sum) goes into r. Shorter than Highway's Exp,
// which also takes what is denormal or above 88.
HWY_INLINE Vec exp_of_difference(Vec v, Vec ref) {
  const Floats d;
  const hn::RebindToSigned<Floats> ints;
  const Vec s = hn::Sub(v, ref);
  const Vec minus_ref = hn::Sub(s, v);
  const Vec e = hn::Sub(hn::Sub(v, hn::Sub(s, minus_ref)), hn::Add(ref, minus_ref));

  // Added to 1.5 * 2^23, a float is rounded to an integer, which is its last bits.
  const Vec rounder = hn::Set(d, 0x1.8p23f);
  const Vec rounded = hn::MulAdd(s, hn::Set(d, 1.44269504f), rounder);
  const Vec q = hn::Sub(rounded, rounder);
  // log(2) in two parts, the first short enough for an exact product.
  const Vec near = hn::MulAdd(q, hn::Set(d, -0.693145751953125f), s);
  const Vec r = hn::Add(hn::MulAdd(q, hn::Set(d, -1.428606765330187e-6f), near), e);

  // exp(r) = 1 + r + r^2 * (minimax polynomial of degree 4), relative error 3e-9.
  const Vec r2 = hn::Mul(r, r);
  const Vec low = hn::MulAdd(r, hn::Set(d, 0.16666520401f), hn::Set(d, 0.49999993432f));
  const Vec high = hn::MulAdd(r, hn::Set(d, 0.00836874465f), hn::Set(d, 0.04166839074f));
  const Vec poly = hn::MulAdd(r2, hn::MulAdd(r2, hn::Set(d, 0.00138145423f), high), low);
  const Vec y = hn::MulAdd(r2, poly, hn::Add(hn::Set(d, 1.0f), r));

  const Vec scaled =
      hn::BitCast(d, hn::Add(hn::BitCast(ints, y), hn::ShiftLeft<23>(hn::BitCast(ints, rounded))));
  // Below this the exponent has no room; where v is -infinity, all of the above is NaN.
  return hn::IfThenElseZero(hn::Ge(s, hn::Set(d, -87.0f)), scaled);
}

double exp_shifted(const float* x, int n, float reference, float* out) {
  const Floats d;
  const hn::ScalableTag<double> wide;
  const hn::Rebind<float, decltype(wide)> half;
  constexpr int kLanes = hn::MaxLanes(Floats());
  const Vec ref = hn::Set(d, reference);
  auto sum = hn::Zero(wide);
  const auto step = [&](const float* from, float* to) HWY_ATTR {
    hn::StoreU(exp_of_difference(hn::LoadU(d, from), ref), d, to);
    for (int part = 0; part < kLanes; part += static_cast<int>(hn::Lanes(wide)))
      sum = hn::Add(sum, hn::PromoteTo(wide, hn::LoadU(half, to + part)));
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) step(x + i, out + i);
  if (i < n) {
    HWY_ALIGN float tail[kLanes];
    std::fill_n(tail, kLanes, -std::numeric_limits<float>::infinity());
    std::copy_n(x + i, n - i, tail);
    step(tail, tail);
    std::copy_n(tail, n - i, out + i);
  }
  return hn::GetLane(hn::SumOfLanes(wide, sum));
}

void exp_shifted_each(const float* x, int n, const float* references, float* out) {
  const Floats d;
  if (out != x) std::copy_n(x, n, out);
  for_each_vector(references, static_cast<std::size_t>(n), out,
                  [&](const float* ref, float* to) HWY_ATTR {
                    hn::StoreU(exp_of_difference(hn::LoadU(d, to), hn::LoadU(d, ref)), d, to);
                  });
}

// out[i] = fold(acc[i], factors[r], x[r, i]) over the rows, for some vectors next to one another.
template <int kVectors, class Fold>
HWY_INLINE void fold_vectors(const ScaledRows& rows, int first, const float* acc, const Fold& fold,
                             float* out) {
  const Floats d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  Vec sums[kVectors];
  MORPHKV_UNROLL
  for (int v = 0; v < kVectors; ++v) sums[v] = hn::LoadU(d, acc + first + v * lanes);
  for (int r = 0; r < rows.rows; ++r) {
    const Vec factor = hn::Set(d, rows.factors[r]);
    const float* x = rows.x + r * rows.stride + first;
    MORPHKV_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[v] = fold(sums[v], factor, hn::LoadU(d, x + v * lanes));
  }
  MORPHKV_UNROLL
  for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[v], d, out + v * lanes);
}

// acc[i] = fold(acc[i], factors[r], x[r, i]) over the rows. As in for_each_vector, the last vector
// is made first.
template <class Fold>
HWY_INLINE void fold_rows(const ScaledRows& rows, int n, float* acc, const Fold& fold) {
  const Floats d;
  constexpr int kVectors = 4;
  const int lanes = static_cast<int>(hn::Lanes(d));
  if (n < lanes) {
    for (int r = 0; r < rows.rows; ++r) {
      const Vec factor = hn::Set(d, rows.factors[r]);
      for_each_vector(rows.x + r * rows.stride, static_cast<std::size_t>(n), acc,
                      [&](const float* from, float* to) HWY_ATTR {
                        hn::StoreU(fold(hn::LoadU(d, to), factor, hn::LoadU(d, from)), d, to);
                      });
    }
    return;
  }
  HWY_ALIGN float last[hn::MaxLanes(Floats())];
  fold_vectors<1>(rows, n - lanes, acc, fold, last);
  int i = 0;
  for (; i + kVectors * lanes <= n; i += kVectors * lanes)
    fold_vectors<kVectors>(rows, i, acc, fold, acc + i);
  for (; i + lanes < n; i += lanes) fold_vectors<1>(rows, i, acc, fold, acc + i);
  hn::StoreU(hn::Load(d, last), d, acc + n - lanes);
}

void add_scaled(const ScaledRows& rows, int n, float* acc) {
  fold_rows(rows, n, acc, [](Vec sum, Vec f, Vec x) HWY_ATTR { return hn::MulAdd(f, x, sum); });
}

void max_scaled(const ScaledRows& rows, int n, float* acc) {
  fold_rows(rows, n, acc,
            [](Vec sum, Vec f, Vec x) HWY_ATTR { return hn::Max(sum, hn::Mul(f, x)); });
}

// The maximum of 2^k neighbours comes from two of 2^(k-1); two of those that overlap make any
// width.
void max_of_neighbours(const float* x, int n, int reach, float* scratch, float* out) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  std::fill_n(scratch, reach, kNothing);
  std::fill_n(scratch + reach + n, reach, kNothing);
  const Floats d;
  for_each_vector(x, static_cast<std::size_t>(n), scratch + reach,
                  [&](const float* from, float* to)
                      HWY_ATTR { hn::StoreU(comparable(hn::LoadU(d, from)), d, to); });
  const auto larger = [&](const float* from, float* to) HWY_ATTR {
    hn::StoreU(hn::Max(hn::LoadU(d, to), hn::LoadU(d, from)), d, to);
  };
  const int width = 2 * reach + 1;
  int have = 1;
  for (; 2 * have <= width; have *= 2) {
    for_each_vector(scratch + have, static_cast<std::size_t>(n + 2 * reach - have), scratch,
                    larger);
  }
  std::copy_n(scratch, n, out);
  for_each_vector(scratch + width - have, static_cast<std::size_t>(n), out, larger);
}

template <class T>
HWY_INLINE void to_float_from(const T* in, std::size_t n, float* out) {
  const Floats d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(load(in + i), d, out + i);
  if (i == n) return;
  HWY_ALIGN float tail[hn::MaxLanes(Floats())];
  hn::Store(load_first(in + i, n - i), d, tail);
  std::memcpy(out + i, tail, (n - i) * sizeof(float));
}

void to_float(const std::byte* in, DType dtype, int n, float* out) {
  const std::size_t count = static_cast<std::size_t>(n);
  switch (dtype) {
    case DType::kF16:
      return to_float_from(reinterpret_cast<const hwy::float16_t*>(in), count, out);
    case DType::kBF16:
      return to_float_from(reinterpret_cast<const hwy::bfloat16_t*>(in), count, out);
    case DType::kF32:
      return to_float_from(reinterpret_cast<const float*>(in), count, out);
    case DType::kF64:
      break;  // never stored
  }
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace morphkv::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace morphkv::kernels {

void prefetch(std::span<const std::byte> bytes) {
  constexpr std::size_t kLine = 64;
  // Loads, not prefetch instructions: only loads make the processor's own prefetcher run ahead
  // (bench/kernel_speed: an attention step out of memory takes 9.9 us with them, 12 without).
  unsigned sum = 0;
  for (std::size_t i = 0; i < bytes.size(); i += kLine) sum += static_cast<unsigned char>(bytes[i]);
  [[maybe_unused]] const volatile unsigned not_removed = sum;
}

HWY_EXPORT(dot_rows);
HWY_EXPORT(max_of);
HWY_EXPORT(least_of);
HWY_EXPORT(first_least);
HWY_EXPORT(index_of);
HWY_EXPORT(sum_of);
HWY_EXPORT(exp_shifted);
HWY_EXPORT(exp_shifted_each);
HWY_EXPORT(add_scaled);
HWY_EXPORT(max_scaled);
HWY_EXPORT(max_of_neighbours);
HWY_EXPORT(to_float);
HWY_EXPORT(target_name);

void dot_rows(const DotRowsArgs& args) { HWY_DYNAMIC_DISPATCH(dot_rows)(args); }
float max_of(const float* x, int n) { return HWY_DYNAMIC_DISPATCH(max_of)(x, n); }
float least_of(const float* x, int n) { return HWY_DYNAMIC_DISPATCH(least_of)(x, n); }
int first_least(const float* x, int n) { return HWY_DYNAMIC_DISPATCH(first_least)(x, n); }
int index_of(int value, const int* x, int n) { return HWY_DYNAMIC_DISPATCH(index_of)(value, x, n); }
float sum_of(const float* x, int n) { return HWY_DYNAMIC_DISPATCH(sum_of)(x, n); }
double exp_shifted(const float* x, int n, float reference, float* out) {
  return HWY_DYNAMIC_DISPATCH(exp_shifted)(x, n, reference, out);
}
void exp_shifted(const float* x, int n, const float* references, float* out) {
  HWY_DYNAMIC_DISPATCH(exp_shifted_each)(x, n, references, out);
}
void add_scaled(const ScaledRows& rows, int n, float* acc) {
  HWY_DYNAMIC_DISPATCH(add_scaled)(rows, n, acc);
}
void max_scaled(const ScaledRows& rows, int n, float* acc) {
  HWY_DYNAMIC_DISPATCH(max_scaled)(rows, n, acc);
}
void max_of_neighbours(const float* x, int n, int reach, float* scratch, float* out) {
  HWY_DYNAMIC_DISPATCH(max_of_neighbours)(x, n, reach, scratch, out);
}
void to_float(const std::byte* in, DType dtype, int n, float* out) {
  HWY_DYNAMIC_DISPATCH(to_float)(in, dtype, n, out);
}
const char* target_name() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace morphkv::kernels
#endif  // HWY_ONCE

// Vector loops of the retention core, dispatched at run time to the best target of the CPU.
// Plain interface: what Highway is, only src/kernels/*.cc and their tests know.
#pragma once

#include <span>

#include "morphkv/tensor_view.h"

namespace morphkv::kernels {

// out[q * out_stride + slot] = scale * sum_d queries[q * query_stride + d] * rows[slot][d]
// for q in [0, n_queries) and slot in [first_slot, last_slot). Products and sums in float. dim may
// be any length >= 1; multiples of 16 are fast. A product has the same bits whatever else is in the
// call, and with its two vectors exchanged. Rows hold finite numbers: not every target keeps
// infinity and NaN of f16.
struct DotRowsArgs {
  const float* queries;       // [query, dim]
  std::int64_t query_stride;  // elements
  int n_queries;
  RowsView rows;  // [slot, dim]
  int first_slot;
  int last_slot;
  float scale;
  float* out;               // [query, slot]
  std::int64_t out_stride;  // elements
};
void dot_rows(const DotRowsArgs& args);

// Largest of x[0, n); -infinity when n == 0.
float max_of(const float* x, int n);

// Least of x[0, n), NaN counting as -infinity; infinity when n == 0.
float least_of(const float* x, int n);

// Index of the first of the least values of x[0, n), n >= 1. NaN counts as -infinity.
int first_least(const float* x, int n);

// Index of the first of x[0, n) that is `value`; n if none is.
int index_of(int value, const int* x, int n);

// Sum of x[0, n): relative error below 1e-6 for values >= 0, however many.
float sum_of(const float* x, int n);

// out[i] = exp(x[i] - reference) for finite reference, relative error below 2e-6 where that is at
// least 1e-37; less gives 0 or nearly 0, -infinity exactly 0, reference exactly 1. out may be x.
// Returns the sum of out, in double. What is more than 88 above the reference gives anything.
double exp_shifted(const float* x, int n, float reference, float* out);
// The same with a reference for each.
void exp_shifted(const float* x, int n, const float* references, float* out);

// Rows of one length, each with a factor.
struct ScaledRows {
  const float* x;        // [row, n]
  std::int64_t stride;   // elements
  const float* factors;  // [row]
  int rows;
};

// acc[i] += sum_r factors[r] * x[r, i], in the order of the rows.
void add_scaled(const ScaledRows& rows, int n, float* acc);

// acc[i] = max(acc[i], max_r factors[r] * x[r, i])
void max_scaled(const ScaledRows& rows, int n, float* acc);

// out[i] = the largest of x[i - reach, i + reach] within [0, n). NaN counts as -infinity. `scratch`
// holds n + 2 * reach floats; out may be x.
void max_of_neighbours(const float* x, int n, int reach, float* scratch, float* out);

// One row to float. in and out hold n elements.
void to_float(const std::byte* in, DType dtype, int n, float* out);

// Brings these bytes into the cache, one line after the other.
void prefetch(std::span<const std::byte> bytes);

// Name of the vector target in use, such as "AVX3".
const char* target_name();

}  // namespace morphkv::kernels

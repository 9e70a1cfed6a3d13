// Vector loops of the retention core, dispatched at run time to the best target of the CPU.
// Plain interface: what Highway is, only src/kernels/*.cc and their tests know.
#pragma once

#include "morphkv/tensor_view.h"

namespace morphkv::kernels {

// out[q * out_stride + slots[i]] = scale * sum_d queries[q * query_stride + d] * rows[slots[i]][d]
// for q in [0, n_queries) and i in [0, n_slots). Products and sums in float.
// slots == nullptr stands for 0, 1, ..., n_slots - 1. dim may be any length >= 1; multiples of 16
// are fast. A product has the same bits whatever else is in the call, and with its two vectors
// exchanged. Rows hold finite numbers: not every target keeps infinity and NaN of f16.
struct DotRowsArgs {
  const float* queries;       // [query, dim]
  std::int64_t query_stride;  // elements
  int n_queries;
  RowsView rows;  // [slot, dim]
  const int* slots;
  int n_slots;
  float scale;
  float* out;               // [query, slot]
  std::int64_t out_stride;  // elements
};
void dot_rows(const DotRowsArgs& args);

// Largest of x[0, n); -infinity when n == 0.
float max_of(const float* x, int n);

// Index of the first of the least values of x[0, n), n >= 1. NaN counts as -infinity.
int first_least(const float* x, int n);

// Sum of x[0, n), added up in double: relative error below 1e-6 for values >= 0, however many.
float sum_of(const float* x, int n);

// out[i] = exp(x[i] - reference) for finite reference, relative error below 2e-6 where that is at
// least 1e-37; less gives 0 or nearly 0, -infinity exactly 0, reference exactly 1. out may be x.
void exp_shifted(const float* x, int n, float reference, float* out);

// acc[i] += factor * x[i]
void add_scaled(const float* x, int n, float factor, float* acc);

// acc[i] = max(acc[i], factor * x[i])
void max_scaled(const float* x, int n, float factor, float* acc);

// One row to float. in and out hold n elements.
void to_float(const std::byte* in, DType dtype, int n, float* out);

// Name of the vector target in use, such as "AVX3".
const char* target_name();

}  // namespace morphkv::kernels

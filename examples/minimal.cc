// Fills a cache past its budget and prints what it keeps. One cache serves one attention layer.
#include <cmath>
#include <cstdio>
#include <vector>

#include "morphkv/cache.h"

using morphkv::ArrayView;
using morphkv::DType;

int main() {
  // At most 8 rows per KV head: the first 2 tokens and the last 2 always, and of the others those
  // that the last 2 tokens attend to most.
  morphkv::MorphKVCache cache({.budget = 8, .n_sink = 2, .window = 2});

  constexpr int kHeads = 2;
  constexpr int kDim = 4;
  std::vector<float> keys(kHeads * kDim);
  std::vector<float> values(kHeads * kDim);
  for (int token = 0; token < 32; ++token) {
    for (int i = 0; i < kHeads * kDim; ++i) {
      keys[i] = std::sin(0.7f * static_cast<float>(token * (i + 1)));  // your model's numbers
      values[i] = static_cast<float>(token);
    }
    // [batch, KV head, token, dim]; any float type and any strides will do.
    const auto k = ArrayView::contiguous(keys.data(), DType::kF32, {1, kHeads, 1, kDim});
    const auto v = ArrayView::contiguous(values.data(), DType::kF32, {1, kHeads, 1, kDim});
    // The rows held before and the new one: attend to these.
    const auto rows = cache.update_and_fetch(k, v);
    if (rows.keys.rows > 9) return 1;
  }

  const auto positions = cache.positions();  // [batch, head, row]
  for (int h = 0; h < kHeads; ++h) {
    std::printf("head %d keeps the tokens", h);
    for (std::int64_t row = 0; row < cache.tokens_kept(); ++row) {
      std::printf(" %lld", static_cast<long long>(positions[h * cache.tokens_kept() + row]));
    }
    std::printf("\n");
  }
  std::printf("%lld tokens seen, %zu bytes of %zu held: %.1f times less\n",
              static_cast<long long>(cache.offset()), cache.kept_bytes(), cache.full_seq_bytes(),
              cache.compression_ratio());
  return cache.tokens_kept() == 8 && cache.offset() == 32 ? 0 : 1;
}

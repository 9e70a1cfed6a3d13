// An attention layer by hand: a prompt and then single tokens, with a cache of constant size. What
// it puts out is checked against plain attention over the same tokens, which this program never
// forgets.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "half.h"
#include "morphkv/cache.h"

using morphkv::ArrayView;
using morphkv::DType;

namespace {

constexpr int kHeads = 2;  // KV heads
constexpr int kGroup = 3;  // query heads that read one KV head
constexpr int kDim = 16;
constexpr int kPrompt = 40;
constexpr int kTokens = 100;

using Row = std::vector<float>;

// Attention of one query to some rows.
Row attend(const Row& query, const std::vector<Row>& keys, const std::vector<Row>& values) {
  std::vector<float> weights;
  for (const Row& key : keys) {
    float logit = 0;
    for (int d = 0; d < kDim; ++d) logit += query[d] * key[d];
    weights.push_back(logit / std::sqrt(static_cast<float>(kDim)));
  }
  const float largest = *std::max_element(weights.begin(), weights.end());
  float sum = 0;
  for (float& weight : weights) sum += weight = std::exp(weight - largest);
  Row out(kDim, 0.0f);
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (int d = 0; d < kDim; ++d) out[d] += weights[i] / sum * values[i][d];
  }
  return out;
}

Row row_of(const morphkv::Rows& rows, int head, std::int64_t index) {
  Row row;
  for (int d = 0; d < kDim; ++d) {
    row.push_back(element(rows.head(0, head).row(static_cast<int>(index)), d, rows.dtype));
  }
  return row;
}

// Numbers of the model that is not there: [head, token, dim] of `tokens` tokens.
std::vector<float> random_numbers(int heads, int tokens) {
  static std::mt19937 bits(1);
  std::vector<float> numbers(static_cast<std::size_t>(heads * tokens * kDim));
  for (float& x : numbers) x = static_cast<float>(bits() % 256) / 128.0f - 1.0f;  // exact in fp16
  return numbers;
}

Row part(const std::vector<float>& numbers, int index) {
  return {numbers.begin() + index * kDim, numbers.begin() + (index + 1) * kDim};
}

}  // namespace

int main() {
  // The model's own queries decide which rows stay.
  morphkv::MorphKVCache cache({.budget = 24,
                               .n_sink = 2,
                               .window = 4,
                               .pool = 3,
                               .queries = morphkv::QuerySource::kAttention});
  std::vector<Row> all_keys[kHeads];  // [position], what a cache without limit would hold
  std::vector<Row> all_values[kHeads];
  float largest_error = 0;

  for (int first = 0; first < kTokens;) {
    const int n = first == 0 ? kPrompt : 1;
    const auto q = random_numbers(kHeads * kGroup, n);
    const auto k = random_numbers(kHeads, n);
    const auto v = random_numbers(kHeads, n);
    const auto view = [n](const std::vector<float>& numbers, int heads) {
      return ArrayView::contiguous(numbers.data(), DType::kF32, {1, heads, n, kDim});
    };

    // 1. Before the call: which of the rows that it will return may each new token see?
    const auto mask = cache.make_mask(n, std::nullopt);
    auto positions = cache.positions();  // for the check below
    const auto held = cache.tokens_kept();

    // 2. Store the new rows and get all rows to attend to: those held, then the new ones.
    const auto [keys, values] =
        cache.update_and_fetch(view(k, kHeads), view(v, kHeads), view(q, kHeads * kGroup));

    for (int h = 0; h < kHeads; ++h) {
      for (int t = 0; t < n; ++t) {
        all_keys[h].push_back(part(k, h * n + t));
        all_values[h].push_back(part(v, h * n + t));
      }
      for (int t = 0; t < n; ++t) {
        // 3. Attention over the rows that the mask allows.
        std::vector<Row> seen_keys;
        std::vector<Row> seen_values;
        for (std::int64_t row = 0; row < keys.rows; ++row) {
          if (mask && mask->allowed[t * mask->rows + row] == 0) continue;
          seen_keys.push_back(row_of(keys, h, row));
          seen_values.push_back(row_of(values, h, row));
        }
        // The check: the tokens that were held, and the new ones up to this one.
        std::vector<Row> due_keys;
        std::vector<Row> due_values;
        for (std::int64_t row = 0; row < held; ++row) {
          due_keys.push_back(all_keys[h][positions[h * held + row]]);
          due_values.push_back(all_values[h][positions[h * held + row]]);
        }
        for (int position = first; position <= first + t; ++position) {
          due_keys.push_back(all_keys[h][position]);
          due_values.push_back(all_values[h][position]);
        }
        for (int g = 0; g < kGroup; ++g) {
          const Row query = part(q, (h * kGroup + g) * n + t);
          const Row out = attend(query, seen_keys, seen_values);
          const Row due = attend(query, due_keys, due_values);
          for (int d = 0; d < kDim; ++d) {
            largest_error = std::max(largest_error, std::fabs(out[d] - due[d]));
          }
        }
      }
    }
    first += n;
  }

  std::printf("%lld tokens, %lld rows per KV head held, largest error %g\n",
              static_cast<long long>(cache.offset()), static_cast<long long>(cache.tokens_kept()),
              static_cast<double>(largest_error));
  return cache.tokens_kept() == 24 && largest_error == 0 ? 0 : 1;
}

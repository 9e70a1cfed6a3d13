// Callers of a cache: arrays [batch, head, token, dim] of every type and layout, and a harness that
// feeds them to a MorphKVCache and checks after each call what came back and what is held. Which
// rows should be held is the matter of the oracle (oracle.h).
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "generators.h"
#include "morphkv/cache.h"

namespace morphkv::test {

using Positions = std::vector<Position>;

// Numbers [batch, head, token, dim] before they have a type.
struct Tensor {
  std::array<std::int64_t, 4> shape{};
  std::vector<double> numbers = {};

  double& at(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t d) {
    return numbers[static_cast<std::size_t>(((b * shape[1] + h) * shape[2] + t) * shape[3] + d)];
  }
  double at(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t d) const {
    return const_cast<Tensor*>(this)->at(b, h, t, d);
  }
  // Tokens [first, first + count).
  Tensor tokens(std::int64_t first, std::int64_t count) const {
    Tensor part{{shape[0], shape[1], count, shape[3]}};
    for (std::int64_t row = 0; row < shape[0] * shape[1]; ++row) {
      const auto begin = numbers.begin() + (row * shape[2] + first) * shape[3];
      part.numbers.insert(part.numbers.end(), begin, begin + count * shape[3]);
    }
    return part;
  }
};

inline Tensor random_tensor(std::array<std::int64_t, 4> shape, Random& random, double spread = 1) {
  Tensor tensor{shape};
  const auto n = static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]);
  for (std::size_t i = 0; i < n; ++i) tensor.numbers.push_back(spread * random.normal());
  return tensor;
}

// GEN(T, H, D) of the field cases as [1, H, T, D].
inline Tensor gen_tensor(int tokens, int heads, int dim) {
  const Stream stream = gen_stream(tokens, heads, dim);
  Tensor tensor{{1, heads, tokens, dim}};
  for (int h = 0; h < heads; ++h) {
    for (int t = 0; t < tokens; ++t) {
      for (const float number : stream.key(t, h)) tensor.numbers.push_back(number);
    }
  }
  return tensor;
}

// How the axes lie in memory, outermost first; which run backwards; elements from one number of the
// innermost axis to the next.
struct ArrayLayout {
  std::array<int, 4> order{0, 1, 2, 3};
  std::array<bool, 4> reversed{};
  int step = 1;
};

inline ArrayLayout any_layout(Random& random) {
  ArrayLayout layout;
  std::vector<int> order = {0, 1, 2, 3};
  if (random.coin()) random.shuffle(order);
  for (std::size_t axis = 0; axis < 4; ++axis) {
    layout.order[axis] = order[axis];
    layout.reversed[axis] = random.between(0, 3) == 0;
  }
  layout.step = random.pick({1, 1, 2, 3});
  return layout;
}

// The memory of somebody's array.
class HostArray {
 public:
  HostArray(const Tensor& tensor, DType dtype, const ArrayLayout& layout = {}) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    std::int64_t stride = size * layout.step;
    view_.dtype = dtype;
    view_.shape = tensor.shape;
    std::int64_t start = 0;
    for (int i = 3; i >= 0; --i) {
      const auto axis = static_cast<std::size_t>(layout.order[static_cast<std::size_t>(i)]);
      view_.strides[axis] = layout.reversed[axis] ? -stride : stride;
      if (layout.reversed[axis]) start += stride * (tensor.shape[axis] - 1);
      stride *= tensor.shape[axis];
    }
    bytes_.assign(static_cast<std::size_t>(stride), std::byte{0xFF});  // NaN in the gaps
    view_.data = bytes_.data() + start;
    for (std::int64_t b = 0; b < tensor.shape[0]; ++b) {
      for (std::int64_t h = 0; h < tensor.shape[1]; ++h) {
        for (std::int64_t t = 0; t < tensor.shape[2]; ++t) {
          for (std::int64_t d = 0; d < tensor.shape[3]; ++d) {
            const auto& s = view_.strides;
            store(bytes_.data() + start + b * s[0] + h * s[1] + t * s[2] + d * s[3], dtype,
                  tensor.at(b, h, t, d));
          }
        }
      }
    }
  }
  HostArray(const HostArray&) = delete;
  HostArray& operator=(const HostArray&) = delete;

  const ArrayView& view() const { return view_; }

 private:
  static void store(std::byte* at, DType dtype, double number) {
    const auto put = [at](auto value) { std::memcpy(at, &value, sizeof value); };
    if (dtype == DType::kF16) put(to_f16(number));
    if (dtype == DType::kBF16) put(to_bf16(static_cast<float>(number)));
    if (dtype == DType::kF32) put(static_cast<float>(number));
    if (dtype == DType::kF64) put(number);
  }

  std::vector<std::byte> bytes_;
  ArrayView view_;
};

// The bits that a cache of `stored` should hold for a number that came in as `in`.
inline std::uint16_t stored_bits(double number, DType in, DType stored) {
  if (stored == DType::kBF16) return to_bf16(static_cast<float>(number));
  if (in == DType::kF32) return to_f16(static_cast<float>(number));
  if (in == DType::kBF16) return to_f16(from_bf16(to_bf16(static_cast<float>(number))));
  return to_f16(number);
}

inline float stored_number(std::uint16_t bits, DType stored) {
  return stored == DType::kF16 ? from_f16(bits) : from_bf16(bits);
}

inline void expect_same_state(const CacheState& a, const CacheState& b) {
  EXPECT_EQ(a.config, b.config);
  EXPECT_EQ(std::tuple(a.batch, a.heads, a.dim, a.dtype, a.offset, a.saturated),
            std::tuple(b.batch, b.heads, b.dim, b.dtype, b.offset, b.saturated));
  EXPECT_EQ(a.positions, b.positions);
  EXPECT_TRUE(a.keys == b.keys);
  EXPECT_TRUE(a.values == b.values);
  EXPECT_TRUE(a.memory == b.memory);
}

// A stream of tokens for one cache, and the checks of every call.
class CacheHarness {
 public:
  CacheHarness(MorphKVCache cache, Tensor keys, Tensor values, DType in = DType::kF32)
      : cache_(std::move(cache)), keys_(std::move(keys)), values_(std::move(values)), in_(in) {
    stored_ = in == DType::kBF16 ? DType::kBF16 : DType::kF16;
  }

  MorphKVCache& cache() { return cache_; }
  std::int64_t offset() const { return offset_; }
  std::int64_t left() const { return keys_.shape[2] - offset_; }
  std::int64_t n_heads() const { return keys_.shape[0] * keys_.shape[1]; }
  void set_queries(Tensor queries) { queries_ = std::move(queries); }
  void set_cache(MorphKVCache cache) { cache_ = std::move(cache); }
  DType stored() const { return stored_; }

  // [batch * head] what is held.
  std::vector<Positions> held() const {
    const Positions all = cache_.positions();
    std::vector<Positions> heads(static_cast<std::size_t>(n_heads()));
    const std::size_t rows = all.size() / heads.size();
    for (std::size_t h = 0; h < heads.size(); ++h) {
      heads[h].assign(all.begin() + static_cast<std::ptrdiff_t>(h * rows),
                      all.begin() + static_cast<std::ptrdiff_t>((h + 1) * rows));
    }
    return heads;
  }

  std::vector<float> stored_key(std::int64_t head, Position position) const {
    return stored_row(keys_, head, position);
  }

  // One call: what comes back is what was held and all that is new, and what is held then is live.
  void feed(std::int64_t tokens, const ArrayLayout& key_layout = {},
            const ArrayLayout& value_layout = {}) {
    bring(tokens, false, key_layout, value_layout);
  }
  // The same, and all of it is held.
  void extend(std::int64_t tokens, const ArrayLayout& key_layout = {},
              const ArrayLayout& value_layout = {}) {
    std::vector<Positions> due = held();
    for (auto& head : due) {
      for (std::int64_t t = 0; t < tokens; ++t) head.push_back(offset_ + t);
    }
    bring(tokens, true, key_layout, value_layout);
    ASSERT_EQ(held(), due);
  }

  // The rows of a guide come back behind those held, and nothing else has changed.
  void guide(const Tensor& keys, const Tensor& values, const std::optional<Tensor>& queries = {}) {
    const auto before = held();
    const std::size_t bytes = cache_.kept_bytes();
    const std::int64_t saturated = cache_.saturated();
    const HostArray k(keys, in_);
    const HostArray v(values, in_);
    const auto call = [&] {
      if (!queries) return cache_.guide_and_fetch(k.view(), v.view());
      const HostArray q(*queries, DType::kF32);
      return cache_.guide_and_fetch(k.view(), v.view(), q.view());
    };
    const KeysAndValues fetched = call();
    expect_rows(fetched.keys, keys_, before, &keys);
    expect_rows(fetched.values, values_, before, &values);
    EXPECT_EQ(held(), before);
    EXPECT_EQ(cache_.offset(), offset_);
    EXPECT_EQ(cache_.tokens_seen(), n_heads() * offset_);
    EXPECT_EQ(cache_.kept_bytes(), bytes);
    EXPECT_EQ(cache_.saturated(), saturated);
  }
  // What the cache would store of a row of `tensor`.
  std::vector<float> stored_row(const Tensor& tensor, std::int64_t head, std::int64_t token) const {
    std::vector<float> row;
    for (const std::uint16_t bits : bits_of(tensor, head, token)) {
      row.push_back(stored_number(bits, stored_));
    }
    return row;
  }

  // keys() and values() hold the rows of positions(). Not after every call: they complete the
  // eviction.
  void expect_rows_live() {
    expect_rows(cache_.keys(), keys_, held());
    expect_rows(cache_.values(), values_, held());
  }

  // The rows of `from` at these positions, and then all of `behind`.
  void expect_rows(const Rows& rows, const Tensor& from, const std::vector<Positions>& due,
                   const Tensor* behind = nullptr) const {
    ASSERT_EQ(rows.batch, keys_.shape[0]);
    ASSERT_EQ(rows.heads, keys_.shape[1]);
    ASSERT_EQ(rows.dim, keys_.shape[3]);
    ASSERT_EQ(rows.dtype, stored_);
    const std::int64_t more = behind == nullptr ? 0 : behind->shape[2];
    ASSERT_EQ(rows.rows, static_cast<std::int64_t>(due.front().size()) + more);
    std::vector<std::uint16_t> expected;
    for (std::size_t h = 0; h < due.size(); ++h) {
      const auto add = [&](const Tensor& tensor, std::int64_t token) {
        const auto bits = bits_of(tensor, static_cast<std::int64_t>(h), token);
        expected.insert(expected.end(), bits.begin(), bits.end());
      };
      for (const Position position : due[h]) add(from, position);
      for (std::int64_t t = 0; t < more; ++t) add(*behind, t);
    }
    std::vector<std::uint16_t> found(expected.size());
    rows.copy_to(found.data());
    ASSERT_TRUE(found == expected)
        << "other rows than the " << rows.rows << " due at offset " << offset_;
  }

 private:
  void bring(std::int64_t tokens, bool extend, const ArrayLayout& key_layout,
             const ArrayLayout& value_layout) {
    std::vector<Positions> due = held();
    for (auto& head : due) {
      for (std::int64_t t = 0; t < tokens; ++t) head.push_back(offset_ + t);
    }
    const HostArray keys(keys_.tokens(offset_, tokens), in_, key_layout);
    const HostArray values(values_.tokens(offset_, tokens), in_, value_layout);
    const auto call = [&] {
      if (!queries_) {
        return extend ? cache_.extend_and_fetch(keys.view(), values.view())
                      : cache_.update_and_fetch(keys.view(), values.view());
      }
      const HostArray queries(queries_->tokens(offset_, tokens), DType::kF32, value_layout);
      return extend ? cache_.extend_and_fetch(keys.view(), values.view(), queries.view())
                    : cache_.update_and_fetch(keys.view(), values.view(), queries.view());
    };
    const KeysAndValues fetched = call();
    offset_ += tokens;
    expect_rows(fetched.keys, keys_, due);
    expect_rows(fetched.values, values_, due);

    EXPECT_EQ(cache_.offset(), offset_);
    EXPECT_EQ(cache_.tokens_seen(), n_heads() * offset_);
    const auto kept = held();
    for (const Positions& head : kept) {
      EXPECT_EQ(cache_.tokens_kept(), static_cast<std::int64_t>(head.size()));
    }
    const auto row_bytes = static_cast<std::size_t>(n_heads() * keys_.shape[3] * 2 * 2);
    EXPECT_EQ(cache_.kept_bytes(), kept.front().size() * row_bytes);
    EXPECT_EQ(cache_.full_seq_bytes(), static_cast<std::size_t>(offset_) * row_bytes);
  }

  std::vector<std::uint16_t> bits_of(const Tensor& from, std::int64_t head, Position at) const {
    std::vector<std::uint16_t> bits;
    for (std::int64_t d = 0; d < from.shape[3]; ++d) {
      const double number = from.at(head / from.shape[1], head % from.shape[1], at, d);
      bits.push_back(stored_bits(number, in_, stored_));
    }
    return bits;
  }

  MorphKVCache cache_;
  Tensor keys_;
  Tensor values_;
  std::optional<Tensor> queries_;
  DType in_;
  DType stored_;
  std::int64_t offset_ = 0;
};

// The text of the std::invalid_argument that `call` throws.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was refused";
}

}  // namespace morphkv::test

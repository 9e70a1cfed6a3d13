// A policy of one's own: keep the rows with the largest keys. Who is protected, how many leave and
// where rows lie is not its business.
#include <cstdio>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "half.h"
#include "morphkv/cache.h"

using morphkv::ArrayView;
using morphkv::DType;
using morphkv::KeepSet;

// What one KV head remembers: the squared norm of each key, in a column, which goes where the rows
// go and is saved with them.
class LargestKeysHead final : public morphkv::HeadPolicy {
 public:
  LargestKeysHead() : norm_(columns_.add(1, 0.0f)) {}

  // New rows came.
  void append(const KeepSet& /*keep*/, const morphkv::NewRows& rows, int first, int count,
              morphkv::Workspace& /*scratch*/) override {
    for (int token = first; token < first + count; ++token) {
      const int slot = rows.slots[token];
      float norm = 0;
      for (int d = 0; d < rows.keys.dim; ++d) {
        const float x = element(rows.keys.row(slot), d, rows.keys.dtype);
        norm += x * x;
      }
      columns_[norm_][slot] = norm;
    }
  }
  // The least score leaves.
  void score(const KeepSet& keep, std::span<float> scores, morphkv::Workspace&) override {
    for (int rank = 0; rank < keep.size(); ++rank) {
      scores[rank] = columns_[norm_][keep.slots()[rank]];
    }
  }
  std::unique_ptr<HeadPolicy> clone() const override {
    return std::make_unique<LargestKeysHead>(*this);
  }

 private:
  int norm_;  // column
};

class LargestKeys final : public morphkv::Policy {
 public:
  std::string_view name() const override { return "largest-keys"; }
  morphkv::PolicyTraits traits() const override { return {.needs_keys = true}; }
  std::unique_ptr<morphkv::HeadPolicy> make_head(morphkv::HeadId) const override {
    return std::make_unique<LargestKeysHead>();
  }
};

int main() {
  morphkv::MorphKVCache cache({.budget = 8, .n_sink = 1, .window = 2},
                              std::make_shared<LargestKeys>());
  for (int token = 0; token < 40; ++token) {
    // Every fifth key is large.
    const float key[] = {token % 5 == 0 ? 2.0f : 0.5f, 0.1f};
    const auto rows = ArrayView::contiguous(key, DType::kF32, {1, 1, 1, 2});
    cache.update_and_fetch(rows, rows);
  }
  std::printf("kept:");
  for (const auto position : cache.positions()) {
    std::printf(" %lld", static_cast<long long>(position));
  }
  std::printf("\n");
  // The sink 0, the tail 38 and 39, and of the large ones the last five: of equals the oldest
  // leave.
  const std::vector<morphkv::Position> due = {0, 15, 20, 25, 30, 35, 38, 39};
  return cache.positions() == due ? 0 : 1;
}

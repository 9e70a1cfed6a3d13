#include "morphkv/keep_set.h"

#include <algorithm>
#include <cassert>

namespace morphkv {
namespace {

template <typename T>
void erase_ranks(std::vector<T>& values, std::span<const int> ranks) {
  if (ranks.empty()) return;
  auto out = values.begin() + ranks.front();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto first = values.begin() + ranks[i] + 1;
    const auto last = i + 1 < ranks.size() ? values.begin() + ranks[i + 1] : values.end();
    out = std::copy(first, last, out);
  }
  values.erase(out, values.end());
}

}  // namespace

KeepSet::KeepSet(int max_slots) { reserve(max_slots); }

int KeepSet::slot_limit() const {
  int limit = 0;
  for (const int slot : slots_) limit = std::max(limit, slot + 1);
  return limit;
}

void KeepSet::append(int slot, Position position) {
  assert(slots_.size() < slots_.capacity());
  assert(positions_.empty() || position > positions_.back());
  slots_.push_back(slot);
  positions_.push_back(position);
}

void KeepSet::erase(std::span<const int> ranks) {
  assert(std::is_sorted(ranks.begin(), ranks.end()));
  erase_ranks(slots_, ranks);
  erase_ranks(positions_, ranks);
}

void KeepSet::move(int from, int to) {
  assert(std::find(slots_.begin(), slots_.end(), to) == slots_.end());
  const auto row = std::find(slots_.begin(), slots_.end(), from);
  assert(row != slots_.end());
  *row = to;
}

void KeepSet::shift(int first, int last, int by) {
  for (int& slot : slots_) slot += slot >= first && slot < last ? by : 0;
}

void KeepSet::clear() {
  slots_.clear();
  positions_.clear();
}

void KeepSet::reserve(int max_slots) {
  slots_.reserve(static_cast<std::size_t>(max_slots));
  positions_.reserve(static_cast<std::size_t>(max_slots));
}

}  // namespace morphkv

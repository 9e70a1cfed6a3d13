#include "morphkv/keep_set.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>

#include "kernels/kernels.h"

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

void SlotSet::shift(int first, int last, int by) {
  if (first >= last) return;
  if (next(first, ~std::uint64_t{0}) >= last) {
    // Of a run only the ends are seen to move.
    const int n = std::min(std::abs(by), last - first);
    for (int i = 0; i < n; ++i) remove(by < 0 ? last - 1 - i : first + i);
    for (int i = 0; i < n; ++i) add(by < 0 ? first + by + i : last + by - 1 - i);
    return;
  }
  for (int i = 0; i < last - first; ++i) {
    const int slot = by < 0 ? first + i : last - 1 - i;
    if (!contains(slot)) continue;
    remove(slot);
    add(slot + by);
  }
}

KeepSet::KeepSet(int max_slots) : held_(max_slots) { reserve(max_slots); }

int KeepSet::rank_of(int slot) const {
  assert(held_.contains(slot));
  return kernels::index_of(slot, slots_.data(), size());
}

void KeepSet::append(int slot, Position position) {
  assert(slots_.size() < slots_.capacity());
  assert(positions_.empty() || position > positions_.back());
  assert(!held_.contains(slot));
  slots_.push_back(slot);
  positions_.push_back(position);
  held_.add(slot);
}

void KeepSet::erase(std::span<const int> ranks) {
  assert(std::is_sorted(ranks.begin(), ranks.end()));
  for (const int rank : ranks) held_.remove(slots_[static_cast<std::size_t>(rank)]);
  erase_ranks(slots_, ranks);
  erase_ranks(positions_, ranks);
}

void KeepSet::move(int from, int to) {
  assert(!held_.contains(to));
  slots_[static_cast<std::size_t>(rank_of(from))] = to;
  held_.remove(from);
  held_.add(to);
}

void KeepSet::shift(int first, int last, int by) {
  for (int& slot : slots_) slot += slot >= first && slot < last ? by : 0;
  held_.shift(first, last, by);
}

void KeepSet::put_in_order() {
  held_.clear();
  for (int rank = 0; rank < size(); ++rank) {
    slots_[rank] = rank;
    held_.add(rank);
  }
}

void KeepSet::clear() {
  slots_.clear();
  positions_.clear();
  held_.clear();
}

void KeepSet::reserve(int max_slots) {
  slots_.reserve(static_cast<std::size_t>(max_slots));
  positions_.reserve(static_cast<std::size_t>(max_slots));
  held_.reserve(max_slots);
}

}  // namespace morphkv

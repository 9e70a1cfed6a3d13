#include "morphkv/slot_columns.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace morphkv {
namespace {

// Whole cache lines, an odd number of them: at a power of two all columns would want the same place
// in the cache for a slot.
std::int64_t stride_of(int max_slots) {
  constexpr std::int64_t kLine = 16;
  return ((max_slots + kLine - 1) / kLine | 1) * kLine;
}

}  // namespace

int SlotColumns::add(int columns, float least) {
  assert(numbers_.empty());
  least_.insert(least_.end(), static_cast<std::size_t>(columns), least);
  return static_cast<int>(least_.size()) - columns;
}

void SlotColumns::erase(int slot) {
  for (int c = 0; c < columns(); ++c) (*this)[c][slot] = least_[c];
}

void SlotColumns::move(int from, int to) {
  for (int c = 0; c < columns(); ++c) {
    (*this)[c][to] = (*this)[c][from];
    (*this)[c][from] = least_[c];
  }
}

void SlotColumns::shift(int first, int last, int by) {
  const auto bytes = static_cast<std::size_t>(last - first) * sizeof(float);
  const int left = by > 0 ? first : last + by;
  for (int c = 0; c < columns(); ++c) {
    float* const column = (*this)[c];
    std::memmove(column + first + by, column + first, bytes);
    std::fill_n(column + left, std::abs(by), least_[c]);
  }
}

void SlotColumns::gather(std::span<const int> slots) {
  std::vector<float> numbers(slots.size());
  for (int c = 0; c < columns(); ++c) {
    for (std::size_t i = 0; i < slots.size(); ++i) numbers[i] = (*this)[c][slots[i]];
    std::fill_n((*this)[c], stride_, least_[c]);
    std::copy(numbers.begin(), numbers.end(), (*this)[c]);
  }
}

void SlotColumns::clear() {
  for (int c = 0; c < columns(); ++c) std::fill_n((*this)[c], stride_, least_[c]);
}

void SlotColumns::resize(int max_slots) {
  if (max_slots == max_slots_) return;
  const SlotColumns old = std::move(*this);
  least_ = old.least_;
  max_slots_ = max_slots;
  stride_ = stride_of(max_slots);
  numbers_.resize(offset(columns()));
  clear();
  const int slots = std::min(old.max_slots_, max_slots);
  for (int c = 0; c < columns(); ++c) std::copy_n(old[c], slots, (*this)[c]);
}

void SlotColumns::save(std::span<const int> slots, std::vector<float>& out) const {
  for (int c = 0; c < columns(); ++c) {
    for (const int slot : slots) out.push_back((*this)[c][slot]);
  }
}

bool SlotColumns::load(std::span<const int> slots, std::span<const float> saved) {
  if (saved.size() != least_.size() * slots.size()) return false;
  for (std::size_t i = 0; i < saved.size(); ++i) {
    if (!(saved[i] >= least_[i / slots.size()])) return false;
  }
  clear();
  const float* number = saved.data();
  for (int c = 0; c < columns(); ++c) {
    for (const int slot : slots) (*this)[c][slot] = *number++;
  }
  return true;
}

}  // namespace morphkv

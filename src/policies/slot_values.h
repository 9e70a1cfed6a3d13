// One number for each slot, which goes where the row in the slot goes.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "morphkv/keep_set.h"

namespace morphkv::policies {

class SlotValues {
 public:
  explicit SlotValues(int max_slots) : values_(static_cast<std::size_t>(max_slots), 0.0f) {}

  float* data() { return values_.data(); }
  const float* data() const { return values_.data(); }
  float& operator[](int slot) { return values_[static_cast<std::size_t>(slot)]; }
  float operator[](int slot) const { return values_[static_cast<std::size_t>(slot)]; }

  void move(int from, int to) { (*this)[to] = (*this)[from]; }
  void shift(int first, int last, int by) {
    const auto begin = values_.begin() + first;
    const auto end = values_.begin() + last;
    if (by < 0) {
      std::copy(begin, end, begin + by);
    } else {
      std::copy_backward(begin, end, end + by);
    }
  }
  void clear() { std::fill(values_.begin(), values_.end(), 0.0f); }
  void resize(int max_slots) { values_.resize(static_cast<std::size_t>(max_slots)); }

  // HeadPolicy::save() and load() of numbers that are never negative.
  void save(const KeepSet& keep, std::vector<float>& out) const {
    for (const int slot : keep.slots()) out.push_back((*this)[slot]);
  }
  bool load(const KeepSet& keep, std::span<const float> saved) {
    const bool good = std::all_of(saved.begin(), saved.end(), [](float x) { return x >= 0.0f; });
    if (!good || saved.size() != static_cast<std::size_t>(keep.size())) return false;
    for (std::size_t rank = 0; rank < saved.size(); ++rank) {
      (*this)[keep.slots()[rank]] = saved[rank];
    }
    return true;
  }

 private:
  std::vector<float> values_;
};

}  // namespace morphkv::policies

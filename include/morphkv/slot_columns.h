// What a policy remembers of each row, as numbers. The one place where these go along when rows
// leave, change their slots or are saved.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace morphkv {

class SlotColumns {
 public:
  // Adds `columns` columns and returns the index of the first. `least`: no number of a row lies
  // below it, and slots that are not held have it. All before the first resize().
  int add(int columns, float least);

  float* operator[](int column) { return numbers_.data() + offset(column); }  // [slot]
  const float* operator[](int column) const { return numbers_.data() + offset(column); }
  int max_slots() const { return max_slots_; }
  std::int64_t stride() const { return stride_; }  // floats from one column to the next

  // The row in `slot` has left.
  void erase(int slot);
  // The row in slot `from` now lies in slot `to`, which was not held.
  void move(int from, int to);
  // The rows in slots [first, last) now lie `by` slots further on, over slots that are not held.
  void shift(int first, int last, int by);
  // The rows in slots[rank] now lie in slots 0, 1, ... Allocates.
  void gather(std::span<const int> slots);
  void clear();
  // From now on slots are 0 .. max_slots - 1; no row lies beyond. Allocates.
  void resize(int max_slots);

  // [column, rank] the numbers of the rows in slots[rank].
  void save(std::span<const int> slots, std::vector<float>& out) const;
  // Forgets all others. False, having changed nothing, if these are no such numbers.
  bool load(std::span<const int> slots, std::span<const float> saved);

 private:
  std::size_t offset(int column) const {
    return static_cast<std::size_t>(column) * static_cast<std::size_t>(stride_);
  }
  int columns() const { return static_cast<int>(least_.size()); }

  int max_slots_ = 0;
  std::int64_t stride_ = 0;
  std::vector<float> least_;    // [column]
  std::vector<float> numbers_;  // [column, slot]
};

}  // namespace morphkv

// The rows that one head holds: which token position lies in which slot, in ascending position.
// Pure bookkeeping; the vectors themselves belong to the host.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace morphkv {

// Absolute index of a token in its sequence.
using Position = std::int64_t;

class KeepSet {
 public:
  // Slots are numbered 0 .. max_slots - 1; at most so many rows are ever held. Allocates once,
  // here.
  explicit KeepSet(int max_slots);

  int size() const { return static_cast<int>(slots_.size()); }
  // [rank] rank 0 is the oldest row.
  std::span<const int> slots() const { return slots_; }
  std::span<const Position> positions() const { return positions_; }
  // One more than the highest slot in use.
  int slot_limit() const;

  // The new row becomes the last rank. `position` must be above all others, `slot` free.
  void append(int slot, Position position);
  // Removes the rows at these ranks, which ascend.
  void erase(std::span<const int> ranks);
  // The row in slot `from` now lies in slot `to`, which must be free.
  void move(int from, int to);
  // The rows in slots [first, last) now lie `by` slots further on.
  void shift(int first, int last, int by);
  void clear();
  // Changes the number of slots. Allocates.
  void reserve(int max_slots);

 private:
  std::vector<int> slots_;
  std::vector<Position> positions_;
};

}  // namespace morphkv

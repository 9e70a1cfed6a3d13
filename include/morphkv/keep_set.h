// The rows that one head holds: which token position lies in which slot, in ascending position.
// Pure bookkeeping; the vectors themselves belong to the host.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

namespace morphkv {

// Absolute index of a token in its sequence.
using Position = std::int64_t;

// A set of slots, as runs of neighbours: what lies together is read together.
class SlotSet {
 public:
  explicit SlotSet(int max_slots) { reserve(max_slots); }

  bool contains(int slot) const { return (words_[word(slot)] & bit(slot)) != 0; }
  void add(int slot) { words_[word(slot)] |= bit(slot); }
  void remove(int slot) { words_[word(slot)] &= ~bit(slot); }
  // The slots of the set in [first, last) go `by` further on, over slots that are not in it.
  void shift(int first, int last, int by);
  void clear() { std::fill(words_.begin(), words_.end(), 0); }
  // Keeps the slots below max_slots. Allocates.
  void reserve(int max_slots) { words_.resize(word(max_slots) + 1); }

  // One more than the highest slot.
  int limit() const {
    auto w = words_.size();
    while (w > 0 && words_[w - 1] == 0) --w;
    return w == 0 ? 0 : static_cast<int>(64 * w) - std::countl_zero(words_[w - 1]);
  }
  // Calls body(first, last) for every longest run [first, last), ascending; runs with at most `gap`
  // slots between them count as one.
  template <class Body>
  void for_each_run(const Body& body, int gap = 0) const {
    for (int first = next(0, 0); first >= 0;) {
      int last = next(first, ~std::uint64_t{0});
      int after = next(last, 0);
      while (after >= 0 && after - last <= gap) {
        last = next(after, ~std::uint64_t{0});
        after = next(last, 0);
      }
      body(first, last);
      first = after;
    }
  }

 private:
  static std::size_t word(int slot) { return static_cast<std::size_t>(slot) / 64; }
  static std::uint64_t bit(int slot) { return std::uint64_t{1} << (slot % 64); }
  // The first slot from `from` on that is in the set (flip = 0) or not in it (flip = all ones), or
  // -1. The last word always has a slot that is not in it.
  int next(int from, std::uint64_t flip) const {
    std::uint64_t mask = ~std::uint64_t{0} << (from % 64);
    for (std::size_t w = word(from); w < words_.size(); ++w, mask = ~std::uint64_t{0}) {
      const std::uint64_t found = (words_[w] ^ flip) & mask;
      if (found != 0) return static_cast<int>(64 * w) + std::countr_zero(found);
    }
    return -1;
  }

  std::vector<std::uint64_t> words_;  // one bit per slot
};

class KeepSet {
 public:
  // Slots are numbered 0 .. max_slots - 1; at most so many rows are ever held. Allocates once,
  // here.
  explicit KeepSet(int max_slots);

  int size() const { return static_cast<int>(slots_.size()); }
  // [rank] rank 0 is the oldest row.
  std::span<const int> slots() const { return slots_; }
  std::span<const Position> positions() const { return positions_; }
  // Where `slot`, which is held, stands in that order.
  int rank_of(int slot) const;
  // The same slots, as they lie in memory.
  const SlotSet& held() const { return held_; }

  // The new row becomes the last rank. `position` must be above all others, `slot` free.
  void append(int slot, Position position);
  // Removes the rows at these ranks, which ascend.
  void erase(std::span<const int> ranks);
  // The row in slot `from` now lies in slot `to`, which must be free.
  void move(int from, int to);
  // The rows in slots [first, last) now lie `by` slots further on.
  void shift(int first, int last, int by);
  // Each row now lies in the slot of the number of its rank.
  void put_in_order();
  void clear();
  // Changes the number of slots. Allocates.
  void reserve(int max_slots);

 private:
  std::vector<int> slots_;
  std::vector<Position> positions_;
  SlotSet held_;
};

}  // namespace morphkv

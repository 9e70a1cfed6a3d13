// The random numbers of the texts: the same for the same seed on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace morphkv::eval {

// SplitMix64 (Steele et al., OOPSLA 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t x = state_ += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }
  // Uniform enough in [0, n).
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(next() % n); }

 private:
  std::uint64_t state_;
};

// Deals the numbers 0 .. size - 1 in a random order, again and again.
class Deck {
 public:
  explicit Deck(std::size_t size) : size_(size) {}

  std::size_t deal(Random& random) {
    if (rest_.empty()) {
      for (std::size_t i = 0; i < size_; ++i) rest_.push_back(i);
    }
    const std::size_t at = random.below(rest_.size());
    const std::size_t card = rest_[at];
    rest_[at] = rest_.back();
    rest_.pop_back();
    return card;
  }

 private:
  std::size_t size_;
  std::vector<std::size_t> rest_;
};

}  // namespace morphkv::eval

// Which rows leave: protection, the smallest scores, and the tie rule.
#pragma once

#include <span>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"

namespace morphkv {

// Ranks that may be evicted: [first, last).
struct EvictableRanks {
  int first = 0;
  int last = 0;
};

// Sinks are the first n_sink rows held, the tail the last protected_tail() of them; both are safe.
constexpr EvictableRanks evictable_ranks(int rows, int n_sink, int protected_tail) {
  const int last = rows - protected_tail;
  return {n_sink, last > n_sink ? last : n_sink};
}

// Writes the ranks of the out.size() evictable rows with the least scores to `out`, ascending.
// Tie rule: of equal scores the lowest position (rank) leaves first. A score that is no number
// counts as least. `scratch` is as long as `scores`. There must be at least out.size() evictable
// rows.
void choose_victims(std::span<const float> scores, EvictableRanks evictable, std::span<int> scratch,
                    std::span<int> out);

// The rank of the one victim, by scores [slot] of the rows held: what choose_victims() finds by
// rank. Overwrites the scores of slots that must not be chosen. There must be an evictable row.
int choose_victim(const KeepSet& keep, EvictableRanks evictable, std::span<float> slot_scores);

// places[rank] becomes the lower of what it was and the rank's place in the order of `scores`, best
// first: 0 for the row that choose_victims() would evict last. `scratch` is at least as long.
void improve_places(std::span<const float> scores, std::span<int> scratch, std::span<int> places);

}  // namespace morphkv

#include "morphkv/victim.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/kernels.h"

namespace morphkv {
namespace {

float comparable(float score) {
  return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
}

auto leaves_before(std::span<const float> scores) {
  return [scores](int a, int b) {
    const float sa = comparable(scores[a]);
    const float sb = comparable(scores[b]);
    return sa != sb ? sa < sb : a < b;
  };
}

}  // namespace

void choose_victims(std::span<const float> scores, EvictableRanks evictable, std::span<int> scratch,
                    std::span<int> out) {
  const auto candidates = scratch.first(static_cast<std::size_t>(evictable.last - evictable.first));
  assert(out.size() <= candidates.size());
  if (out.empty()) return;
  if (out.size() == 1) {
    const auto n = static_cast<int>(candidates.size());
    out[0] = evictable.first + kernels::first_least(scores.data() + evictable.first, n);
    return;
  }
  std::iota(candidates.begin(), candidates.end(), evictable.first);
  const auto end = candidates.begin() + static_cast<std::ptrdiff_t>(out.size());
  if (end != candidates.end())
    std::nth_element(candidates.begin(), end, candidates.end(), leaves_before(scores));
  std::copy(candidates.begin(), end, out.begin());
  std::sort(out.begin(), out.end());
}

int choose_victim(const KeepSet& keep, EvictableRanks evictable, std::span<float> slot_scores) {
  constexpr float kStays = std::numeric_limits<float>::infinity();
  const auto slots = keep.slots();
  assert(evictable.first < evictable.last);
  for (int rank = 0; rank < evictable.first; ++rank) slot_scores[slots[rank]] = kStays;
  for (int rank = evictable.last; rank < keep.size(); ++rank) slot_scores[slots[rank]] = kStays;
  int done = 0;
  keep.held().for_each_run([&](int first, int last) {
    std::fill(slot_scores.begin() + done, slot_scores.begin() + first, kStays);
    done = last;
  });
  const int slot = kernels::first_least(slot_scores.data(), done);
  const float least = comparable(slot_scores[slot]);
  const float second = kernels::least_of(slot_scores.data() + slot + 1, done - slot - 1);
  if (second > least) return keep.rank_of(slot);
  // Of equal ones the lowest rank, which only the ranks in turn tell.
  int rank = evictable.first;
  while (comparable(slot_scores[slots[rank]]) > least) ++rank;
  return rank;
}

void improve_places(std::span<const float> scores, std::span<int> scratch, std::span<int> places) {
  const auto order = scratch.first(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.rbegin(), order.rend(), leaves_before(scores));
  for (int place = 0; place < static_cast<int>(order.size()); ++place) {
    places[order[place]] = std::min(places[order[place]], place);
  }
}

}  // namespace morphkv

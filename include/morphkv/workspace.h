// Scratch memory for the work on one head after the other.
#pragma once

#include <algorithm>
#include <vector>

#include "morphkv/keep_set.h"

namespace morphkv {

// The heads of one thread share it; sized once. What a function leaves here is lost when it
// returns, but for `logits`: a policy that evicts per token finds there in append() what it left
// there for the earlier tokens of the call (policies/window_head.cc). So in between nobody writes
// to `logits`: neither its score() and erased() nor HeadRetention.
struct Workspace {
  static constexpr int kBlock = 32;  // queries that share one reading of the keys

  Workspace(int max_slots, int max_group, int max_dim)
      : Workspace(static_cast<std::size_t>(max_slots),
                  static_cast<std::size_t>(std::max(kBlock, max_group)),
                  static_cast<std::size_t>(max_dim)) {}

  std::vector<float> logits;       // [max(kBlock, group), slot]
  std::vector<float> queries;      // [max(kBlock, group), dim]
  std::vector<float> factors;      // [max(kBlock, group)]
  std::vector<float> slot_scores;  // [slot]
  std::vector<float> scores;       // [rank]
  std::vector<float> pooled;       // [3, rank]
  std::vector<int> ranks;          // [2, rank] victims, and what they are chosen from
  SlotSet seen;                    // what a guide or a block of keys looks at

 private:
  Workspace(std::size_t slots, std::size_t at_once, std::size_t dim)
      : logits(at_once * slots),
        queries(at_once * dim),
        factors(at_once),
        slot_scores(slots),
        scores(slots),
        pooled(3 * slots),
        ranks(2 * slots),
        seen(static_cast<int>(slots)) {}
};

}  // namespace morphkv

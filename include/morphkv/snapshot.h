// An immutable record of what a layer holds, and the invariants that every such record must
// satisfy.
#pragma once

#include <string>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"
#include "morphkv/retention.h"

namespace morphkv {

struct HeadSnapshot {
  std::vector<int> slots;           // [rank]
  std::vector<Position> positions;  // [rank]
};

struct LayerSnapshot {
  CacheConfig config;
  bool evicts = true;   // PolicyTraits::evicts
  Position offset = 0;  // tokens seen
  int max_slots = 0;
  std::vector<HeadSnapshot> heads;
};

LayerSnapshot take_snapshot(const LayerRetention& layer, Position offset, int max_slots);

// Every broken invariant, in words; empty when all hold (between calls, for a policy that evicts):
//   bound      a head holds at most `budget` rows
//   order      positions ascend and lie in [0, offset)
//   slots      a slot is used once and lies in [0, max_slots)
//   common     all heads use the same slots
//   sinks      the first n_sink positions are held
//   tail       the last protected_tail() positions are held
std::vector<std::string> violations(const LayerSnapshot& layer);

}  // namespace morphkv

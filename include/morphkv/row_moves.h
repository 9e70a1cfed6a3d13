// How evicted rows make room: every head may evict a different token, yet all heads must free the
// same slots. A row that lies in a slot about to be freed is copied over one of the head's own
// victims.
#pragma once

#include <span>

namespace morphkv {

// Copy the row of one head from slot `from` to slot `to`.
struct RowMove {
  int from = 0;
  int to = 0;
  bool operator==(const RowMove&) const = default;
};

// Plans the moves of one head. `victims`: the slots whose rows it evicts; `freed`: the slots that
// end up empty in every head. Both ascend and are equally long. Writes to `out` (as long as they)
// and returns how many moves there are: the k-th slot of freed - victims goes to the k-th slot of
// victims - freed. No move reads a slot that another one writes, so their order does not matter.
int plan_row_moves(std::span<const int> victims, std::span<const int> freed,
                   std::span<RowMove> out);

}  // namespace morphkv

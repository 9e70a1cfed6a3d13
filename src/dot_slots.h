// Products of queries with the rows of a set of slots.
#pragma once

#include "kernels/kernels.h"
#include "morphkv/keep_set.h"

namespace morphkv {

// dot_rows() for the slots of `slots`; its first_slot and last_slot do not count. A gap of a few
// slots is gone through rather than around: the columns of slots that are not in the set may hold
// anything afterwards.
inline void dot_slots(kernels::DotRowsArgs args, const SlotSet& slots) {
  constexpr int kGap = 4;
  slots.for_each_run(
      [&](int first, int last) {
        args.first_slot = first;
        args.last_slot = last;
        kernels::dot_rows(args);
      },
      kGap);
}

}  // namespace morphkv

// Runs code on one of the CPU targets that Highway has compiled here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// The same set as in kernels.cc.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#include "hwy/targets.h"

namespace morphkv::test {

inline std::vector<std::int64_t> targets_here() {
  std::vector<std::int64_t> targets = hwy::SupportedAndGeneratedTargets();
  if (std::ranges::find(targets, HWY_STATIC_TARGET) == targets.end()) {
    targets.push_back(HWY_STATIC_TARGET);  // always callable, not always listed
  }
  return targets;
}

// Dispatch keeps the target it chose first, so changing the supported set needs an Update.
class OnlyTarget {
 public:
  explicit OnlyTarget(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ~OnlyTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
  OnlyTarget(const OnlyTarget&) = delete;
  OnlyTarget& operator=(const OnlyTarget&) = delete;
};

}  // namespace morphkv::test

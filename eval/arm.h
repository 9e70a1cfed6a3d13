// An arm of the comparison: a rule under a name, whatever the budget.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "morphkv/config.h"
#include "trial.h"

namespace morphkv::eval {

struct Arm {
  std::string name;        // the specification
  CacheConfig cache;       // but for the budget
  int recent_percent = 0;  // of the budget; 0 = cache.recent
  bool general_guide =
      false;  // a document whose question is not known is read with the profile chat's guide
};

// "POLICY [key=value ...]": keys queries (attention, keys), window, pool, fuse (mean, max), sinks,
// guide (general, none),
// recent (rows, or a share of the budget as in 25%). What is not said is the policy's own default
// (arm.cc), which for morphkv is that of `morphkv run`. Throws std::invalid_argument.
Arm parse_arm(const std::string& specification);

// The rule with that budget. Throws std::invalid_argument like validate().
CacheConfig with_budget(const Arm& arm, int budget);

// Every policy once, morphkv also with stored keys and as its paper has it.
std::vector<std::string> default_arms();

}  // namespace morphkv::eval

// An arm of the comparison: a rule under a name, whatever the budget.
#pragma once

#include <string>
#include <vector>

#include "morphkv/settings.h"
#include "trial.h"

namespace morphkv::eval {

struct Arm {
  std::string name;  // the specification
  Settings settings;
  // A document whose question is not known is read with the profile chat's guide.
  bool general_guide = false;
};

// "POLICY [key=value ...]": keys are the flags of `morphkv run` without dashes (queries, window,
// pool, fuse, sinks, recent in rows or as a share of the budget as in 25%), guide (general, none)
// and profile, which stands first. What is not said is the policy's own default (arm.cc), which for
// morphkv is that of `morphkv run`. Throws std::invalid_argument.
Arm parse_arm(const std::string& specification);

// The rule with that budget. Throws std::invalid_argument like validate().
CacheConfig with_budget(const Arm& arm, int budget);

// Every policy once, morphkv also with stored keys and as its paper has it.
std::vector<std::string> default_arms();

}  // namespace morphkv::eval

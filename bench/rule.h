// The rules that are timed and what reports say of them, from the profiles and nothing else: the
// default is timed with the settings that it has now.
#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>

#include "morphkv/profile.h"

namespace morphkv::bench {

inline constexpr std::string_view kReference = "reference";  // stored keys ask

inline CacheConfig default_rule(int budget) { return default_profile().with_budget(budget); }

// Of a profile with another window.
inline CacheConfig rule_of(Profile profile, int budget, int window) {
  profile.cache.window = window;
  return profile.with_budget(budget);
}

// One token, the default's, and the paper's.
inline std::set<int> timed_windows() {
  return {1, default_profile().cache.window, find_profile("paper").cache.window};
}

// "morphkv attention, window 8, pool 31, tail 128"
inline std::string label_of(const CacheConfig& rule) {
  if (rule.policy != "morphkv") return rule.policy;
  std::string label = rule.policy + " " + std::string(to_string(rule.queries)) + ", window " +
                      std::to_string(rule.window);
  if (rule.pool > 1) label += ", pool " + std::to_string(rule.pool);
  if (rule.recent > 0) label += ", tail " + std::to_string(rule.recent);
  return label + (rule.fusion == Fusion::kMax ? ", max" : "");
}

inline nlohmann::ordered_json json_of(const CacheConfig& rule) {
  return {{"policy", rule.policy},
          {"queries", to_string(rule.queries)},
          {"window", rule.window},
          {"pool", rule.pool},
          {"tail", rule.recent},
          {"fusion", to_string(rule.fusion)},
          {"default", rule == default_rule(rule.budget)}};
}

}  // namespace morphkv::bench

#include "arm.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <stdexcept>

#include "morphkv/policy.h"
#include "morphkv/profile.h"

namespace morphkv::eval {
namespace {

[[noreturn]] void refuse(const std::string& arm, const std::string& why) {
  throw std::invalid_argument("arm '" + arm + "': " + why);
}

int number(const std::string& arm, const std::string& key, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    refuse(arm, key + " '" + std::string(text) + "' is no whole number");
  }
  return value;
}

// What the policies' papers use, and morphkv what the default profile uses.
Arm defaults_of(const std::string& policy) {
  Arm arm;
  if (policy == default_profile().cache.policy) {
    arm.cache = default_profile().cache;
    arm.recent_percent = default_profile().recent_percent;
    return arm;
  }
  arm.cache.policy = policy;
  arm.cache.queries = QuerySource::kAttention;
  if (policy == "snapkv") {
    arm.cache.window = 32;
    arm.cache.pool = 7;
  }
  if (policy == "rkv") arm.cache.pool = 7;
  if (policy == "h2o") arm.recent_percent = 50;
  return arm;
}

void set(Arm& arm, const std::string& key, std::string value) {
  CacheConfig& c = arm.cache;
  if (key == "queries") {
    if (value != "attention" && value != "keys") {
      refuse(arm.name, "queries '" + value + "' is not attention or keys");
    }
    c.queries = value == "keys" ? QuerySource::kKeys : QuerySource::kAttention;
  } else if (key == "fuse") {
    if (value != "mean" && value != "max")
      refuse(arm.name, "fuse '" + value + "' is not mean or max");
    c.fusion = value == "max" ? Fusion::kMax : Fusion::kMean;
  } else if (key == "guide") {
    if (value != "general" && value != "none") {
      refuse(arm.name, "guide '" + value + "' is not general or none");
    }
    arm.general_guide = value == "general";
  } else if (key == "window") {
    c.window = number(arm.name, key, value);
  } else if (key == "pool") {
    c.pool = number(arm.name, key, value);
  } else if (key == "sinks") {
    c.n_sink = number(arm.name, key, value);
  } else if (key == "recent" && value.ends_with('%')) {
    value.pop_back();
    arm.recent_percent = number(arm.name, key, value);
    if (arm.recent_percent < 0 || arm.recent_percent > 99) {
      refuse(arm.name, "recent " + value + " % is not from 0 to 99 % of the budget");
    }
  } else if (key == "recent") {
    c.recent = number(arm.name, key, value);
    arm.recent_percent = 0;
  } else {
    refuse(arm.name,
           "'" + key + "' is not one of queries, window, pool, fuse, sinks, recent, guide");
  }
}

}  // namespace

Arm parse_arm(const std::string& specification) {
  std::istringstream words(specification);
  std::string word;
  words >> word;
  if (!is_policy_name(word) && word != kControl) {
    refuse(specification, "'" + word + "' is not one of " + policy_names_text());
  }
  Arm arm = defaults_of(word == kControl ? "morphkv" : word);
  arm.name = specification;
  while (words >> word) {
    const auto equals = word.find('=');
    if (equals == std::string::npos) refuse(specification, "'" + word + "' is no key=value");
    set(arm, word.substr(0, equals), word.substr(equals + 1));
  }
  return arm;
}

CacheConfig with_budget(const Arm& arm, int budget) {
  CacheConfig cache = arm.cache;
  cache.budget = budget;
  if (arm.recent_percent > 0) cache.recent = recent_rows(arm.recent_percent, cache);
  validate(cache);
  return cache;
}

std::vector<std::string> default_arms() {
  return {"full",
          "streaming",
          "random",
          "tova",
          "h2o",
          "snapkv",
          "keydiff",
          "rkv",
          "morphkv",
          "morphkv window=32 pool=1",
          "morphkv queries=keys pool=1"};
}

}  // namespace morphkv::eval

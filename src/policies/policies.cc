#include "policies/policies.h"

#include <algorithm>
#include <array>

namespace morphkv {
namespace {

struct Entry {
  std::string_view name;
  std::unique_ptr<Policy> (*make)(const CacheConfig&);
};

constexpr std::array kPolicies = {
    Entry{"morphkv", policies::make_morphkv},     Entry{"h2o", policies::make_h2o},
    Entry{"snapkv", policies::make_snapkv},       Entry{"tova", policies::make_tova},
    Entry{"keydiff", policies::make_keydiff},     Entry{"rkv", policies::make_rkv},
    Entry{"streaming", policies::make_streaming}, Entry{"random", policies::make_random},
    Entry{"full", policies::make_full},
};

const Entry* find_policy(std::string_view name) {
  const auto* const entry = std::find_if(kPolicies.begin(), kPolicies.end(),
                                         [&](const Entry& e) { return e.name == name; });
  return entry == kPolicies.end() ? nullptr : entry;
}

}  // namespace

std::unique_ptr<Policy> policies::make(const CacheConfig& config) {
  return find_policy(config.policy)->make(config);
}

bool is_policy_name(std::string_view name) { return find_policy(name) != nullptr; }

std::vector<std::string_view> policy_names() {
  std::vector<std::string_view> names;
  for (const Entry& entry : kPolicies) names.push_back(entry.name);
  return names;
}

std::string policy_names_text() {
  std::string text;
  for (const std::string_view name : policy_names()) {
    if (!text.empty()) text += ", ";
    text += name;
  }
  return text;
}

}  // namespace morphkv

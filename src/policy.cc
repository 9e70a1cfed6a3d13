#include "morphkv/policy.h"

#include "policies/policies.h"

namespace morphkv {
std::unique_ptr<Policy> make_policy(const CacheConfig& config) {
  validate(config);
  return policies::make(config);
}

std::string policy_names_text(bool PolicyTraits::*trait) {
  std::vector<std::string_view> names = policy_names();
  std::erase_if(names, [&](std::string_view name) {
    return !(make_policy({.policy = std::string(name)})->traits().*trait);
  });
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 < names.size() ? ", " : " or ";
    text += names[i];
  }
  return text;
}

}  // namespace morphkv

#include "arm.h"

#include <charconv>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "morphkv/policy.h"

namespace morphkv::eval {
namespace {

[[noreturn]] void refuse(const std::string& arm, const std::string& why) {
  throw std::invalid_argument("arm '" + arm + "': " + why);
}

int number(const std::string& arm, std::string_view key, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    refuse(arm, std::string(key) + " '" + std::string(text) + "' is no whole number");
  }
  return value;
}

// What the policies' papers use; morphkv has the default profile.
Profile profile_of(std::string_view policy) {
  if (policy == kControl || policy == default_profile().cache.policy) return default_profile();
  Profile profile{.name = policy,
                  .why = "as its paper has it",
                  .cache = {.queries = QuerySource::kAttention, .policy = std::string(policy)}};
  if (policy == "snapkv") {
    profile.cache.window = 32;
    profile.cache.pool = 7;
  }
  if (policy == "rkv") profile.cache.pool = 7;
  if (policy == "h2o") profile.recent_percent = 50;
  return profile;
}

template <typename T>
void set_field(Arm& arm, const CacheField<T>& field, const std::string& text) {
  if constexpr (std::is_enum_v<T>) {
    try {
      arm.settings.set(field, choice_of<T>(field.flag, text));
    } catch (const std::invalid_argument& error) {
      refuse(arm.name, error.what());
    }
  } else if constexpr (std::is_same_v<T, int>) {
    arm.settings.set(field, number(arm.name, field.flag, text));
  }
}

// Budget and policy are the plan's and the arm's first word.
bool is_key(std::string_view flag) { return !flag.empty() && flag != "budget" && flag != "policy"; }

void set(Arm& arm, const std::string& key, std::string value) {
  if (key == "guide") {
    if (value != "general" && value != "none") {
      refuse(arm.name, "guide '" + value + "' is not general or none");
    }
    arm.general_guide = value == "general";
    return;
  }
  if (key == "profile") return arm.settings.use(find_profile(value));
  if (key == "recent" && value.ends_with('%')) {
    value.pop_back();
    const int percent = number(arm.name, key, value);
    if (percent < 0 || percent > 99) {
      refuse(arm.name, "recent " + value + " % is not from 0 to 99 % of the budget");
    }
    return arm.settings.set_recent_percent(percent);
  }
  bool known = false;
  std::string keys;
  for_each_cache_field([&](const auto& field) {
    if (!is_key(field.flag)) return;
    keys += std::string(field.flag) + ", ";
    if (field.flag != key) return;
    known = true;
    set_field(arm, field, value);
  });
  if (!known) refuse(arm.name, "'" + key + "' is not one of " + keys + "guide, profile");
}

}  // namespace

Arm parse_arm(const std::string& specification) {
  std::istringstream words(specification);
  std::string word;
  words >> word;
  if (!is_policy_name(word) && word != kControl) {
    refuse(specification, "'" + word + "' is not one of " + policy_names_text());
  }
  Arm arm{specification, Settings(profile_of(word))};
  if (word != kControl) arm.settings.set(kPolicyField, word);
  while (words >> word) {
    const auto equals = word.find('=');
    if (equals == std::string::npos) refuse(specification, "'" + word + "' is no key=value");
    set(arm, word.substr(0, equals), word.substr(equals + 1));
  }
  return arm;
}

CacheConfig with_budget(const Arm& arm, int budget) {
  Settings settings = arm.settings;
  settings.set(kBudgetField, budget);
  CacheConfig cache = settings.cache();
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

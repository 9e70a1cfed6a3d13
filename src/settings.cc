#include "morphkv/settings.h"

#include <stdexcept>
#include <type_traits>

#include "morphkv/policy.h"

namespace morphkv {

std::string to_text(const ResolvedSettings& settings) {
  std::string text = "profile " + settings.profile;
  for_each_cache_field([&](const auto& field) {
    text += ", " + std::string(field.name) + " " + value_text(settings.cache.*field.member);
  });
  return text + ", prefill " + std::string(to_string(settings.prefill));
}

CacheConfig Settings::cache() const {
  CacheConfig cache = profile_.cache;
  for_each_cache_field([&](const auto& field) {
    if (has(field.name)) cache.*field.member = own_.*field.member;
  });
  if (!has("recent") && profile_.recent_percent > 0) {
    cache.recent = recent_rows(profile_.recent_percent, cache);
  }
  return cache;
}

ResolvedSettings Settings::resolve() const {
  ResolvedSettings out{.cache = cache(),
                       .prefill = prefill_.value_or(profile_.prefill),
                       .guide_text = {},
                       .profile = std::string(profile_.name)};
  validate(out.cache);
  const bool guided = make_policy(out.cache)->traits().guided;
  if (out.prefill == Prefill::kGuided && !guided) {
    if (prefill_) {
      throw std::invalid_argument("prefill 'guided': policy '" + out.cache.policy +
                                  "' takes no guide: use policy " +
                                  policy_names_text(&PolicyTraits::guided) + ", or leave it out");
    }
    out.prefill = Prefill::kStream;
  }
  if (out.prefill == Prefill::kGuided) out.guide_text = profile_.guide_text;
  return out;
}

namespace {

template <typename Choice>
std::string words_of() {
  std::string words;
  for (const Choice choice : kChoices<Choice>) {
    words += (words.empty() ? "" : ", ") + std::string(to_string(choice));
  }
  return words;
}

template <typename T>
std::string taken(const CacheField<T>& field) {
  if constexpr (std::is_same_v<T, int>) {
    return std::to_string(field.least) + " to " + std::to_string(field.most);
  } else if constexpr (std::is_same_v<T, std::string>) {
    return policy_names_text();
  } else if constexpr (std::is_enum_v<T>) {
    return words_of<T>();
  } else {
    return "a whole number";
  }
}

std::string code(std::string_view text) {
  return text.empty() ? "" : "`" + std::string(text) + "`";
}

}  // namespace

std::string settings_table() {
  std::string head = "| flag | JSON field, keyword argument | takes |";
  std::string rule = "|---|---|---|";
  for (const Profile& profile : profiles()) {
    head += " " + std::string(profile.name) + " |";
    rule += "---|";
  }
  std::string table = head + " what it is |\n" + rule + "---|\n";
  const auto add = [&](std::string_view flag, std::string_view name, const std::string& takes,
                       const auto& value_in, std::string_view help) {
    table += "| " + (flag.empty() ? "" : code("--" + std::string(flag))) + " | " + code(name) +
             " | " + takes + " |";
    for (const Profile& profile : profiles()) table += " " + value_in(profile) + " |";
    table += " " + std::string(help) + " |\n";
  };
  for_each_cache_field([&](const auto& field) {
    const auto value_in = [&](const Profile& profile) {
      const bool share = field.name == "recent" && profile.recent_percent > 0;
      if (share) return std::to_string(profile.recent_percent) + " % of the budget";
      return value_text(profile.cache.*field.member);
    };
    add(field.flag, field.name, taken(field), value_in, field.help);
  });
  add(
      "prefill", "prefill", words_of<Prefill>(),
      [](const Profile& profile) { return std::string(to_string(profile.prefill)); }, kPrefillHelp);
  return table;
}

}  // namespace morphkv

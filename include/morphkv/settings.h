// What a user chooses: a profile, and what stands in the place of single values of it. Every host
// (run, chat, serve, the Python package, eval) fills in a Settings and runs what resolve() returns,
// so that the same choice means the same everywhere.
#pragma once

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "morphkv/config.h"
#include "morphkv/profile.h"

namespace morphkv {

inline constexpr std::string_view kPrefillHelp =
    "prompts beyond the budget: in pieces, guided by the prompt's end or --guide-text; in pieces "
    "without; whole and then compressed (guided for policies morphkv and rkv, else stream)";

// What the engine runs.
struct ResolvedSettings {
  CacheConfig cache;
  Prefill prefill = Prefill::kGuided;
  std::string guide_text;  // guides beside the prompt's end while reading guided; "" = none
  std::string profile;     // its name
};

// "profile chat, budget 512, n_sink 4, ..., prefill guided": what every host shows of them.
std::string to_text(const ResolvedSettings& settings);

class Settings {
 public:
  explicit Settings(const Profile& profile = default_profile()) : profile_(profile) {}

  // Takes the other values from this profile from now on. What is set stays.
  void use(const Profile& profile) { profile_ = profile; }
  template <typename T>
  void set(const CacheField<T>& field, T value) {
    own_.*field.member = std::move(value);
    names_.insert(field.name);
  }
  void set_prefill(Prefill prefill) { prefill_ = prefill; }
  // At least so many sinks: a beginning that is never to be evicted.
  void pin(int tokens) { set(kSinkField, std::max(cache().n_sink, tokens)); }
  // The protected tail as a share of the budget, in per cent, in place of the profile's.
  void set_recent_percent(int percent) { profile_.recent_percent = percent; }

  bool has(std::string_view name) const { return names_.contains(name); }
  const Profile& profile() const { return profile_; }
  std::optional<Prefill> prefill() const { return prefill_; }  // that is set

  // The rule alone. The tail is the profile's share of the budget unless `recent` is set. What
  // comes out may not be valid.
  CacheConfig cache() const;
  // Throws std::invalid_argument like validate(), and where prefill guided is set for a policy that
  // takes no guide; without being asked for, such a policy streams.
  ResolvedSettings resolve() const;

 private:
  Profile profile_;
  CacheConfig own_;  // of which the fields in names_ count
  std::set<std::string_view> names_;
  std::optional<Prefill> prefill_;
};

// Every setting as a line of a Markdown table: its flag, its name as a JSON field and keyword
// argument, what it takes, its value in each profile, what it is. docs/settings.md shows it.
std::string settings_table();

}  // namespace morphkv

#include "cache_options.h"

#include <stdexcept>
#include <type_traits>

#include "morphkv/llama_cpp/engine_context.h"
#include "morphkv/policy.h"
#include "options.h"

namespace morphkv::cli {
namespace {

template <typename T>
Choices<T> words_of() {
  Choices<T> words;
  for (const T choice : kChoices<T>) words.emplace_back(to_string(choice), choice);
  return words;
}

void add_field(CLI::App* group, const CacheField<int>& field, Settings& settings) {
  add_number(group, "--" + std::string(field.flag), settings.cache().*field.member, field.least,
             field.most, std::string(field.help),
             [&settings, &field](int value) { settings.set(field, value); });
}

template <typename Choice>
void add_field(CLI::App* group, const CacheField<Choice>& field, Settings& settings) {
  Choices<Choice> words;
  if constexpr (std::is_enum_v<Choice>) {
    words = words_of<Choice>();
  } else {
    for (const std::string_view name : policy_names()) words.emplace_back(name, name);
  }
  add_choice(group, "--" + std::string(field.flag), settings.cache().*field.member, words,
             std::string(field.help),
             [&settings, &field](const Choice& value) { settings.set(field, value); });
}

}  // namespace

void add_cache_options(CLI::App* group, CacheOptions& o) {
  Settings& settings = o.settings;
  std::string names;
  for (const Profile& profile : profiles()) {
    names +=
        (names.empty() ? "" : "; ") + std::string(profile.name) + ": " + std::string(profile.why);
  }
  group
      ->add_option_function<std::string>(
          "--profile",
          [&settings](const std::string& name) {
            try {
              settings.use(find_profile(name));
            } catch (const std::invalid_argument& error) {
              throw CLI::ValidationError("--" + std::string(error.what()));
            }
          },
          "defaults of the options below. " + names)
      ->type_name("WORD")
      ->default_str(std::string(default_profile().name));
  for_each_cache_field([&](const auto& field) {
    if constexpr (!std::is_same_v<decltype(field), const CacheField<std::uint64_t>&>) {
      add_field(group, field, settings);
    }
  });
  add_choice(group, "--prefill", settings.profile().prefill, words_of<Prefill>(),
             std::string(kPrefillHelp),
             [&settings](Prefill prefill) { settings.set_prefill(prefill); });
  Choices<ggml_type> types;
  for (const ggml_type type : llama_cpp::kCacheTypes)
    types.emplace_back(ggml_type_name(type), type);
  add_choice(group, "--cache-type-k", o.type_k, types, "(-ctk) type of stored keys");
  add_choice(group, "--cache-type-v", o.type_v, types, "(-ctv) type of stored values");
}

}  // namespace morphkv::cli

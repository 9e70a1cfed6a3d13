#include "cache_options.h"

#include <stdexcept>
#include <utility>
#include <vector>

#include "morphkv/policy.h"
#include "options.h"

namespace morphkv::cli {

CacheOptions::CacheOptions() { use(default_profile()); }

void CacheOptions::use(const Profile& chosen) {
  cache = chosen.cache;
  recent_percent = chosen.recent_percent;
  prefill = chosen.prefill;
  profile = chosen.name;
  guide_text = chosen.guide_text;
}

const CacheConfig& CacheOptions::settled() {
  if (recent_percent > 0) cache.recent = recent_rows(recent_percent, cache);
  return cache;
}

void add_cache_options(CLI::App* group, CacheOptions& o) {
  CacheConfig& c = o.cache;
  // The first of the group, so that the options after it have the last word.
  std::string names;
  for (const Profile& profile : profiles()) {
    names +=
        (names.empty() ? "" : "; ") + std::string(profile.name) + ": " + std::string(profile.why);
  }
  group
      ->add_option_function<std::string>(
          "--profile",
          [&o](const std::string& name) {
            try {
              o.use(find_profile(name));
            } catch (const std::invalid_argument& error) {
              throw CLI::ValidationError("--" + std::string(error.what()));
            }
          },
          "defaults of the options below. " + names)
      ->type_name("WORD")
      ->default_str(std::string(default_profile().name));
  add_number(group, "--budget", c.budget, 1, kMaxBudget, "rows per KV head and layer");
  add_number(group, "--sinks", c.n_sink, 0, kMaxBudget, "first positions that are never evicted");
  add_number(group, "--window", c.window, 1, kMaxBudget,
             "last tokens whose queries score the others; protected");
  CLI::Option* recent = add_number(group, "--recent", c.recent, 0, kMaxBudget,
                                   "protected tail, at least the window; 0 = the window");
  recent->each([&o](const std::string&) { o.recent_percent = 0; });
  add_number(group, "--pool", c.pool, 1, kMaxBudget,
             "odd width of the neighbour maximum over scores; 1 = off");
  add_choice<Fusion>(group, "--fuse", c.fusion, {{"mean", Fusion::kMean}, {"max", Fusion::kMax}},
                     "how the window's weights become one score");
  add_choice<QuerySource>(group, "--queries", c.queries,
                          {{"attention", QuerySource::kAttention}, {"keys", QuerySource::kKeys}},
                          "what asks: the model's queries, or the stored keys in their place");
  std::vector<std::pair<std::string, std::string>> policies;
  for (const std::string_view name : policy_names()) policies.emplace_back(name, name);
  add_choice<std::string>(group, "--policy", c.policy, policies, "which rows to keep");
  add_choice<Prefill>(
      group, "--prefill", o.prefill,
      {{"guided", Prefill::kGuided}, {"stream", Prefill::kStream}, {"whole", Prefill::kWhole}},
      "prompts beyond the budget: in pieces, guided by the prompt's end or --guide-text; in pieces "
      "without; whole and then compressed (guided for policies morphkv and rkv, else stream)");
  const std::vector<std::pair<std::string, ggml_type>> types = {
      {"f16", GGML_TYPE_F16}, {"q8_0", GGML_TYPE_Q8_0}, {"q4_0", GGML_TYPE_Q4_0}};
  add_choice<ggml_type>(group, "--cache-type-k", o.type_k, types, "(-ctk) type of stored keys");
  add_choice<ggml_type>(group, "--cache-type-v", o.type_v, types, "(-ctv) type of stored values");
}

}  // namespace morphkv::cli

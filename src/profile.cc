#include "morphkv/profile.h"

#include <algorithm>
#include <stdexcept>

#include "morphkv/settings.h"

namespace morphkv {

std::string_view to_string(Prefill prefill) {
  switch (prefill) {
    case Prefill::kGuided:
      return "guided";
    case Prefill::kStream:
      return "stream";
    case Prefill::kWhole:
      return "whole";
  }
  return "";
}

int recent_rows(int percent, const CacheConfig& cache) {
  const std::int64_t rows = std::int64_t{cache.budget} * percent / 100;
  const std::int64_t most = std::int64_t{cache.budget - cache.n_sink} * 3 / 4;
  return percent == 0 ? 0 : std::max(cache.window, static_cast<int>(std::min(rows, most)));
}

CacheConfig Profile::with_budget(int budget) const {
  Settings settings(*this);
  settings.set(kBudgetField, budget);
  return settings.cache();
}

const std::vector<Profile>& profiles() {
  static const std::vector<Profile> all = {
      {.name = "document",
       .why = "finds what the prompt's end asks for in a long text",
       .cache = {.window = 8, .pool = 31, .queries = QuerySource::kAttention},
       .recent_percent = 25},
      {.name = "chat",
       .why = "keeps names, numbers and facts for questions that come later",
       .cache = {.window = 8, .pool = 21, .queries = QuerySource::kAttention},
       .recent_percent = 25,
       .guide_text = "\n\nQuestion: What are the names, numbers, codes, keys, values and other "
                     "facts that the text wants me to remember?\nAnswer: The"},
      {.name = "reference",
       .why = "the rule of the reference implementation: stored keys ask",
       .cache = {.window = 8, .queries = QuerySource::kKeys},
       .prefill = Prefill::kStream},
      {.name = "paper",
       .why = "the rule of the paper: attention of the last 32 tokens, the prompt read whole",
       .cache = {.window = 32, .queries = QuerySource::kAttention},
       .prefill = Prefill::kWhole},
  };
  return all;
}

const Profile& default_profile() { return profiles().front(); }

const Profile& find_profile(std::string_view name) {
  std::string names;
  for (const Profile& profile : profiles()) {
    if (profile.name == name) return profile;
    names += (names.empty() ? "" : ", ") + std::string(profile.name);
  }
  throw std::invalid_argument("profile '" + std::string(name) + "' is not one of " + names);
}

}  // namespace morphkv

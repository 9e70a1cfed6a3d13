#include "morphkv/profile.h"

#include <stdexcept>

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

const std::vector<Profile>& profiles() {
  static const std::vector<Profile> all = {
      {.name = "document",
       .why = "finds what the prompt's end asks for in a long text",
       .cache = {.window = 8, .pool = 21, .queries = QuerySource::kAttention}},
      {.name = "chat",
       .why = "keeps names, numbers and facts for questions that come later",
       .cache = {.window = 8, .pool = 21, .queries = QuerySource::kAttention},
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

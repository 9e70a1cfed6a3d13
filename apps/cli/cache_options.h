// The options about what each KV head keeps: of `run`, `serve` and `chat`.
#pragma once

#include <ggml.h>

#include <CLI/CLI.hpp>
#include <string>

#include "morphkv/profile.h"

namespace morphkv::cli {

struct CacheOptions {
  CacheConfig cache;
  int recent_percent = 0;  // the profile's, unless --recent is given
  Prefill prefill = Prefill::kGuided;
  std::string profile;     // its name
  std::string guide_text;  // the profile's, beside the prompt's end
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;

  // With the default profile.
  CacheOptions();
  void use(const Profile& profile);
  // The rule, with the profile's share of the budget as the tail unless the user said how long it
  // is.
  const CacheConfig& settled();
};

// Adds --profile, --budget and so on to the group. What is given after --profile has the last word.
void add_cache_options(CLI::App* group, CacheOptions& options);

}  // namespace morphkv::cli

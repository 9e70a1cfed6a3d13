// The options about what each KV head keeps: of `run`, `serve` and `chat`.
#pragma once

#include <ggml.h>

#include <CLI/CLI.hpp>
#include <string>

#include "morphkv/settings.h"

namespace morphkv::cli {

struct CacheOptions {
  Settings settings;
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;
};

// Adds --profile, --budget and so on to the group, from the tables of config.h and profile.h. What
// is given beside --profile has the last word.
void add_cache_options(CLI::App* group, CacheOptions& options);

}  // namespace morphkv::cli

// The options about how the next token is chosen: of `run` and `chat`.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>

#include "morphkv/llama_cpp/sampling.h"
#include "morphkv/settings.h"
#include "options.h"

namespace morphkv::cli {

struct SamplingFlags {
  llama_cpp::SamplingOptions options;
  std::int64_t seed = -1;  // negative = a random one

  // The seed is that of policy random as well.
  void settle(Settings& settings) {
    if (seed < 0) return;
    options.seed = static_cast<std::uint32_t>(seed);
    settings.set(kSeedField, static_cast<std::uint64_t>(seed));
  }
};

inline void add_sampling_options(CLI::App* group, SamplingFlags& flags) {
  constexpr int kMost = std::numeric_limits<int>::max();
  llama_cpp::SamplingOptions& s = flags.options;
  add_number(group, "-s,--seed", flags.seed, -1, std::numeric_limits<std::uint32_t>::max(),
             "seed of sampling and of policy random; -1 = a random one");
  add_number(group, "--temp,--temperature", s.temperature, 0.0f, 100.0f,
             "temperature; 0 = always the likeliest token");
  add_number(group, "--top-k", s.top_k, 0, kMost, "sample from the k likeliest; 0 = all");
  add_number(group, "--top-p", s.top_p, 0.0f, 1.0f,
             "sample from the likeliest that make up p; 1 = all");
  add_number(group, "--min-p", s.min_p, 0.0f, 1.0f,
             "least share of the likeliest token's probability; 0 = off");
  add_number(group, "--repeat-penalty", s.repeat_penalty, 0.01f, 100.0f,
             "penalty on repeated tokens; 1 = none");
  add_number(group, "--repeat-last-n", s.repeat_last_n, 0, 1 << 20,
             "tokens that --repeat-penalty looks at");
}

}  // namespace morphkv::cli

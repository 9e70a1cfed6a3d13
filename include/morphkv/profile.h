// Settings for trained models, by what they are for. The figures that they were chosen by:
// docs/quality.md. MorphKVCache's own defaults are the reference's (CacheConfig).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/config.h"

namespace morphkv {

// How a prompt longer than the budget is read.
enum class Prefill : std::uint8_t {
  kGuided,  // in pieces; after each, a guide (the prompt's end, or other texts) says which rows
            // matter: memory stays at budget + one micro-batch. Policies that take no guide stream
  kStream,  // in pieces, scored by the last tokens of each: the same memory, the question unknown
  kWhole,   // whole into a larger cache, compressed once at its end (the paper's way), the larger
            // cache then freed
};
std::string_view to_string(Prefill prefill);
template <>
inline constexpr std::array kChoices<Prefill>{Prefill::kGuided, Prefill::kStream, Prefill::kWhole};

struct Profile {
  std::string_view name;
  std::string_view why;  // one line
  CacheConfig cache;
  int recent_percent = 0;  // protected tail as a share of the budget; 0 = cache.recent
  Prefill prefill = Prefill::kGuided;
  // A text that guides beside the prompt's own end, for questions that nobody has asked yet.
  std::string_view guide_text = {};

  // Its rule with that budget (Settings::cache()). It may not be valid: a small budget leaves no
  // room for the tail.
  CacheConfig with_budget(int budget) const;
};

// The protected tail that is `percent` of the budget, but at most three quarters of what the sinks
// leave, and at least the window. 0 per cent = 0, the window alone.
int recent_rows(int percent, const CacheConfig& cache);

// document, chat, reference, paper. The first one is the default.
const std::vector<Profile>& profiles();
const Profile& default_profile();
// Throws std::invalid_argument that names the profiles there are.
const Profile& find_profile(std::string_view name);

}  // namespace morphkv

// From trials to a table: one cell for each task, mode, length, arm and budget.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "trial.h"

namespace morphkv::eval {

// A mean with the 95 % percentile interval of a bootstrap over documents (1,000 resamples, seeded):
// questions of one document are not independent. Of a text: over its stretches.
struct Estimate {
  double mean = 0.0;
  double low = 0.0;
  double high = 0.0;
};

struct Cell {
  std::string task;
  std::string mode;
  int tokens = 0;
  std::string arm;
  int budget = 0;
  int trials = 0;
  int documents = 0;  // of a text: stretches. What the interval resamples
  Estimate score;     // of text: of exp(mean), the perplexity
  // Score as a share of the full cache's on the very same questions; a bootstrap over both. Of
  // text: perplexity over that of the full cache. Unset when the full cache was not asked all, or
  // its score is 0.
  bool has_full = false;
  Estimate of_full;
  // Means of those trials that have the measure. Of text: per token, weighted by the tokens judged,
  // each also as "<name>_last_quarter", and "ppl_last_quarter". The last quarter of a text is that
  // of the stretches that any arm has, rounded, at least one.
  std::map<std::string, Estimate> measures;
  int tokens_judged = 0;  // of all trials together
  int rows_kept = 0;      // the most of any trial, as are the bytes
  std::int64_t kv_bytes_kept = 0;
  std::int64_t kv_bytes_allocated = 0;
  // Medians of the trials that have measured them (not 0); of evict_ms: that have a step_ms.
  double read_ms = 0.0;
  double step_ms = 0.0;
  double evict_ms = 0.0;
};

inline constexpr std::string_view kTextMode = "text";

// The mode in which the full cache answers what is asked in `mode`: how a document was read
// makes no difference to it, so "whole" stands for "guided" and "stream".
std::string_view full_mode(std::string_view mode);

// In the order of first appearance of task, mode, length, arm; budgets ascend. The order of the
// trials makes no other difference.
std::vector<Cell> summarise(const std::vector<Trial>& trials, std::uint64_t seed);

}  // namespace morphkv::eval

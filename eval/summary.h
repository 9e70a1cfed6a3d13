// From trials to a table: one cell for each task, mode, length, arm and budget.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trial.h"

namespace morphkv::eval {

// A mean with the 95 % percentile interval of a bootstrap over documents (1,000 resamples, seeded):
// questions of one document, and neighbouring stretches of one text, are not independent.
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
  Estimate score;  // of text: of exp(mean), the perplexity
  // Score as a share of the full cache's on the very same questions; a bootstrap over both. Of
  // text: perplexity over that of the full cache. Unset when the full cache was not asked all.
  bool has_full = false;
  Estimate of_full;
  std::map<std::string, Estimate> measures;
  int rows_kept = 0;  // the most of any trial
  std::int64_t kv_bytes_kept = 0;
  std::int64_t kv_bytes_allocated = 0;
  double read_ms = 0.0;   // medians
  double step_ms = 0.0;
  double evict_ms = 0.0;
};

// In the order of first appearance of task, mode, length, arm; budgets ascend.
std::vector<Cell> summarise(const std::vector<Trial>& trials, std::uint64_t seed);

}  // namespace morphkv::eval

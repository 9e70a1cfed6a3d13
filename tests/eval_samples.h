// Made-up trials and cells for the tests of the reports.
#pragma once

#include <string>
#include <vector>

#include "results.h"
#include "summary.h"
#include "trial.h"

namespace morphkv::eval {

inline RunInfo sample_info() {
  return {.model = "model.gguf",
          .model_fingerprint = "abc123",
          .model_description = "llama 135M Q4_1",
          .version = "0.1.0",
          .engine = "b1234",
          .cpu = "a CPU",
          .seed = 7};
}

// A question about a document of task "needle", read whole.
inline Trial sample_trial(const std::string& arm, int budget, int document, int question,
                          double score) {
  Trial trial;
  trial.key = {.task = "needle",
               .mode = "whole",
               .tokens = 4096,
               .arm = arm,
               .budget = budget,
               .document = document,
               .question = question};
  trial.score = score;
  trial.tokens_judged = 5;
  return trial;
}

// A stretch of a text.
inline Trial sample_stretch(const std::string& arm, int budget, int stretch, double nll,
                            int tokens) {
  Trial trial = sample_trial(arm, budget, 0, stretch, nll);
  trial.key.task = "prose";
  trial.key.mode = "text";
  trial.tokens_judged = tokens;
  return trial;
}

inline Cell sample_cell(const std::string& task, const std::string& mode, const std::string& arm,
                        int budget, double score) {
  Cell cell;
  cell.task = task;
  cell.mode = mode;
  cell.tokens = 4096;
  cell.arm = arm;
  cell.budget = budget;
  cell.trials = 60;
  cell.documents = 20;
  cell.score = {score, score - 0.04, score + 0.03};
  cell.rows_kept = budget > 0 ? budget : 4096;
  cell.kv_bytes_kept = 1048576LL * cell.rows_kept / 64;
  cell.kv_bytes_allocated = 2 * cell.kv_bytes_kept;
  cell.step_ms = 3.0 + 0.001 * cell.rows_kept;
  cell.evict_ms = budget > 0 ? 0.2 : 0.0;
  return cell;
}

}  // namespace morphkv::eval

// The harness: every arm on the same documents in the same order, one trial after the other.
#pragma once

#include <llama.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "arm.h"
#include "results.h"
#include "task.h"

namespace morphkv::eval {

struct TextFile {
  std::string name;
  std::string text;
};

struct Plan {
  std::vector<const Task*> tasks;
  std::vector<std::string> modes;  // trial.h
  std::vector<TextFile> texts;     // of mode text
  std::vector<Arm> arms;           // full is run in any case, and a control that it must equal
  std::vector<int> budgets;
  int tokens = 2500;  // of a document
  int first_document = 0;
  int documents = 4;       // of each task
  int text_tokens = 6000;  // of each text
  int threads = 1;
};

struct RunnerCallbacks {
  // Tokens evaluated of those that the plan takes, about, and what is going on.
  std::function<void(double done, double total, std::string_view what)> on_progress;
  std::function<void(const Trial&)> on_trial;
  std::function<bool()> cancelled;
};

// Runs what `results` does not have yet. Throws Interrupted (lane.h) when cancelled,
// std::invalid_argument for a plan that cannot be carried out, EngineError, and std::runtime_error
// when the control is not the full cache's equal.
void run(const llama_model* model, const Plan& plan, Results& results,
         const RunnerCallbacks& callbacks);

}  // namespace morphkv::eval

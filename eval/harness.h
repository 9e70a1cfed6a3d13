// What the kinds of trials share: the plan, where results go, who is told.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lane.h"
#include "runner.h"

namespace morphkv::eval {

class Harness {
 public:
  Harness(const llama_model* model, const Plan& plan, Results& results,
          const RunnerCallbacks& callbacks);

  const llama_model* model() const { return model_; }
  const Plan& plan() const { return plan_; }
  bool plans(std::string_view mode) const;

  bool has(const TrialKey& key) const { return results_.has(key); }
  const Trial* find(const TrialKey& key) const { return results_.find(key); }
  void add(const Trial& trial);

  // So many tokens have been evaluated, or need not be. Throws Interrupted.
  void did(double tokens, const std::string& what);
  void expect(double tokens) { total_ += tokens; }
  void require_going() const;

  LaneShape shape(int tokens, int micro_batch = 512) const;
  // The rule that keeps all of so many tokens.
  CacheConfig keeping(int tokens) const;
  // Empty lines of a trial, filled with what a bounded lane measures of itself.
  Trial trial_of(const TrialKey& key, const Lane& lane) const;

 private:
  const llama_model* model_;
  const Plan& plan_;
  Results& results_;
  const RunnerCallbacks& callbacks_;
  double done_ = 0.0;
  double total_ = 0.0;
};

// A rule at a budget.
struct Contender {
  std::string arm;
  CacheConfig cache;
  bool guided = false;  // its policy takes a guide
  bool general_guide = false;
};
// Every arm of the plan but full and control, at every budget; arms outermost.
std::vector<Contender> contenders(const Plan& plan);

// Throws std::runtime_error unless `trial` scores exactly as that of the full cache, in every
// measure that `full` has: one of an older file may lack some.
void require_equal(const Trial& trial, const Trial* full);

// About how many tokens the missing trials take, and the trials themselves.
double expect_questions(const Harness& harness, const Task& task, int number);
void run_questions(Harness& harness, const Task& task, int number);
double expect_continuation(const Harness& harness, const Task& task, int number);
void run_continuation(Harness& harness, const Task& task, int number);
double expect_text(const Harness& harness, int number);
void run_text(Harness& harness, int number);

}  // namespace morphkv::eval

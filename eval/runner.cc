#include "runner.h"

#include <algorithm>
#include <stdexcept>

#include "harness.h"
#include "measure.h"
#include "morphkv/policy.h"

namespace morphkv::eval {
namespace {

constexpr int kMostGuide = 64;  // tokens of the general guide

}  // namespace

Harness::Harness(const llama_model* model, const Plan& plan, Results& results,
                 const RunnerCallbacks& callbacks)
    : model_(model), plan_(plan), results_(results), callbacks_(callbacks) {}

bool Harness::plans(std::string_view mode) const {
  return std::ranges::find(plan_.modes, mode) != plan_.modes.end();
}

void Harness::add(const Trial& trial) {
  results_.add(trial);
  if (callbacks_.on_trial) callbacks_.on_trial(trial);
}

void Harness::did(double tokens, const std::string& what) {
  done_ += tokens;
  if (callbacks_.on_progress) callbacks_.on_progress(done_, total_, what);
  require_going();
}

void Harness::require_going() const {
  if (callbacks_.cancelled && callbacks_.cancelled()) throw Interrupted();
}

LaneShape Harness::shape(int tokens, int micro_batch) const {
  return {.threads = plan_.threads,
          .micro_batch = micro_batch,
          .tokens = tokens,
          .guide = kMostGuide,
          .cancelled = callbacks_.cancelled};
}

CacheConfig Harness::keeping(int tokens) const {
  CacheConfig cache{.queries = QuerySource::kAttention};
  cache.budget = std::max(tokens, llama_model_n_swa(model_) + cache.n_sink);  // the least it takes
  return cache;
}

Trial Harness::trial_of(const TrialKey& key, const Lane& lane) const {
  Trial trial;
  trial.key = key;
  trial.threads = plan_.threads;
  std::vector<double> step_ms;
  double evict_ms = 0.0;
  for (const Lane::Step& step : lane.steps()) {
    step_ms.push_back(step.ms);
    evict_ms += step.evict_ms;
  }
  trial.step_ms = median(step_ms);
  if (!step_ms.empty()) trial.evict_ms = evict_ms / static_cast<double>(step_ms.size());
  if (lane.bounded()) {
    const llama_cpp::EvictorStats stats = lane.evictor().stats();
    trial.rows_kept = stats.rows_kept;
    trial.kv_bytes_kept = static_cast<std::int64_t>(stats.kv_bytes_kept);
    trial.kv_bytes_allocated = static_cast<std::int64_t>(stats.kv_bytes_allocated);
  }
  return trial;
}

std::vector<Contender> contenders(const Plan& plan) {
  std::vector<Contender> out;
  for (const Arm& arm : plan.arms) {
    if (arm.name == kFull || arm.name == kControl) continue;
    for (const int budget : plan.budgets) {
      const CacheConfig cache = with_budget(arm, budget);
      out.push_back({arm.name, cache, make_policy(cache)->traits().guided, arm.general_guide});
    }
  }
  return out;
}

void require_equal(const Trial& trial, const Trial* full) {
  const auto is_same = [&](const auto& measure) {
    const auto found = trial.measures.find(measure.first);
    return found != trial.measures.end() && found->second == measure.second;
  };
  if (full != nullptr && trial.score == full->score && std::ranges::all_of(full->measures, is_same))
    return;
  throw std::runtime_error("task " + trial.key.task + ", mode " + trial.key.mode + ", document " +
                           std::to_string(trial.key.document) + ", question " +
                           std::to_string(trial.key.question) +
                           ": a bounded cache that evicted nothing does not score as the full one");
}

void run(const llama_model* model, const Plan& plan, Results& results,
         const RunnerCallbacks& callbacks) {
  Harness harness(model, plan, results, callbacks);
  const int last = plan.first_document + plan.documents;
  const bool asks = harness.plans("whole") || harness.plans("guided") || harness.plans("stream");
  const auto for_each = [&](auto questions, auto continuation, auto text) {
    for (int number = 0; number < static_cast<int>(plan.texts.size()); ++number) {
      if (harness.plans("text")) text(number);
    }
    for (int number = plan.first_document; number < last; ++number) {
      for (const Task* task : plan.tasks) {
        if (task->document && asks) questions(*task, number);
        if (task->continuation && harness.plans("generate")) continuation(*task, number);
      }
    }
  };
  for_each([&](const Task& task, int n) { harness.expect(expect_questions(harness, task, n)); },
           [&](const Task& task, int n) { harness.expect(expect_continuation(harness, task, n)); },
           [&](int n) { harness.expect(expect_text(harness, n)); });
  harness.did(0.0, "");
  for_each([&](const Task& task, int n) { run_questions(harness, task, n); },
           [&](const Task& task, int n) { run_continuation(harness, task, n); },
           [&](int n) { run_text(harness, n); });
}

}  // namespace morphkv::eval

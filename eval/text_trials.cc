// Trials of a text: every arm and the full cache go through it side by side, a token at a time, and
// each token is held against the full cache's distribution. A stretch is a trial.
#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>

#include "harness.h"
#include "judge.h"
#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::eval {
namespace {

constexpr int kStretch = 250;
constexpr int kControlled = 2;  // stretches that the control goes through
constexpr int kMicroBatch = 32;

TrialKey key_of(const Harness& harness, int number, std::string_view arm, int budget, int stretch) {
  const Plan& plan = harness.plan();
  return {.task = "text-" + plan.texts[static_cast<std::size_t>(number)].name,
          .mode = "text",
          .tokens = plan.text_tokens,
          .arm = std::string(arm),
          .budget = budget,
          .document = number,
          .question = stretch};
}

int stretches(const Plan& plan) { return plan.text_tokens / kStretch; }

// What a lane has done in the stretch that is going on.
struct Runner {
  std::string arm;
  int budget = 0;
  int last_stretch = 0;  // it goes no further
  std::optional<CacheConfig> cache = std::nullopt;
  std::unique_ptr<Lane> lane = nullptr;
  double nll = 0.0;
  double kl = 0.0;
  int agreed = 0;
};

// Full first; arms of which a stretch is missing.
std::vector<Runner> runners(const Harness& harness, int number) {
  const int all = stretches(harness.plan());
  std::vector<Runner> out;
  const auto consider = [&](std::string_view arm, int budget, int last,
                            const std::optional<CacheConfig>& cache) {
    bool missing = arm == kFull;
    for (int s = 0; s < last; ++s) {
      missing = missing || !harness.has(key_of(harness, number, arm, budget, s));
    }
    if (missing) out.push_back({std::string(arm), budget, last, cache});
  };
  consider(kFull, 0, all, std::nullopt);
  const int controlled = std::min(kControlled, all);
  consider(kControl, 0, controlled, harness.keeping(controlled * kStretch + 1));
  for (const Contender& c : contenders(harness.plan())) {
    CacheConfig cache = c.cache;
    cache.seed = static_cast<std::uint64_t>(number);
    consider(c.arm, cache.budget, all, cache);
  }
  const bool only_full = out.size() == 1;
  if (only_full && harness.has(key_of(harness, number, kFull, 0, all - 1))) out.clear();
  return out;
}

// Ends the stretch: its trial, and everything from zero.
void finish_stretch(Harness& harness, int number, int stretch, Runner& runner) {
  const TrialKey key = key_of(harness, number, runner.arm, runner.budget, stretch);
  Trial trial = harness.trial_of(key, *runner.lane);
  trial.score = runner.nll / kStretch;
  trial.measures["kl"] = runner.kl / kStretch;
  trial.measures["top1"] = static_cast<double>(runner.agreed) / kStretch;
  trial.tokens_judged = kStretch;
  trial.prompt_tokens = (stretch + 1) * kStretch;
  if (!runner.lane->bounded()) trial.rows_kept = trial.prompt_tokens;
  if (runner.arm == kControl) {
    require_equal(trial, harness.find(key_of(harness, number, kFull, 0, stretch)));
  }
  if (!harness.has(key)) harness.add(trial);
  runner.nll = runner.kl = 0.0;
  runner.agreed = 0;
  runner.lane->forget_times();
}

}  // namespace

double expect_text(const Harness& harness, int number) {
  double sum = 0.0;
  for (const Runner& runner : runners(harness, number)) sum += runner.last_stretch * kStretch;
  return sum;
}

void run_text(Harness& harness, int number) {
  std::vector<Runner> lanes = runners(harness, number);
  if (lanes.empty()) return;
  const TextFile& file = harness.plan().texts[static_cast<std::size_t>(number)];
  const std::vector<llama_token> tokens = llama_cpp::tokenize(harness.model(), file.text, false);
  const int needed = stretches(harness.plan()) * kStretch + 1;
  if (std::ssize(tokens) < needed) {
    throw std::invalid_argument("text '" + file.name + "' has " + std::to_string(tokens.size()) +
                                " tokens, " + std::to_string(needed) +
                                " are needed: lower --text-tokens, or give a longer text");
  }
  for (Runner& runner : lanes) {
    const int most = runner.cache ? 0 : needed;
    runner.lane =
        std::make_unique<Lane>(harness.model(), harness.shape(most, kMicroBatch), runner.cache);
  }
  for (int t = 0; t + 1 < needed; ++t) {
    const llama_token next = tokens[static_cast<std::size_t>(t) + 1];
    const int stretch = t / kStretch;
    Odds full;
    for (Runner& runner : lanes) {
      if (stretch >= runner.last_stretch) continue;
      runner.lane->feed(tokens[static_cast<std::size_t>(t)]);
      const std::span<const float> logits = runner.lane->logits();
      const Odds odds = odds_of(logits);
      const bool is_full = &runner == &lanes.front();
      if (is_full) full = odds;
      runner.nll += odds.log_sum - logits[next];
      runner.kl += is_full ? 0.0 : divergence(lanes.front().lane->logits(), full, logits, odds);
      runner.agreed += odds.likeliest == full.likeliest ? 1 : 0;
      if ((t + 1) % kStretch == 0) finish_stretch(harness, number, stretch, runner);
      harness.did(1.0, "text " + file.name);
    }
  }
}

}  // namespace morphkv::eval

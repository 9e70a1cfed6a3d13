// Trials of what a model makes of a prompt. The prompt is evaluated whole and decided about by each
// rule at its end; then the model goes on, and never ends before its time.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>

#include "harness.h"
#include "judge.h"
#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::eval {
namespace {

// The next token: the likeliest, or drawn with the temperature. Never one that ends the text.
class Sampler {
 public:
  Sampler(const llama_model* model, float temperature, std::uint64_t seed)
      : vocab_(llama_model_get_vocab(model)), temperature_(temperature), random_(seed) {}

  llama_token operator()(std::span<const float> logits) {
    allowed_.assign(logits.begin(), logits.end());
    for (std::size_t i = 0; i < allowed_.size(); ++i) {
      if (llama_vocab_is_eog(vocab_, static_cast<llama_token>(i))) {
        allowed_[i] = -std::numeric_limits<float>::infinity();
      }
    }
    const Odds odds = odds_of(allowed_);
    if (temperature_ <= 0.0f) return odds.likeliest;
    for (float& logit : allowed_) logit /= temperature_;
    const Odds cooled = odds_of(allowed_);
    double rest = static_cast<double>(random_() >> 11) * 0x1.0p-53;
    for (std::size_t i = 0; i < allowed_.size(); ++i) {
      rest -= std::exp(allowed_[i] - cooled.log_sum);
      if (rest < 0.0) return static_cast<llama_token>(i);
    }
    return odds.likeliest;
  }

 private:
  const llama_vocab* vocab_;
  float temperature_;
  std::mt19937_64 random_;
  std::vector<float> allowed_;
};

TrialKey key_of(const Task& task, std::string_view arm, int budget, int number) {
  return {.task = std::string(task.name),
          .mode = "generate",
          .tokens = 0,
          .arm = std::string(arm),
          .budget = budget,
          .document = number,
          .question = 0};
}

// Without `cache`: llama.cpp as it is.
Trial go_on(Harness& harness, const TrialKey& key, const Continuation& from,
            const std::optional<CacheConfig>& cache) {
  const auto prompt = llama_cpp::tokenize(harness.model(), from.prompt, false);
  const int tokens = static_cast<int>(prompt.size());
  Lane lane(harness.model(), harness.shape(cache ? tokens : tokens + from.tokens, 256), cache);
  lane.evaluate(prompt);
  if (cache) lane.decide();
  Sampler sample(harness.model(), from.temperature, static_cast<std::uint64_t>(key.document));
  std::string text;
  for (int i = 0; i < from.tokens; ++i) {
    const llama_token token = sample(lane.logits());
    text += llama_cpp::token_text(harness.model(), token, false);
    if (i + 1 < from.tokens) lane.feed(token);
    harness.did(1.0, key.task + " " + std::to_string(key.document) + ", " + key.arm);
  }
  Trial trial = harness.trial_of(key, lane);
  if (!cache) trial.rows_kept = tokens + from.tokens - 1;
  trial.measures = from.judge(text);
  trial.score = trial.measures.at("score");
  trial.measures.erase("score");
  trial.text = std::move(text);
  trial.prompt_tokens = tokens;
  trial.tokens_judged = from.tokens;
  return trial;
}

}  // namespace

double expect_continuation(const Harness& harness, const Task& task, int number) {
  const double tokens = task.continuation(static_cast<std::uint64_t>(number)).tokens;
  double sum = harness.has(key_of(task, kFull, 0, number)) ? 0.0 : tokens;
  if (!harness.has(key_of(task, kControl, 0, number))) sum += tokens;
  for (const Contender& c : contenders(harness.plan())) {
    if (!harness.has(key_of(task, c.arm, c.cache.budget, number))) sum += tokens;
  }
  return sum;
}

void run_continuation(Harness& harness, const Task& task, int number) {
  const Continuation from = task.continuation(static_cast<std::uint64_t>(number));
  const TrialKey full = key_of(task, kFull, 0, number);
  if (!harness.has(full)) harness.add(go_on(harness, full, from, std::nullopt));
  const TrialKey control = key_of(task, kControl, 0, number);
  if (!harness.has(control)) {
    const auto prompt =
        static_cast<int>(llama_cpp::tokenize(harness.model(), from.prompt, false).size());
    const Trial trial = go_on(harness, control, from, harness.keeping(prompt + from.tokens));
    require_equal(trial, harness.find(full));
    harness.add(trial);
  }
  for (const Contender& c : contenders(harness.plan())) {
    const TrialKey key = key_of(task, c.arm, c.cache.budget, number);
    if (harness.has(key)) continue;
    CacheConfig cache = c.cache;
    cache.seed = static_cast<std::uint64_t>(number);
    harness.add(go_on(harness, key, from, cache));
  }
}

}  // namespace morphkv::eval

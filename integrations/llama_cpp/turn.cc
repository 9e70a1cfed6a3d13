#include "morphkv/llama_cpp/turn.h"

#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/model_file.h"
#include "rule.h"

namespace morphkv::llama_cpp {
namespace {

constexpr int kMostAlternatives = 20;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_rule(const CacheConfig& cache, const TurnLimits& limits, const llama_model* model) {
  validate(cache);
  if (cache.budget > limits.budget) {
    refuse("budget " + std::to_string(cache.budget) + " is above " + std::to_string(limits.budget) +
           ", what is reserved for each slot: lower it");
  }
  try {
    if (!Rule(model, cache).traits.evicts && limits.evicts) {
      refuse("policy '" + cache.policy +
             "' evicts nothing: ask for strict instead, which refuses "
             "what does not fit");
    }
  } catch (const Unsupported& error) {
    refuse(error.what());
  }
}

void check_prompt(const Turn& turn, const llama_model* model) {
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  for (const llama_token token : turn.prompt) {
    if (token < 0 || token >= n_vocab) {
      refuse("token " + std::to_string(token) + " of the prompt is none of 0 to " +
             std::to_string(n_vocab - 1));
    }
  }
  if (turn.prompt.empty()) refuse("the prompt is empty: give at least one token");
  if (turn.question >= turn.prompt.size()) {
    refuse("the question begins at token " + std::to_string(turn.question) + ", the prompt has " +
           std::to_string(turn.prompt.size()) +
           ": give an index below that, 0 for the whole prompt");
  }
}

void check_guides(const Turn& turn, int most) {
  if (turn.guide < 0) {
    refuse("guide " + std::to_string(turn.guide) + " is negative: use 0 for the usual length");
  }
  for (const auto& guide : turn.guides) {
    if (guide.empty()) refuse("a guide is empty: give at least one token");
    if (static_cast<int>(guide.size()) > most) {
      refuse("a guide has " + std::to_string(guide.size()) + " tokens, the limit is " +
             std::to_string(most) + ": shorten it");
    }
  }
}

void check_length(const Turn& turn, int trained, std::size_t before) {
  const auto tokens = static_cast<int>(turn.prompt.size());
  if (!turn.allow_past_training && trained > 0 && tokens > trained) {
    const std::string behind =
        before == 0 ? "" : " behind a session of " + std::to_string(before) + " tokens";
    throw TooLong("the prompt has " + std::to_string(turn.prompt.size() - before) + " tokens" +
                      behind + ", the model was trained for " + std::to_string(trained) +
                      ": shorten it, or go beyond knowingly with allow_past_training "
                      "(--allow-past-training)",
                  tokens, trained);
  }
  if (turn.strict && tokens > turn.cache.budget) {
    throw TooLong("the prompt has " + std::to_string(tokens) + " tokens, the budget is " +
                      std::to_string(turn.cache.budget) +
                      " rows and strict forbids eviction: shorten it, or leave strict out",
                  tokens, turn.cache.budget);
  }
}

}  // namespace

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kTrainedLength:
      return "trained_length";
    case FinishReason::kInterrupted:
      return "interrupted";
  }
  return "";
}

std::string_view mode_text(const std::optional<Prefill>& mode) {
  return mode ? to_string(*mode) : "at_once";
}

void Turn::use(const ResolvedSettings& settings, const llama_model* model,
               const std::vector<std::string>& texts) {
  cache = settings.cache;
  prefill = settings.prefill;
  end_guides_too = texts.empty() && !settings.guide_text.empty();
  guides.clear();
  // A guide is read in the middle of a text.
  for (const std::string& text : texts) guides.push_back(tokenize_continuation(model, text));
  if (end_guides_too) guides.push_back(tokenize_continuation(model, settings.guide_text));
}

void check_turn(const Turn& turn, const TurnLimits& limits, const llama_model* model,
                std::size_t before) {
  check_rule(turn.cache, limits, model);
  validate(turn.sampling);
  check_prompt(turn, model);
  check_guides(turn, limits.guide_tokens);
  if (turn.top_logprobs > kMostAlternatives) {
    refuse("top_logprobs " + std::to_string(turn.top_logprobs) + " is above " +
           std::to_string(kMostAlternatives));
  }
  check_length(turn, trained_length(model), before);
}

}  // namespace morphkv::llama_cpp

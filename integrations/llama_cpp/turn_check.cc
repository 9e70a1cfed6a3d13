#include "turn_check.h"

#include <algorithm>

#include "bounded_sequence.h"

namespace morphkv::llama_cpp {
namespace {

constexpr int kMostAlternatives = 20;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_length(const Turn& turn, int trained_length) {
  const auto tokens = static_cast<int>(turn.prompt.size());
  if (!turn.allow_past_training && trained_length > 0 && tokens > trained_length) {
    throw TooLong("the prompt has " + std::to_string(tokens) +
                      " tokens, the model was trained for " + std::to_string(trained_length) +
                      ": shorten it, or go beyond knowingly with allow_past_training",
                  tokens, trained_length);
  }
  if (turn.strict && tokens > turn.cache.budget) {
    throw TooLong("the prompt has " + std::to_string(tokens) + " tokens, the budget is " +
                      std::to_string(turn.cache.budget) +
                      " rows and strict forbids eviction: shorten it, or leave strict out",
                  tokens, turn.cache.budget);
  }
}

}  // namespace

void check_turn(const Turn& turn, const SlotsOptions& options, const llama_model* model) {
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  const CacheConfig& cache = turn.cache;
  validate(cache);
  if (cache.budget > options.budget) {
    refuse("budget " + std::to_string(cache.budget) + " is above " +
           std::to_string(options.budget) + ", what is reserved for each slot: lower it");
  }
  try {
    if (!Rule(model, cache).traits.evicts) {
      refuse("policy '" + cache.policy +
             "' evicts nothing: ask for strict instead, which refuses "
             "what does not fit");
    }
  } catch (const Unsupported& error) {
    refuse(error.what());
  }
  if (turn.prefill == Prefill::kWhole) {
    refuse("prefill 'whole' needs a cache as large as the prompt: use guided or stream");
  }
  validate(turn.sampling);
  for (const llama_token token : turn.prompt) {
    if (token < 0 || token >= n_vocab) {
      refuse("token " + std::to_string(token) + " of the prompt is none of 0 to " +
             std::to_string(n_vocab - 1));
    }
  }
  if (turn.prompt.empty()) refuse("the prompt is empty: give at least one token");
  if (turn.question >= turn.prompt.size()) {
    refuse("the question begins at token " + std::to_string(turn.question) + ", the prompt has " +
           std::to_string(turn.prompt.size()));
  }
  const int most = std::min({kMostGuide, options.piece / 2, options.batch_tokens});
  for (const auto& guide : turn.guides) {
    if (guide.empty()) refuse("a guide is empty: give at least one token");
    if (static_cast<int>(guide.size()) > most) {
      refuse("a guide has " + std::to_string(guide.size()) + " tokens, the limit is " +
             std::to_string(most) + ": shorten it");
    }
  }
  if (turn.top_logprobs > kMostAlternatives) {
    refuse("top_logprobs " + std::to_string(turn.top_logprobs) + " is above " +
           std::to_string(kMostAlternatives));
  }
  check_length(turn, llama_model_n_ctx_train(model));
}

}  // namespace morphkv::llama_cpp

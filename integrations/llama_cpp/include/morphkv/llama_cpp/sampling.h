// How the next token is chosen.
#pragma once

#include <llama.h>

#include <cstdint>
#include <span>
#include <vector>

#include "morphkv/llama_cpp/llama_ptr.h"

namespace morphkv::llama_cpp {

struct SamplingOptions {
  std::uint32_t seed = LLAMA_DEFAULT_SEED;  // LLAMA_DEFAULT_SEED = a random one
  float temperature = 0.8f;                 // <= 0: always the most likely token
  int top_k = 40;                           // <= 0: off
  float top_p = 0.95f;
  float min_p = 0.05f;
  float repeat_penalty = 1.0f;  // 1 = off
  int repeat_last_n = 64;
  float presence_penalty = 0.0f;   // once for a token among the last repeat_last_n
  float frequency_penalty = 0.0f;  // for each time it is among them
};

// Throws std::invalid_argument for a number out of its range; the text names it.
void validate(const SamplingOptions& options);

struct TokenProbability {
  llama_token token = 0;
  float logprob = 0.0f;  // natural logarithm, of the model's own distribution
};

class Sampler {
 public:
  // Throws std::invalid_argument (validate()).
  Sampler(const llama_model* model, const SamplingOptions& options);

  // Chooses among the logits [vocabulary] and remembers the choice. With `ignore_eos` no token that
  // ends the text. Throws EngineError for a logit that is no number.
  llama_token choose(std::span<const float> logits, bool ignore_eos);

 private:
  SamplerPtr chain_;
  std::vector<llama_token> ends_;  // tokens that end a text
  std::vector<llama_token_data> candidates_;
};

// The probability of `token` under these logits.
TokenProbability probability_of(llama_token token, std::span<const float> logits);
// The n likeliest tokens, the likeliest first.
std::vector<TokenProbability> likeliest(int n, std::span<const float> logits);

}  // namespace morphkv::llama_cpp

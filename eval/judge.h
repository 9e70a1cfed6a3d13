// How an answer is judged: the model is given it token by token, and each token is held against
// what the model would have said.
#pragma once

#include <llama.h>

#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "task.h"

namespace morphkv::eval {

// Probabilities of one token.
struct Odds {
  llama_token likeliest = 0;
  double log_sum = 0.0;  // log of the sum of exp(logits)
};
// Throws llama_cpp::EngineError for a logit that is no number.
Odds odds_of(std::span<const float> logits);

// Of two distributions over the vocabulary: sum of p * (log p - log q), in nats.
double divergence(std::span<const float> p_logits, const Odds& p, std::span<const float> q_logits,
                  const Odds& q);

// A question in tokens.
struct AskedTokens {
  std::vector<llama_token> question;
  std::vector<std::vector<llama_token>> parts;  // of the answer
  std::vector<llama_token> choices;             // their first tokens
};
AskedTokens tokens_of(const llama_model* model, const Question& question);

struct Judgement {
  double score = 0.0;
  double nll = 0.0;      // mean of the answer's tokens, in nats
  int tokens = 0;        // of the answer
  int tokens_right = 0;  // of them: the likeliest one, given those before
};

// `logits` of the token that follows; `feed` takes it.
Judgement judge(const AskedTokens& asked, const std::function<std::span<const float>()>& logits,
                const std::function<void(llama_token)>& feed);

}  // namespace morphkv::eval

#include "judge.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::eval {

Odds odds_of(std::span<const float> logits) {
  const auto most = std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - *most));
  if (!std::isfinite(sum)) {
    throw llama_cpp::EngineError("the model gave a logit that is no number");
  }
  return {static_cast<llama_token>(most - logits.begin()), *most + std::log(sum)};
}

double divergence(std::span<const float> p_logits, const Odds& p, std::span<const float> q_logits,
                  const Odds& q) {
  double sum = 0.0;
  for (std::size_t i = 0; i < p_logits.size(); ++i) {
    const double log_p = p_logits[i] - p.log_sum;
    if (std::isinf(log_p)) continue;  // never said
    sum += std::exp(log_p) * (log_p - (q_logits[i] - q.log_sum));
  }
  return std::max(0.0, sum);
}

AskedTokens tokens_of(const llama_model* model, const Question& question) {
  AskedTokens asked;
  asked.question = llama_cpp::tokenize_continuation(model, question.text);
  for (const std::string& part : question.answer) {
    asked.parts.push_back(llama_cpp::tokenize_continuation(model, part));
  }
  for (const std::string& choice : question.choices) {
    asked.choices.push_back(llama_cpp::tokenize_continuation(model, choice).front());
  }
  return asked;
}

Judgement judge(const AskedTokens& asked, const std::function<std::span<const float>()>& logits,
                const std::function<void(llama_token)>& feed) {
  Judgement out;
  int parts_right = 0;
  bool chosen = true;
  for (std::size_t i = 0; i < asked.parts.size(); ++i) {
    bool right = true;
    for (std::size_t t = 0; t < asked.parts[i].size(); ++t) {
      const llama_token token = asked.parts[i][t];
      const std::span<const float> given = logits();
      const Odds odds = odds_of(given);
      if (out.tokens == 0) {
        for (const llama_token other : asked.choices) {
          chosen = chosen && (other == token || given[token] > given[other]);
        }
      }
      out.tokens_right += odds.likeliest == token ? 1 : 0;
      right = right && odds.likeliest == token;
      out.nll += odds.log_sum - given[token];
      ++out.tokens;
      const bool last = i + 1 == asked.parts.size() && t + 1 == asked.parts[i].size();
      if (!last) feed(token);
    }
    parts_right += right ? 1 : 0;
  }
  out.nll /= out.tokens;
  out.score = asked.choices.empty()
                  ? static_cast<double>(parts_right) / static_cast<double>(asked.parts.size())
                  : (chosen ? 1.0 : 0.0);
  return out;
}

}  // namespace morphkv::eval

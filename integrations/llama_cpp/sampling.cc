#include "morphkv/llama_cpp/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "morphkv/llama_cpp/evictor.h"

namespace morphkv::llama_cpp {
namespace {

SamplerPtr make_chain(const SamplingOptions& o, int n_vocab) {
  SamplerPtr chain(llama_sampler_chain_init(llama_sampler_chain_default_params()));
  const auto add = [&](llama_sampler* sampler) { llama_sampler_chain_add(chain.get(), sampler); };
  if (o.repeat_penalty != 1.0f || o.presence_penalty != 0.0f || o.frequency_penalty != 0.0f) {
    add(llama_sampler_init_penalties(n_vocab, o.repeat_last_n, o.repeat_penalty,
                                     o.frequency_penalty, o.presence_penalty));
  }
  if (o.temperature <= 0.0f) {
    add(llama_sampler_init_greedy());
    return chain;
  }
  if (o.top_k > 0) add(llama_sampler_init_top_k(o.top_k));
  if (o.top_p < 1.0f) add(llama_sampler_init_top_p(o.top_p, 1));
  if (o.min_p > 0.0f) add(llama_sampler_init_min_p(o.min_p, 1));
  add(llama_sampler_init_temp(o.temperature));
  add(llama_sampler_init_dist(o.seed));
  return chain;
}

// log of the sum of exp, of the model's own distribution.
double log_sum(std::span<const float> logits) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - top));
  return top + std::log(sum);
}

}  // namespace

void validate(const SamplingOptions& o) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (!(o.repeat_penalty > 0.0f) || !std::isfinite(o.repeat_penalty)) {
    refuse("repeat penalty " + std::to_string(o.repeat_penalty) +
           " is not above 0: use 1 for none");
  }
  if (!std::isfinite(o.temperature)) refuse("temperature is no finite number");
  if (!(o.top_p >= 0.0f && o.top_p <= 1.0f)) {
    refuse("top-p " + std::to_string(o.top_p) + " is not in [0, 1]");
  }
  if (!(o.min_p >= 0.0f && o.min_p <= 1.0f)) {
    refuse("min-p " + std::to_string(o.min_p) + " is not in [0, 1]");
  }
  for (const float penalty : {o.presence_penalty, o.frequency_penalty}) {
    if (!std::isfinite(penalty)) refuse("a presence or frequency penalty is no finite number");
  }
}

Sampler::Sampler(const llama_model* model, const SamplingOptions& options) {
  validate(options);
  const llama_vocab* vocab = llama_model_get_vocab(model);
  const int n_vocab = llama_vocab_n_tokens(vocab);
  chain_ = make_chain(options, n_vocab);
  candidates_.resize(static_cast<std::size_t>(n_vocab));
  for (llama_token token = 0; token < n_vocab; ++token) {
    if (llama_vocab_is_eog(vocab, token)) ends_.push_back(token);
  }
}

llama_token Sampler::choose(std::span<const float> logits, bool ignore_eos) {
  bool numbers = true;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    numbers &= !std::isnan(logits[i]);
    candidates_[i] = {static_cast<llama_token>(i), logits[i], 0.0f};
  }
  if (!numbers) throw EngineError("the model gave a logit that is no number");
  if (ignore_eos) {
    for (const llama_token token : ends_) {
      candidates_[static_cast<std::size_t>(token)].logit = -std::numeric_limits<float>::infinity();
    }
  }
  llama_token_data_array array{candidates_.data(), candidates_.size(), -1, false};
  llama_sampler_apply(chain_.get(), &array);
  const llama_token token = array.data[array.selected].id;
  llama_sampler_accept(chain_.get(), token);
  return token;
}

TokenProbability probability_of(llama_token token, std::span<const float> logits) {
  const double logprob = logits[static_cast<std::size_t>(token)] - log_sum(logits);
  return {token, static_cast<float>(logprob)};
}

std::vector<TokenProbability> likeliest(int n, std::span<const float> logits) {
  std::vector<llama_token> order(logits.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<llama_token>(i);
  const auto most = order.begin() + std::min(static_cast<std::ptrdiff_t>(n), std::ssize(order));
  std::partial_sort(order.begin(), most, order.end(), [&](llama_token a, llama_token b) {
    const float la = logits[static_cast<std::size_t>(a)];
    const float lb = logits[static_cast<std::size_t>(b)];
    return la != lb ? la > lb : a < b;
  });
  const double sum = log_sum(logits);
  std::vector<TokenProbability> out;
  for (auto token = order.begin(); token != most; ++token) {
    out.push_back({*token, static_cast<float>(logits[static_cast<std::size_t>(*token)] - sum)});
  }
  return out;
}

}  // namespace morphkv::llama_cpp

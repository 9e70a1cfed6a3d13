#include "rule.h"

#include <string>
#include <utility>

#include "morphkv/llama_cpp/evictor.h"

namespace morphkv::llama_cpp {
namespace {

void check_model(const llama_model* model, const CacheConfig& config, bool evicts) {
  const auto refuse = [](const std::string& why) {
    throw Unsupported("this model cannot be bounded: " + why);
  };
  if (llama_model_is_recurrent(model)) refuse("it is recurrent and has no KV cache of rows");
  if (llama_model_is_hybrid(model)) refuse("it is a hybrid with recurrent layers");
  if (llama_model_is_diffusion(model)) refuse("it is a diffusion model");
  if (llama_model_has_encoder(model)) refuse("it has an encoder");
  if (!llama_model_has_decoder(model)) refuse("it has no decoder");
  const int n_swa = llama_model_n_swa(model);
  if (evicts && n_swa > config.budget - config.n_sink) {
    refuse("its sliding window of " + std::to_string(n_swa) +
           " tokens is larger than budget - n_sink = " +
           std::to_string(config.budget - config.n_sink) + "; use a budget of at least " +
           std::to_string(n_swa + config.n_sink));
  }
}

}  // namespace

Rule::Rule(const llama_model* model, CacheConfig c)
    : config(std::move(c)), policy(make_policy(config)), traits(policy->traits()) {
  check_model(model, config, traits.evicts);
}

}  // namespace morphkv::llama_cpp

#include "lane.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "measure.h"
#include "morphkv/llama_cpp/engine_context.h"

namespace morphkv::eval {

// Measured: the policy that keeps everything allocates what a plain context does.
std::size_t plain_kv_bytes(const llama_model* model, int tokens) {
  const Lane lane(model, {.micro_batch = 32, .tokens = tokens}, CacheConfig{.policy = "full"});
  return lane.evictor().stats().kv_bytes_allocated;
}

Lane::Lane(const llama_model* model, const LaneShape& shape,
           const std::optional<CacheConfig>& cache)
    : n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))), cancelled_(shape.cancelled) {
  llama_context_params params = llama_cpp::context_params(shape.threads, shape.micro_batch);
  params.n_ctx = static_cast<std::uint32_t>(std::max(shape.tokens, shape.micro_batch));
  params.swa_full = false;  // as a bounded context has it
  if (cache) {
    evictor_.emplace(model, llama_cpp::EvictorOptions{.cache = *cache});
    evictor_->attach(params, shape.tokens, shape.guide);
  }
  context_ = llama_cpp::make_context(model, params);
  if (evictor_) evictor_->bind(context_.get());
}

void Lane::read(std::span<const llama_token> tokens, std::span<const llama_token> guide) {
  const int n_ubatch = static_cast<int>(llama_n_ubatch(context_.get()));
  const int most =
      evictor_ ? llama_cpp::bounded_micro_batch(n_ubatch, evictor_->config().budget) : n_ubatch;
  const std::size_t piece = static_cast<std::size_t>(most) - guide.size();
  for (std::size_t done = 0; done < tokens.size(); done += piece) {
    decode(tokens.subspan(done, std::min(piece, tokens.size() - done)));
    if (!evictor_) continue;
    if (guide.empty()) {
      decide();
    } else {
      evictor_->hold();
      decode(guide);
      evictor_->guide();
      evictor_->evict();
    }
  }
}

void Lane::evaluate(std::span<const llama_token> tokens) {
  const std::size_t piece = llama_n_ubatch(context_.get());
  for (std::size_t done = 0; done < tokens.size(); done += piece) {
    decode(tokens.subspan(done, std::min(piece, tokens.size() - done)));
  }
}

Lane::Step Lane::feed(llama_token token) {
  Step step;
  const Stopwatch whole;
  decode({&token, 1});
  llama_synchronize(context_.get());
  if (evictor_) {
    const Stopwatch eviction;
    decide();
    step.evict_ms = eviction.ms();
  }
  step.ms = whole.ms();
  steps_.push_back(step);
  return step;
}

std::vector<std::uint8_t> Lane::state() const {
  std::vector<std::uint8_t> state(llama_state_seq_get_size(context_.get(), 0));
  state.resize(llama_state_seq_get_data(context_.get(), state.data(), state.size(), 0));
  return state;
}

void Lane::restore(std::span<const std::uint8_t> state) {
  if (llama_state_seq_set_data(context_.get(), state.data(), state.size(), 0) != state.size()) {
    throw llama_cpp::EngineError("llama_state_seq_set_data refused " +
                                 std::to_string(state.size()) + " bytes");
  }
}

std::span<const float> Lane::logits() const {
  const float* logits = llama_get_logits_ith(context_.get(), -1);
  if (logits == nullptr) throw llama_cpp::EngineError("llama.cpp gave no logits");
  return {logits, static_cast<std::size_t>(n_vocab_)};
}

llama_token Lane::likeliest() const {
  const std::span<const float> all = logits();
  return static_cast<llama_token>(std::max_element(all.begin(), all.end()) - all.begin());
}

void Lane::decode(std::span<const llama_token> tokens) {
  // The engine's batch is not const, it does not write to the tokens.
  auto* data = const_cast<llama_token*>(tokens.data());
  const int status = llama_decode(
      context_.get(), llama_batch_get_one(data, static_cast<std::int32_t>(tokens.size())));
  if (status != 0) {
    throw llama_cpp::EngineError("llama_decode failed with status " + std::to_string(status));
  }
  if (cancelled_ && cancelled_()) throw Interrupted();
}

}  // namespace morphkv::eval

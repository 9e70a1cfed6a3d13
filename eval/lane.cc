#include "lane.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

namespace morphkv::eval {
namespace {

constexpr int kMostGuide = 64;  // tokens of a guide

}  // namespace

Lane::Lane(const llama_model* model, const LaneShape& shape,
           const std::optional<CacheConfig>& cache)
    : n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))), cancelled_(shape.cancelled) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(std::max(shape.tokens, shape.micro_batch));
  params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(shape.micro_batch);
  params.n_threads = params.n_threads_batch = shape.threads;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.no_perf = true;
  params.swa_full = false;  // as a bounded context has it
  if (cache) {
    evictor_.emplace(model, llama_cpp::EvictorOptions{.cache = *cache});
    evictor_->attach(params, shape.tokens, kMostGuide);
  }
  context_.reset(llama_init_from_model(const_cast<llama_model*>(model), params));
  if (!context_) {
    throw llama_cpp::EngineError("llama.cpp could not make a context of " +
                                 std::to_string(params.n_ctx) + " cells");
  }
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

void Lane::feed(llama_token token) {
  const auto start = std::chrono::steady_clock::now();
  decode({&token, 1});
  llama_synchronize(context_.get());
  if (evictor_) decide();
  step_ms_.push_back(
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
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

double Lane::evict_ms_per_step() const {
  if (!evictor_ || step_ms_.empty()) return 0.0;
  return (evictor_->stats().evict_ms - evict_ms_before_) / static_cast<double>(step_ms_.size());
}

void Lane::forget_times() {
  step_ms_.clear();
  if (evictor_) evict_ms_before_ = evictor_->stats().evict_ms;
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

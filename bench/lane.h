// A llama.cpp context on its way through a text, as it comes or with an Evictor: the least that a
// decode loop does, so that its steps can be timed one by one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "morphkv/builder.h"
#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/llama_ptr.h"
#include "support.h"

namespace morphkv::bench {

inline constexpr int kMicroBatch = 512;
// Of a lane. After larger pieces the rows of a budget of 512 lie in cells further up, and the
// engine's attention looks at those in between as well, until as many tokens have been generated.
inline constexpr int kLaneMicroBatch = 256;

// K and V in f16 of a llama.cpp context with room for `tokens` tokens.
inline std::size_t full_kv_bytes(const ModelSpec& model, int tokens) {
  constexpr int kCells = 256;  // the engine rounds up to these
  const auto cells = static_cast<std::size_t>((tokens + kCells - 1) / kCells * kCells);
  return cells * static_cast<std::size_t>(model.n_layers) *
         static_cast<std::size_t>(model.n_heads_kv) * static_cast<std::size_t>(model.head_dim) * 2 *
         sizeof(std::uint16_t);
}

class Lane {
 public:
  struct Step {
    double ms = 0;        // decoding, eviction and the choice of the next token
    double evict_ms = 0;  // the eviction in it
  };

  // Without `cache` every row stays, nothing listens to the engine, and there is room for as many
  // tokens as `text` has. `text` must outlive the lane.
  Lane(llama_model* model, std::span<const llama_token> text, int threads,
       const std::optional<CacheConfig>& cache)
      : text_(text), n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(model))) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<std::uint32_t>(text.size());
    params.n_batch = params.n_ubatch = kLaneMicroBatch;
    params.n_threads = params.n_threads_batch = threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.no_perf = true;
    if (cache) {
      evictor_.emplace(model, llama_cpp::EvictorOptions{.cache = *cache});
      evictor_->attach(params);
    }
    context_.reset(llama_init_from_model(model, params));
    if (!context_) throw std::runtime_error("llama.cpp made no context");
    if (evictor_) evictor_->bind(context_.get());
  }

  // Reads the text up to `position`, evicting after each micro-batch.
  void read_to(int position) {
    if (position < position_ || static_cast<std::size_t>(position) > text_.size()) {
      throw std::runtime_error("cannot read from token " + std::to_string(position_) + " to " +
                               std::to_string(position) + " of " + std::to_string(text_.size()));
    }
    const int piece = static_cast<int>(llama_n_ubatch(context_.get()));
    while (position_ < position) {
      const auto n = static_cast<std::size_t>(std::min(piece, position - position_));
      decode(text_.subspan(static_cast<std::size_t>(position_), n));
      if (evictor_) evictor_->after_decode();
    }
    choose_next();
  }

  // One step on the next token of the text, whatever the model would have said.
  Step step() { return step(text_[static_cast<std::size_t>(position_)]); }

  Step step(llama_token token) {
    Step step;
    const Stopwatch whole;
    decode({&token, 1});
    if (evictor_) {
      const Stopwatch eviction;
      evictor_->after_decode();
      step.evict_ms = eviction.ms();
    }
    choose_next();
    step.ms = whole.ms();
    return step;
  }

  int position() const { return position_; }
  llama_token next() const { return next_; }  // the most likely one
  const std::optional<llama_cpp::Evictor>& evictor() const { return evictor_; }

 private:
  void decode(std::span<const llama_token> tokens) {
    // The engine's batch is not const, it does not write to the tokens.
    auto* data = const_cast<llama_token*>(tokens.data());
    const auto n = static_cast<std::int32_t>(tokens.size());
    if (llama_decode(context_.get(), llama_batch_get_one(data, n)) != 0)
      throw std::runtime_error("llama_decode failed");
    llama_synchronize(context_.get());
    position_ += n;
  }

  void choose_next() {
    const float* logits = llama_get_logits_ith(context_.get(), -1);
    if (logits == nullptr) throw std::runtime_error("llama.cpp gave no logits");
    next_ = static_cast<llama_token>(std::max_element(logits, logits + n_vocab_) - logits);
  }

  std::span<const llama_token> text_;
  int n_vocab_;
  std::optional<llama_cpp::Evictor> evictor_;
  llama_cpp::ContextPtr context_;  // after evictor_: the context calls it back
  int position_ = 0;
  llama_token next_ = 0;
};

}  // namespace morphkv::bench

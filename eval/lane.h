// A llama.cpp context on its way through tokens, as it comes or bounded: what every trial is made
// of, and every timed step of a benchmark.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/llama_ptr.h"

namespace morphkv::eval {

// The user wants to stop.
class Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("interrupted") {}
};

struct LaneShape {
  int threads = 1;
  int micro_batch = 512;
  int tokens = 0;  // most tokens at once: of a plain context all there will be, of a bounded one
                   // those of a call; 0 = a micro-batch
  int guide = 0;   // most tokens of a guide
  std::function<bool()> cancelled = {};  // asked after every micro-batch; true throws Interrupted
};

// K and V memory of a plain context with room for so many tokens, as the engine allocates it.
std::size_t plain_kv_bytes(const llama_model* model, int tokens);

class Lane {
 public:
  struct Step {
    double ms = 0.0;        // evaluating a token, eviction included
    double evict_ms = 0.0;  // the eviction in it
  };

  // Without `cache` a plain context. `model` must outlive the lane.
  Lane(const llama_model* model, const LaneShape& shape, const std::optional<CacheConfig>& cache);

  // Evaluates tokens in micro-batches and evicts after each, by a guide if there is one.
  void read(std::span<const llama_token> tokens, std::span<const llama_token> guide = {});
  // The same without evicting: all of it is one call of the rule, which decide() ends.
  void evaluate(std::span<const llama_token> tokens);
  void decide() { evictor_->after_decode(); }
  // One step, timed.
  Step feed(llama_token token);

  // What a plain context holds, to go back to; a bounded one has Evictor::checkpoint().
  std::vector<std::uint8_t> state() const;
  void restore(std::span<const std::uint8_t> state);

  // Of the token that follows. [vocabulary]
  std::span<const float> logits() const;
  llama_token likeliest() const;
  // What feed() took since forget_times(), step by step.
  const std::vector<Step>& steps() const { return steps_; }
  void forget_times() { steps_.clear(); }

  bool bounded() const { return evictor_.has_value(); }
  llama_cpp::Evictor& evictor() { return *evictor_; }
  const llama_cpp::Evictor& evictor() const { return *evictor_; }
  llama_context* context() const { return context_.get(); }

 private:
  void decode(std::span<const llama_token> tokens);

  int n_vocab_;
  std::function<bool()> cancelled_;
  std::optional<llama_cpp::Evictor> evictor_;
  llama_cpp::ContextPtr context_;  // after evictor_: the context calls it back
  std::vector<Step> steps_;
};

}  // namespace morphkv::eval

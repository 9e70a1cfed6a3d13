// A llama.cpp context on its way through tokens, as it comes or bounded: what every trial is made
// of.
#pragma once

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
  std::function<bool()> cancelled = {};  // asked after every micro-batch; true throws Interrupted
};

class Lane {
 public:
  // Without `cache` a plain context. `model` must outlive the lane.
  Lane(const llama_model* model, const LaneShape& shape, const std::optional<CacheConfig>& cache);

  // Evaluates tokens in micro-batches and evicts after each, by a guide if there is one.
  void read(std::span<const llama_token> tokens, std::span<const llama_token> guide = {});
  // The same without evicting: all of it is one call of the rule, which decide() ends.
  void evaluate(std::span<const llama_token> tokens);
  void decide() { evictor_->after_decode(); }
  // One step.
  void feed(llama_token token);

  // What a plain context holds, to go back to; a bounded one has Evictor::checkpoint().
  std::vector<std::uint8_t> state() const;
  void restore(std::span<const std::uint8_t> state);

  // Of the token that follows. [vocabulary]
  std::span<const float> logits() const;
  // Milliseconds that each feed() took, eviction included, and eviction alone, since
  // forget_times().
  const std::vector<double>& step_ms() const { return step_ms_; }
  double evict_ms_per_step() const;
  void forget_times();

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
  std::vector<double> step_ms_;
  double evict_ms_before_ = 0.0;
};

}  // namespace morphkv::eval

// The Service on a model: one thread owns the slots. It takes requests from a queue, steps while
// any slot is busy, and hands tokens to the answers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "service.h"

namespace morphkv::server {

struct EngineServiceOptions {
  llama_cpp::SlotsOptions slots;
  int max_queue = 64;  // requests that may wait
};

class EngineService : public Service {
 public:
  // Reserves all memory. Throws like llama_cpp::Slots. The model must outlive the service.
  EngineService(const llama_model* model, EngineServiceOptions options);
  // Ends what runs.
  ~EngineService() override;

  std::unique_ptr<Answer> submit(Request request) override;
  std::vector<SlotInfo> slots() const override;
  Counters counters() const override;
  std::size_t kv_bytes_allocated() const override;
  Picture picture(int slot, int most) const override;
  std::string save(int slot) override;
  void restore(int slot, std::string bytes) override;
  void erase(int slot) override;

  // For what may be asked from any thread (Slots::check()).
  const llama_cpp::Slots& engine_slots() const;

  // From now on requests are refused (Stopping); those that run or wait go on.
  void drain();
  // Nothing runs and nothing waits.
  bool idle() const;
  // Ends all requests within one step.
  void stop_now();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace morphkv::server

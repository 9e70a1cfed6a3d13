// The engine's own threads, borrowed between two of its graphs: a graph with one custom operation.
// No pool of ours competes with threads that the engine keeps ready.
#pragma once

#include <functional>
#include <memory>

#include "morphkv/llama_cpp/evictor.h"

namespace morphkv::llama_cpp {

class EngineThreads {
 public:
  // At most `threads` at once, the caller included. Throws EngineError.
  explicit EngineThreads(int threads);
  ~EngineThreads();
  EngineThreads(const EngineThreads&) = delete;
  EngineThreads& operator=(const EngineThreads&) = delete;

  int threads() const;
  // Calls body(i, worker) for every i in [0, n), in any order, with worker in [0, min(threads,
  // threads())). Returns when all are done; the first exception of a body is thrown again, and
  // bodies not begun by then are left out.
  void for_each(int n, int threads, const std::function<void(int i, int worker)>& body);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace morphkv::llama_cpp

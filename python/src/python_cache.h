// A MorphKVCache as Python holds it: the GIL is released while the cache works, one thread at a
// time works on it, and results are arrays of the kind that came in.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>
#include <utility>

#include "arrays.h"
#include "morphkv/cache.h"

namespace morphkv::python {

class PythonCache {
 public:
  PythonCache(MorphKVCache cache, int layer) : layer_(layer), cache_(std::move(cache)) {}
  PythonCache(CacheConfig config, int layer)
      : PythonCache(MorphKVCache(std::move(config), layer), layer) {}

  // Calls work(cache) without the GIL. `work` touches nothing of Python's.
  template <typename Work>
  auto locked(Work work) {
    nb::gil_scoped_release no_gil;
    const std::lock_guard lock(mutex_);
    return work(cache_);
  }

  int layer() const { return layer_; }
  const CacheConfig& config() const { return cache_.config(); }
  // Of the last call's keys; guarded by the GIL.
  ArrayKind kind;

 private:
  int layer_;
  std::mutex mutex_;
  MorphKVCache cache_;
};

// CacheState as a dict with arrays of `kind`, and back.
nb::dict to_dict(CacheState state, const ArrayKind& kind);
CacheState from_dict(nb::handle state);

// CacheState as plain numbers and bytes, for pickle, and back. The configuration is not part of it.
nb::tuple to_bytes(const CacheState& state);
CacheState from_bytes(const CacheConfig& config, const nb::tuple& state);

}  // namespace morphkv::python

// A configuration made ready for a model: its policy, and whether the model can be bounded by it.
#pragma once

#include <llama.h>

#include <memory>

#include "morphkv/config.h"
#include "morphkv/policy.h"

namespace morphkv::llama_cpp {

// Throws std::invalid_argument (validate()), or Unsupported for a model that cannot be bounded.
struct Rule {
  Rule(const llama_model* model, CacheConfig config);

  CacheConfig config;
  std::unique_ptr<Policy> policy;
  PolicyTraits traits;
};

}  // namespace morphkv::llama_cpp

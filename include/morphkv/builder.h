// One cache for each layer of a model, from one configuration.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "morphkv/cache.h"
#include "morphkv/config.h"

namespace morphkv {

// What the caches of a model need to know of it. For a GGUF file: llama_cpp::read_model_spec
// (model_spec.h).
struct ModelSpec {
  int n_layers = 0;
  int n_heads_kv = 0;  // KV heads per layer, for memory estimates; 0 = unknown
  int head_dim = 0;    // D, likewise
};

class CacheBuilder {
 public:
  // One MorphKVCache per layer. Throws std::invalid_argument (validate(), n_layers below 1).
  static std::vector<MorphKVCache> for_model(const ModelSpec& spec, const CacheConfig& config);

  // A cache by the name of its policy (policy.h); the other fields from `config`.
  static MorphKVCache create(std::string_view policy, CacheConfig config = {}, int layer = 0);
};

}  // namespace morphkv

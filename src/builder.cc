#include "morphkv/builder.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace morphkv {

std::vector<MorphKVCache> CacheBuilder::for_model(const ModelSpec& spec,
                                                  const CacheConfig& config) {
  if (spec.n_layers < 1) {
    throw std::invalid_argument("n_layers " + std::to_string(spec.n_layers) +
                                " is below 1: a model has layers");
  }
  std::vector<MorphKVCache> caches;
  caches.reserve(static_cast<std::size_t>(spec.n_layers));
  for (int layer = 0; layer < spec.n_layers; ++layer) caches.emplace_back(config, layer);
  return caches;
}

MorphKVCache CacheBuilder::create(std::string_view policy, CacheConfig config, int layer) {
  config.policy = policy;
  return MorphKVCache(std::move(config), layer);
}

}  // namespace morphkv

// Heavy hitters: a row is worth all the attention that it has had since it came (Zhang et al.,
// NeurIPS 2023, arXiv 2306.14048).
#pragma once

#include <memory>

#include "morphkv/config.h"
#include "morphkv/policy.h"

namespace morphkv {

// Query source keys: each new key asks once, all rows held and itself. Query source attention: all
// queries shown ask, causally, fused over the group; all of a call leave at its end.
PolicyTraits h2o_traits(const CacheConfig& config);
std::unique_ptr<HeadPolicy> make_h2o_head(const CacheConfig& config, int max_slots);

}  // namespace morphkv

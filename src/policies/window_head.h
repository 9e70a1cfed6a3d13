// What the policies with a window share: a ring of the weights that the last tokens pay to each row
// (window_logits.h), fused into scores.
#pragma once

#include <memory>

#include "morphkv/config.h"
#include "morphkv/policy.h"

namespace morphkv::policies {

struct WindowRule {
  QuerySource source;
  int window;     // last tokens that ask; who is protected is the config's matter
  Fusion fusion;  // over the window, and of source attention over the group
};

// Query source keys: stored keys ask, every row answers, one eviction per token. Query source
// attention: the model's own queries ask, causally; all of a call leave at its end. Either takes
// guides.
std::unique_ptr<HeadPolicy> make_window_head(const WindowRule& rule, int max_slots);

// Of a policy whose heads are no more than window heads; pools and guided are the policy's choice.
PolicyTraits window_traits(QuerySource source);

}  // namespace morphkv::policies

// What the policies with a window share: a ring of the weights that the last tokens pay to each row
// (window_logits.h), fused into scores.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/policy.h"
#include "morphkv/window_logits.h"

namespace morphkv::policies {

struct WindowRule {
  QuerySource source;
  int window;     // last tokens that ask; who is protected is the config's matter
  Fusion fusion;  // over the window, and of source attention over the group
};

// Query source keys: the rule of the reference page: stored keys ask, every row answers, one
// eviction per token. Query source attention: the rule of the paper: the model's own queries ask,
// causally; all of a call leave at its end. Either takes guides.
class WindowHead : public WindowLogits {
 public:
  explicit WindowHead(const WindowRule& rule)
      : WindowLogits(rule.source, rule.window), fusion_(rule.fusion) {}

  void append(const KeepSet& keep, const NewRows& rows, int first, int count,
              Workspace& ws) override;
  void score(const KeepSet& keep, std::span<float> scores, Workspace& ws) override;
  void score_by_guide(const KeepSet& keep, const NewRows& guide, std::span<float> scores,
                      Workspace& ws) override;
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<WindowHead>(*this); }

 private:
  void multiply_block(const KeepSet& keep, const NewRows& rows, int first, Workspace& ws);

  Fusion fusion_;
};

// Of a policy whose heads are no more than window heads; pools and guided are the policy's choice.
PolicyTraits window_traits(QuerySource source);

}  // namespace morphkv::policies

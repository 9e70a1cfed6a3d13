// TOVA (Oren et al., 2024, arXiv 2401.06104): keeps the rows that the last token attends to: the
// window rule with a window of 1, mean over the group, no pooling. config.window still gives the
// protected tail, as for all policies; config.fusion and config.pool are not used.
//
// Where it differs from the paper: the paper averages over all heads of a layer and evicts the same
// tokens from them, here each KV head has its own rows; and with query source attention a call of
// several tokens evicts once, at its end. With query source keys it is the rule of the reference
// page with window 1.
#include "policies/policies.h"
#include "policies/window_head.h"

namespace morphkv::policies {

std::unique_ptr<Policy> make_tova(const CacheConfig& config) {
  return std::make_unique<NamedPolicy>(
      config, window_traits(config.queries),
      [](const CacheConfig& c, HeadId) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<WindowHead>(WindowRule{c.queries, 1, Fusion::kMean});
      });
}

}  // namespace morphkv::policies

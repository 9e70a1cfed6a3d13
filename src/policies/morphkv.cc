// MorphKV (Ghadia et al., ICML 2025, arXiv 2503.00979): keeps the rows that the last `window`
// tokens attend to. Query source attention is the rule of the paper; query source keys that of the
// reference page, where stored keys stand in for the queries. Pooling, guides and a protected tail
// longer than the window are not the paper's.
#include "policies/policies.h"
#include "policies/window_head.h"

namespace morphkv::policies {

std::unique_ptr<Policy> make_morphkv(const CacheConfig& config) {
  PolicyTraits traits = window_traits(config.queries);
  traits.pools = true;
  traits.guided = true;
  return std::make_unique<NamedPolicy>(
      config, traits, [](const CacheConfig& c, HeadId) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<WindowHead>(WindowRule{c.queries, c.window, c.fusion});
      });
}

}  // namespace morphkv::policies

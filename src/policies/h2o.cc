// Heavy hitters (Zhang et al., NeurIPS 2023, arXiv 2306.14048): a row is worth all the attention
// that it has had since it came. With query source keys each new key asks once, all rows held and
// itself; with attention all queries shown ask, causally, fused over the group.
//
// Where it differs from the paper: scores may be pooled (config.pool), and with query source
// attention a call of several tokens evicts once, at its end.
#include <algorithm>

#include "kernels/kernels.h"
#include "morphkv/scores.h"
#include "policies/policies.h"

namespace morphkv::policies {
namespace {

class H2oHead final : public HeadPolicy {
 public:
  explicit H2oHead(const CacheConfig& config)
      : source_(config.queries), fusion_(config.fusion), total_(columns_.add(1, 0.0f)) {}

  void append(const KeepSet& keep, const NewRows& rows, int first, int count,
              Workspace& ws) override {
    const auto asking =
        rows.slots.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    AttentionPass pass(asked_by(source_, rows, asking, keep.held(), fusion_), ws);
    const int limit = keep.held().limit();
    const float once = 1.0f;
    while (pass.next()) {
      std::fill_n(ws.slot_scores.begin(), limit, 0.0f);
      pass.add_to(ws.slot_scores.data());
      kernels::add_scaled({ws.slot_scores.data(), 0, &once, 1}, limit, columns_[total_]);
    }
  }
  void score(const KeepSet& keep, std::span<float> scores, Workspace&) override {
    std::copy_n(columns_[total_], keep.held().limit(), scores.data());
  }
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<H2oHead>(*this); }

 private:
  QuerySource source_;
  Fusion fusion_;
  int total_;  // column: attention that the row had
};

}  // namespace

std::unique_ptr<Policy> make_h2o(const CacheConfig& config) {
  const bool keys = config.queries == QuerySource::kKeys;
  return std::make_unique<NamedPolicy>(
      config,
      PolicyTraits{.needs_keys = true,
                   .needs_queries = !keys,
                   .every_query = !keys,
                   .evicts_per_token = keys,
                   .pools = true,
                   .by_slot = true},
      [](const CacheConfig& c, HeadId) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<H2oHead>(c);
      });
}

}  // namespace morphkv::policies

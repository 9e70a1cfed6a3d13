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
#include "policies/slot_values.h"

namespace morphkv::policies {
namespace {

class H2oHead final : public HeadPolicy {
 public:
  H2oHead(const CacheConfig& config, int max_slots)
      : source_(config.queries), fusion_(config.fusion), total_(max_slots) {}

  void append(const KeepSet& keep, const NewRows& rows, int first, int count,
              Workspace& ws) override {
    for (int t = first; t < first + count; ++t) total_[rows.slots[t]] = 0.0f;
    const auto asking =
        rows.slots.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    AttentionPass pass(asked_by(source_, rows, asking, keep.held(), fusion_), ws);
    const int limit = keep.held().limit();
    const float once = 1.0f;
    while (pass.next()) {
      std::fill_n(ws.slot_scores.begin(), limit, 0.0f);
      pass.add_to(ws.slot_scores.data());
      kernels::add_scaled({ws.slot_scores.data(), 0, &once, 1}, limit, total_.data());
    }
  }
  void score(const KeepSet& keep, std::span<float> scores, Workspace&) override {
    std::copy_n(total_.data(), keep.held().limit(), scores.data());
  }
  void move(int from, int to) override { total_.move(from, to); }
  void shift(int first, int last, int by) override { total_.shift(first, last, by); }
  void clear() override { total_.clear(); }
  void resize(int max_slots) override { total_.resize(max_slots); }
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<H2oHead>(*this); }
  void save(const KeepSet& keep, std::vector<float>& out) const override { total_.save(keep, out); }
  bool load(const KeepSet& keep, std::span<const float> saved) override {
    return total_.load(keep, saved);
  }

 private:
  QuerySource source_;
  Fusion fusion_;
  SlotValues total_;  // attention that the row had
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
      [](const CacheConfig& c, HeadId, int max_slots) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<H2oHead>(c, max_slots);
      });
}

}  // namespace morphkv::policies

// KeyDiff (Park et al., 2025, arXiv 2504.15364): keeps the keys that differ most from the others.
// The score is -cos(key, anchor), the anchor the mean of the unit vectors of the keys held; the
// anchor's length, which is the same for all, is left out. Nobody asks: no queries, no window, no
// pooling.
//
// Where it differs from the paper: sinks and the protected tail stay whatever their keys are; and
// the paper reads a prompt in blocks of its own size, here a call evicts once, at its end, with the
// anchor of all that is held then. The anchor never lags.
#include "policies/policies.h"
#include "policies/unit_keys.h"

namespace morphkv::policies {
namespace {

class KeydiffHead final : public HeadPolicy {
 public:
  KeydiffHead() : keys_(columns_) {}

  void append(const KeepSet& keep, const NewRows& rows, int first, int count,
              Workspace& ws) override {
    keys_.append(columns_, keep, rows, first, count, ws);
  }
  void score(const KeepSet& keep, std::span<float> scores, Workspace&) override {
    for (std::size_t rank = 0; rank < scores.size(); ++rank) {
      scores[rank] = -keys_.mean_cosine(columns_, keep.slots()[rank]);
    }
  }
  void erased(int slot, const RowsView* keys, Workspace& ws) override {
    keys_.erased(columns_, slot, keys, ws);
  }
  std::unique_ptr<HeadPolicy> clone() const override {
    return std::make_unique<KeydiffHead>(*this);
  }
  void save(const KeepSet&, std::vector<float>&) const override {}
  bool load(const KeepSet&, std::span<const float> saved) override {
    if (!saved.empty()) return false;
    keys_.forget();
    return true;
  }

 private:
  UnitKeys keys_;
};

}  // namespace

std::unique_ptr<Policy> make_keydiff(const CacheConfig& config) {
  return std::make_unique<NamedPolicy>(
      config, PolicyTraits{.needs_keys = true},
      [](const CacheConfig&, HeadId) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<KeydiffHead>();
      });
}

}  // namespace morphkv::policies

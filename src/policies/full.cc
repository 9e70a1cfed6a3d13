// Keeps every row: what the others are measured against. From no paper.
#include <numeric>

#include "policies/policies.h"

namespace morphkv::policies {
namespace {

class FullHead final : public HeadPolicy {
 public:
  void append(const KeepSet&, const NewRows&, int, int, Workspace&) override {}
  void score(const KeepSet&, std::span<float> scores, Workspace&) override {
    std::iota(scores.begin(), scores.end(), 0.0f);  // nobody asks: nothing leaves
  }
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<FullHead>(*this); }
};

}  // namespace

std::unique_ptr<Policy> make_full(const CacheConfig& config) {
  return std::make_unique<NamedPolicy>(
      config, PolicyTraits{.evicts = false},
      [](const CacheConfig&, HeadId) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<FullHead>();
      });
}

}  // namespace morphkv::policies

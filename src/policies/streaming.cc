// Attention sinks (Xiao et al., ICLR 2024, arXiv 2309.17453): keeps the sinks and the most recent
// rows. The paper numbers the rows it keeps anew before it rotates their keys; here keys keep the
// rotation of their token positions.
#include <numeric>

#include "policies/policies.h"

namespace morphkv::policies {
namespace {

class StreamingHead final : public HeadPolicy {
 public:
  void append(const KeepSet&, const NewRows&, int, int, Workspace&) override {}
  void score(const KeepSet&, std::span<float> scores, Workspace&) override {
    std::iota(scores.begin(), scores.end(), 0.0f);  // the oldest leaves
  }
  std::unique_ptr<HeadPolicy> clone() const override {
    return std::make_unique<StreamingHead>(*this);
  }
};

}  // namespace

std::unique_ptr<Policy> make_streaming(const CacheConfig& config) {
  return std::make_unique<NamedPolicy>(
      config, PolicyTraits{}, [](const CacheConfig&, HeadId) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<StreamingHead>();
      });
}

}  // namespace morphkv::policies

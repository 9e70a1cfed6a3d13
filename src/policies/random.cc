// A uniform sample of the unprotected rows seen, the baseline that every rule should beat: each row
// draws one priority from config.seed and its head, layer and position. From no paper.
#include <cstdint>

#include "policies/policies.h"

namespace morphkv::policies {
namespace {

class RandomHead final : public HeadPolicy {
 public:
  RandomHead(std::uint64_t seed, HeadId id)
      : stream_(mix(seed + mix((static_cast<std::uint64_t>(id.layer) << 32) +
                               static_cast<std::uint64_t>(id.head)))) {}

  void append(const KeepSet&, const NewRows&, int, int, Workspace&) override {}
  void score(const KeepSet& keep, std::span<float> scores, Workspace&) override {
    for (std::size_t rank = 0; rank < scores.size(); ++rank) {
      const auto bits = mix(stream_ ^ static_cast<std::uint64_t>(keep.positions()[rank]));
      scores[rank] = static_cast<float>(bits >> 40) * 0x1p-24f;  // uniform in [0, 1)
    }
  }
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<RandomHead>(*this); }

 private:
  // SplitMix64 finaliser (Steele et al., OOPSLA 2014): a hash, so that a row's priority never
  // changes.
  static constexpr std::uint64_t mix(std::uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

  std::uint64_t stream_;
};

}  // namespace

std::unique_ptr<Policy> make_random(const CacheConfig& config) {
  return std::make_unique<NamedPolicy>(
      config, PolicyTraits{}, [](const CacheConfig& c, HeadId id) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<RandomHead>(c.seed, id);
      });
}

}  // namespace morphkv::policies

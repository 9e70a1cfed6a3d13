#include "h2o.h"

#include <algorithm>

#include "kernels/kernels.h"
#include "morphkv/scores.h"

namespace morphkv {
namespace {

class H2oHead final : public HeadPolicy {
 public:
  H2oHead(const CacheConfig& config, int max_slots)
      : source_(config.queries),
        fusion_(config.fusion),
        total_(static_cast<std::size_t>(max_slots), 0.0f) {}

  void append(const KeepSet& keep, const NewRows& rows, int first, int count,
              Workspace& ws) override {
    for (int t = first; t < first + count; ++t) total_[slot_of(rows, t)] = 0.0f;
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
    for (std::size_t rank = 0; rank < scores.size(); ++rank) {
      scores[rank] = total_[static_cast<std::size_t>(keep.slots()[rank])];
    }
  }
  void move(int from, int to) override {
    total_[static_cast<std::size_t>(to)] = total_[static_cast<std::size_t>(from)];
  }
  void shift(int first, int last, int by) override {
    const auto begin = total_.begin() + first;
    const auto end = total_.begin() + last;
    if (by < 0) {
      std::copy(begin, end, begin + by);
    } else {
      std::copy_backward(begin, end, end + by);
    }
  }
  void clear() override { std::fill(total_.begin(), total_.end(), 0.0f); }
  void resize(int max_slots) override { total_.resize(static_cast<std::size_t>(max_slots)); }
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<H2oHead>(*this); }

  void save(const KeepSet& keep, std::vector<float>& out) const override {
    for (const int slot : keep.slots()) out.push_back(total_[static_cast<std::size_t>(slot)]);
  }
  bool load(const KeepSet& keep, std::span<const float> saved) override {
    const bool good = std::all_of(saved.begin(), saved.end(), [](float x) { return x >= 0.0f; });
    if (!good || saved.size() != static_cast<std::size_t>(keep.size())) return false;
    for (std::size_t rank = 0; rank < saved.size(); ++rank) {
      total_[static_cast<std::size_t>(keep.slots()[rank])] = saved[rank];
    }
    return true;
  }

 private:
  static std::size_t slot_of(const NewRows& rows, int token) {
    return static_cast<std::size_t>(rows.slots[static_cast<std::size_t>(token)]);
  }

  QuerySource source_;
  Fusion fusion_;
  std::vector<float> total_;  // [slot] attention that the row had
};

}  // namespace

PolicyTraits h2o_traits(const CacheConfig& config) {
  const bool keys = config.queries == QuerySource::kKeys;
  return {.needs_keys = true,
          .needs_queries = !keys,
          .every_query = !keys,
          .evicts_per_token = keys,
          .pools = true};
}

std::unique_ptr<HeadPolicy> make_h2o_head(const CacheConfig& config, int max_slots) {
  return std::make_unique<H2oHead>(config, max_slots);
}

}  // namespace morphkv

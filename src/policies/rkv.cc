// R-KV (Cai et al., 2025, arXiv 2505.24133): keeps rows that are attended to and unlike the others:
// lambda * importance - (1 - lambda) * redundancy, with the paper's lambda of 0.1. Importance is
// the score of morphkv (mean over window and group, pooled by config.pool) as a share of the sum
// over all rows held; redundancy the softmax, over the same rows, of a key's mean cosine with the
// other keys. So both sum to 1.
//
// Where it differs from the paper: it evicts as morphkv does, and not once for many tokens of a
// buffer; importance is a mean over the group where the authors' code takes the maximum, and is
// divided by its sum after pooling; and the latest of several keys that are nearly the same is a
// repetition too, which the paper forgives, but finding it takes every pair of keys, where the mean
// takes one pass over them. Guides are not the paper's: a row is worth its best place by any of
// them or by the score above. config.fusion is not used.
#include "kernels/kernels.h"
#include "morphkv/scores.h"
#include "policies/policies.h"
#include "policies/unit_keys.h"
#include "policies/window_head.h"

namespace morphkv::policies {
namespace {

constexpr float kLambda = 0.1f;

class RkvHead final : public WindowHead {
 public:
  explicit RkvHead(const CacheConfig& config)
      : WindowHead({config.queries, config.window, Fusion::kMean}),
        pool_(config.pool),
        keys_(columns_) {}

  void append(const KeepSet& keep, const NewRows& rows, int first, int count,
              Workspace& ws) override {
    WindowHead::append(keep, rows, first, count, ws);
    keys_.append(columns_, keep, rows, first, count, ws);
  }
  void score(const KeepSet& keep, std::span<float> scores, Workspace& ws) override {
    WindowHead::score(keep, ws.slot_scores, ws);
    by_rank(keep, ws.slot_scores.data(), scores);
    pool_scores(pool_, scores, ws.pooled);
    const int rows = keep.size();
    float* redundancy = ws.pooled.data();
    for (int rank = 0; rank < rows; ++rank) {
      redundancy[rank] = keys_.mean_cosine_with_others(columns_, keep.slots()[rank], rows);
    }
    const double all =
        kernels::exp_shifted(redundancy, rows, kernels::max_of(redundancy, rows), redundancy);
    const float repeats = (1.0f - kLambda) / static_cast<float>(all);
    const float sum = kernels::sum_of(scores.data(), rows);
    const float matters = sum > 0.0f ? kLambda / sum : 0.0f;
    for (int rank = 0; rank < rows; ++rank) {
      scores[rank] = matters * scores[rank] - repeats * redundancy[rank];
    }
  }
  void score_by_guide(const KeepSet& keep, const NewRows& guide, std::span<float> scores,
                      Workspace& ws) override {
    WindowHead::score_by_guide(keep, guide, scores, ws);
    pool_scores(pool_, scores, ws.pooled);
  }
  void erased(int slot, const RowsView* keys, Workspace& ws) override {
    WindowHead::erased(slot, keys, ws);
    keys_.erased(columns_, slot, keys, ws);
  }
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<RkvHead>(*this); }
  bool load(const KeepSet& keep, std::span<const float> saved) override {
    if (!WindowHead::load(keep, saved)) return false;
    keys_.forget();
    return true;
  }

 private:
  int pool_;
  UnitKeys keys_;
};

}  // namespace

std::unique_ptr<Policy> make_rkv(const CacheConfig& config) {
  PolicyTraits traits = window_traits(config.queries);
  traits.by_slot = false;
  traits.guided = true;
  traits.beside_guides = true;
  return std::make_unique<NamedPolicy>(
      config, traits, [](const CacheConfig& c, HeadId) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<RkvHead>(c);
      });
}

}  // namespace morphkv::policies

// SnapKV (Li et al., NeurIPS 2024, arXiv 2404.14469): keeps the rows of a prompt that its last
// `window` tokens attend to: mean over these tokens and the group, then the maximum over neighbours
// (config.pool), all of a call leaving at its end. Asked once: a row keeps the score of the last
// call of more than one token, which here is a prompt, or a piece of one, or the next turn of a
// chat.
//
// Where it differs from the paper, which leaves the cache to grow while it answers: the budget goes
// on to hold. Rows that came one by one are worth more than any row of a prompt, so that first the
// prompt's leave, the least score before the others, and then the oldest. Fed one by one from the
// start, nothing is ever scored and the policy is streaming. The window's rows are scored like the
// others and lose their protection when they leave the tail. With query source keys the stored keys
// of the window ask, each seeing what came before it. config.fusion is not used.
#include <algorithm>
#include <limits>

#include "morphkv/scores.h"
#include "policies/policies.h"

namespace morphkv::policies {
namespace {

// Of equal scores the oldest row leaves first (victim.h).
constexpr float kGenerated = std::numeric_limits<float>::infinity();

class SnapkvHead final : public HeadPolicy {
 public:
  explicit SnapkvHead(const CacheConfig& config)
      : source_(config.queries),
        window_(config.window),
        pool_(config.pool),
        score_(columns_.add(1, 0.0f)) {}

  void append(const KeepSet& keep, const NewRows& rows, int /*first*/, int count,
              Workspace& ws) override {
    float* const score = columns_[score_];
    if (count == 1) {
      score[keep.slots().back()] = kGenerated;
      return;
    }
    std::fill_n(ws.slot_scores.begin(), keep.held().limit(), 0.0f);
    const auto asking = static_cast<std::size_t>(std::min(count, window_));
    AttentionPass pass(asked_by(source_, rows, rows.slots.last(asking), keep.held(), Fusion::kMean),
                       ws);
    while (pass.next()) pass.add_to(ws.slot_scores.data());

    // The sum over the window orders rows as its mean does. Pooled here and not when asked: rows
    // that come later lend nothing.
    const auto rows_held = static_cast<std::size_t>(keep.size());
    const auto scores = std::span(ws.scores).first(rows_held);
    by_rank(keep, ws.slot_scores.data(), scores);
    pool_scores(pool_, scores, ws.pooled);
    for (std::size_t rank = 0; rank < rows_held; ++rank) score[keep.slots()[rank]] = scores[rank];
  }
  void score(const KeepSet& keep, std::span<float> scores, Workspace&) override {
    by_rank(keep, columns_[score_], scores);
  }
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<SnapkvHead>(*this); }

 private:
  QuerySource source_;
  int window_;
  int pool_;
  int score_;  // column: fixed at the end of the last call of several tokens, or kGenerated
};

}  // namespace

std::unique_ptr<Policy> make_snapkv(const CacheConfig& config) {
  const bool keys = config.queries == QuerySource::kKeys;
  return std::make_unique<NamedPolicy>(
      config, PolicyTraits{.needs_keys = true, .needs_queries = !keys},
      [](const CacheConfig& c, HeadId) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<SnapkvHead>(c);
      });
}

}  // namespace morphkv::policies

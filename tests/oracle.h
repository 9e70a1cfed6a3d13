// The rule written plainly: one head, double precision, everything recomputed from the vectors at
// every step. Shares nothing with the fast path but the configuration. Slow on purpose.
#pragma once

#include <span>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"

namespace morphkv::test {

// Two scores this close may be taken for one another by the fast path, which computes in float. A
// logit of size 15 summed over 130 products is off by 1e-6 or so; exp makes that a relative error
// of the weight, and the sums add a few units in the last place. The absolute part is for weights
// that float cannot hold: below it all are equal.
inline constexpr double kNearTieRelative = 1e-5;
inline constexpr double kNearTieAbsolute = 1e-30;

bool is_near_tie(double a, double b);

// p(j) of one query over `keys`: softmax of scale * q . k, soft-capped when softcap > 0.
std::vector<double> softmax_of(std::span<const double> query,
                               const std::vector<std::vector<double>>& keys, double scale,
                               double softcap);

// scores[rank] becomes the maximum over ranks [rank - pool / 2, rank + pool / 2].
std::vector<double> pooled(const std::vector<double>& scores, int pool);

class HeadOracle {
 public:
  // `scale` and `softcap` belong to the model's attention; the keys source has 1 / sqrt(D) and no
  // cap.
  explicit HeadOracle(const CacheConfig& config, double scale = 1.0, double softcap = 0.0)
      : config_(config), scale_(scale), softcap_(softcap) {}

  // The next token's row is stored.
  void append(std::span<const float> key);
  // Attention: the token stored last asks, with the queries [group] of its query heads. It sees
  // what is held now.
  void ask(std::vector<std::vector<double>> group);

  // A guide ranks the rows held, until the next append(). Its rows have these `keys` [token], none
  // when it is the last rows held; its last tokens ask with `questions` [token][group], which with
  // the keys source are their keys.
  void guide(const std::vector<std::vector<double>>& keys,
             const std::vector<std::vector<std::vector<double>>>& questions);

  const std::vector<Position>& positions() const { return held_; }

  // Of the rows held now, in rank order, pooled; of guides the best place, negative. Protected rows
  // have scores as well.
  std::vector<double> scores() const;
  // The positions that the rule evicts now, ascending: as many as are over the budget.
  std::vector<Position> victims() const;
  // Whether it is a matter of rounding that `other` leave instead of victims().
  bool is_near_tie_with(const std::vector<Position>& other) const;
  void evict(const std::vector<Position>& victims);

 private:
  struct Question {
    std::vector<std::vector<double>> group;
    std::vector<Position> visible;
  };
  std::vector<std::vector<double>> keys_at(const std::vector<Position>& positions) const;
  std::vector<double> raw_scores() const;
  std::vector<double> scores_of_guides() const;
  bool guides_have_near_ties() const;
  // Weights on the rows held, one vector per query that has a say.
  std::vector<std::vector<double>> weights_of_keys() const;
  std::vector<std::vector<double>> weights_of_questions() const;

  CacheConfig config_;
  double scale_;
  double softcap_;
  std::vector<std::vector<double>> history_;  // [position] the key, never forgotten
  std::vector<Position> held_;                // ascending
  std::vector<Question> questions_;           // all ever asked
  std::vector<std::vector<double>> guides_;   // [guide][rank] pooled scores
};

}  // namespace morphkv::test

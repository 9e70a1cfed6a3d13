#include "oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

namespace morphkv::test {

bool is_near_tie(double a, double b) {
  return std::fabs(a - b) <=
         kNearTieAbsolute + kNearTieRelative * std::max(std::fabs(a), std::fabs(b));
}

std::vector<double> softmax_of(std::span<const double> query,
                               const std::vector<std::vector<double>>& keys, double scale,
                               double softcap) {
  std::vector<double> weights;
  for (const auto& key : keys) {
    double logit = 0.0;
    for (std::size_t d = 0; d < key.size(); ++d) logit += query[d] * key[d];
    logit *= scale;
    if (softcap > 0.0) logit = softcap * std::tanh(logit / softcap);
    weights.push_back(logit);
  }
  const double largest = *std::max_element(weights.begin(), weights.end());
  double sum = 0.0;
  for (double& weight : weights) sum += weight = std::exp(weight - largest);
  for (double& weight : weights) weight /= sum;
  return weights;
}

std::vector<double> pooled(const std::vector<double>& scores, int pool) {
  const auto n = static_cast<std::int64_t>(scores.size());
  std::vector<double> result(scores.size());
  for (std::int64_t rank = 0; rank < n; ++rank) {
    const auto first = std::max<std::int64_t>(rank - pool / 2, 0);
    const auto last = std::min<std::int64_t>(rank + pool / 2, n - 1);
    result[static_cast<std::size_t>(rank)] =
        *std::max_element(scores.begin() + first, scores.begin() + last + 1);
  }
  return result;
}

void HeadOracle::append(std::span<const float> key) {
  guides_.clear();
  held_.push_back(static_cast<Position>(history_.size()));
  history_.emplace_back(key.begin(), key.end());
}

void HeadOracle::ask(std::vector<std::vector<double>> group) {
  questions_.push_back({std::move(group), held_});
}

void HeadOracle::guide(const std::vector<std::vector<double>>& keys,
                       const std::vector<std::vector<std::vector<double>>>& questions) {
  auto rows = keys_at(held_);
  rows.insert(rows.end(), keys.begin(), keys.end());
  const bool keys_ask = config_.queries == QuerySource::kKeys;
  const double scale =
      keys_ask ? 1.0 / std::sqrt(static_cast<double>(rows.front().size())) : scale_;
  std::vector<double> scores(held_.size(), 0.0);
  auto visible = static_cast<std::ptrdiff_t>(rows.size() - questions.size());
  for (const auto& group : questions) {
    ++visible;  // the token itself
    for (const auto& query : group) {
      const auto weights = softmax_of(query, {rows.begin(), rows.begin() + visible}, scale,
                                      keys_ask ? 0.0 : softcap_);
      for (std::size_t rank = 0; rank < std::min(scores.size(), weights.size()); ++rank) {
        scores[rank] = std::max(scores[rank], weights[rank]);
      }
    }
  }
  guides_.push_back(pooled(scores, config_.pool));
}

std::vector<double> HeadOracle::scores_of_guides() const {
  std::vector<double> best(held_.size(), -std::numeric_limits<double>::infinity());
  const auto first = static_cast<std::size_t>(config_.n_sink);
  const std::size_t last = held_.size() - static_cast<std::size_t>(config_.protected_tail());
  for (const auto& scores : guides_) {
    for (std::size_t rank = first; rank < last; ++rank) {
      double better = 0.0;
      for (std::size_t other = first; other < last; ++other) {
        const bool tie_won = scores[other] == scores[rank] && other > rank;
        if (scores[other] > scores[rank] || tie_won) ++better;
      }
      best[rank] = std::max(best[rank], -better);
    }
  }
  return best;
}

// Equal scores are none: pooling makes them, in float as well.
bool HeadOracle::guides_have_near_ties() const {
  return std::any_of(guides_.begin(), guides_.end(), [](std::vector<double> scores) {
    std::sort(scores.begin(), scores.end());
    return std::adjacent_find(scores.begin(), scores.end(), [](double a, double b) {
             return a != b && is_near_tie(a, b);
           }) != scores.end();
  });
}

std::vector<std::vector<double>> HeadOracle::keys_at(const std::vector<Position>& positions) const {
  std::vector<std::vector<double>> keys;
  for (const Position position : positions) {
    keys.push_back(history_[static_cast<std::size_t>(position)]);
  }
  return keys;
}

std::vector<std::vector<double>> HeadOracle::weights_of_keys() const {
  const auto keys = keys_at(held_);
  const double scale = 1.0 / std::sqrt(static_cast<double>(keys.front().size()));
  const std::size_t window = std::min(keys.size(), static_cast<std::size_t>(config_.window));
  std::vector<std::vector<double>> weights;
  for (std::size_t i = keys.size() - window; i < keys.size(); ++i) {
    weights.push_back(softmax_of(keys[i], keys, scale, 0.0));
  }
  return weights;
}

std::vector<std::vector<double>> HeadOracle::weights_of_questions() const {
  const std::size_t window = std::min(questions_.size(), static_cast<std::size_t>(config_.window));
  std::vector<std::vector<double>> weights;
  for (std::size_t i = questions_.size() - window; i < questions_.size(); ++i) {
    const Question& question = questions_[i];
    for (const auto& query : question.group) {
      const auto seen = softmax_of(query, keys_at(question.visible), scale_, softcap_);
      auto& held = weights.emplace_back();
      for (const Position position : held_) {
        const auto at = std::find(question.visible.begin(), question.visible.end(), position);
        const bool visible = at != question.visible.end();
        held.push_back(visible ? seen[static_cast<std::size_t>(at - question.visible.begin())]
                               : 0.0);
      }
    }
  }
  return weights;
}

std::vector<double> HeadOracle::raw_scores() const {
  const auto weights =
      config_.queries == QuerySource::kKeys ? weights_of_keys() : weights_of_questions();
  std::vector<double> scores(held_.size(), 0.0);
  for (const auto& of_query : weights) {
    for (std::size_t rank = 0; rank < scores.size(); ++rank) {
      scores[rank] = config_.fusion == Fusion::kMean ? scores[rank] + of_query[rank]
                                                     : std::max(scores[rank], of_query[rank]);
    }
  }
  if (config_.fusion == Fusion::kMean) {
    for (double& score : scores) score /= static_cast<double>(weights.size());
  }
  return scores;
}

std::vector<double> HeadOracle::scores() const {
  return guides_.empty() ? pooled(raw_scores(), config_.pool) : scores_of_guides();
}

std::vector<Position> HeadOracle::victims() const {
  const auto rows = static_cast<int>(held_.size());
  if (rows <= config_.budget) return {};
  std::vector<double> left = scores();
  const int tail = std::max(config_.window, config_.recent);
  for (int rank = 0; rank < rows; ++rank) {
    const bool is_protected = rank < config_.n_sink || rank >= rows - tail;
    if (is_protected)
      left[static_cast<std::size_t>(rank)] = std::numeric_limits<double>::infinity();
  }
  std::vector<Position> victims;
  for (int i = 0; i < rows - config_.budget; ++i) {
    // Of equal scores the first, which is the lowest position.
    const auto least = std::min_element(left.begin(), left.end());
    victims.push_back(held_[static_cast<std::size_t>(least - left.begin())]);
    *least = std::numeric_limits<double>::infinity();
  }
  std::sort(victims.begin(), victims.end());
  return victims;
}

bool HeadOracle::is_near_tie_with(const std::vector<Position>& other) const {
  const auto rule = victims();
  const auto values = scores();
  const auto only_in = [&](const std::vector<Position>& a, const std::vector<Position>& b) {
    std::vector<double> result;
    for (std::size_t rank = 0; rank < held_.size(); ++rank) {
      const bool in_a = std::binary_search(a.begin(), a.end(), held_[rank]);
      if (in_a && !std::binary_search(b.begin(), b.end(), held_[rank]))
        result.push_back(values[rank]);
    }
    return result;
  };
  const auto wrongly_kept = only_in(rule, other);
  const auto wrongly_evicted = only_in(other, rule);
  // Sinks and the tail are no matter of rounding.
  const int tail = std::max(config_.window, config_.recent);
  for (const Position position : other) {
    const auto at = std::find(held_.begin(), held_.end(), position);
    const auto rank = static_cast<int>(at - held_.begin());
    if (at == held_.end() || rank < config_.n_sink ||
        rank >= static_cast<int>(held_.size()) - tail) {
      return false;
    }
  }
  if (rule.size() != other.size()) return false;
  if (wrongly_evicted.empty()) return true;
  if (!guides_.empty()) return guides_have_near_ties();
  return is_near_tie(*std::max_element(wrongly_evicted.begin(), wrongly_evicted.end()),
                     *std::min_element(wrongly_kept.begin(), wrongly_kept.end()));
}

void HeadOracle::evict(const std::vector<Position>& victims) {
  if (!victims.empty()) guides_.clear();
  std::erase_if(held_, [&](Position position) {
    return std::find(victims.begin(), victims.end(), position) != victims.end();
  });
}

}  // namespace morphkv::test

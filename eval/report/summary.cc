#include "summary.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <tuple>
#include <utility>

#include "../measure.h"
#include "bootstrap.h"

namespace morphkv::eval {
namespace {

using Trials = std::vector<const Trial*>;
using Cluster = std::pair<int, int>;  // document, and of a text the stretch

constexpr const char* kLastQuarter = "_last_quarter";

bool is_text(const Trial& trial) { return trial.key.mode == kTextMode; }

Cluster cluster_of(const Trial& trial) {
  return {trial.key.document, is_text(trial) ? trial.key.question : 0};
}

double weight_of(const Trial& trial) { return is_text(trial) ? trial.tokens_judged : 1.0; }

// --- What several cells share --------------------------------------------------------------------

// All trials, to find the full cache's of a question and the stretches of a text.
class Lookup {
 public:
  explicit Lookup(const std::vector<Trial>& trials) {
    for (const Trial& trial : trials) {
      if (trial.key.arm == kFull && trial.key.budget == 0) full_[trial.key] = &trial;
      if (is_text(trial)) stretches_[text_of(trial)].insert(trial.key.question);
    }
  }

  // Null where the full cache was not asked.
  const Trial* full(const Trial& trial) const {
    TrialKey key = trial.key;
    key.mode = full_mode(key.mode);
    key.arm = kFull;
    key.budget = 0;
    const auto found = full_.find(key);
    return found == full_.end() ? nullptr : found->second;
  }

  bool is_in_last_quarter(const Trial& trial) const {
    const std::set<int>& stretches = stretches_.at(text_of(trial));
    const auto quarter = std::max<std::ptrdiff_t>(1, (std::ssize(stretches) + 2) / 4);
    return trial.key.question >= *std::prev(stretches.end(), quarter);
  }

 private:
  using Text = std::tuple<std::string, int, int>;
  static Text text_of(const Trial& trial) {
    return {trial.key.task, trial.key.tokens, trial.key.document};
  }

  std::map<TrialKey, const Trial*> full_;
  std::map<Text, std::set<int>> stretches_;
};

// --- Figures of a cell ---------------------------------------------------------------------------

// Statistics over the same clusters, by name. The names of `measures` are those of Cell.
struct Figures {
  Statistic score;
  Statistic of_full;
  std::map<std::string, Statistic> measures;
};

void add_measure(Figures& figures, const std::string& name, std::size_t cluster, double value,
                 double weight) {
  Statistic& statistic = figures.measures[name];
  statistic.clusters.resize(figures.score.clusters.size());
  statistic.clusters[cluster] += {.value = weight * value, .weight = weight};
}

void add_trial(Figures& figures, const Trial& trial, std::size_t cluster, const Lookup& lookup) {
  const double weight = weight_of(trial);
  const Sums score = {.value = weight * trial.score, .weight = weight};
  figures.score.clusters[cluster] += score;
  if (const Trial* full = lookup.full(trial)) {
    Sums both = score;
    both.full_weight = weight_of(*full);
    both.full_value = both.full_weight * full->score;
    figures.of_full.clusters[cluster] += both;
  }
  for (const auto& [name, value] : trial.measures) {
    add_measure(figures, name, cluster, value, weight);
  }
  if (!is_text(trial) || !lookup.is_in_last_quarter(trial)) return;
  add_measure(figures, std::string("ppl") + kLastQuarter, cluster, trial.score, weight);
  figures.measures.at(std::string("ppl") + kLastQuarter).figure = exp_mean_of;
  for (const auto& [name, value] : trial.measures) {
    add_measure(figures, name + kLastQuarter, cluster, value, weight);
  }
}

Figures figures_of(const Trials& trials, const Lookup& lookup) {
  std::map<Cluster, std::size_t> clusters;
  for (const Trial* trial : trials) clusters[cluster_of(*trial)] = 0;
  std::size_t next = 0;
  for (auto& [cluster, index] : clusters) index = next++;

  const bool text = is_text(*trials.front());
  Figures figures;
  figures.score = {text ? exp_mean_of : mean_of, std::vector<Sums>(next)};
  figures.of_full = {text ? exp_ratio_of : ratio_of, std::vector<Sums>(next)};
  for (const Trial* trial : trials) {
    add_trial(figures, *trial, clusters.at(cluster_of(*trial)), lookup);
  }
  return figures;
}

void estimate(Cell& cell, const Figures& figures, bool asked_all, std::uint64_t seed) {
  std::vector<Statistic> statistics = {figures.score, figures.of_full};
  for (const auto& [name, statistic] : figures.measures) statistics.push_back(statistic);
  const std::vector<Estimate> estimates = bootstrap(statistics, seed);
  cell.documents = static_cast<int>(figures.score.clusters.size());
  cell.score = estimates[0];
  cell.has_full = asked_all && std::isfinite(estimates[1].mean);
  if (cell.has_full) cell.of_full = estimates[1];
  std::size_t next = 2;
  for (const auto& [name, statistic] : figures.measures) {
    const Estimate& measure = estimates[next++];
    if (std::isfinite(measure.mean)) cell.measures[name] = measure;
  }
}

void measure_cost(Cell& cell, const Trials& trials) {
  std::vector<double> read;
  std::vector<double> step;
  std::vector<double> evict;
  for (const Trial* trial : trials) {
    cell.rows_kept = std::max(cell.rows_kept, trial->rows_kept);
    cell.kv_bytes_kept = std::max(cell.kv_bytes_kept, trial->kv_bytes_kept);
    cell.kv_bytes_allocated = std::max(cell.kv_bytes_allocated, trial->kv_bytes_allocated);
    cell.tokens_judged += trial->tokens_judged;
    if (trial->read_ms > 0) read.push_back(trial->read_ms);
    if (trial->step_ms <= 0) continue;
    step.push_back(trial->step_ms);
    evict.push_back(trial->evict_ms);
  }
  cell.read_ms = median(read);
  cell.step_ms = median(step);
  cell.evict_ms = median(evict);
}

Cell cell_of(Trials trials, const Lookup& lookup, std::uint64_t seed) {
  // Sums of floating point numbers depend on their order.
  std::sort(trials.begin(), trials.end(),
            [](const Trial* a, const Trial* b) { return a->key < b->key; });
  const TrialKey& key = trials.front()->key;
  Cell cell;
  cell.task = key.task;
  cell.mode = key.mode;
  cell.tokens = key.tokens;
  cell.arm = key.arm;
  cell.budget = key.budget;
  cell.trials = static_cast<int>(trials.size());
  const bool asked_all = std::all_of(trials.begin(), trials.end(), [&](const Trial* trial) {
    return lookup.full(*trial) != nullptr;
  });
  estimate(cell, figures_of(trials, lookup), asked_all, seed);
  measure_cost(cell, trials);
  return cell;
}

}  // namespace

std::string_view full_mode(std::string_view mode) {
  return mode == "guided" || mode == "stream" ? "whole" : mode;
}

std::vector<Cell> summarise(const std::vector<Trial>& trials, std::uint64_t seed) {
  std::map<std::string, int> tasks;
  std::map<std::string, int> modes;
  std::map<int, int> lengths;
  std::map<std::string, int> arms;
  const auto place = [](auto& places, const auto& value) {
    return places.try_emplace(value, static_cast<int>(places.size())).first->second;
  };
  std::map<std::array<int, 5>, Trials> groups;
  for (const Trial& trial : trials) {
    const TrialKey& key = trial.key;
    groups[{place(tasks, key.task), place(modes, key.mode), place(lengths, key.tokens),
            place(arms, key.arm), key.budget}]
        .push_back(&trial);
  }
  const Lookup lookup(trials);
  std::vector<Cell> cells;
  cells.reserve(groups.size());
  for (const auto& [places, group] : groups) cells.push_back(cell_of(group, lookup, seed));
  return cells;
}

}  // namespace morphkv::eval

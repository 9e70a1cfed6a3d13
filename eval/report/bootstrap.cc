#include "bootstrap.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>

namespace morphkv::eval {
namespace {

constexpr int kSamples = 1000;
constexpr std::size_t kTailPermille = 25;

// In [0, n). std::uniform_int_distribution is another one in every standard library.
std::size_t draw(std::mt19937_64& random, std::size_t n) {
  return static_cast<std::size_t>(((random() >> 32) * n) >> 32);
}

Estimate estimate_of(double mean, std::vector<double>& samples) {
  if (samples.empty()) return {mean, mean, mean};
  std::sort(samples.begin(), samples.end());
  const std::size_t tail = samples.size() * kTailPermille / 1000;
  return {mean, std::min(mean, samples[tail]), std::max(mean, samples[samples.size() - 1 - tail])};
}

double figure_of(const Statistic& statistic, const std::vector<std::size_t>& sample) {
  Sums sums;
  for (const std::size_t cluster : sample) sums += statistic.clusters[cluster];
  return statistic.figure(sums);
}

}  // namespace

Sums& Sums::operator+=(const Sums& other) {
  value += other.value;
  weight += other.weight;
  full_value += other.full_value;
  full_weight += other.full_weight;
  return *this;
}

double mean_of(const Sums& sums) { return sums.value / sums.weight; }

double exp_mean_of(const Sums& sums) { return std::exp(mean_of(sums)); }

double ratio_of(const Sums& sums) { return mean_of(sums) / (sums.full_value / sums.full_weight); }

double exp_ratio_of(const Sums& sums) {
  return std::exp(mean_of(sums) - sums.full_value / sums.full_weight);
}

std::vector<Estimate> bootstrap(const std::vector<Statistic>& statistics, std::uint64_t seed) {
  if (statistics.empty()) return {};
  const std::size_t clusters = statistics.front().clusters.size();
  std::vector<std::size_t> sample(clusters);
  for (std::size_t i = 0; i < clusters; ++i) sample[i] = i;
  std::vector<double> figures;
  figures.reserve(statistics.size());
  for (const Statistic& statistic : statistics) figures.push_back(figure_of(statistic, sample));

  std::mt19937_64 random(seed);
  std::vector<std::vector<double>> samples(statistics.size());
  for (int i = 0; i < kSamples; ++i) {
    for (std::size_t& cluster : sample) cluster = draw(random, clusters);
    for (std::size_t s = 0; s < statistics.size(); ++s) {
      const double figure = figure_of(statistics[s], sample);
      if (std::isfinite(figure)) samples[s].push_back(figure);
    }
  }
  std::vector<Estimate> estimates;
  estimates.reserve(statistics.size());
  for (std::size_t s = 0; s < statistics.size(); ++s) {
    estimates.push_back(estimate_of(figures[s], samples[s]));
  }
  return estimates;
}

}  // namespace morphkv::eval

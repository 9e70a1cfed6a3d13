// The percentile bootstrap over clusters: what belongs together is drawn together.
#pragma once

#include <cstdint>
#include <vector>

#include "summary.h"

namespace morphkv::eval {

// What a cluster, or a sample of clusters, adds up to: of the arm and of the full cache.
struct Sums {
  double value = 0.0;  // weighted
  double weight = 0.0;
  double full_value = 0.0;
  double full_weight = 0.0;

  Sums& operator+=(const Sums& other);
};

// Figures of a sample. Not finite when the sample has none.
double mean_of(const Sums& sums);
double exp_mean_of(const Sums& sums);
double ratio_of(const Sums& sums);      // of the two means
double exp_ratio_of(const Sums& sums);  // of the exponentials of the two means

struct Statistic {
  double (*figure)(const Sums&) = mean_of;
  std::vector<Sums> clusters;
};

// One estimate for each statistic; all have the same clusters, and every sample is of the same ones
// for all. The 95 % percentile interval of 1,000 samples, widened to hold the figure itself, which
// is `mean`. Samples whose figure is not finite are left out. The same on every platform.
std::vector<Estimate> bootstrap(const std::vector<Statistic>& statistics, std::uint64_t seed);

}  // namespace morphkv::eval

// What every benchmark's report says of itself, and how it sums up its times.
#pragma once

#include <ctime>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

// Private: that the library computes with SIMD is nobody else's business, but it explains a time.
#include "kernels/kernels.h"
#include "measure.h"
#include "morphkv/version.h"

namespace morphkv::bench {

inline std::string date() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

inline nlohmann::ordered_json report_head(const std::string& benchmark) {
  return {{"benchmark", benchmark},
          {"morphkv_version", kVersion},
          {"cpu", cpu_name()},
          {"simd_target", kernels::target_name()},
          {"date", date()}};
}

inline nlohmann::ordered_json spread(const std::vector<double>& ms) {
  return {{"median_ms", median(ms)}, {"p10_ms", quantile(ms, 0.1)}, {"p90_ms", quantile(ms, 0.9)}};
}

}  // namespace morphkv::bench

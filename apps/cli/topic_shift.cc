#include "topic_shift.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <random>
#include <stdexcept>

#include "morphkv/cache.h"

namespace morphkv::cli {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

void validate(const TopicShiftGeometry& g) {
  require(g.dim >= 2, "the dimension must be at least 2, one for each topic");
  require(g.first_tokens >= g.budget && g.asking_tokens >= g.budget,
          "first and asking tokens must be at least the budget of " + std::to_string(g.budget) +
              ": else a cache that keeps the most recent rows keeps all that is needed");
  require(g.recent >= 32, "the protected tail must be at least the longest window of 32");
  require(
      g.needed_tokens >= 1 && g.needed_tokens <= free_rows(g),
      "needed tokens must be from 1 to budget - sinks - tail = " + std::to_string(free_rows(g)));
  require(g.seeds >= 1, "at least 1 seed is needed");
}

// Normal numbers, the same with every standard library.
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : bits_(seed) {}
  double operator()() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }

 private:
  double uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }
  std::mt19937_64 bits_;
};

struct Text {
  std::vector<float> keys;       // [token, dim]
  std::vector<Position> needed;  // ascending
  std::int64_t tokens = 0;
};

Text make_text(const TopicShiftGeometry& g, bool shifts, int seed) {
  Normal normal(static_cast<std::uint64_t>(seed));
  Text text;
  const auto add = [&](int count, int topic, double strength, bool needed) {
    for (int t = 0; t < count; ++t, ++text.tokens) {
      for (int d = 0; d < g.dim; ++d) {
        const double on_topic = d == topic ? strength : 0.0;
        text.keys.push_back(static_cast<float>(on_topic + g.noise * normal()));
      }
      if (needed) text.needed.push_back(text.tokens);
    }
  };
  const int second = shifts ? 1 : 0;
  add(g.first_tokens, 0, g.strength, !shifts);
  add(g.needed_tokens, second, g.strength, true);
  add(g.asking_tokens, second, g.signal, !shifts);
  return text;
}

// Of the needed tokens, or of as many as find room, the share that is held without being protected.
double share_held(const CacheConfig& config, const TopicShiftGeometry& g, const Text& text) {
  MorphKVCache cache(config);
  const auto rows =
      ArrayView::contiguous(text.keys.data(), DType::kF32, {1, 1, text.tokens, g.dim});
  cache.update_and_fetch(rows, rows);
  auto held = cache.positions();
  held.erase(held.end() - g.recent, held.end());
  held.erase(held.begin(), held.begin() + g.n_sink);
  const auto n = std::count_if(held.begin(), held.end(), [&](Position p) {
    return std::binary_search(text.needed.begin(), text.needed.end(), p);
  });
  const auto room = std::min(text.needed.size(), held.size());
  return static_cast<double>(n) / static_cast<double>(room);
}

}  // namespace

std::vector<TopicShiftArm> measure_topic_shift(const TopicShiftGeometry& g) {
  validate(g);
  const CacheConfig base{.budget = g.budget, .n_sink = g.n_sink, .window = 1, .recent = g.recent};
  std::vector<TopicShiftArm> arms;
  const auto add = [&](const std::string& name, const char* policy, int window) {
    CacheConfig config = base;
    config.policy = policy;
    config.window = window;
    arms.push_back({name, config, {}, {}});
  };
  add("h2o", "h2o", 1);
  for (const int window : {1, 8, 32}) {
    add("morphkv, window " + std::to_string(window), "morphkv", window);
  }
  add("streaming", "streaming", 1);
  for (int seed = 1; seed <= g.seeds; ++seed) {
    const Text shift = make_text(g, true, seed);
    const Text control = make_text(g, false, seed);
    for (TopicShiftArm& arm : arms) {
      arm.shift.push_back(share_held(arm.config, g, shift));
      arm.control.push_back(share_held(arm.config, g, control));
    }
  }
  return arms;
}

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double deviation_of(const std::vector<double>& values) {
  if (values.size() < 2) return 0.0;
  const double mean = mean_of(values);
  double squares = 0.0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

}  // namespace morphkv::cli

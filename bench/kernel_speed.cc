// The vector loops against plain scalar ones, and one decode step of a head against a plain pass
// over its keys (the roofline: dot_rows of one query). Answers are checked before anything is
// timed: the loops against double precision, the step's keep set against the rule written plainly
// (tests/oracle.h). Single thread. All times are the least of many rounds, in turns.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "../tests/generators.h"
#include "../tests/oracle.h"
#include "morphkv/policy.h"
#include "morphkv/retention.h"
#include "report.h"
#include "rule.h"

namespace {

using namespace morphkv;  // NOLINT
using Json = nlohmann::ordered_json;
using test::Random;

constexpr int kRows = 512;

// Nanoseconds of one call: the least of `rounds` means over `calls`.
double time_ns(int calls, const std::function<void()>& call) {
  const Stopwatch watch;
  for (int i = 0; i < calls; ++i) call();
  return 1e6 * watch.ms() / calls;
}

// ---------------------------------------------------------------- kernels

std::vector<float> random_floats(std::size_t n, Random& random) {
  std::vector<float> x(n);
  for (float& value : x) value = static_cast<float>(random.normal());
  return x;
}

// One kernel beside its plain scalar twin in double, which is also what its answer is held against.
struct Contest {
  std::string kernel;
  std::string dtype = "f32";
  int dim = kRows;
  int queries = 1;
  std::size_t bytes = 0;  // read by one call
  std::function<void()> fast = {};
  std::function<void()> plain = {};
  const std::vector<float>* got = nullptr;
  const std::vector<double>* expected = nullptr;
  double tolerance = 2e-6;  // of the largest value expected, in size
};

Json measure_kernel(const Contest& c, int rounds) {
  c.fast();
  c.plain();
  double largest = 0;
  double error = 0;
  for (const double e : *c.expected) largest = std::max(largest, std::fabs(e));
  for (std::size_t i = 0; i < c.expected->size(); ++i)
    error = std::max(error, std::fabs((*c.got)[i] - (*c.expected)[i]) / largest);
  if (!(error <= c.tolerance))
    throw std::runtime_error(c.kernel + " is off by " + std::to_string(error));
  double ns = 1e30;
  double scalar_ns = 1e30;
  for (int i = 0; i < rounds; ++i) {
    ns = std::min(ns, time_ns(200, c.fast));
    scalar_ns = std::min(scalar_ns, time_ns(10, c.plain));
  }
  std::printf("| %-12s | %-4s | %3d | %2d | %7.0f | %5.1fx | %5.1f | %.1e |\n", c.kernel.c_str(),
              c.dtype.c_str(), c.dim, c.queries, ns, scalar_ns / ns,
              static_cast<double>(c.bytes) / ns, error);
  return {{"kernel", c.kernel},
          {"dtype", c.dtype},
          {"dim", c.dim},
          {"queries", c.queries},
          {"ns", ns},
          {"scalar_ns", scalar_ns},
          {"gb_per_second", static_cast<double>(c.bytes) / ns},
          {"max_relative_error", error}};
}

Json measure_dot_rows(DType dtype, int dim, int queries, int rounds, Random& random) {
  const auto q = random_floats(static_cast<std::size_t>(queries * dim), random);
  test::StoredRows rows({.dtype = dtype}, kRows, dim);
  std::vector<std::vector<float>> values;  // as stored
  for (int r = 0; r < kRows; ++r) {
    rows.set(r, random_floats(static_cast<std::size_t>(dim), random));
    values.push_back(rows.get(r));
  }
  std::vector<float> got(static_cast<std::size_t>(queries * kRows));
  std::vector<double> expected(got.size());
  const kernels::DotRowsArgs args{.queries = q.data(),
                                  .query_stride = dim,
                                  .n_queries = queries,
                                  .rows = rows.view(),
                                  .first_slot = 0,
                                  .last_slot = kRows,
                                  .scale = 0.125f,
                                  .out = got.data(),
                                  .out_stride = kRows};
  const auto plain = [&] {
    for (int i = 0; i < queries; ++i) {
      for (int r = 0; r < kRows; ++r) {
        double sum = 0;
        for (int d = 0; d < dim; ++d)
          sum += double{values[static_cast<std::size_t>(r)][static_cast<std::size_t>(d)]} *
                 q[static_cast<std::size_t>(i * dim + d)];
        expected[static_cast<std::size_t>(i * kRows + r)] = 0.125 * sum;
      }
    }
  };
  const char* name = dtype == DType::kF16 ? "f16" : dtype == DType::kBF16 ? "bf16" : "f32";
  return measure_kernel(
      {"dot_rows", name, dim, queries, size_of(dtype) * kRows * static_cast<std::size_t>(dim),
       [&] { kernels::dot_rows(args); }, plain, &got, &expected},
      rounds);
}

// Kernels over the scores of one head: each beside the same in double.
Json measure_score_kernels(int rounds, Random& random) {
  constexpr int kWindow = 8;
  constexpr int kReach = 5;
  const auto rows = static_cast<std::size_t>(kRows);
  const auto x = random_floats(rows * kWindow, random);
  const auto factors = random_floats(kWindow, random);
  std::vector<float> weights(rows);  // all positive
  for (std::size_t i = 0; i < rows; ++i) weights[i] = std::exp(x[i]);
  std::vector<float> got(rows);
  std::vector<float> scratch(rows + 2 * kReach);
  std::vector<double> expected(rows);
  Json report = Json::array();
  const auto measure = [&](const char* name, int queries, auto fast, auto plain) {
    report.push_back(
        measure_kernel({.kernel = name,
                        .queries = queries,
                        .bytes = rows * sizeof(float) * static_cast<std::size_t>(queries),
                        .fast = fast,
                        .plain = plain,
                        .got = &got,
                        .expected = &expected},
                       rounds));
  };
  measure(
      "exp_shifted", 1, [&] { kernels::exp_shifted(x.data(), kRows, 2.0f, got.data()); },
      [&] {
        for (std::size_t i = 0; i < rows; ++i) expected[i] = std::exp(double{x[i]} - 2.0);
      });
  measure(
      "add_scaled", kWindow,
      [&] {
        std::fill(got.begin(), got.end(), 0.0f);
        kernels::add_scaled({x.data(), kRows, factors.data(), kWindow}, kRows, got.data());
      },
      [&] {
        for (std::size_t i = 0; i < rows; ++i) {
          expected[i] = 0;
          for (std::size_t r = 0; r < kWindow; ++r)
            expected[i] += double{factors[r]} * x[r * rows + i];
        }
      });
  measure(
      "max_of_neighbours", 1,
      [&] { kernels::max_of_neighbours(x.data(), kRows, kReach, scratch.data(), got.data()); },
      [&] {
        for (int i = 0; i < kRows; ++i) {
          const auto first = x.begin() + std::max(0, i - kReach);
          const auto last = x.begin() + std::min(kRows, i + kReach + 1);
          expected[static_cast<std::size_t>(i)] = *std::max_element(first, last);
        }
      });
  got.resize(1);
  expected.resize(1);
  measure(
      "sum_of", 1, [&] { got[0] = kernels::sum_of(weights.data(), kRows); },
      [&] { expected[0] = std::accumulate(weights.begin(), weights.end(), 0.0); });
  measure(
      "max_of", 1, [&] { got[0] = kernels::max_of(x.data(), kRows); },
      [&] { expected[0] = *std::max_element(x.begin(), x.begin() + kRows); });
  measure(
      "first_least", 1, [&] { got[0] = static_cast<float>(kernels::first_least(x.data(), kRows)); },
      [&] {
        expected[0] =
            static_cast<double>(std::min_element(x.begin(), x.begin() + kRows) - x.begin());
      });
  return report;
}

Json measure_kernels(int rounds) {
  Random random(3);
  Json report = measure_score_kernels(rounds, random);
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const int dim : {64, 128}) {
      for (const int queries : {1, 3, 8, 32})
        report.push_back(measure_dot_rows(dtype, dim, queries, rounds, random));
    }
  }
  return report;
}

// ---------------------------------------------------------------- steps

struct Shape {
  Profile profile;
  CacheConfig config;
  int layers = 1;
  int heads = 1;
  int group = 1;
  int dim = 64;
};

// Layers whose rows lie as an engine keeps them, [cell, head, dim] float16, in steady state: every
// step brings one token, each head gives up a row, and the cell of the oldest token is freed by
// moving what it holds to where rows were given up.
class Layers {
 public:
  Layers(const Shape& shape, Random& random)
      : shape_(shape),
        policy_(make_policy(shape.config)),
        cells_(shape.config.budget + 8),
        workspace_(cells_, shape.group, shape.dim),
        moves_(static_cast<std::size_t>(cells_)) {
    for (int l = 0; l < shape.layers; ++l) {
      retention_.emplace_back(shape.config, *policy_, l, shape.heads, cells_);
      keys_.emplace_back(row_elements() * static_cast<std::size_t>(cells_));
    }
    for (int i = 0; i < 64; ++i) {
      tokens_.emplace_back();
      for (std::size_t d = 0; d < row_elements(); ++d)
        tokens_.back().push_back(test::to_f16(random.normal()));
    }
    queries_.resize(64 * static_cast<std::size_t>(shape.heads * shape.group * shape.dim));
    for (float& q : queries_) q = static_cast<float>(random.normal());
    for (int cell = cells_ - 1; cell >= 0; --cell) free_.push_back(cell);
    for (int t = 0; t < shape.config.budget; ++t) step();
  }

  void step() {
    const int cell = free_.back();
    free_.pop_back();
    const bool full = static_cast<int>(order_.size()) == shape_.config.budget;
    order_.push_back(cell);
    const auto oldest = order_.begin() + shape_.config.n_sink;
    const int freed = full ? *oldest : -1;
    for (std::size_t l = 0; l < retention_.size(); ++l) step_layer(l, cell, freed);
    if (full) {
      free_.push_back(freed);
      order_.erase(oldest);
    }
    ++token_;
  }

  const KeepSet& keep() const { return retention_.front().keep(0); }
  RowsView keys(std::size_t layer, int head) const {
    return {.data = reinterpret_cast<const std::byte*>(keys_[layer].data() + head * shape_.dim),
            .dtype = DType::kF16,
            .slot_stride = static_cast<std::int64_t>(row_elements() * sizeof(std::uint16_t)),
            .dim = shape_.dim};
  }
  int cells() const { return cells_; }
  std::vector<float> key_of(Position t) const {
    std::vector<float> key;
    for (int d = 0; d < shape_.dim; ++d)
      key.push_back(test::from_f16(tokens_[static_cast<std::size_t>(t % 64)][d]));
    return key;
  }
  QueriesView queries(int head, Position t) const {
    const int per_token = shape_.heads * shape_.group * shape_.dim;
    return {.data = queries_.data() + (t % 64) * per_token + head * shape_.group * shape_.dim,
            .token_stride = per_token,
            .group_stride = shape_.dim,
            .tokens = 1,
            .group = shape_.group,
            .dim = shape_.dim};
  }
  Position tokens() const { return token_; }

 private:
  std::size_t row_elements() const { return static_cast<std::size_t>(shape_.heads * shape_.dim); }
  std::uint16_t* row(std::size_t layer, int cell) {
    return keys_[layer].data() + static_cast<std::size_t>(cell) * row_elements();
  }

  void step_layer(std::size_t l, int cell, int freed) {
    std::copy(tokens_[static_cast<std::size_t>(token_ % 64)].begin(),
              tokens_[static_cast<std::size_t>(token_ % 64)].end(), row(l, cell));
    views_.clear();
    asked_.clear();
    for (int h = 0; h < shape_.heads; ++h) {
      views_.push_back(keys(l, h));
      asked_.push_back(queries(h, token_));
    }
    const int slots[] = {cell};
    LayerRetention& layer = retention_[l];
    layer.append({.slots = slots,
                  .first_position = token_,
                  .keys = views_,
                  .queries = asked_,
                  .scale = 1.0f / std::sqrt(static_cast<float>(shape_.dim))},
                 workspace_);
    if (freed < 0) return;
    const int cells[] = {freed};
    for (int h = 0; h < shape_.heads; ++h) {
      const int n = layer.plan_moves(h, cells, moves_);
      for (int m = 0; m < n; ++m) {
        const RowMove& move = moves_[static_cast<std::size_t>(m)];
        std::memcpy(row(l, move.to) + h * shape_.dim, row(l, move.from) + h * shape_.dim,
                    static_cast<std::size_t>(shape_.dim) * sizeof(std::uint16_t));
      }
      layer.apply_moves(h, std::span(moves_).first(static_cast<std::size_t>(n)));
    }
  }

  Shape shape_;
  std::unique_ptr<Policy> policy_;
  int cells_;
  Workspace workspace_;
  std::vector<RowMove> moves_;
  std::vector<LayerRetention> retention_;
  std::vector<std::vector<std::uint16_t>> keys_;    // [layer][cell, head, dim]
  std::vector<std::vector<std::uint16_t>> tokens_;  // [64][head, dim] keys, over and over
  std::vector<float> queries_;                      // [64, head, group, dim]
  std::vector<int> free_;
  std::deque<int> order_;  // cells by the age of their token
  std::vector<RowsView> views_;
  std::vector<QueriesView> asked_;
  Position token_ = 0;
};

// Reads as much as a small model's weights.
void empty_caches() {
  static std::vector<std::uint64_t> memory(12'000'000, 1);
  static volatile std::uint64_t sum = 0;
  sum = std::accumulate(memory.begin(), memory.end(), sum);
}

// The first head's rows must be those of the rule written plainly, for some steps from empty.
void check_step(Shape shape) {
  shape.config = bench::rule_of(shape.profile, 48, shape.config.window);
  shape.layers = 1;
  Random random(7);
  test::HeadOracle oracle(shape.config, 1.0f / std::sqrt(static_cast<float>(shape.dim)));
  Layers layers(shape, random);
  const Position steps = 160;
  for (Position t = 0; t < steps; ++t) {
    oracle.append(layers.key_of(t));
    if (shape.config.queries == QuerySource::kAttention) {
      std::vector<std::vector<double>> group;
      for (int g = 0; g < shape.group; ++g) {
        const float* query = layers.queries(0, t).query(0, g);
        group.emplace_back(query, query + shape.dim);
      }
      oracle.ask(group);
    }
    oracle.evict(oracle.victims());
  }
  while (layers.tokens() < steps) layers.step();
  const auto held = layers.keep().positions();
  if (!std::ranges::equal(held, oracle.positions()))
    throw std::runtime_error("a step keeps other rows than the rule written plainly");
}

Json measure_step(const Shape& shape, int rounds) {
  check_step(shape);
  Random random(7);
  Layers layers(shape, random);
  const int heads = shape.layers * shape.heads;
  std::vector<float> query(static_cast<std::size_t>(shape.dim), 0.25f);
  std::vector<float> out(static_cast<std::size_t>(layers.cells()));
  const auto pass = [&] {
    for (std::size_t l = 0; l < static_cast<std::size_t>(shape.layers); ++l) {
      for (int h = 0; h < shape.heads; ++h) {
        kernels::dot_rows({.queries = query.data(),
                           .query_stride = shape.dim,
                           .n_queries = 1,
                           .rows = layers.keys(l, h),
                           .first_slot = 0,
                           .last_slot = shape.config.budget,
                           .scale = 0.125f,
                           .out = out.data(),
                           .out_stride = layers.cells()});
      }
    }
  };
  // One head stays in the cache; a model's heads do not, because its weights pass by in between.
  const bool cold = heads > 1;
  std::vector<double> step_times, pass_times;
  for (int i = 0; i < rounds; ++i) {
    if (cold) empty_caches();
    step_times.push_back(time_ns(cold ? 1 : 400, [&] { layers.step(); }) / heads);
    if (cold) empty_caches();
    pass_times.push_back(time_ns(cold ? 1 : 400, pass) / heads);
  }
  const double step_ns = *std::min_element(step_times.begin(), step_times.end());
  const double pass_ns = *std::min_element(pass_times.begin(), pass_times.end());
  const int passes = shape.config.queries == QuerySource::kAttention ? shape.group : 1;
  const double ratio = step_ns / (passes * pass_ns);
  const std::string name = bench::label_of(shape.config);
  std::printf("| %-46s | %3d | %2d | %7.0f | %7.0f | %d | %.2f |\n", name.c_str(), shape.dim, heads,
              step_ns, pass_ns, passes, ratio);
  return {{"step", name},         {"rule", bench::json_of(shape.config)},
          {"dim", shape.dim},     {"rows", shape.config.budget},
          {"group", shape.group}, {"heads", heads},
          {"ns", step_ns},        {"pass_ns", pass_ns},
          {"passes", passes},     {"ratio", ratio}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Speed of the vector loops and of one step of a head.");
  std::string json_path;
  int rounds = 60;
  app.add_option("--json", json_path, "write the figures to this file");
  std::string only;
  app.add_option("--only", only,
                 "only steps like 'morphkv keys, window 8, D 64, 1 heads' that contain this");
  app.add_option("--rounds", rounds, "rounds to take the least of")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    Json report = bench::report_head("kernel_speed");
    report["rows"] = kRows;
    if (only.empty() || only == "kernels") report["kernels"] = measure_kernels(rounds);
    for (const auto& [layers, heads] : {std::pair{1, 1}, {30, 3}}) {
      for (const int dim : {64, 128}) {
        for (const int window : bench::timed_windows()) {
          for (const auto& [profile, group] :
               {std::pair{find_profile(bench::kReference), 1}, {default_profile(), 3}}) {
            const Shape shape = {
                profile, bench::rule_of(profile, kRows, window), layers, heads, group, dim};
            const std::string label = bench::label_of(shape.config) + ", D " + std::to_string(dim) +
                                      ", " + std::to_string(layers * heads) + " heads";
            if (label.find(only) == std::string::npos) continue;
            report["steps"].push_back(measure_step(shape, rounds));
          }
        }
      }
    }
    if (!json_path.empty()) std::ofstream(json_path) << report.dump(2) << "\n";
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernel_speed: error: %s\n", error.what());
    return 1;
  }
}

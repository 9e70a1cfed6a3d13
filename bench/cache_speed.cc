// Speed of MorphKVCache alone, one layer, one thread: a decode step, a long prefill, and a deep
// copy of a model's caches. Prints JSON, with the positions kept, so that a caller that hands in
// the rows can check the answer (reference_speed.py does).
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "morphkv/cache.h"
#include "report.h"
#include "row_convert.h"

namespace {

using namespace morphkv;  // NOLINT
using Json = nlohmann::ordered_json;

struct Bench {
  CacheConfig config;
  std::int64_t heads = 8;
  std::int64_t dim = 128;
  std::int64_t prefill = 2048;  // tokens
  int steps = 500;              // decode steps, each of one token
  int repeats = 5;              // of the prefill and of the deep copy
};

// [head, token, dim] float16 of prefill + steps tokens.
std::vector<std::uint16_t> read_rows(const Bench& b, const std::string& path) {
  std::vector<std::uint16_t> rows(
      static_cast<std::size_t>(b.heads * (b.prefill + b.steps) * b.dim));
  if (path.empty()) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto& value : rows) value = to_f16(normal(random));
    return rows;
  }
  std::ifstream file(path, std::ios::binary);
  const auto bytes = static_cast<std::streamsize>(rows.size() * sizeof(rows[0]));
  if (!file.read(reinterpret_cast<char*>(rows.data()), bytes) || file.peek() != EOF) {
    throw std::runtime_error("'" + path + "' must hold " + std::to_string(bytes) +
                             " bytes: [head, token, dim] float16 of prefill + steps tokens");
  }
  return rows;
}

// Tokens [first, first + tokens) of `rows`, as a part of the whole array.
ArrayView part(const Bench& b, const std::vector<std::uint16_t>& rows, std::int64_t first,
               std::int64_t tokens) {
  ArrayView view =
      ArrayView::contiguous(rows.data(), DType::kF16, {1, b.heads, b.prefill + b.steps, b.dim});
  view.data += first * view.strides[2];
  view.shape[2] = tokens;
  return view;
}

Json measure_deep_copy(int repeats) {
  Bench small{.config = {.budget = 512}, .heads = 3, .dim = 64, .prefill = 600, .steps = 0};
  const auto rows = read_rows(small, "");
  std::vector<MorphKVCache> layers;
  for (int layer = 0; layer < 30; ++layer) {
    layers.emplace_back(small.config, layer);
    layers.back().update_and_fetch(part(small, rows, 0, 600), part(small, rows, 0, 600));
    layers.back().keys();
  }
  std::vector<double> ms;
  for (int i = 0; i < repeats; ++i) {
    const Stopwatch watch;
    std::vector<MorphKVCache> copies;
    for (const auto& layer : layers) copies.push_back(layer.copy());
    ms.push_back(watch.ms());
    if (copies.back().positions() != layers.back().positions())
      throw std::runtime_error("a copy differs from its original");
  }
  return bench::spread(ms);
}

Json measure(const Bench& b, const std::vector<std::uint16_t>& rows) {
  std::vector<double> prefill;
  MorphKVCache cache(b.config);
  for (int i = 0; i < b.repeats; ++i) {
    cache.reset();
    const Stopwatch watch;
    cache.update_and_fetch(part(b, rows, 0, b.prefill), part(b, rows, 0, b.prefill));
    prefill.push_back(watch.ms());
  }
  cache.keys();
  std::vector<double> decode;
  for (int t = 0; t < b.steps; ++t) {
    const ArrayView token = part(b, rows, b.prefill + t, 1);
    const Stopwatch watch;
    cache.update_and_fetch(token, token);
    decode.push_back(watch.ms());
  }
  cache.keys();
  Json report = bench::report_head("cache_speed");
  report.update({{"threads", 1},
                 {"budget", b.config.budget},
                 {"n_sink", b.config.n_sink},
                 {"window", b.config.window},
                 {"heads", b.heads},
                 {"dim", b.dim},
                 {"prefill_tokens", b.prefill}});
  report["decode_step"] = bench::spread(decode);
  report["prefill"] = bench::spread(prefill);
  report["deep_copy_30_layers"] = measure_deep_copy(b.repeats);
  report["positions"] = cache.positions();  // [head, row]
  return report;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Speed of MorphKVCache, one layer, one thread; prints JSON.");
  Bench b;
  std::string rows_path;
  app.add_option("--rows", rows_path, "keys = values, [head, token, dim] float16; default: random");
  app.add_option("--budget", b.config.budget, "rows per KV head")->capture_default_str();
  app.add_option("--window", b.config.window, "scoring window")->capture_default_str();
  app.add_option("--heads", b.heads, "KV heads")->capture_default_str();
  app.add_option("--dim", b.dim, "head dimension")->capture_default_str();
  app.add_option("--prefill", b.prefill, "tokens of the prefill")->capture_default_str();
  app.add_option("--steps", b.steps, "decode steps")->capture_default_str();
  app.add_option("--repeats", b.repeats, "repeats of prefill and copy")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    std::cout << measure(b, read_rows(b, rows_path)).dump(2) << "\n";
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cache_speed: error: %s\n", error.what());
    return 1;
  }
  return 0;
}

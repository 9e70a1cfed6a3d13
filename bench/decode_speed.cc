// Decode speed and KV memory against context length, for the full cache, streaming and morphkv, in
// one run. The answer is checked before anything is timed: a budget that never fills gives the full
// cache's tokens. A bounded arm generates one long text and is measured along the way; the full
// cache reads a prompt of each length first, which is far quicker than generating it and leaves the
// same cache.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/llama_cpp/session.h"
#include "report.h"

namespace {

using namespace morphkv;             // NOLINT
using namespace morphkv::llama_cpp;  // NOLINT
using Json = nlohmann::ordered_json;

struct Bench {
  const llama_model* model;
  std::vector<llama_token> text;  // tokens to read; repeated as needed
  int budget;
  int threads;
  int steps;                 // decode steps per measured point
  std::vector<int> lengths;  // tokens of context at the points

  std::vector<llama_token> prompt(int tokens) const {
    std::vector<llama_token> out;
    for (int i = 0; i < tokens; ++i) out.push_back(text[static_cast<std::size_t>(i) % text.size()]);
    return out;
  }
};

struct Arm {
  std::string name;
  CacheConfig cache;
};

SessionOptions options(const Bench& b, const Arm& arm, int max_tokens) {
  SessionOptions o;
  o.evictor.cache = arm.cache;
  o.sampling.temperature = 0.0f;
  o.max_tokens = max_tokens;
  o.ignore_eos = true;
  o.threads = b.threads;
  return o;
}

struct Run {
  SessionResult result;
  std::vector<double> ms;  // [token]
  std::vector<llama_token> tokens;
};

Run run(const Bench& b, const Arm& arm, int prompt_tokens, int max_tokens) {
  Session session(b.model, options(b, arm, max_tokens));
  Run r;
  SessionCallbacks callbacks;
  callbacks.on_token = [&](llama_token token, std::string_view, double ms) {
    r.ms.push_back(ms);
    r.tokens.push_back(token);
    if (r.ms.size() % 500 == 0)
      std::fprintf(stderr, "  %s: %zu tokens\n", arm.name.c_str(), r.ms.size());
  };
  r.result = session.run(b.prompt(prompt_tokens), callbacks);
  if (const auto broken = session.evictor().violations(); !broken.empty()) {
    throw std::runtime_error(arm.name + ": " + broken.front());
  }
  return r;
}

// Median and the 10th and 90th percentile of ms[first, last).
Json spread(const std::vector<double>& ms, int first, int last) {
  std::vector<double> part(ms.begin() + first, ms.begin() + last);
  std::sort(part.begin(), part.end());
  const auto at = [&](double share) {
    return part[static_cast<std::size_t>(share * static_cast<double>(part.size() - 1))];
  };
  return {{"median_ms", at(0.5)},
          {"p10_ms", at(0.1)},
          {"p90_ms", at(0.9)},
          {"tokens_per_second", 1000.0 / at(0.5)}};
}

Json point(const Run& r, int tokens, int first, int last) {
  Json p = {{"context_tokens", tokens}};
  p.update(spread(r.ms, first, last));
  p["kv_bytes_allocated"] = r.result.cache.kv_bytes_allocated;
  return p;
}

Json measure_full(const Bench& b, const Arm& arm) {
  Json points = Json::array();
  for (const int tokens : b.lengths) {
    std::fprintf(stderr, "%s at %d tokens\n", arm.name.c_str(), tokens);
    const Run r = run(b, arm, tokens - b.steps, b.steps);
    points.push_back(point(r, tokens, 0, b.steps - 1));
  }
  return {{"arm", arm.name}, {"points", points}};
}

Json measure_bounded(const Bench& b, const Arm& arm) {
  constexpr int kPrompt = 16;
  const int last = b.lengths.back();
  std::fprintf(stderr, "%s to %d tokens\n", arm.name.c_str(), last);
  const Run r = run(b, arm, kPrompt, last - kPrompt);
  if (r.result.cache.rows_kept != b.budget) {
    throw std::runtime_error(arm.name + ": " + std::to_string(r.result.cache.rows_kept) +
                             " rows kept, budget " + std::to_string(b.budget));
  }
  Json points = Json::array();
  for (const int tokens : b.lengths)
    points.push_back(point(r, tokens, tokens - b.steps - kPrompt, tokens - 1 - kPrompt));
  const auto at = [&](int from, int to) {
    return spread(r.ms, from - kPrompt, to - kPrompt)["median_ms"].get<double>();
  };
  Json json = {{"arm", arm.name}, {"points", points}};
  if (last >= 7500) {
    json["flatness"] =
        at(7000, 7500) / at(1000, 1500);  // of the median step: tokens 7,000-7,500 over 1,000-1,500
  }
  json["evict_share_of_decode"] = r.result.evict_decode_ms / r.result.decode_ms;
  json["kv_bytes_kept"] = r.result.cache.kv_bytes_kept;
  return json;
}

void check_answer(const Bench& b, const Arm& full, Arm bounded) {
  bounded.cache.budget = 1024;
  const auto expected = run(b, full, 300, 60).tokens;
  const auto got = run(b, bounded, 300, 60).tokens;
  if (got != expected)
    throw std::runtime_error("a budget that never fills does not give the full cache's tokens");
}

void print_table(const Json& report) {
  std::printf(
      "| cache | context | KV memory | ms per token (p10-p90) | tokens per second | vs full |\n");
  std::printf("|---|---|---|---|---|---|\n");
  const Json& full = report["arms"][0]["points"];
  for (const Json& arm : report["arms"]) {
    for (std::size_t i = 0; i < arm["points"].size(); ++i) {
      const Json& p = arm["points"][i];
      std::printf("| %s | %d | %.1f MiB | %.1f (%.1f-%.1f) | %.0f | %.2fx |\n",
                  arm["arm"].get<std::string>().c_str(), p["context_tokens"].get<int>(),
                  p["kv_bytes_allocated"].get<double>() / 1048576.0, p["median_ms"].get<double>(),
                  p["p10_ms"].get<double>(), p["p90_ms"].get<double>(),
                  p["tokens_per_second"].get<double>(),
                  full[i]["median_ms"].get<double>() / p["median_ms"].get<double>());
    }
  }
  for (const Json& arm : report["arms"]) {
    if (!arm.contains("evict_share_of_decode")) continue;
    std::printf("\n%s: eviction %.1f %% of decode time", arm["arm"].get<std::string>().c_str(),
                100.0 * arm["evict_share_of_decode"].get<double>());
    if (arm.contains("flatness")) {
      std::printf("; median step of tokens 7,000-7,500 over 1,000-1,500: %.3f",
                  arm["flatness"].get<double>());
    }
  }
  std::printf("\n");
}

Json measure(const Bench& b) {
  CacheConfig keys;
  keys.budget = b.budget;
  CacheConfig attention = keys;
  attention.queries = QuerySource::kAttention;
  attention.pool = 7;
  CacheConfig streaming = keys;
  streaming.policy = "streaming";
  CacheConfig full = keys;
  full.policy = "full";
  check_answer(b, {"full", full}, {"morphkv", attention});
  Json report = bench::report_head("decode_speed");
  report["llama_version"] = llama_version();
  report["threads"] = b.threads;
  report["budget"] = b.budget;
  report["arms"] = Json::array();
  report["arms"].push_back(measure_full(b, {"full", full}));
  report["arms"].push_back(measure_bounded(b, {"streaming", streaming}));
  report["arms"].push_back(measure_bounded(b, {"morphkv attention, window 8, pool 7", attention}));
  report["arms"].push_back(measure_bounded(b, {"morphkv keys, window 8", keys}));
  return report;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Decode speed and KV memory against context length.");
  std::string model_path;
  std::string text_path;
  std::string json_path;
  Bench b{nullptr,           {}, 512, static_cast<int>(std::thread::hardware_concurrency()), 64,
          {1000, 4000, 8000}};
  app.add_option("-m,--model", model_path, "GGUF model")->required();
  app.add_option("-f,--file", text_path, "text to read")->required();
  app.add_option("--json", json_path, "write the figures to this file");
  app.add_option("--budget", b.budget, "rows per KV head")->capture_default_str();
  app.add_option("-t,--threads", b.threads, "threads")->capture_default_str();
  app.add_option("--steps", b.steps, "decode steps per point")->capture_default_str();
  app.add_option("--lengths", b.lengths, "context lengths, ascending")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  try {
    const ModelPtr model = load_model(model_path, {});
    b.model = model.get();
    std::ifstream file(text_path);
    b.text = tokenize(b.model, std::string(std::istreambuf_iterator<char>(file), {}), false);
    if (b.text.empty()) throw std::runtime_error("no text in '" + text_path + "'");
    const Json report = measure(b);
    print_table(report);
    if (!json_path.empty()) std::ofstream(json_path) << report.dump(2) << "\n";
  } catch (const std::exception& error) {
    std::fprintf(stderr, "decode_speed: error: %s\n", error.what());
    return 1;
  }
  return 0;
}

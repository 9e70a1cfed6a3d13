// What the benchmarks that run a model share: their flags, their text, their way from the one to a
// report.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/model_file.h"
#include "report.h"

namespace morphkv::bench {

using Json = nlohmann::ordered_json;
using Tokens = std::vector<llama_token>;

struct CommonOptions {
  std::string model;
  std::string text;
  std::string json;
  int budget = 512;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
};

inline void add_options(CLI::App& app, CommonOptions& o) {
  app.add_option("-m,--model", o.model, "GGUF model")->required();
  app.add_option("-f,--file", o.text, "text to read, repeated as needed")->required();
  app.add_option("--json", o.json, "write the figures to this file");
  app.add_option("--budget", o.budget, "rows per KV head")->capture_default_str();
  app.add_option("-t,--threads", o.threads, "threads")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
}

// The file as tokens, over and over until there are `n`.
inline Tokens read_text(const llama_model* model, const std::string& path, int n) {
  std::ifstream file(path);
  const Tokens once = llama_cpp::tokenize(
      model, std::string(std::istreambuf_iterator<char>(file), {}), /*parse_special=*/false);
  if (once.empty()) throw std::runtime_error("no text in '" + path + "'");
  Tokens text;
  while (text.size() < static_cast<std::size_t>(n)) text.push_back(once[text.size() % once.size()]);
  return text;
}

// Loads the model, has it measured, prints the table and writes the file. `measure` gets the model
// and the report to fill. Returns the exit status.
template <typename Measure, typename PrintTable>
int run_benchmark(const std::string& name, const CommonOptions& o, const Measure& measure,
                  const PrintTable& print_table) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  try {
    const llama_cpp::ModelPtr model = llama_cpp::load_model(o.model, {});
    Json report = report_head(name);
    report["llama_version"] = llama_version();
    report["threads"] = o.threads;
    report["budget"] = o.budget;
    measure(model.get(), report);
    print_table(report);
    if (!o.json.empty() && !(std::ofstream(o.json) << report.dump(2) << "\n"))
      throw std::runtime_error("cannot write '" + o.json + "'");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: error: %s\n", name.c_str(), error.what());
    return 1;
  }
  return 0;
}

}  // namespace morphkv::bench

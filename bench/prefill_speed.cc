// Time and memory to read a long prompt: llama.cpp as it is, morphkv in pieces (stream) and guided,
// round by round in one run; some of them on a shorter prompt too. Checked before it is timed:
// every arm's first token is that of llama.cpp when nothing needs to be evicted; and whenever it is
// timed: the rows held are the budget.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "lane.h"
#include "morphkv/llama_cpp/session.h"
#include "report.h"
#include "rule.h"
#include "support.h"

namespace {

using namespace morphkv;             // NOLINT
using namespace morphkv::bench;      // NOLINT
using namespace morphkv::llama_cpp;  // NOLINT

using TokenSpan = std::span<const llama_token>;

constexpr int kMicroBatch = 512;
constexpr int kPlainMicroBatch = 256;

struct Options {
  CommonOptions common;
  int tokens = 7500;
  int short_tokens = 2000;
  int rounds = 1;
};

struct Arm {
  std::string name;
  std::optional<CacheConfig> cache = std::nullopt;  // none: llama.cpp as it is
  Prefill prefill = Prefill::kStream;
  bool reads_short = true;  // also reads the shorter prompt
};

struct Read {
  double ms = 0;
  double guide_ms = 0;
  double evict_ms = 0;
  std::size_t kv_bytes = 0;
  llama_token next = 0;
};

std::vector<Arm> make_arms(int budget) {
  std::vector<Arm> arms = {{.name = "llama.cpp"}};
  const auto add = [&](const CacheConfig& cache, Prefill prefill, bool reads_short) {
    const std::string name = std::string(to_string(prefill)) + " (" + label_of(cache) + ")";
    arms.push_back({name, cache, prefill, reads_short});
  };
  const CacheConfig standard = default_rule(budget);
  add({.budget = budget, .policy = "streaming"}, Prefill::kStream, false);
  add(standard, Prefill::kStream, true);
  add(find_profile(kReference).with_budget(budget), Prefill::kStream, false);
  add(standard, Prefill::kGuided, true);
  return arms;
}

Read read_plain(const llama_model* model, TokenSpan prompt, int threads) {
  const int tokens = static_cast<int>(prompt.size());
  eval::Lane lane(model, {.threads = threads, .micro_batch = kPlainMicroBatch, .tokens = tokens},
                  std::nullopt);
  const Stopwatch watch;
  lane.read(prompt);
  const llama_token next = lane.likeliest();
  return {.ms = watch.ms(), .kv_bytes = eval::plain_kv_bytes(model, tokens), .next = next};
}

Read read_bounded(llama_model* model, const Arm& arm, TokenSpan prompt, int threads) {
  SessionOptions o;
  o.cache = *arm.cache;
  o.prefill = arm.prefill;
  o.sampling.temperature = 0.0f;
  o.max_tokens = 1;
  o.ignore_eos = true;
  o.threads = threads;
  o.micro_batch = kMicroBatch;
  Read r;
  SessionCallbacks callbacks;
  callbacks.on_token = [&](llama_token token, std::string_view, double) { r.next = token; };
  Session session(model, o);
  const SessionResult result = session.run(prompt, callbacks);
  const int due = std::min(arm.cache->budget, static_cast<int>(prompt.size()));
  if (result.cache.rows_kept != due || !session.evictor().violations().empty()) {
    throw std::runtime_error(arm.name + ": " + std::to_string(result.cache.rows_kept) +
                             " rows kept, due " + std::to_string(due));
  }
  r.ms = result.prefill_ms;
  r.guide_ms = result.guide_ms;
  r.evict_ms = result.evict_ms;
  r.kv_bytes = result.kv_bytes_peak;
  return r;
}

class Bench {
 public:
  Bench(const Options& o, llama_model* model)
      : o_(o),
        model_(model),
        arms_(make_arms(o.common.budget)),
        text_(read_text(model, o.common.text, std::max(o.tokens, o.short_tokens))) {}

  void check_answers() const {
    constexpr std::size_t kTokens = 400;
    const TokenSpan head = TokenSpan(text_).first(std::min(kTokens, text_.size()));
    const llama_token expected = read(arms_.front(), head).next;
    for (Arm arm : arms_) {
      if (arm.cache) arm.cache->budget = 1024;
      if (read(arm, head).next != expected) {
        throw std::runtime_error(arm.name +
                                 ": within its budget its first token is not llama.cpp's");
      }
    }
  }

  // Entries of the report for a prompt of `tokens` tokens.
  std::vector<Json> measure(int tokens, bool all_arms) const {
    std::vector<Arm> arms = arms_;
    if (!all_arms) std::erase_if(arms, [](const Arm& arm) { return !arm.reads_short; });
    std::vector<std::vector<Read>> reads(arms.size());  // [arm, round]
    for (int round = 0; round < o_.rounds; ++round) {
      for (std::size_t i = 0; i < arms.size(); ++i) {
        std::fprintf(stderr, "%d tokens, round %d of %d: %s\n", tokens, round + 1, o_.rounds,
                     arms[i].name.c_str());
        reads[i].push_back(read(arms[i], TokenSpan(text_).first(static_cast<std::size_t>(tokens))));
      }
    }
    std::vector<Json> entries;
    const double plain_ms = median(all_ms(reads.front()));
    for (std::size_t i = 0; i < arms.size(); ++i)
      entries.push_back(entry(arms[i], tokens, reads[i], plain_ms));
    return entries;
  }

 private:
  Read read(const Arm& arm, TokenSpan prompt) const {
    const int threads = o_.common.threads;
    return arm.cache ? read_bounded(model_, arm, prompt, threads)
                     : read_plain(model_, prompt, threads);
  }

  static std::vector<double> all_ms(const std::vector<Read>& rounds) {
    std::vector<double> ms;
    for (const Read& r : rounds) ms.push_back(r.ms);
    return ms;
  }

  static Json entry(const Arm& arm, int tokens, const std::vector<Read>& rounds, double plain_ms) {
    const std::vector<double> ms = all_ms(rounds);
    const Read& last = rounds.back();
    Json entry = {{"arm", arm.name},
                  {"tokens", tokens},
                  {"median_ms", median(ms)},
                  {"all_ms", ms},
                  {"against_llama_cpp", plain_ms / median(ms)},
                  {"guide_ms", last.guide_ms},
                  {"guide_share", last.guide_ms / (last.ms - last.guide_ms)},
                  {"evict_share", last.evict_ms / last.ms},
                  {"kv_bytes", last.kv_bytes}};
    if (arm.cache) {
      entry["rule"] = json_of(*arm.cache);
      entry["prefill"] = to_string(arm.prefill);
    }
    return entry;
  }

  Options o_;
  llama_model* model_;
  std::vector<Arm> arms_;
  Tokens text_;
};

void measure(const Options& o, llama_model* model, Json& report) {
  const Bench bench(o, model);
  std::fprintf(stderr, "checking the answers\n");
  bench.check_answers();
  report["rounds"] = o.rounds;
  report["arms"] = bench.measure(o.tokens, /*all_arms=*/true);
  if (o.short_tokens == 0) return;
  for (const Json& entry : bench.measure(o.short_tokens, /*all_arms=*/false))
    report["arms"].push_back(entry);
}

void print_table(const Json& report) {
  std::printf(
      "| cache | tokens | time | tokens per second | vs llama.cpp | guide | eviction | KV memory "
      "|\n");
  std::printf("|---|---|---|---|---|---|---|---|\n");
  for (const Json& a : report["arms"]) {
    const int tokens = a["tokens"].get<int>();
    const double ms = a["median_ms"].get<double>();
    std::printf("| %s | %d | %.1f s | %.0f | %.2fx | %.1f %% | %.1f %% | %.1f MiB |\n",
                a["arm"].get<std::string>().c_str(), tokens, ms / 1000, 1000 * tokens / ms,
                a["against_llama_cpp"].get<double>(), 100 * a["guide_share"].get<double>(),
                100 * a["evict_share"].get<double>(), a["kv_bytes"].get<double>() / 1048576);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Time and memory to read a long prompt.");
  Options o;
  add_options(app, o.common);
  app.add_option("--tokens", o.tokens, "tokens of the prompt that every arm reads")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--short", o.short_tokens,
                 "tokens of a prompt that only llama.cpp, one stream and guided read; 0 = none")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--rounds", o.rounds, "how often")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  return run_benchmark(
      "prefill_speed", o.common,
      [&](llama_model* model, Json& report) { measure(o, model, report); }, print_table);
}

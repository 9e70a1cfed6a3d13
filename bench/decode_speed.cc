// Decode speed and KV memory against context length: llama.cpp as it is, streaming and morphkv, in
// one run. All arms read the same text and take their timed steps in turns, so that a slow phase of
// the machine meets all of them. Checked before anything is timed: with a budget that never fills,
// every arm gives the tokens of llama.cpp; and at the end: every bounded cache holds its budget.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lane.h"
#include "report.h"
#include "rule.h"
#include "support.h"

namespace {

using namespace morphkv;         // NOLINT
using namespace morphkv::bench;  // NOLINT
using eval::Lane;
using eval::plain_kv_bytes;

constexpr int kTurn = 8;         // steps that an arm takes before the next one's turn
constexpr int kFlatSteps = 128;  // of the long and of the short lane
constexpr int kShortTokens = 1000;
// After larger pieces the rows of a budget of 512 lie in cells further up, and the engine's
// attention looks at those in between as well, until as many tokens have been generated.
constexpr int kMicroBatch = 256;

struct Options {
  CommonOptions common;
  int steps = 64;
  std::vector<int> lengths = {1000, 2000, 4000, 8000};
  std::vector<std::string> arms;  // parts of names; none = all
};

struct Arm {
  std::string name;
  std::optional<CacheConfig> cache;  // none: llama.cpp as it is

  bool is_full() const { return !cache; }
  bool is_streaming() const { return cache && cache->policy == "streaming"; }
};

// A lane on its way through a text.
struct Track {
  Track(const Arm& rule, const llama_model* model, std::span<const llama_token> whole, int threads)
      : arm(rule),
        text(whole),
        lane(model,
             {.threads = threads,
              .micro_batch = kMicroBatch,
              .tokens = rule.cache ? 0 : static_cast<int>(whole.size())},
             rule.cache) {}

  // Evicts after each micro-batch.
  void read_to(int end) {
    lane.read(
        text.subspan(static_cast<std::size_t>(position), static_cast<std::size_t>(end - position)));
    position = end;
  }
  // On the next token of the text, whatever the model would have said.
  Lane::Step step() { return lane.feed(text[static_cast<std::size_t>(position++)]); }

  Arm arm;
  std::span<const llama_token> text;
  Lane lane;
  int position = 0;
  Json points = Json::array();
};

std::vector<Arm> make_arms(const Options& o) {
  const int budget = o.common.budget;
  std::vector<CacheConfig> rules = {{.budget = budget, .policy = "streaming"}};
  for (const Profile& profile : {find_profile(kReference), default_profile()}) {
    for (const int window : timed_windows()) rules.push_back(rule_of(profile, budget, window));
  }
  std::vector<Arm> arms = {{"full", std::nullopt}};
  for (const CacheConfig& rule : rules) arms.push_back({label_of(rule), rule});
  std::erase_if(arms, [&](const Arm& arm) {
    return !o.arms.empty() && std::none_of(o.arms.begin(), o.arms.end(), [&](const auto& part) {
      return arm.name.find(part) != std::string::npos;
    });
  });
  if (arms.empty()) throw std::runtime_error("--arms: no arm has such a name");
  return arms;
}

void check_answers(const llama_model* model, const Tokens& text, int threads,
                   const std::vector<Arm>& arms) {
  constexpr int kPrompt = 300;
  constexpr int kAnswer = 40;
  const auto answer = [&](Arm arm) {
    if (arm.cache) arm.cache->budget = 1024;
    Track track(arm, model, text, threads);
    track.read_to(kPrompt);
    Tokens tokens;
    for (int i = 0; i < kAnswer; ++i) {
      tokens.push_back(track.lane.likeliest());
      track.lane.feed(tokens.back());
    }
    return tokens;
  };
  const Tokens expected = answer({"full", std::nullopt});
  for (const Arm& arm : arms) {
    if (answer(arm) != expected)
      throw std::runtime_error(arm.name +
                               ": within its budget it gives other tokens than llama.cpp");
  }
}

void check_bound(const Track& track) {
  if (!track.arm.cache) return;
  const llama_cpp::Evictor& evictor = track.lane.evictor();
  const int rows = evictor.stats().rows_kept;
  const int due = std::min(track.arm.cache->budget, track.position);
  if (rows != due) {
    throw std::runtime_error(track.arm.name + ": " + std::to_string(rows) + " rows kept, due " +
                             std::to_string(due));
  }
  if (const auto broken = evictor.violations(); !broken.empty())
    throw std::runtime_error(track.arm.name + ": " + broken.front());
}

struct Times {
  std::vector<double> ms, evict_ms;  // [step]
};

// `steps` steps of every track, a few at a time. [track]
std::vector<Times> time_in_turns(const std::vector<Track*>& tracks, int steps) {
  std::vector<Times> times(tracks.size());
  for (Track* track : tracks) track->step();  // the engine's graph for one token is new
  for (int done = 0; done < steps; done += kTurn) {
    for (std::size_t i = 0; i < tracks.size(); ++i) {
      for (int n = std::min(kTurn, steps - done); n > 0; --n) {
        const Lane::Step step = tracks[i]->step();
        times[i].ms.push_back(step.ms);
        times[i].evict_ms.push_back(step.evict_ms);
      }
    }
  }
  return times;
}

void measure_length(std::vector<Track>& tracks, int length, int steps, const llama_model* model) {
  std::vector<Track*> in_turns;
  for (Track& track : tracks) {
    const Stopwatch reading;
    track.read_to(length - 1);  // and a step that is not timed
    std::fprintf(stderr, "%s: %d tokens read (%.1f s)\n", track.arm.name.c_str(), length,
                 reading.ms() / 1000);
    in_turns.push_back(&track);
  }
  const std::vector<Times> times = time_in_turns(in_turns, steps);
  const auto median_where = [&](bool (Arm::*is)() const) {
    for (std::size_t i = 0; i < tracks.size(); ++i)
      if ((tracks[i].arm.*is)()) return median(times[i].ms);
    return 0.0;
  };
  const double full = median_where(&Arm::is_full);
  const double streaming = median_where(&Arm::is_streaming);
  for (std::size_t i = 0; i < tracks.size(); ++i) {
    const double ms = median(times[i].ms);
    Json point = {{"context_tokens", length}};
    point.update(spread(times[i].ms));
    point["tokens_per_second"] = 1000 / ms;
    point["evict_share"] = median(times[i].evict_ms) / ms;
    if (full > 0) point["against_full"] = full / ms;
    if (streaming > 0) point["against_streaming"] = ms / streaming;
    // The lane of llama.cpp has room for all lengths; at each one counts what that one needs.
    point["kv_bytes_allocated"] = tracks[i].arm.cache
                                      ? tracks[i].lane.evictor().stats().kv_bytes_allocated
                                      : plain_kv_bytes(model, length);
    tracks[i].points.push_back(point);
  }
}

// Median step of the arm, long as its text is now, over that of a short one.
Json measure_flatness(Track& track, const llama_model* model, const Tokens& text, int threads) {
  const int long_tokens = track.position;
  Track fresh(track.arm, model, text, threads);
  fresh.read_to(kShortTokens);
  const std::vector<Times> times = time_in_turns({&track, &fresh}, kFlatSteps);
  check_bound(fresh);
  return {{"arm", track.arm.name},
          {"long_tokens", long_tokens},
          {"short_tokens", kShortTokens},
          {"ratio", median(times[0].ms) / median(times[1].ms)}};
}

void check_lengths(const Options& o) {
  for (std::size_t i = 1; i < o.lengths.size(); ++i) {
    if (o.lengths[i] - o.lengths[i - 1] <= o.steps) {
      throw std::runtime_error("lengths " + std::to_string(o.lengths[i - 1]) + " and " +
                               std::to_string(o.lengths[i]) + " are not more than " +
                               std::to_string(o.steps) + " apart: lower --steps or drop one");
    }
  }
}

void measure(const Options& o, llama_model* model, Json& report) {
  check_lengths(o);
  const std::vector<Arm> arms = make_arms(o);
  const int threads = o.common.threads;
  const int longest = o.lengths.back();
  const Tokens text = read_text(model, o.common.text, longest + o.steps + kFlatSteps + 1);
  std::fprintf(stderr, "checking the answers\n");
  check_answers(model, text, threads, arms);
  std::vector<Track> tracks;
  for (const Arm& arm : arms) tracks.emplace_back(arm, model, text, threads);
  for (const int length : o.lengths) measure_length(tracks, length, o.steps, model);
  Json flatness = Json::array();
  for (Track& track : tracks) {
    const bool asked = track.arm.is_streaming() || track.arm.cache == default_rule(o.common.budget);
    // Both texts must have filled the budget.
    if (asked && longest > kShortTokens && o.common.budget <= kShortTokens)
      flatness.push_back(measure_flatness(track, model, text, threads));
  }
  report["steps"] = o.steps;
  report["arms"] = Json::array();
  for (const Track& track : tracks) {
    check_bound(track);
    Json arm = {{"arm", track.arm.name}, {"points", track.points}};
    if (track.arm.cache) arm["rule"] = json_of(*track.arm.cache);
    report["arms"].push_back(arm);
  }
  report["flatness"] = flatness;
}

void print_table(const Json& report) {
  std::printf(
      "| cache | context | KV memory | ms per token (p10-p90) | tokens per second | eviction | vs "
      "full | over streaming |\n");
  std::printf("|---|---|---|---|---|---|---|---|\n");
  const auto times = [](const Json& point, const char* key) {
    char text[16] = "-";
    if (point.contains(key)) std::snprintf(text, sizeof text, "%.2fx", point[key].get<double>());
    return std::string(text);
  };
  for (const Json& arm : report["arms"]) {
    for (const Json& p : arm["points"]) {
      std::printf("| %s | %d | %.1f MiB | %.1f (%.1f-%.1f) | %.0f | %.0f %% | %s | %s |\n",
                  arm["arm"].get<std::string>().c_str(), p["context_tokens"].get<int>(),
                  p["kv_bytes_allocated"].get<double>() / 1048576, p["median_ms"].get<double>(),
                  p["p10_ms"].get<double>(), p["p90_ms"].get<double>(),
                  p["tokens_per_second"].get<double>(), 100 * p["evict_share"].get<double>(),
                  times(p, "against_full").c_str(), times(p, "against_streaming").c_str());
    }
  }
  for (const Json& flat : report["flatness"]) {
    std::printf("\n%s: median step at %d tokens over that at %d: %.3f",
                flat["arm"].get<std::string>().c_str(), flat["long_tokens"].get<int>(),
                flat["short_tokens"].get<int>(), flat["ratio"].get<double>());
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Decode speed and KV memory against context length.");
  Options o;
  add_options(app, o.common);
  app.add_option("--steps", o.steps, "timed decode steps per arm and length")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--lengths", o.lengths, "context lengths, more than --steps apart")
      ->capture_default_str()
      ->check(CLI::Range(2, kMaxBudget));
  app.add_option("--arms", o.arms, "measure only the arms with one of these in their name");
  CLI11_PARSE(app, argc, argv);
  std::sort(o.lengths.begin(), o.lengths.end());
  return run_benchmark(
      "decode_speed", o.common,
      [&](llama_model* model, Json& report) { measure(o, model, report); }, print_table);
}

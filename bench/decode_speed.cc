// Decode speed and KV memory against context length: llama.cpp as it is, streaming and morphkv, in
// one run. All arms read the same text and take their timed steps in turns, so that a slow phase of
// the machine meets all of them. Checked before anything is timed: with a budget that never fills,
// every arm gives the tokens of llama.cpp; and at the end: every bounded cache holds its budget.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lane.h"
#include "morphkv/llama_cpp/model_spec.h"
#include "report.h"
#include "support.h"

namespace {

using namespace morphkv;         // NOLINT
using namespace morphkv::bench;  // NOLINT

constexpr int kTurn = 8;         // steps that an arm takes before the next one's turn
constexpr int kFlatSteps = 128;  // of the long and of the short lane
constexpr int kShortTokens = 1000;
constexpr const char* kFull = "full";
constexpr const char* kStreaming = "streaming";
constexpr const char* kMorphKV = "morphkv attention, window 8";

struct Options {
  CommonOptions common;
  int steps = 64;
  std::vector<int> lengths = {1000, 2000, 4000, 8000};
  std::vector<std::string> arms;  // parts of names; none = all
};

struct Arm {
  std::string name;
  std::optional<CacheConfig> cache;  // none: llama.cpp as it is
};

struct Track {
  Arm arm;
  Lane lane;
  Json points = Json::array();
};

std::vector<Arm> make_arms(const Options& o) {
  const int budget = o.common.budget;
  std::vector<Arm> arms = {{kFull, std::nullopt},
                           {kStreaming, CacheConfig{.budget = budget, .policy = "streaming"}}};
  for (const int window : {1, 8, 32}) {
    arms.push_back({"morphkv keys, window " + std::to_string(window),
                    CacheConfig{.budget = budget, .window = window}});
  }
  for (const int window : {1, 8, 32}) {
    arms.push_back(
        {"morphkv attention, window " + std::to_string(window),
         CacheConfig{
             .budget = budget, .window = window, .pool = 11, .queries = QuerySource::kAttention}});
  }
  std::erase_if(arms, [&](const Arm& arm) {
    return !o.arms.empty() && std::none_of(o.arms.begin(), o.arms.end(), [&](const auto& part) {
      return arm.name.find(part) != std::string::npos;
    });
  });
  if (arms.empty()) throw std::runtime_error("--arms: no arm has such a name");
  return arms;
}

void check_answers(llama_model* model, const Tokens& text, int threads,
                   const std::vector<Arm>& arms) {
  constexpr int kPrompt = 300;
  constexpr int kAnswer = 40;
  const auto answer = [&](std::optional<CacheConfig> cache) {
    if (cache) cache->budget = 1024;
    Lane lane(model, text, threads, cache);
    lane.read_to(kPrompt);
    Tokens tokens;
    for (int i = 0; i < kAnswer; ++i) {
      tokens.push_back(lane.next());
      lane.step(lane.next());
    }
    return tokens;
  };
  const Tokens expected = answer(std::nullopt);
  for (const Arm& arm : arms) {
    if (arm.cache && answer(arm.cache) != expected)
      throw std::runtime_error(arm.name +
                               ": within its budget it gives other tokens than llama.cpp");
  }
}

void check_bound(const Track& track) {
  if (!track.lane.evictor()) return;
  const int rows = track.lane.evictor()->stats().rows_kept;
  const int due = std::min(track.arm.cache->budget, track.lane.position());
  if (rows != due) {
    throw std::runtime_error(track.arm.name + ": " + std::to_string(rows) + " rows kept, due " +
                             std::to_string(due));
  }
  if (const auto broken = track.lane.evictor()->violations(); !broken.empty())
    throw std::runtime_error(track.arm.name + ": " + broken.front());
}

struct Times {
  std::vector<double> ms, evict_ms;  // [step]
};

// `steps` steps of every lane, a few at a time. [lane]
std::vector<Times> time_in_turns(const std::vector<Lane*>& lanes, int steps) {
  std::vector<Times> times(lanes.size());
  for (Lane* lane : lanes) lane->step();  // the engine's graph for one token is new
  for (int done = 0; done < steps; done += kTurn) {
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      for (int n = std::min(kTurn, steps - done); n > 0; --n) {
        const Lane::Step step = lanes[i]->step();
        times[i].ms.push_back(step.ms);
        times[i].evict_ms.push_back(step.evict_ms);
      }
    }
  }
  return times;
}

void measure_length(std::vector<Track>& tracks, int length, int steps, const ModelSpec& spec) {
  std::vector<Lane*> lanes;
  for (Track& track : tracks) {
    const Stopwatch reading;
    track.lane.read_to(length - 1);  // and a step that is not timed
    std::fprintf(stderr, "%s: %d tokens read (%.1f s)\n", track.arm.name.c_str(), length,
                 reading.ms() / 1000);
    lanes.push_back(&track.lane);
  }
  const std::vector<Times> times = time_in_turns(lanes, steps);
  const auto median_of = [&](const char* name) {
    for (std::size_t i = 0; i < tracks.size(); ++i)
      if (tracks[i].arm.name == name) return median(times[i].ms);
    return 0.0;
  };
  const double full = median_of(kFull);
  const double streaming = median_of(kStreaming);
  for (std::size_t i = 0; i < tracks.size(); ++i) {
    const double ms = median(times[i].ms);
    Json point = {{"context_tokens", length},
                  {"median_ms", ms},
                  {"p10_ms", quantile(times[i].ms, 0.1)},
                  {"p90_ms", quantile(times[i].ms, 0.9)},
                  {"tokens_per_second", 1000 / ms},
                  {"evict_share", median(times[i].evict_ms) / ms}};
    if (full > 0) point["against_full"] = full / ms;
    if (streaming > 0) point["against_streaming"] = ms / streaming;
    const auto& evictor = tracks[i].lane.evictor();
    // The lane of llama.cpp has room for all lengths; at each one counts what that one needs.
    point["kv_bytes_allocated"] =
        evictor ? evictor->stats().kv_bytes_allocated : full_kv_bytes(spec, length);
    tracks[i].points.push_back(point);
  }
}

// Median step of the arm's lane, long as it is now, over that of a short one.
Json measure_flatness(Track& track, llama_model* model, const Tokens& text, int threads) {
  const int long_tokens = track.lane.position();
  Track fresh{track.arm, Lane(model, text, threads, track.arm.cache)};
  fresh.lane.read_to(kShortTokens);
  const std::vector<Times> times = time_in_turns({&track.lane, &fresh.lane}, kFlatSteps);
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
  const ModelSpec spec = llama_cpp::read_model_spec(o.common.model);
  const int threads = o.common.threads;
  const int longest = o.lengths.back();
  const Tokens text = read_text(model, o.common.text, longest + o.steps + kFlatSteps + 1);
  std::fprintf(stderr, "checking the answers\n");
  check_answers(model, text, threads, arms);
  std::vector<Track> tracks;
  for (const Arm& arm : arms) tracks.push_back({arm, Lane(model, text, threads, arm.cache)});
  for (const int length : o.lengths) measure_length(tracks, length, o.steps, spec);
  Json flatness = Json::array();
  for (Track& track : tracks) {
    const bool asked = track.arm.name == kStreaming || track.arm.name == kMorphKV;
    // Both lanes must have filled their budget.
    if (asked && longest > kShortTokens && o.common.budget <= kShortTokens)
      flatness.push_back(measure_flatness(track, model, text, threads));
  }
  report["steps"] = o.steps;
  report["arms"] = Json::array();
  for (const Track& track : tracks) {
    check_bound(track);
    report["arms"].push_back({{"arm", track.arm.name}, {"points", track.points}});
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

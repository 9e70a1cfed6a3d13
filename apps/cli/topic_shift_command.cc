#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "commands.h"
#include "morphkv/version.h"
#include "run_record.h"
#include "topic_shift.h"

namespace morphkv::cli {
namespace {

constexpr const char* kGeometry =
    "A topic is a direction of the key space. The text is FIRST tokens of topic A, then NEEDED\n"
    "tokens of topic B (key = strength * direction + noise), then ASKING tokens of topic B that "
    "are\n"
    "weak and noisy (key = signal * direction + noise); noise is normal in every number. Stored\n"
    "keys stand in for queries. Every arm has the same budget, sinks and protected tail.\n"
    "\n"
    "Measured at the end, for each seed: the share of the NEEDED tokens that is still held.\n"
    "Streaming cannot hold any. The control is a text of the same length on one topic, where "
    "every\n"
    "token is needed: the share of the rows to choose that is on topic, 1.0 for every arm. It\n"
    "checks the measure.\n"
    "\n"
    "The shares depend on how weak the end of the text is: with --signal 0.7 --noise 0.35 windows\n"
    "8 and 32 hold everything. This shows what each rule does, not what it is worth on real text.";

nlohmann::ordered_json summary(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return {{"mean", mean_of(values)},
          {"deviation", deviation_of(values)},
          {"min", *least},
          {"max", *most}};
}

std::string to_json(const TopicShiftGeometry& g, const std::vector<TopicShiftArm>& arms) {
  nlohmann::ordered_json out = {{"benchmark", "topic-shift"},
                                {"version", kVersion},
                                {"query_source", "keys"},
                                {"geometry",
                                 {{"dim", g.dim},
                                  {"first_tokens", g.first_tokens},
                                  {"needed_tokens", g.needed_tokens},
                                  {"asking_tokens", g.asking_tokens},
                                  {"strength", g.strength},
                                  {"signal", g.signal},
                                  {"noise", g.noise},
                                  {"budget", g.budget},
                                  {"n_sink", g.n_sink},
                                  {"recent", g.recent},
                                  {"seeds", g.seeds}}}};
  for (const TopicShiftArm& arm : arms) {
    out["arms"].push_back({{"name", arm.name},
                           {"policy", arm.config.policy},
                           {"window", arm.config.window},
                           {"shift", summary(arm.shift)},
                           {"control", summary(arm.control)}});
  }
  return out.dump(2) + "\n";
}

void print_table(const TopicShiftGeometry& g, const std::vector<TopicShiftArm>& arms) {
  std::printf(
      "Topic shift: D %d, %d + %d + %d tokens, strength %g, signal %g, noise %g,\n"
      "budget %d (%d sinks, tail %d, %d to choose), %d seeds\n\n"
      "%-20s  %14s  %7s  %7s\n",
      g.dim, g.first_tokens, g.needed_tokens, g.asking_tokens, g.strength, g.signal, g.noise,
      g.budget, g.n_sink, g.recent, free_rows(g), g.seeds, "needed tokens held", "mean +- dev",
      "range", "control");
  for (const TopicShiftArm& arm : arms) {
    const auto [least, most] = std::minmax_element(arm.shift.begin(), arm.shift.end());
    std::printf("%-20s  %5.2f +- %5.2f  %.1f-%.1f  %7.2f\n", arm.name.c_str(), mean_of(arm.shift),
                deviation_of(arm.shift), *least, *most, mean_of(arm.control));
  }
}

}  // namespace

namespace {

class TopicShiftCommand final : public Command {
 public:
  explicit TopicShiftCommand(CLI::App& bench);
  int run() override;

 private:
  TopicShiftGeometry geometry_;
  std::string json_;
};

}  // namespace

TopicShiftCommand::TopicShiftCommand(CLI::App& bench)
    : Command(bench.add_subcommand("topic-shift",
                                   "Which rows survive a change of topic, with random keys.")) {
  command_->footer(kGeometry);
  TopicShiftGeometry& g = geometry_;
  const auto number = [this](const char* name, auto& target, const char* help) {
    command_->add_option(name, target, help)->capture_default_str();
  };
  number("--dim", g.dim, "numbers of a key");
  number("--first", g.first_tokens, "tokens of the first topic");
  number("--needed", g.needed_tokens, "tokens of the second topic that are needed");
  number("--asking", g.asking_tokens, "tokens of the second topic that ask");
  number("--strength", g.strength, "length of a key along its topic");
  number("--signal", g.signal, "the same for the tokens that ask");
  number("--noise", g.noise, "standard deviation of every number");
  number("--budget", g.budget, "rows that are kept");
  number("--sinks", g.n_sink, "first rows that are never evicted");
  number("--recent", g.recent, "last rows that are never evicted");
  number("--seeds", g.seeds, "texts to measure");
  command_->add_option("--json", json_, "write the record to this file")->type_name("FILE");
}

int TopicShiftCommand::run() {
  try {
    if (!json_.empty()) require_writable(json_);
    const auto arms = measure_topic_shift(geometry_);
    print_table(geometry_, arms);
    if (!json_.empty()) write_file(json_, to_json(geometry_, arms));
    return 0;
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "morphkv: error: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "morphkv: error: %s\n", error.what());
    return 1;
  }
}

std::unique_ptr<Command> make_topic_shift_command(CLI::App& bench) {
  return std::make_unique<TopicShiftCommand>(bench);
}

}  // namespace morphkv::cli

// `morphkv eval`: how much each rule remembers on a model, as JSON, a table and a page.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "commands.h"
#include "describe_run.h"
#include "engine_log.h"
#include "judge.h"
#include "lane.h"
#include "options.h"
#include "page.h"
#include "progress.h"
#include "prompt_text.h"
#include "record.h"
#include "results.h"
#include "run_record.h"
#include "runner.h"
#include "summary.h"
#include "table.h"
#include "texts.h"

namespace morphkv::cli {

using namespace eval;  // NOLINT: the whole file is about its types

struct EvalOptions {
  std::string model;
  std::string out = "morphkv-eval";
  std::vector<std::string> tasks;
  std::vector<std::string> modes;
  std::vector<std::string> arms;
  std::vector<int> budgets;
  std::vector<std::string> texts;
  std::string exported;
  Plan plan;
  int n_gpu_layers = -1;
  bool quick = false;
  bool list = false;
  bool verbose = false;
};

namespace {

constexpr std::array<std::string_view, 5> kModes = {"whole", "guided", "stream", "generate",
                                                    "text"};
constexpr int kMaxTokens = 1 << 20;

constexpr const char* kAbout =
    "Every arm answers the same questions in the same order. The full cache (llama.cpp as it is),\n"
    "streaming and random are always among them, and a control: a bounded cache that is large\n"
    "enough to evict nothing and must score exactly as the full one. DIR/trials.jsonl grows by a\n"
    "line per trial; the same command again goes on where the last one ended. DIR/results.json "
    "and\n"
    "DIR/report.html are made of it.\n"
    "\n"
    "Modes: whole (prompt evaluated whole, then evicted from; the question is seen), guided (read\n"
    "in pieces, guided by the question), stream (read in pieces, the question comes afterwards),\n"
    "generate (the model goes on for long), text (perplexity and divergence from the full cache,\n"
    "token by token).\n"
    "\n"
    "An arm is a policy with settings: 'morphkv window=32 pool=7 recent=25% fuse=max\n"
    "queries=keys sinks=4'. Intervals are 95 % of a bootstrap over documents.";

template <typename Known>
void require_known(const std::string& option, const std::vector<std::string>& words,
                   const Known& known) {
  std::string all;
  for (const auto& word : known) all += (all.empty() ? "" : ", ") + std::string(word);
  for (const std::string& word : words) {
    if (std::ranges::find(known, word) == std::end(known)) {
      throw std::invalid_argument(option + " '" + word + "' is not one of " + all);
    }
  }
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw std::invalid_argument("--text '" + path + "' cannot be read");
  require_text("--text '" + path + "'", text);
  return text;
}

std::vector<std::string> task_names() {
  std::vector<std::string> names;
  for (const Task& task : tasks()) names.emplace_back(task.name);
  return names;
}

void print_list() {
  std::puts("Tasks:");
  for (const Task& task : tasks()) {
    std::printf("  %-20.*s %-12.*s %.*s\n", static_cast<int>(task.name.size()), task.name.data(),
                static_cast<int>(task.group.size()), task.group.data(),
                static_cast<int>(task.what.size()), task.what.data());
  }
  std::puts("Texts of mode text:");
  for (const ShippedText& text : shipped_texts()) {
    std::printf("  %-20.*s %.*s\n", static_cast<int>(text.name.size()), text.name.data(),
                static_cast<int>(text.what.size()), text.what.data());
  }
  std::puts("Arms unless --arm says otherwise:");
  for (const std::string& arm : default_arms()) std::printf("  %s\n", arm.c_str());
}

// The small version: what a quarter of an hour on two cores allows.
void make_quick(EvalOptions& o, bool tokens_given, bool documents_given, bool text_tokens_given) {
  if (o.tasks.empty()) o.tasks = {"passkey", "number-string", "instructions"};
  if (o.modes.empty()) o.modes = {"whole", "guided", "stream", "text"};
  if (o.arms.empty()) o.arms = {"h2o", "morphkv", "morphkv queries=keys pool=1"};
  if (o.budgets.empty()) o.budgets = {128, 512};
  if (!tokens_given) o.plan.tokens = 1500;
  if (!documents_given) o.plan.documents = 1;
  if (!text_tokens_given) o.plan.text_tokens = 750;
}

Plan plan_of(const EvalOptions& o) {
  Plan plan = o.plan;
  require_known("--task", o.tasks, task_names());
  require_known("--mode", o.modes, kModes);
  for (const std::string& name : o.tasks.empty() ? task_names() : o.tasks) {
    plan.tasks.push_back(&find_task(name));
  }
  plan.modes = o.modes;
  if (plan.modes.empty()) plan.modes.assign(kModes.begin(), kModes.end());
  plan.budgets = o.budgets.empty() ? std::vector<int>{128, 256, 512, 1024} : o.budgets;
  std::ranges::sort(plan.budgets);
  const auto repeated = std::ranges::unique(plan.budgets);
  plan.budgets.erase(repeated.begin(), repeated.end());
  std::set<std::string> seen;
  const auto add = [&](const std::string& arm) {
    if (seen.insert(arm).second) plan.arms.push_back(parse_arm(arm));
  };
  for (const char* always : {"full", "streaming", "random"}) add(always);
  for (const std::string& arm : o.arms.empty() ? default_arms() : o.arms) add(arm);
  for (const Arm& arm : plan.arms) {
    for (const int budget : plan.budgets) {
      if (arm.name != kFull) with_budget(arm, budget);
    }
  }
  for (const std::string& path : o.texts) {
    plan.texts.push_back({std::filesystem::path(path).stem().string(), read_text(path)});
  }
  if (o.texts.empty()) {
    for (const ShippedText& text : shipped_texts()) {
      plan.texts.push_back({std::string(text.name), std::string(text.text)});
    }
  }
  return plan;
}

// The questions as JSON lines. Lengths are counted in tokens of the model.
void export_questions(const llama_model* model, const Plan& plan, const std::string& path) {
  const CountTokens count = [&](std::string_view text) {
    return llama_cpp::tokenize_continuation(model, text).size();
  };
  std::string lines;
  for (int number = plan.first_document; number < plan.first_document + plan.documents; ++number) {
    for (const Task* task : plan.tasks) {
      if (!task->document) continue;
      const Document document =
          task->document(static_cast<std::uint64_t>(number), plan.tokens, count);
      for (std::size_t q = 0; q < document.questions.size(); ++q) {
        const Question& question = document.questions[q];
        const nlohmann::ordered_json line = {
            {"task", task->name},     {"tokens", plan.tokens},     {"document", number},
            {"question", q},          {"depth", question.depth},   {"text", document.text},
            {"asked", question.text}, {"answer", question.answer}, {"choices", question.choices}};
        lines += line.dump() + "\n";
      }
    }
  }
  write_file(path, lines);
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::array<char, 16> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d", std::gmtime(&now));
  return text.data();
}

std::string duration(double seconds) {
  const auto whole = static_cast<long>(seconds);
  std::array<char, 32> text{};
  if (whole >= 3600) {
    std::snprintf(text.data(), text.size(), "%ld h %02ld min", whole / 3600, whole / 60 % 60);
  } else {
    std::snprintf(text.data(), text.size(), "%ld min %02ld s", whole / 60, whole % 60);
  }
  return text.data();
}

RunnerCallbacks watched(Progress& progress) {
  const auto start = std::chrono::steady_clock::now();
  RunnerCallbacks callbacks;
  callbacks.cancelled = [] { return interrupted(); };
  callbacks.on_progress = [&progress, start](double done, double total, std::string_view what) {
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::string detail(what);
    if (done > 0 && total > done) {
      detail += ", " + duration(seconds / done * (total - done)) + " left";
    }
    progress.show("eval", done, total, detail);
  };
  return callbacks;
}

// The record, the page and the table of all that is in the results.
void report(const std::string& folder, const Results& results) {
  const RunInfo& info = results.info();
  const std::vector<Cell> cells = summarise(results.trials(), info.seed);
  write_file(folder + "/results.json", to_json(info, cells, today()));
  write_file(folder + "/report.html", to_page(info, cells));
  constexpr int kColumns = 100;
  std::fputs(to_table(cells, kColumns).c_str(), stdout);
  std::fprintf(stderr, "%s/report.html has the plots, %s/results.json the figures\n",
               folder.c_str(), folder.c_str());
}

}  // namespace

namespace {

class EvalCommand final : public Command {
 public:
  explicit EvalCommand(CLI::App& app);
  int run() override;

 private:
  EvalOptions options_;
};

}  // namespace

EvalCommand::EvalCommand(CLI::App& app)
    : Command(app.add_subcommand("eval", "Measure how much each rule remembers on a model.")) {
  EvalOptions& o = options_;
  Plan& plan = o.plan;
  command_->footer(kAbout);
  command_->add_option("-m,--model", o.model, "GGUF model file")->type_name("FILE");
  command_->add_option("-o,--out", o.out, "folder of the results")
      ->type_name("DIR")
      ->capture_default_str();
  command_->add_option("--task", o.tasks, "tasks; all unless given (--list)")->type_name("NAME");
  command_->add_option("--mode", o.modes, "whole, guided, stream, generate, text; all unless given")
      ->type_name("NAME");
  command_->add_option("--arm", o.arms, "arms beside full, streaming and random")
      ->type_name("SPEC");
  command_->add_option("--budget", o.budgets, "rows per KV head and layer; 128 256 512 1024")
      ->type_name("N")
      ->check(CLI::Range(1, kMaxBudget));
  add_number(command_, "--tokens", plan.tokens, 100, kMaxTokens, "length of a document");
  add_number(command_, "--documents", plan.documents, 1, 10000, "documents of each task");
  add_number(command_, "--first-document", plan.first_document, 0, 1 << 24,
             "number of the first one, which seeds it");
  command_
      ->add_option("--text", o.texts, "text files of mode text; three shipped ones unless given")
      ->type_name("FILE");
  add_number(command_, "--text-tokens", plan.text_tokens, 250, kMaxTokens,
             "tokens of each text, in stretches of 250");
  add_number(command_, "-t,--threads", plan.threads, 1, 1024, "threads");
  add_number(command_, "--n-gpu-layers,--gpu-layers", o.n_gpu_layers, -1, kMaxTokens,
             "(-ngl) layers on a GPU, if there is one; -1 = all");
  command_
      ->add_option(
          "--export", o.exported,
          "write documents, questions and answers to this file, for other programs, and end")
      ->type_name("FILE");
  command_->add_flag("--quick", o.quick, "a small version, in under 15 minutes on 2 cores");
  command_->add_flag("--list", o.list, "show tasks, texts and arms, and end");
  command_->add_flag("-v,--verbose", o.verbose, "show the engine's log");
}

int EvalCommand::run() {
  EvalOptions& o = options_;
  if (o.list) {
    print_list();
    return 0;
  }
  EngineLog log;
  log.verbose = o.verbose;
  log.install();
  return guarded(log, [&]() -> int {
    if (o.model.empty()) throw std::invalid_argument("no model: give --model FILE");
    if (o.quick) {
      make_quick(o, command_->count("--tokens") > 0, command_->count("--documents") > 0,
                 command_->count("--text-tokens") > 0);
    }
    const Plan plan = plan_of(o);
    if (!o.exported.empty()) require_writable(o.exported);
    install_interrupt();
    llama_backend_init();
    const llama_cpp::ModelPtr model = load_weights(o.model, o.n_gpu_layers);
    if (!model) return 130;
    log.opened();
    if (!o.exported.empty()) {
      export_questions(model.get(), plan, o.exported);
      return 0;
    }
    std::filesystem::create_directories(o.out);
    Results results(o.out + "/trials.jsonl", describe_run(model.get(), o.model));
    if (!results.trials().empty()) {
      std::fprintf(stderr, "going on with %zu trials in %s/trials.jsonl\n", results.trials().size(),
                   o.out.c_str());
    }
    bool stopped = false;
    {
      Progress progress;
      try {
        eval::run(model.get(), plan, results, watched(progress));
      } catch (const Interrupted&) {
        stopped = true;
      }
    }
    report(o.out, results);
    if (stopped) std::fputs("interrupted: the same command goes on from here\n", stderr);
    return stopped ? 130 : 0;
  });
}

std::unique_ptr<Command> make_eval_command(CLI::App& app) {
  return std::make_unique<EvalCommand>(app);
}

}  // namespace morphkv::cli

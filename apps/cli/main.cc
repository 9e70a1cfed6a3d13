// The command-line tool: flags -> session. Nothing here knows how a cache is bounded.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "chat_command.h"
#include "eval_command.h"
#include "morphkv/settings.h"
#include "morphkv/version.h"
#include "run_command.h"
#include "serve_command.h"
#include "topic_shift_command.h"

namespace {

// Help on standard output with code 0; everything else is one line on standard error with code 2.
int report(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) return app.exit(error);
  const char* command = "run";
  for (const char* name : {"eval", "serve", "chat"}) {
    if (app.got_subcommand(name)) command = name;
  }
  if (app.got_subcommand("bench")) command = "bench topic-shift";
  std::fprintf(stderr, "morphkv: error: %s (morphkv %s --help shows every option)\n", error.what(),
               command);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Large language models with a KV cache of constant size.", "morphkv");
  app.set_version_flag("--version", "morphkv " + std::string(morphkv::kVersion));
  app.require_subcommand(0, 1);  // its own message for none would not name a wrong word
  morphkv::cli::RunCommand run(app);
  morphkv::cli::ChatCommand chat(app);
  morphkv::cli::ServeCommand serve(app);
  morphkv::cli::EvalCommand eval(app);
  CLI::App* bench = app.add_subcommand("bench", "Experiments that need no model.");
  bench->require_subcommand(1);
  morphkv::cli::TopicShiftCommand topic_shift(*bench);
  const CLI::App* settings = app.add_subcommand(
      "settings", "Show what the cache can be told: names, limits, values in each profile.");

  std::vector<std::string> arguments(argv + 1, argv + argc);
  arguments = morphkv::cli::expand_short_options(std::move(arguments));
  std::reverse(arguments.begin(), arguments.end());  // the order that CLI11 asks for
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    return report(app, error);
  }
  if (app.get_subcommands().empty()) {
    std::fputs(
        "morphkv: error: no command: give run, chat, serve, eval, bench or settings (morphkv --help says "
        "more)\n",
        stderr);
    return 2;
  }
  if (settings->parsed()) {
    std::fputs(morphkv::settings_table().c_str(), stdout);
    return 0;
  }
  if (topic_shift.chosen()) return topic_shift.run();
  if (chat.chosen()) return chat.run();
  if (serve.chosen()) return serve.run();
  return eval.chosen() ? eval.run() : run.run();
}

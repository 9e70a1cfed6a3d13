// The command-line tool: flags -> session. Nothing here knows how a cache is bounded.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "commands.h"
#include "morphkv/settings.h"
#include "morphkv/version.h"

using morphkv::cli::Command;

std::string Command::name() const {
  const CLI::App* parent = command_->get_parent();
  return (parent->get_parent() == nullptr ? "" : parent->get_name() + " ") + command_->get_name();
}

namespace {

class SettingsCommand final : public Command {
 public:
  explicit SettingsCommand(CLI::App& app)
      : Command(app.add_subcommand(
            "settings",
            "Show what the cache can be told: names, limits, values in each profile.")) {}
  int run() override {
    std::fputs(morphkv::settings_table().c_str(), stdout);
    return 0;
  }
};

}  // namespace

std::unique_ptr<Command> morphkv::cli::make_settings_command(CLI::App& app) {
  return std::make_unique<SettingsCommand>(app);
}

int main(int argc, char** argv) {
  using namespace morphkv::cli;  // NOLINT: the program is about its types
  CLI::App app("Large language models with a KV cache of constant size.", "morphkv");
  app.set_version_flag("--version", "morphkv " + std::string(morphkv::kVersion));
  app.require_subcommand(0, 1);  // its own message for none would not name a wrong word
  std::vector<std::unique_ptr<Command>> commands;
  for (const auto make :
       {make_run_command, make_chat_command, make_serve_command, make_eval_command}) {
    commands.push_back(make(app));
  }
  CLI::App* bench = app.add_subcommand("bench", "Experiments that need no model.");
  bench->require_subcommand(1);
  commands.push_back(make_topic_shift_command(*bench));
  commands.push_back(make_settings_command(app));
  const auto chosen = [&] {
    return std::ranges::find_if(commands, [](const auto& command) { return command->chosen(); });
  };

  std::vector<std::string> arguments(argv + 1, argv + argc);
  arguments = morphkv::cli::expand_short_options(std::move(arguments));
  std::reverse(arguments.begin(), arguments.end());  // the order that CLI11 asks for
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    // Help on standard output with code 0; all else is one line on standard error with code 2.
    if (error.get_exit_code() == 0) return app.exit(error);
    const auto command = chosen();
    const char* group = bench->parsed() ? "bench topic-shift" : "run";
    const std::string name = command == commands.end() ? group : (*command)->name();
    std::fprintf(stderr, "morphkv: error: %s (morphkv %s --help shows every option)\n",
                 error.what(), name.c_str());
    return 2;
  }
  const auto command = chosen();
  if (command == commands.end()) {
    std::fputs(
        "morphkv: error: no command: give run, chat, serve, eval, bench or settings (morphkv "
        "--help says more)\n",
        stderr);
    return 2;
  }
  return (*command)->run();
}

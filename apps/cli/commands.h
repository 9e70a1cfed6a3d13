// The commands of the tool. Each adds itself to the parser and runs when it was chosen.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

namespace morphkv::cli {

class Command {
 public:
  explicit Command(CLI::App* command) : command_(command) {}
  virtual ~Command() = default;
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  bool chosen() const { return command_->parsed(); }
  // As it is typed: "run", "bench topic-shift".
  std::string name() const;
  // The exit code: 0 done or ended by the user, 1 failure on the way, 2 bad input.
  virtual int run() = 0;

 protected:
  CLI::App* command_;
};

std::unique_ptr<Command> make_run_command(CLI::App& app);
std::unique_ptr<Command> make_chat_command(CLI::App& app);
std::unique_ptr<Command> make_serve_command(CLI::App& app);
std::unique_ptr<Command> make_eval_command(CLI::App& app);
// `morphkv bench topic-shift`: the experiment of topic_shift.h as a table and as JSON.
std::unique_ptr<Command> make_topic_shift_command(CLI::App& bench);
// `morphkv settings`: what the cache can be told.
std::unique_ptr<Command> make_settings_command(CLI::App& app);

// llama.cpp's short options of several letters, which CLI11 does not know, as their long names.
std::vector<std::string> expand_short_options(std::vector<std::string> arguments);

}  // namespace morphkv::cli

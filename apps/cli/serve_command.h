// `morphkv serve`: many sessions, each in constant memory, behind an OpenAI-compatible API.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>

namespace morphkv::cli {

struct ServeOptions;

class ServeCommand {
 public:
  // Adds the subcommand to `app`; parsing runs nothing.
  explicit ServeCommand(CLI::App& app);
  ~ServeCommand();
  bool chosen() const { return command_->parsed(); }
  // The exit code: 0 stopped by a signal, 1 failure, 2 bad input.
  int run();

 private:
  CLI::App* command_;
  std::unique_ptr<ServeOptions> options_;
};

}  // namespace morphkv::cli

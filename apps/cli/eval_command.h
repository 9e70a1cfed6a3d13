// `morphkv eval`: how much each rule remembers on a model, as JSON, a table and a page.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>

namespace morphkv::cli {

struct EvalOptions;

class EvalCommand {
 public:
  // Adds the subcommand to `app`; parsing runs nothing.
  explicit EvalCommand(CLI::App& app);
  ~EvalCommand();
  bool chosen() const { return command_->parsed(); }
  // The exit code: 0 done, 1 failure in the run, 2 bad input, 130 interrupted.
  int run();

 private:
  CLI::App* command_;
  std::unique_ptr<EvalOptions> options_;
};

}  // namespace morphkv::cli

// `morphkv run`: one prompt, one answer, in constant memory.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

namespace morphkv::cli {

struct RunOptions;

class RunCommand {
 public:
  // Adds the subcommand to `app`; parsing runs nothing.
  explicit RunCommand(CLI::App& app);
  ~RunCommand();
  // The exit code: 0 done, 1 failure in the run, 2 bad input.
  int run();

 private:
  CLI::App* command_;
  std::unique_ptr<RunOptions> options_;
};

// llama.cpp's short options of several letters, which CLI11 does not know, as their long names.
std::vector<std::string> expand_short_options(std::vector<std::string> arguments);

}  // namespace morphkv::cli

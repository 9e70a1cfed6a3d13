// `morphkv bench topic-shift`: the experiment of topic_shift.h as a table and as JSON.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "topic_shift.h"

namespace morphkv::cli {

class TopicShiftCommand {
 public:
  // Adds the subcommand to `bench`; parsing runs nothing.
  explicit TopicShiftCommand(CLI::App& bench);
  bool chosen() const { return command_->parsed(); }
  // The exit code: 0 done, 1 the record could not be written, 2 bad input.
  int run();

 private:
  CLI::App* command_;
  TopicShiftGeometry geometry_;
  std::string json_;
};

}  // namespace morphkv::cli

// `morphkv chat`: a conversation in the terminal that may go on for ever in constant memory.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>

namespace morphkv::cli {

struct ChatOptions;

class ChatCommand {
 public:
  // Adds the subcommand to `app`; parsing runs nothing.
  explicit ChatCommand(CLI::App& app);
  ~ChatCommand();
  bool chosen() const { return command_->parsed(); }
  // The exit code: 0 ended by the user, 1 failure, 2 bad input.
  int run();

 private:
  CLI::App* command_;
  std::unique_ptr<ChatOptions> options_;
};

}  // namespace morphkv::cli

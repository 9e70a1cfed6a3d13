// Lines that a user types, with editing and a history when standard input is a terminal.
#pragma once

#include <optional>
#include <string>

namespace morphkv::cli {

class LineInput {
 public:
  LineInput();

  // One message: a line; lines that end in a backslash go on, and lines between two lines of """
  // are one message. Nothing at the end of the input. Ctrl-C while typing gives an empty message.
  std::optional<std::string> read();
  bool terminal() const { return terminal_; }

 private:
  std::optional<std::string> read_line(const char* prompt);

  bool terminal_;
};

}  // namespace morphkv::cli

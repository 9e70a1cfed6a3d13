#include "line_input.h"

#include <editline/readline.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "progress.h"

namespace morphkv::cli {
namespace {

constexpr std::string_view kBlock = "\"\"\"";

}  // namespace

LineInput::LineInput() : terminal_(isatty(STDIN_FILENO) == 1 && isatty(STDOUT_FILENO) == 1) {}

std::optional<std::string> LineInput::read_line(const char* prompt) {
  if (!terminal_) {
    std::string line;
    if (!std::getline(std::cin, line)) return std::nullopt;
    return line;
  }
  char* line = readline(prompt);
  if (line == nullptr) {
    if (take_interrupt()) {  // the line is given up, not the program
      std::fputs("\n", stdout);
      return "";
    }
    return std::nullopt;
  }
  std::string text = line;
  std::free(line);
  return text;
}

std::optional<std::string> LineInput::read() {
  std::optional<std::string> line = read_line("> ");
  if (!line) return std::nullopt;
  std::string text;
  if (*line == kBlock) {
    while ((line = read_line(". ")) && *line != kBlock) text += *line + "\n";
    if (!text.empty()) text.pop_back();
  } else {
    text = *line;
    while (text.ends_with('\\')) {
      text.back() = '\n';
      line = read_line(". ");
      if (!line) break;
      text += *line;
    }
  }
  if (terminal_ && !text.empty()) add_history(text.c_str());
  return text;
}

}  // namespace morphkv::cli

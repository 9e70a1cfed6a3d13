// A progress bar on standard error when it is a terminal; silence when it is not.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace morphkv::cli {

class Progress {
 public:
  Progress();
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Draws at most ten times a second, and always when done == total. `detail` stands behind the
  // bar.
  void show(std::string_view what, double done, double total, std::string_view detail = {});
  // Takes the bar away.
  void clear();

 private:
  bool terminal_;
  bool visible_ = false;
  std::chrono::steady_clock::time_point last_{};
};

// True while SIGINT or SIGTERM has been received since install_interrupt(). A second one ends the
// process.
bool interrupted();
void install_interrupt();
// For a program that goes on after an interrupt: SIGINT only raises the flag, any number of times,
// and take_interrupt() tells and lowers it. SIGTERM ends the process.
void install_soft_interrupt();
bool take_interrupt();

}  // namespace morphkv::cli

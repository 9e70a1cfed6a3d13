#include "progress.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>

namespace morphkv::cli {
namespace {

volatile std::sig_atomic_t g_interrupted = 0;

void on_signal(int signal) {
  g_interrupted = 1;
  std::signal(signal, SIG_DFL);  // the next one ends the process
}

}  // namespace

Progress::Progress() : terminal_(isatty(STDERR_FILENO) == 1) {}

void Progress::show(std::string_view what, double done, double total, std::string_view detail) {
  if (!terminal_ || total <= 0) return;
  const auto now = std::chrono::steady_clock::now();
  if (visible_ && done < total && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  visible_ = true;
  constexpr int kWidth = 30;
  const double share = std::clamp(done / total, 0.0, 1.0);
  const int filled = static_cast<int>(share * kWidth);
  std::string bar(static_cast<std::size_t>(filled), '#');
  bar.resize(kWidth, '.');
  std::fprintf(stderr, "\r\033[K%.*s [%s] %3d %% %.*s", static_cast<int>(what.size()), what.data(),
               bar.c_str(), static_cast<int>(share * 100), static_cast<int>(detail.size()),
               detail.data());
  std::fflush(stderr);
}

void Progress::clear() {
  if (!visible_) return;
  visible_ = false;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
}

void install_soft_interrupt() {
  struct sigaction action {};
  action.sa_handler = [](int) { g_interrupted = 1; };
  sigaction(SIGINT, &action, nullptr);  // without SA_RESTART: a read that waits comes back
  std::signal(SIGPIPE, SIG_IGN);
}

bool take_interrupt() {
  const bool was = g_interrupted != 0;
  g_interrupted = 0;
  return was;
}

bool interrupted() { return g_interrupted != 0; }

void install_interrupt() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  std::signal(SIGPIPE, SIG_IGN);  // a reader that leaves shows up as a failed write
}

}  // namespace morphkv::cli

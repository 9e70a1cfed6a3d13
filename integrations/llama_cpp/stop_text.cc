#include "morphkv/llama_cpp/stop_text.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace morphkv::llama_cpp {

StopText::StopText(std::vector<std::string> stops) {
  for (std::string& text : stops) {
    if (text.empty()) throw std::invalid_argument("a stop text is empty: leave it out");
    Stop stop{.text = std::move(text), .border = {}};
    stop.border.assign(stop.text.size(), 0);
    for (std::size_t i = 1, n = 0; i < stop.text.size(); ++i) {
      while (n > 0 && stop.text[i] != stop.text[n]) n = stop.border[n - 1];
      if (stop.text[i] == stop.text[n]) ++n;
      stop.border[i] = n;
    }
    stops_.push_back(std::move(stop));
  }
}

// True when the byte completes the stop text.
bool StopText::advance(Stop& stop, char byte) {
  while (stop.matched > 0 && stop.text[stop.matched] != byte) {
    stop.matched = stop.border[stop.matched - 1];
  }
  if (stop.text[stop.matched] == byte) ++stop.matched;
  return stop.matched == stop.text.size();
}

std::string StopText::push(std::string_view text) {
  if (stopped_) return "";
  for (const char byte : text) {
    held_ += byte;
    std::size_t longest = 0;  // of the stop texts that are complete
    for (Stop& stop : stops_) {
      if (advance(stop, byte)) longest = std::max(longest, stop.text.size());
    }
    if (longest == 0) continue;
    stopped_ = true;
    held_.resize(held_.size() - longest);
    return std::exchange(held_, {});
  }
  std::size_t held = 0;
  for (const Stop& stop : stops_) held = std::max(held, stop.matched);
  std::string shown = held_.substr(0, held_.size() - held);
  held_.erase(0, shown.size());
  return shown;
}

std::string StopText::finish() { return stopped_ ? "" : std::exchange(held_, {}); }

}  // namespace morphkv::llama_cpp

#include "morphkv/snapshot.h"

#include <algorithm>

namespace morphkv {
namespace {

using Violations = std::vector<std::string>;

std::string in_head(std::size_t head, const std::string& what) {
  return "head " + std::to_string(head) + ": " + what;
}

void check_bound(const LayerSnapshot& layer, std::size_t h, Violations& out) {
  const auto rows = layer.heads[h].slots.size();
  if (layer.evicts && rows > static_cast<std::size_t>(layer.config.budget)) {
    out.push_back(
        in_head(h, std::to_string(rows) + " rows, budget " + std::to_string(layer.config.budget)));
  }
  if (layer.heads[h].positions.size() != rows) {
    out.push_back(in_head(h, "as many positions as slots are needed"));
  }
}

void check_order(const LayerSnapshot& layer, std::size_t h, Violations& out) {
  Position last = -1;
  for (const Position position : layer.heads[h].positions) {
    if (position <= last || position >= layer.offset) {
      out.push_back(in_head(h, "position " + std::to_string(position) + " after " +
                                   std::to_string(last) + ", offset " +
                                   std::to_string(layer.offset)));
      return;
    }
    last = position;
  }
}

void check_slots(const LayerSnapshot& layer, std::size_t h, Violations& out) {
  auto slots = layer.heads[h].slots;
  std::sort(slots.begin(), slots.end());
  if (std::adjacent_find(slots.begin(), slots.end()) != slots.end()) {
    out.push_back(in_head(h, "a slot is used twice"));
  }
  if (!slots.empty() && (slots.front() < 0 || slots.back() >= layer.max_slots)) {
    out.push_back(in_head(h, "a slot lies outside [0, " + std::to_string(layer.max_slots) + ")"));
  }
  auto common = layer.heads.front().slots;
  std::sort(common.begin(), common.end());
  if (slots != common) out.push_back(in_head(h, "uses other slots than head 0"));
}

void check_protected(const LayerSnapshot& layer, std::size_t h, Violations& out) {
  const auto& held = layer.heads[h].positions;
  const auto holds = [&](Position p) { return std::binary_search(held.begin(), held.end(), p); };
  const Position n_sink = std::min<Position>(layer.config.n_sink, layer.offset);
  for (Position p = 0; p < n_sink; ++p) {
    if (!holds(p)) out.push_back(in_head(h, "sink " + std::to_string(p) + " was evicted"));
  }
  const Position tail = std::min<Position>(layer.config.protected_tail(), layer.offset);
  for (Position p = layer.offset - tail; p < layer.offset; ++p) {
    if (!holds(p)) out.push_back(in_head(h, "recent row " + std::to_string(p) + " was evicted"));
  }
}

}  // namespace

LayerSnapshot take_snapshot(const LayerRetention& layer, Position offset, int max_slots) {
  LayerSnapshot snapshot{layer.config(), layer.evicts(), offset, max_slots, {}};
  for (int h = 0; h < layer.n_heads(); ++h) {
    const KeepSet& keep = layer.keep(h);
    snapshot.heads.push_back({{keep.slots().begin(), keep.slots().end()},
                              {keep.positions().begin(), keep.positions().end()}});
  }
  return snapshot;
}

std::vector<std::string> violations(const LayerSnapshot& layer) {
  Violations out;
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    check_bound(layer, h, out);
    check_order(layer, h, out);
    check_slots(layer, h, out);
    check_protected(layer, h, out);
  }
  return out;
}

}  // namespace morphkv

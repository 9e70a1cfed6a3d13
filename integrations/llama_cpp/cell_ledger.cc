#include "cell_ledger.h"

#include <algorithm>
#include <cassert>

namespace morphkv::llama_cpp {

CellLedger::CellLedger(int n_cells, int n_sink)
    : n_cells_(n_cells), n_sink_(n_sink), in_use_(static_cast<std::size_t>(n_cells), false) {
  sinks_.reserve(static_cast<std::size_t>(n_sink));
  cells_.reserve(static_cast<std::size_t>(n_cells));
}

void CellLedger::append(int cell) {
  assert(cell >= 0 && cell < n_cells_ && is_free(cell));
  in_use_[static_cast<std::size_t>(cell)] = true;
  if (static_cast<int>(sinks_.size()) < n_sink_) {
    sinks_.push_back(cell);
    first_ = static_cast<Position>(sinks_.size());
  } else {
    cells_.push_back(cell);
  }
}

void CellLedger::plan_free(int n, FreePlan& plan) const {
  assert(n <= static_cast<int>(cells_.size()));
  plan.first = first_;
  plan.last = first_ + n;
  plan.cells.assign(cells_.begin(), cells_.begin() + n);
  std::sort(plan.cells.begin(), plan.cells.end());
}

void CellLedger::free(const FreePlan& plan) {
  assert(plan.first == first_);
  for (const int cell : plan.cells) in_use_[static_cast<std::size_t>(cell)] = false;
  cells_.erase(cells_.begin(),
               cells_.begin() + static_cast<std::ptrdiff_t>(plan.last - plan.first));
  first_ = plan.last;
}

std::vector<int> CellLedger::cells_in_use() const {
  std::vector<int> cells = sinks_;
  cells.insert(cells.end(), cells_.begin(), cells_.end());
  std::sort(cells.begin(), cells.end());
  return cells;
}

void CellLedger::compact(std::span<const int> cells, int n_cells) {
  n_cells_ = n_cells;
  in_use_.assign(static_cast<std::size_t>(n_cells), false);
  const auto compact_all = [&](std::vector<int>& list) {
    for (int& cell : list) {
      const auto place = std::lower_bound(cells.begin(), cells.end(), cell) - cells.begin();
      cell = static_cast<int>(place);
      in_use_[static_cast<std::size_t>(place)] = true;
    }
  };
  compact_all(sinks_);
  compact_all(cells_);
  cells_.shrink_to_fit();
  cells_.reserve(static_cast<std::size_t>(n_cells));
}

void CellLedger::clear() {
  sinks_.clear();
  cells_.clear();
  std::fill(in_use_.begin(), in_use_.end(), false);
  first_ = 0;
}

void CellLedger::load(Position offset, std::span<const int> cells) {
  clear();
  const auto sinks = std::min<std::size_t>(static_cast<std::size_t>(n_sink_), cells.size());
  sinks_.assign(cells.begin(), cells.begin() + static_cast<std::ptrdiff_t>(sinks));
  cells_.assign(cells.begin() + static_cast<std::ptrdiff_t>(sinks), cells.end());
  first_ = offset - static_cast<Position>(cells_.size());
  for (const int cell : cells) in_use_[static_cast<std::size_t>(cell)] = true;
}

LedgerSnapshot CellLedger::snapshot() const {
  LedgerSnapshot s{n_cells_, n_sink_, offset(), {}, sinks_};
  for (std::size_t i = 0; i < sinks_.size(); ++i) s.labels.push_back(static_cast<Position>(i));
  for (std::size_t i = 0; i < cells_.size(); ++i) {
    s.labels.push_back(first_ + static_cast<Position>(i));
    s.cells.push_back(cells_[i]);
  }
  return s;
}

std::vector<std::string> violations(const LedgerSnapshot& s) {
  std::vector<std::string> out;
  auto cells = s.cells;
  std::sort(cells.begin(), cells.end());
  if (std::adjacent_find(cells.begin(), cells.end()) != cells.end()) {
    out.push_back("a cell carries two labels");
  }
  if (!cells.empty() && (cells.front() < 0 || cells.back() >= s.n_cells)) {
    out.push_back("a cell lies outside [0, " + std::to_string(s.n_cells) + ")");
  }
  if (s.labels.size() != s.cells.size()) out.push_back("as many labels as cells are needed");
  const auto n_sink = static_cast<std::size_t>(std::min<Position>(s.n_sink, s.offset));
  for (std::size_t i = 0; i < n_sink; ++i) {
    if (i >= s.labels.size() || s.labels[i] != static_cast<Position>(i)) {
      out.push_back("sink " + std::to_string(i) + " is not held");
    }
  }
  Position expected = s.offset;
  for (std::size_t i = s.labels.size(); i-- > n_sink;) {
    if (s.labels[i] != --expected) {
      out.push_back("label " + std::to_string(s.labels[i]) + " stands where " +
                    std::to_string(expected) + " is due");
      break;
    }
  }
  return out;
}

}  // namespace morphkv::llama_cpp

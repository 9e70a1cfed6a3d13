// Which engine cell carries which label, for one sequence. The engine sees labels (the token
// positions it wrote); each head of each layer may hold another token's row in that cell (KeepSet,
// with cell = slot). Pure logic: knows no engine.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "morphkv/keep_set.h"

namespace morphkv::llama_cpp {

// Labels [first, last) leave the engine; their cells, ascending.
struct FreePlan {
  Position first = 0;
  Position last = 0;
  std::vector<int> cells;
};

struct LedgerSnapshot {
  int n_cells = 0;
  int n_sink = 0;
  Position offset = 0;
  std::vector<Position> labels;  // ascending
  std::vector<int> cells;        // cells[i] carries labels[i]
};

class CellLedger {
 public:
  // Room for n_cells cells, allocated here once.
  CellLedger(int n_cells, int n_sink);

  // Tokens seen = label of the next token.
  Position offset() const { return first_ + static_cast<Position>(cells_.size()); }
  // Cells in use.
  int rows() const { return static_cast<int>(sinks_.size() + cells_.size()); }

  // Whether `cell` carries no label.
  bool is_free(int cell) const { return !in_use_[static_cast<std::size_t>(cell)]; }
  // The engine wrote the next token to `cell`, which was free.
  void append(int cell);
  // The n oldest labels that are no sinks: what the engine then sees are the sinks and the most
  // recent labels, so positions stay consecutive and a sliding window loses nothing. Reuses the
  // memory of `plan`.
  void plan_free(int n, FreePlan& plan) const;
  // The engine has dropped those labels.
  void free(const FreePlan& plan);

  // Every cell in use, ascending.
  std::vector<int> cells_in_use() const;
  // The rows have moved to a store of n_cells cells: what was in cells[i] is in cell i now. `cells`
  // ascend, and all that are in use are among them.
  void compact(std::span<const int> cells, int n_cells);
  void clear();
  // Takes over labels of which nothing is known but that they break no invariant (violations()):
  // `cells` are those of a snapshot with this offset.
  void load(Position offset, std::span<const int> cells);

  LedgerSnapshot snapshot() const;

 private:
  int n_cells_;
  int n_sink_;
  std::vector<int> sinks_;    // cell of label 0 .. n_sink - 1
  std::vector<int> cells_;    // cell of label first_ + i
  std::vector<bool> in_use_;  // [cell]
  Position first_ = 0;        // oldest label that is no sink
};

// Every broken invariant, in words: cells are used once and lie in [0, n_cells); the sinks are
// held; the other labels are consecutive and end at offset - 1.
std::vector<std::string> violations(const LedgerSnapshot& ledger);

}  // namespace morphkv::llama_cpp

// Cells put together as they stand in a table or a plot, and their means over the tasks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "summary.h"

namespace morphkv::eval {

struct Entry {
  Cell cell;
  int tasks = 1;  // that it is the mean of; a task counts once for each length
};

// A task at a length, read in one mode; or the mean over all those of the mode. Arms with a budget
// are rows, budgets columns; arms without one (full cache, control) are references.
//
// A mean is arithmetic, of perplexities geometric, and taken at each budget over the tasks that all
// arms have which were measured there at all. Its intervals are those of the tasks, combined as
// independent ones.
struct Block {
  std::string task = {};  // empty: the mean
  std::string mode = {};
  int tokens = 0;                      // 0: of several lengths
  std::vector<std::string> arms = {};  // in order of appearance
  std::vector<int> budgets = {};       // ascending
  std::vector<Entry> entries = {};
  std::vector<Entry> references = {};

  bool is_mean() const { return task.empty(); }
  bool is_text() const { return mode == kTextMode; }
  const Entry* find(std::string_view arm, int budget) const;
  const Entry* full() const;
  // That a mean is taken over at this budget.
  int tasks_at(int budget) const;
};

// By mode, in order of appearance: the mean, where there is more than one task, then the tasks.
// What full cache and control did in mode "whole" is not a block of its own where others refer to
// it.
std::vector<Block> to_blocks(const std::vector<Cell>& cells);

// "needle, guided, 4,096 tokens"
std::string heading_of(const Block& block);
// "full cache" for the arm "full".
std::string shown_name(std::string_view arm);
// "n 60", or "n 40-60" where the cells differ: trials, of a text stretches.
std::string count_of(const Block& block);

}  // namespace morphkv::eval

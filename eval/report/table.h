// The summary of a run on a terminal.
#pragma once

#include <string>
#include <vector>

#include "summary.h"

namespace morphkv::eval {

// A block of lines for each task, mode and length, and before those of a mode the mean over its
// tasks. Rows are arms, columns budgets, "-" what was not measured; what does not fit into `width`
// columns (at least 40) goes on below. Of a text: perplexity, KL divergence and top-1 agreement.
std::string to_table(const std::vector<Cell>& cells, int width);

}  // namespace morphkv::eval

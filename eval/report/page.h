// The summary of a run as one page for a browser.
#pragma once

#include <string>
#include <vector>

#include "results.h"
#include "summary.h"

namespace morphkv::eval {

// A whole HTML file that refers to no other and needs no script: for each mode the mean over its
// tasks and then each task, as plots of quality and of speed against the rows kept, and as a table.
// It is well-formed XML, too. No text of the arguments is taken for markup.
std::string to_page(const RunInfo& info, const std::vector<Cell>& cells);

}  // namespace morphkv::eval

// The summary of a run as JSON, for programs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "results.h"
#include "summary.h"

namespace morphkv::eval {

// Everything of the cells, in their order. Units are in the names; a number that is not finite and
// a share of a full cache that was not asked are null. `date` as given.
std::string to_json(const RunInfo& info, const std::vector<Cell>& cells, std::string_view date);

}  // namespace morphkv::eval

// What all trials of a run have in common, read from the model, the program and the machine.
#pragma once

#include <llama.h>

#include <string>

#include "results.h"

namespace morphkv::eval {

RunInfo describe_run(const llama_model* model, const std::string& path);

}  // namespace morphkv::eval

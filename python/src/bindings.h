// The parts of the module, one function for each file.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "morphkv/config.h"

namespace morphkv::python {

void bind_config(nanobind::module_& m);
void bind_cache(nanobind::module_& m);

// budget=512, n_sink=4, ...
std::string fields_text(const CacheConfig& config);

}  // namespace morphkv::python

// morphkv._core: what the package morphkv (python/morphkv) makes public.
#include <nanobind/nanobind.h>

#include "bindings.h"
#include "morphkv/version.h"

NB_MODULE(_core, m) {
  m.doc() = "Constant-size KV caches for LLM inference.";
  m.attr("version") = morphkv::kVersion;
  morphkv::python::bind_config(m);
  morphkv::python::bind_cache(m);
}

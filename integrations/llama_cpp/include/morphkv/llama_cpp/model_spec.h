// What caches need to know of a model, read from the metadata of a GGUF file; no weights are
// loaded.
#pragma once

#include <string>

#include "morphkv/builder.h"

namespace morphkv::llama_cpp {

// Layers, KV heads per layer and head dimension. Throws BadModelFile (model_file.h) for a file that
// cannot be read or does not say, and for a model whose layers differ in their KV heads, for which
// one configuration would be wrong.
ModelSpec read_model_spec(const std::string& path);

}  // namespace morphkv::llama_cpp

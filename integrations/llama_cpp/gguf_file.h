// Opening the metadata of a GGUF file, and what can be wrong with it before that.
#pragma once

#include <gguf.h>

#include <memory>
#include <string>

namespace morphkv::llama_cpp {

struct GgufDeleter {
  void operator()(gguf_context* context) const { gguf_free(context); }
};
using GgufPtr = std::unique_ptr<gguf_context, GgufDeleter>;

// Metadata only. Throws BadModelFile: missing, a directory, unreadable, no GGUF, damaged header.
GgufPtr open_gguf(const std::string& path);

}  // namespace morphkv::llama_cpp

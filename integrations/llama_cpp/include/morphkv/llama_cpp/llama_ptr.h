// Owners of llama.cpp's handles.
#pragma once

#include <llama.h>

#include <memory>

namespace morphkv::llama_cpp {

struct LlamaDeleter {
  void operator()(llama_model* model) const { llama_model_free(model); }
  void operator()(llama_context* context) const { llama_free(context); }
  void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
};

using ModelPtr = std::unique_ptr<llama_model, LlamaDeleter>;
using ContextPtr = std::unique_ptr<llama_context, LlamaDeleter>;
using SamplerPtr = std::unique_ptr<llama_sampler, LlamaDeleter>;

}  // namespace morphkv::llama_cpp

#include "morphkv/llama_cpp/engine_context.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <thread>

#include "morphkv/llama_cpp/evictor.h"

namespace morphkv::llama_cpp {

ggml_type cache_type(std::string_view field, std::string_view name) {
  std::string names;
  for (const ggml_type type : kCacheTypes) {
    if (name == ggml_type_name(type)) return type;
    names += (names.empty() ? "" : ", ") + std::string(ggml_type_name(type));
  }
  throw std::invalid_argument(std::string(field) + " '" + std::string(name) +
                              "' is not known: use one of " + names);
}

llama_context_params context_params(int threads, int batch, ggml_type type_k, ggml_type type_v) {
  llama_context_params params = llama_context_default_params();
  if (threads == 0) threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  params.n_threads = params.n_threads_batch = threads;
  params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(batch);
  params.type_k = type_k;
  params.type_v = type_v;
  params.no_perf = true;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  return params;
}

ContextPtr make_context(const llama_model* model, const llama_context_params& params) {
  // The engine does not write to the model.
  ContextPtr context(llama_init_from_model(const_cast<llama_model*>(model), params));
  if (!context) {
    throw EngineError("llama.cpp could not make a context of " + std::to_string(params.n_ctx) +
                      " cells; lower the budget, the micro-batch or the number of slots");
  }
  return context;
}

}  // namespace morphkv::llama_cpp

// How every context of llama.cpp is made here, bounded or not.
#pragma once

#include <llama.h>

#include <array>
#include <string_view>

#include "morphkv/llama_cpp/llama_ptr.h"

namespace morphkv::llama_cpp {

// Types that stored keys and values may have.
inline constexpr std::array kCacheTypes{GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};
// The one of that name. Throws std::invalid_argument that names `field`, the name and the types.
ggml_type cache_type(std::string_view field, std::string_view name);

// llama.cpp's defaults with flash attention, as many threads (0 = one per core) and at most `batch`
// tokens evaluated at once.
llama_context_params context_params(int threads, int batch, ggml_type type_k = GGML_TYPE_F16,
                                    ggml_type type_v = GGML_TYPE_F16);

// Throws EngineError with the number of cells when the engine makes no context. The model must
// outlive it.
ContextPtr make_context(const llama_model* model, const llama_context_params& params);

}  // namespace morphkv::llama_cpp

// What can be wrong with a turn before a slot takes it.
#pragma once

#include "morphkv/llama_cpp/slots.h"

namespace morphkv::llama_cpp {

// Most tokens of a guide: their queries are kept, of every layer and slot.
inline constexpr int kMostGuide = 64;

// Throws std::invalid_argument that names the value, the limit and the fix; TooLong.
void check_turn(const Turn& turn, const SlotsOptions& options, const llama_model* model);

}  // namespace morphkv::llama_cpp

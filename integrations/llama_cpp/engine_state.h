// The engine's bytes of one sequence (llama_state_seq_get_data). They tell how many sequences the
// context has, and the engine takes them only where there are as many; here they are told anew. The
// format is that of LLAMA_STATE_SEQ_VERSION; tests/saved_text_test.cc goes from one number to
// another.
#pragma once

#include <llama.h>

#include <cstdint>
#include <span>
#include <vector>

namespace morphkv::llama_cpp {

struct EngineState {
  std::vector<std::uint8_t> bytes;
  int sequences = 1;            // of the context that they come from
  llama_seq_id sequence = 0;    // in that context
  std::uint64_t swa_bytes = 0;  // at the end, of the layers with sliding windows
};

// Throws EngineError if the engine gives nothing.
EngineState get_engine_state(llama_context* context, llama_seq_id sequence);

// The same rows for a context of `sequences` sequences. Empty when the bytes are not in the format
// that this knows.
std::vector<std::uint8_t> bytes_for(const EngineState& state, int sequences);

}  // namespace morphkv::llama_cpp

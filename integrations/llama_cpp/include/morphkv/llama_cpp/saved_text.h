// A text that one model has read and written in part, as bytes: what `run`, `chat`, `serve` and
// Python's Session save, each for all of them. Checked as a whole before any of it is used.
// Versioned, sized, checksummed. It is good for the model and the cell types it was made with, in
// any context.
#pragma once

#include <llama.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/llama_cpp/chat_message.h"
#include "morphkv/llama_cpp/evictor.h"

namespace morphkv::llama_cpp {

// Most bytes of a file that is read as a saved text, wherever it is read.
inline constexpr std::uint64_t kMostSavedBytes = std::uint64_t{64} << 30;

struct SavedText {
  std::string model;                // model_signature()
  std::vector<llama_token> tokens;  // the text; checkpoint.offset() of them have been evaluated
  Checkpoint checkpoint;            // of a moment between two calls
  std::vector<ChatMessage> messages = {};  // whose text it is; empty where nobody knows

  // Throws std::invalid_argument when a call of after_decode() is due.
  std::string to_bytes() const;
  // Throws std::invalid_argument for bytes that are cut, damaged, of another version or in
  // themselves impossible, and for a budget above `most_budget`; the text says what.
  static SavedText from_bytes(std::string_view bytes, int most_budget = kMaxBudget);

  // Throws std::invalid_argument with what differs, both values, when the text is of another model
  // or of other cell types, or has a token that the model does not have.
  void require_model(const llama_model* model, ggml_type type_k, ggml_type type_v) const;
};

// What must be the same for rows to have a meaning: the model's name, architecture and sizes, the
// types of the cells, and the engine's format for them. One line.
std::string model_signature(const llama_model* model, ggml_type type_k, ggml_type type_v);

}  // namespace morphkv::llama_cpp

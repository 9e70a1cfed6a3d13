// Opening a GGUF model: what is wrong with a file is said before the engine is asked to load it.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/llama_cpp/llama_ptr.h"

namespace morphkv::llama_cpp {

// The file cannot be used as a model; what() is one line that names it and the reason.
class BadModelFile : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct LoadOptions {
  int n_gpu_layers = -1;    // as llama.cpp's -ngl; negative = all
  bool vocab_only = false;  // tokenizer and metadata, no weights
  // Called with 0.0 .. 1.0; returning false ends the loading.
  std::function<bool(float)> progress;
};

// Loads `path`. Throws BadModelFile for a missing, unreadable, truncated or non-GGUF file and for
// one that the engine refuses. Returns null only when `progress` ended the loading.
ModelPtr load_model(const std::string& path, const LoadOptions& options);

// The number under "<architecture>.<name>" in the model's metadata, or 0 when it is not there.
// Works with vocab_only.
int architecture_number(const llama_model* model, const std::string& name);

// Length in tokens that the model was trained for, or 0 when the file does not say. Works with
// vocab_only.
int trained_length(const llama_model* model);

// `text` as tokens, with the model's own start token if it wants one. Special tokens in the text
// are recognised only if `parse_special`.
std::vector<llama_token> tokenize(const llama_model* model, std::string_view text,
                                  bool parse_special);
// Text that goes on from other text: neither a start token nor the space that some tokenizers put
// before a text.
std::vector<llama_token> tokenize_continuation(const llama_model* model, std::string_view text,
                                               bool parse_special = false);

// The bytes of one token, as text to show; special tokens only if `special`. May be part of a UTF-8
// character.
std::string token_text(const llama_model* model, llama_token token, bool special);

}  // namespace morphkv::llama_cpp

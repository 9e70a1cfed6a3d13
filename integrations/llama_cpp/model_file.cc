#include "morphkv/llama_cpp/model_file.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>

#include "gguf_file.h"

namespace morphkv::llama_cpp {
namespace {

void require_gguf(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw BadModelFile("model file '" + path + "': " + why);
  };
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status))
    refuse("there is no such file; check the path given with -m");
  if (std::filesystem::is_directory(status))
    refuse("this is a directory; give the path of a .gguf file");
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse("it cannot be opened for reading; check its permissions");
  std::array<char, 4> magic{};
  file.read(magic.data(), magic.size());
  if (file.gcount() < 4)
    refuse("it has only " + std::to_string(file.gcount()) + " bytes; it is no GGUF model");
  if (std::string_view(magic.data(), 4) != "GGUF")
    refuse("it does not begin with 'GGUF'; it is no GGUF model");
}

// Bytes that the header promises.
std::uint64_t promised_bytes(const gguf_context* gguf) {
  std::uint64_t end = gguf_get_data_offset(gguf);
  for (std::int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
    end =
        std::max<std::uint64_t>(end, gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i) +
                                         gguf_get_tensor_size(gguf, i));
  }
  return end;
}

void require_whole(const std::string& path) {
  const std::uint64_t promised = promised_bytes(open_gguf(path).get());
  const std::uint64_t size = std::filesystem::file_size(path);
  if (size < promised) {
    throw BadModelFile("model file '" + path + "': it is cut short, " + std::to_string(size) +
                       " of " + std::to_string(promised) +
                       " bytes are there; fetch the file again");
  }
}

}  // namespace

GgufPtr open_gguf(const std::string& path) {
  require_gguf(path);
  GgufPtr gguf(gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = nullptr}));
  if (!gguf) {
    throw BadModelFile("model file '" + path +
                       "': its GGUF header is damaged or cut short; fetch the file again");
  }
  return gguf;
}

ModelPtr load_model(const std::string& path, const LoadOptions& options) {
  require_whole(path);
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = options.n_gpu_layers;
  params.vocab_only = options.vocab_only;
  struct Progress {
    const std::function<bool(float)>& call;
    bool ended = false;
  } progress{options.progress};
  if (options.progress) {
    params.progress_callback_user_data = &progress;
    params.progress_callback = [](float done, void* data) {
      auto& p = *static_cast<Progress*>(data);
      p.ended = p.ended || !p.call(done);
      return !p.ended;
    };
  }
  ModelPtr model(llama_model_load_from_file(path.c_str(), params));
  if (!model && !progress.ended) {
    throw BadModelFile("model file '" + path + "': llama.cpp " + llama_version() +
                       " cannot load it; its log has the reason");
  }
  return model;
}

int architecture_number(const llama_model* model, const std::string& name) {
  std::array<char, 256> text{};
  const auto value = [&](const std::string& key) -> std::string {
    return llama_model_meta_val_str(model, key.c_str(), text.data(), text.size()) < 0 ? ""
                                                                                      : text.data();
  };
  return std::atoi(value(value("general.architecture") + "." + name).c_str());
}

int trained_length(const llama_model* model) {
  return architecture_number(model, "context_length");
}

namespace {

std::vector<llama_token> tokens_of(const llama_vocab* vocab, std::string_view text,
                                   bool add_special, bool parse_special) {
  std::vector<llama_token> tokens(text.size() + 8);
  const auto call = [&] {
    return llama_tokenize(vocab, text.data(), static_cast<std::int32_t>(text.size()), tokens.data(),
                          static_cast<std::int32_t>(tokens.size()), add_special, parse_special);
  };
  int n = call();
  if (n < 0) {
    tokens.resize(static_cast<std::size_t>(-n));
    n = call();
  }
  tokens.resize(static_cast<std::size_t>(std::max(n, 0)));
  return tokens;
}

}  // namespace

std::vector<llama_token> tokenize(const llama_model* model, std::string_view text,
                                  bool parse_special) {
  return tokens_of(llama_model_get_vocab(model), text, true, parse_special);
}

std::vector<llama_token> tokenize_continuation(const llama_model* model, std::string_view text,
                                               bool parse_special) {
  const llama_vocab* vocab = llama_model_get_vocab(model);
  if (!text.empty() && llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_SPM) {
    // SentencePiece puts a space before what it is given; not so behind a line end, which is then
    // taken off.
    const auto line_end = tokens_of(vocab, "\n", false, parse_special);
    const auto whole = tokens_of(vocab, "\n" + std::string(text), false, parse_special);
    const auto [end, rest] =
        std::mismatch(line_end.begin(), line_end.end(), whole.begin(), whole.end());
    if (end == line_end.end()) return {rest, whole.end()};
  }
  return tokens_of(vocab, text, false, parse_special);
}

std::string token_text(const llama_model* model, llama_token token, bool special) {
  const llama_vocab* vocab = llama_model_get_vocab(model);
  std::string text(64, '\0');
  const auto call = [&] {
    return llama_token_to_piece(vocab, token, text.data(), static_cast<std::int32_t>(text.size()),
                                0, special);
  };
  int n = call();
  if (n < 0) {
    text.resize(static_cast<std::size_t>(-n));
    n = call();
  }
  text.resize(static_cast<std::size_t>(std::max(n, 0)));
  return text;
}

}  // namespace morphkv::llama_cpp

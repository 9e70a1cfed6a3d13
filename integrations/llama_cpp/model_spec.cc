#include "morphkv/llama_cpp/model_spec.h"

#include <cstdint>
#include <limits>
#include <optional>

#include "gguf_file.h"
#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::llama_cpp {
namespace {

// The metadata of one architecture: keys begin with its name.
class Metadata {
 public:
  explicit Metadata(const std::string& path) : path_(path), gguf_(open_gguf(path)) {
    const std::int64_t key = gguf_find_key(gguf_.get(), "general.architecture");
    if (key < 0 || gguf_get_kv_type(gguf_.get(), key) != GGUF_TYPE_STRING) {
      refuse("it has no general.architecture; it is no language model");
    }
    architecture_ = gguf_get_val_str(gguf_.get(), key);
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw BadModelFile("model file '" + path_ + "': " + why);
  }

  // A count of at least 1; none when the key is not there. An array counts if all its elements
  // agree.
  std::optional<int> count(const std::string& name) const {
    const std::string full = architecture_ + "." + name;
    const std::int64_t key = gguf_find_key(gguf_.get(), full.c_str());
    if (key < 0) return std::nullopt;
    std::int64_t value = 0;
    switch (gguf_get_kv_type(gguf_.get(), key)) {
      case GGUF_TYPE_UINT32:
        value = gguf_get_val_u32(gguf_.get(), key);
        break;
      case GGUF_TYPE_INT32:
        value = gguf_get_val_i32(gguf_.get(), key);
        break;
      case GGUF_TYPE_ARRAY:
        value = common_element(key, full);
        break;
      default:
        refuse(full + " is no whole number");
    }
    if (value < 1 || value > std::numeric_limits<int>::max()) {
      refuse(full + " is " + std::to_string(value) + ", which no cache of rows can serve");
    }
    return static_cast<int>(value);
  }

  int required(const std::string& name) const {
    const auto value = count(name);
    if (!value) refuse("it does not say " + architecture_ + "." + name);
    return *value;
  }

 private:
  std::int64_t common_element(std::int64_t key, const std::string& full) const {
    const gguf_type type = gguf_get_arr_type(gguf_.get(), key);
    const std::size_t n = gguf_get_arr_n(gguf_.get(), key);
    if ((type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_INT32) || n == 0) {
      refuse(full + " is no list of whole numbers");
    }
    const auto* values = static_cast<const std::uint32_t*>(gguf_get_arr_data(gguf_.get(), key));
    for (std::size_t i = 1; i < n; ++i) {
      if (values[i] != values[0]) {
        refuse(full + " differs between layers: make one cache per layer yourself");
      }
    }
    return type == GGUF_TYPE_INT32 ? static_cast<std::int32_t>(values[0]) : std::int64_t{values[0]};
  }

  std::string path_;
  GgufPtr gguf_;
  std::string architecture_;
};

}  // namespace

ModelSpec read_model_spec(const std::string& path) {
  const Metadata metadata(path);
  const int heads = metadata.required("attention.head_count");
  ModelSpec spec;
  spec.n_layers = metadata.required("block_count");
  spec.n_heads_kv = metadata.count("attention.head_count_kv").value_or(heads);
  const auto key_length = metadata.count("attention.key_length");
  spec.head_dim = key_length ? *key_length : metadata.required("embedding_length") / heads;
  return spec;
}

}  // namespace morphkv::llama_cpp

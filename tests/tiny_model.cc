#include "tiny_model.h"

#include <ggml-backend.h>
#include <gguf.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace morphkv::test {
namespace {

struct GgufDeleter {
  void operator()(gguf_context* context) const { gguf_free(context); }
};
using GgufPtr = std::unique_ptr<gguf_context, GgufDeleter>;

// Sets `<architecture>.<key>`.
class Metadata {
 public:
  Metadata(gguf_context* gguf, std::string prefix) : gguf_(gguf), prefix_(std::move(prefix)) {}
  void number(const char* key, int value) {
    gguf_set_val_u32(gguf_, (prefix_ + key).c_str(), static_cast<std::uint32_t>(value));
  }
  void numbers(const char* key, const std::vector<std::uint32_t>& values) {
    gguf_set_arr_data(gguf_, (prefix_ + key).c_str(), GGUF_TYPE_UINT32, values.data(),
                      values.size());
  }
  void real(const char* key, float value) {
    gguf_set_val_f32(gguf_, (prefix_ + key).c_str(), value);
  }

 private:
  gguf_context* gguf_;
  std::string prefix_;
};

std::vector<std::string> token_names(const TinyModel& model) {
  std::vector<std::string> names;
  if (model.pieces.empty()) {
    for (int i = 0; i < model.n_vocab; ++i) names.push_back(std::to_string(i));
    return names;
  }
  names = {"<unk>", "<s>", "</s>"};
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  for (std::size_t byte = 0; byte < 256; ++byte) {
    names.push_back(std::string("<0x") + kDigits[byte / 16] + kDigits[byte % 16] + '>');
  }
  names.insert(names.end(), model.pieces.begin(), model.pieces.end());
  return names;
}

std::vector<std::int32_t> token_types(std::size_t tokens) {
  std::vector<std::int32_t> types(tokens, LLAMA_TOKEN_TYPE_NORMAL);
  std::fill_n(types.begin(), kFirstPiece, LLAMA_TOKEN_TYPE_BYTE);
  types[0] = LLAMA_TOKEN_TYPE_UNKNOWN;
  types[1] = types[2] = LLAMA_TOKEN_TYPE_CONTROL;
  return types;
}

void describe_vocabulary(gguf_context* gguf, const TinyModel& model) {
  const std::vector<std::string> names = token_names(model);
  std::vector<const char*> pointers;
  for (const std::string& name : names) pointers.push_back(name.c_str());
  const std::vector<float> scores(names.size(), 0.0f);
  gguf_set_val_str(gguf, "tokenizer.ggml.model", model.pieces.empty() ? "test" : "llama");
  gguf_set_arr_str(gguf, "tokenizer.ggml.tokens", pointers.data(), pointers.size());
  if (!model.pieces.empty()) {
    const auto types = token_types(names.size());
    gguf_set_arr_data(gguf, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(),
                      types.size());
  }
  gguf_set_arr_data(gguf, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, scores.data(), scores.size());
  if (model.eos >= 0) {
    gguf_set_val_u32(gguf, "tokenizer.ggml.eos_token_id", static_cast<std::uint32_t>(model.eos));
  }
  if (model.bos >= 0) {
    gguf_set_val_u32(gguf, "tokenizer.ggml.bos_token_id", static_cast<std::uint32_t>(model.bos));
    gguf_set_val_bool(gguf, "tokenizer.ggml.add_bos_token", model.add_bos);
  }
  if (!model.chat_template.empty()) {
    gguf_set_val_str(gguf, "tokenizer.chat_template", model.chat_template.c_str());
  }
}

void describe_mla(Metadata& meta) {
  constexpr int kRank = 64;
  constexpr int kRope = 32;
  meta.number("attention.head_count_kv", 1);
  meta.number("attention.kv_lora_rank", kRank);
  meta.number("attention.key_length", kRank + kRope);
  meta.number("attention.value_length", kRank);
  meta.number("attention.key_length_mla", 64);
  meta.number("attention.value_length_mla", 32);
  meta.number("rope.dimension_count", kRope);
}

// Keys that an architecture does not ask for do no harm.
GgufPtr describe(const TinyModel& model) {
  GgufPtr gguf(gguf_init_empty());
  const int n_embd = model.n_head * model.head_dim;
  gguf_set_val_str(gguf.get(), "general.architecture", model.architecture.c_str());
  Metadata meta(gguf.get(), model.architecture + ".");
  meta.number("vocab_size", static_cast<int>(token_names(model).size()));
  meta.number("context_length", model.trained_length);
  meta.number("embedding_length", n_embd);
  meta.number("block_count", model.n_layer);
  meta.number("feed_forward_length", 2 * n_embd);
  meta.number("attention.head_count", model.n_head);
  meta.number("attention.head_count_kv", model.n_head_kv);
  meta.number("attention.key_length", model.head_dim);
  meta.number("attention.value_length", model.head_dim);
  meta.number("rope.dimension_count", model.head_dim);
  meta.real("attention.layer_norm_epsilon", 1e-5f);
  meta.real("attention.layer_norm_rms_epsilon", 1e-5f);
  if (model.sliding_window > 0) {
    meta.number("attention.sliding_window", model.sliding_window);
    meta.number("attention.sliding_window_pattern", model.swa_pattern);
  }
  if (model.architecture == "mamba") {
    meta.number("ssm.conv_kernel", 4);
    meta.number("ssm.inner_size", 2 * n_embd);
    meta.number("ssm.state_size", 16);
    meta.number("ssm.time_step_rank", 4);
  }
  if (model.architecture == "lfm2") {  // attention in every other layer, convolutions between
    std::vector<std::uint32_t> heads(static_cast<std::size_t>(model.n_layer), 0);
    for (std::size_t i = 1; i < heads.size(); i += 2) {
      heads[i] = static_cast<std::uint32_t>(model.n_head_kv);
    }
    meta.numbers("attention.head_count_kv", heads);
    meta.number("shortconv.l_cache", 3);
  }
  if (model.architecture == "gemma2") {
    meta.real("attn_logit_softcapping", 1.0f);  // low, so that it matters
    meta.real("final_logit_softcapping", 30.0f);
  }
  if (model.mla) {
    describe_mla(meta);
    meta.number("attention.q_lora_rank", 64);
    meta.number("leading_dense_block_count", 1);
    meta.number("expert_count", 2);
    meta.number("expert_used_count", 1);
    meta.number("expert_shared_count", 1);
    meta.number("expert_feed_forward_length", n_embd);
    meta.number("expert_gating_func", 2);
    meta.number("attention.indexer.head_count", 64);
    meta.number("attention.indexer.key_length", 128);
    meta.number("attention.indexer.top_k", 64);
  }
  describe_vocabulary(gguf.get(), model);
  return gguf;
}

// Normal numbers that keep the size of what passes through a matrix; norms are about 1. Scales and
// rotation factors, which the engine takes when they are there, are exactly 1.
void fill(ggml_tensor* tensor, void* seed) {
  const std::string_view name = tensor->name;
  std::uint32_t hash = *static_cast<const std::uint32_t*>(seed);
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  std::mt19937 generator(hash);
  const bool is_norm = name.find("norm") != std::string_view::npos && name.ends_with("weight");
  const bool is_matrix = tensor->ne[1] > 1;
  const float spread = is_matrix ? 1.5f / std::sqrt(static_cast<float>(tensor->ne[0])) : 0.1f;
  std::normal_distribution<float> normal(is_norm ? 1.0f : 0.0f, spread);
  const bool is_factor = name.ends_with("scale") || name.starts_with("rope_freqs");
  std::vector<float> values(static_cast<std::size_t>(ggml_nelements(tensor)));
  for (float& value : values) value = is_factor ? 1.0f : normal(generator);
  if (tensor->type == GGML_TYPE_F32) {
    ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
  } else {
    std::vector<ggml_fp16_t> halves(values.size());
    ggml_fp32_to_fp16_row(values.data(), halves.data(), ggml_nelements(tensor));
    ggml_backend_tensor_set(tensor, halves.data(), 0, ggml_nbytes(tensor));
  }
}

}  // namespace

llama_cpp::ModelPtr make_tiny_model(const TinyModel& model) {
  const GgufPtr gguf = describe(model);
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  params.progress_callback = [](float, void*) { return true; };
  std::uint32_t seed = model.seed;
  llama_cpp::ModelPtr made(llama_model_init_from_user(gguf.get(), fill, &seed, params));
  if (!made) {
    throw std::runtime_error("llama.cpp " + std::string(llama_version()) +
                             " refuses the tiny model of architecture " + model.architecture);
  }
  return made;
}

void write_tiny_model(const TinyModel& model, const std::string& path) {
  llama_model_save_to_file(make_tiny_model(model).get(), path.c_str());
}

}  // namespace morphkv::test

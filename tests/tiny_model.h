// Tiny models with random weights, made in memory: they stand for architectures of which no small
// trained model is at hand. Their vocabulary is llama.cpp's test tokenizer, which cuts text into
// pieces of five bytes, and a token's text is its number in hexadecimal; or SentencePiece.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "morphkv/llama_cpp/llama_ptr.h"

namespace morphkv::test {

inline constexpr int kFirstPiece = 3 + 256;  // <unk>, <s>, </s> and the bytes

struct TinyModel {
  // A name of llama.cpp's, as in a GGUF file: llama, gemma2, gemma3, bloom, mamba, lfm2, deepseek2,
  // ...
  std::string architecture = "llama";
  int n_layer = 2;
  int n_head = 4;
  int n_head_kv = 2;
  int head_dim = 32;
  int n_vocab = 96;
  int trained_length = 4096;
  int sliding_window = 0;  // 0 = none, where the architecture lets one choose
  int swa_pattern = 2;     // each swa_pattern-th layer sees everything, the others the window
  int eos = -1;            // token that ends an answer; -1 = none
  int bos = -1;            // token that begins a text; -1 = none
  bool add_bos = false;    // whether the tokenizer is to begin each text with it
  std::string chat_template = {};  // Jinja; empty = none
  // Behind kFirstPiece tokens that SentencePiece always has, in place of n_vocab; empty = the test
  // tokenizer. "\u2581" is a space.
  std::vector<std::string> pieces = {};
  bool mla = false;  // deepseek2: one latent head instead of heads of keys and values
  std::uint32_t seed = 1;
};

// Throws std::runtime_error when llama.cpp refuses it.
llama_cpp::ModelPtr make_tiny_model(const TinyModel& model);

// The same model as a GGUF file.
void write_tiny_model(const TinyModel& model, const std::string& path);

}  // namespace morphkv::test

// A decode loop of one's own with llama.cpp, in constant memory: four lines of it belong to
// morphkv (marked >>>). Usage: llama_step MODEL.gguf [TOKENS]. Generates TOKENS tokens at a budget
// of 64 rows per KV head.
#include <llama.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/llama_ptr.h"

using morphkv::llama_cpp::ContextPtr;
using morphkv::llama_cpp::Evictor;
using morphkv::llama_cpp::ModelPtr;
using morphkv::llama_cpp::SamplerPtr;

namespace {

void generate(const char* path, int n_tokens) {
  const ModelPtr model(llama_model_load_from_file(path, llama_model_default_params()));
  if (!model) throw std::runtime_error(std::string("cannot load ") + path);
  llama_context_params params = llama_context_default_params();

  // >>> Before the context is made: say what to keep, and let the evictor set up the context.
  Evictor evictor(model.get(), {.cache = {.budget = 64,
                                          .n_sink = 4,
                                          .window = 8,
                                          .pool = 7,
                                          .queries = morphkv::QuerySource::kAttention}});
  evictor.attach(params);
  const ContextPtr context(llama_init_from_model(model.get(), params));
  evictor.bind(context.get());

  const llama_vocab* vocab = llama_model_get_vocab(model.get());
  const SamplerPtr sampler(llama_sampler_init_greedy());
  const std::string prompt = "Once upon a time";
  llama_token tokens[64];
  int n = llama_tokenize(vocab, prompt.data(), static_cast<int>(prompt.size()), tokens, 64, true,
                         false);
  for (int i = 0; i < n_tokens; ++i) {
    if (llama_decode(context.get(), llama_batch_get_one(tokens, n)) != 0) {
      throw std::runtime_error("llama_decode failed");
    }
    // >>> After each llama_decode: evict down to the budget.
    evictor.after_decode();

    tokens[0] = llama_sampler_sample(sampler.get(), context.get(), -1);
    n = 1;
    char text[64];
    const int length = llama_token_to_piece(vocab, tokens[0], text, sizeof text, 0, false);
    std::printf("%.*s", length, text);
  }

  const auto stats = evictor.stats();
  std::printf("\n%lld tokens seen, %d rows per KV head kept, %zu bytes of %zu\n",
              static_cast<long long>(stats.tokens_seen), stats.rows_kept, stats.kv_bytes_kept,
              stats.kv_bytes_full);
  if (stats.rows_kept > 64 || !evictor.violations().empty())
    throw std::runtime_error("the bound was broken");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: llama_step MODEL.gguf [TOKENS]\n");
    return 2;
  }
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  try {
    generate(argv[1], argc > 2 ? std::atoi(argv[2]) : 200);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "llama_step: %s\n", error.what());
    return 1;
  }
  return 0;
}

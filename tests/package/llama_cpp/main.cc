// A project that knows only the installed integration: its header, the core and llama.cpp behind.
#include <llama.h>
#include <morphkv/llama_cpp/evictor.h>

#include <cstdio>
#include <stdexcept>

int main() {
  morphkv::llama_cpp::EvictorOptions options;
  options.cache.budget = 0;  // refused before the model is looked at
  try {
    morphkv::llama_cpp::Evictor evictor(nullptr, options);
  } catch (const std::invalid_argument& error) {
    std::printf("%s\n%s\n", error.what(), llama_print_system_info());
    return 0;
  }
  return 1;
}

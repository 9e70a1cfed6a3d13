#include "describe_run.h"

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>

#include "measure.h"
#include "morphkv/archive.h"
#include "morphkv/version.h"

namespace morphkv::eval {
namespace {

// The checksum of the size and the first MiB: metadata, tokenizer and some weights.
std::string fingerprint(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes = std::to_string(std::filesystem::file_size(path)) + "\n";
  const std::size_t size = bytes.size();
  bytes.resize(size + (1 << 20));
  file.read(bytes.data() + size, 1 << 20);
  bytes.resize(size + static_cast<std::size_t>(file.gcount()));
  const std::uint64_t hash = checksum(bytes);
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  for (int shift = 60; shift >= 0; shift -= 4) hex += kDigits[hash >> shift & 15];
  return hex;
}

}  // namespace

RunInfo describe_run(const llama_model* model, const std::string& path) {
  std::array<char, 128> description{};
  llama_model_desc(model, description.data(), description.size());
  return {.model = std::filesystem::path(path).filename().string(),
          .model_fingerprint = fingerprint(path),
          .model_description = description.data(),
          .version = std::string(kVersion),
          .engine = "llama.cpp " + std::string(llama_version()),
          .cpu = cpu_name(),
          .seed = 0};
}

}  // namespace morphkv::eval

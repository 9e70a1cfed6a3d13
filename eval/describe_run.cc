#include "describe_run.h"

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>

#include "morphkv/version.h"

namespace morphkv::eval {
namespace {

// FNV-1a of the size and the first MiB: metadata, tokenizer and some weights.
std::string fingerprint(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes = std::to_string(std::filesystem::file_size(path)) + "\n";
  const std::size_t size = bytes.size();
  bytes.resize(size + (1 << 20));
  file.read(bytes.data() + size, 1 << 20);
  bytes.resize(size + static_cast<std::size_t>(file.gcount()));
  std::uint64_t hash = 0xCBF29CE484222325ull;
  for (const char byte : bytes) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001B3ull;
  }
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  for (int shift = 60; shift >= 0; shift -= 4) hex += kDigits[hash >> shift & 15];
  return hex;
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
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

// The trials of a run on disk: a file of JSON lines that only grows, so that a run which was
// interrupted goes on where it ended.
#pragma once

#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "trial.h"

namespace morphkv::eval {

// What all trials of a file have in common: its first line.
struct RunInfo {
  std::string model;        // file name without folder
  std::string model_sha256; // of the first MiB and the size: tells models apart, quickly
  std::string model_description;  // llama_model_desc()
  std::string version;      // of morphkv
  std::string engine;       // of llama.cpp
  std::string cpu;
  std::uint64_t seed = 0;
};

class Results {
 public:
  // Opens or creates `path`. A last line that was cut off is dropped. Throws std::runtime_error
  // with the path and the line for a file that is none of ours, and std::invalid_argument for one
  // of another model or seed.
  Results(std::string path, const RunInfo& info);
  // Only reads.
  static Results read(const std::string& path);

  bool has(const TrialKey& key) const;
  // Writes and flushes a line. Throws std::runtime_error.
  void add(const Trial& trial);
  const RunInfo& info() const;
  const std::vector<Trial>& trials() const;
};

}  // namespace morphkv::eval

// The trials of a run on disk: a file of JSON lines that only grows, so that a run which was
// interrupted goes on where it ended. One process writes a file at a time.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "trial.h"

namespace morphkv::eval {

// What all trials of a file have in common: its first line.
struct RunInfo {
  std::string model;              // file name without folder
  std::string model_fingerprint;  // of the size and the first MiB: tells models apart, quickly
  std::string model_description;  // llama_model_desc()
  std::string version;            // of morphkv
  std::string engine;             // of llama.cpp
  std::string cpu;
  std::uint64_t seed = 0;
};

class Results {
 public:
  // Opens or creates `path`. A last line that was cut off is dropped. Throws std::runtime_error
  // with the path and the line for a file that is none of ours, and std::invalid_argument for one
  // of another model (by model_fingerprint) or seed; the file stays as it is then.
  Results(std::string path, const RunInfo& info);
  // Only reads: a last line that was cut off is passed over. Throws std::runtime_error.
  static Results read(const std::string& path);

  bool has(const TrialKey& key) const { return index_.contains(key); }
  // Null if it is not there. Valid until the next add().
  const Trial* find(const TrialKey& key) const;
  // Writes and flushes a line. What is no UTF-8 in the text is replaced. Throws std::runtime_error
  // when the line cannot be written (the file then ends with the line before and is closed),
  // std::invalid_argument for a number that is not finite and for a name that is no UTF-8,
  // std::logic_error for a key that is there, and when the file is closed, as after read().
  void add(const Trial& trial);
  // Of the file: a run that is resumed with another version or CPU keeps those of its beginning.
  const RunInfo& info() const { return info_; }
  const std::vector<Trial>& trials() const { return trials_; }

 private:
  Results() = default;

  void load(const std::string& text);
  void start(const std::string& header);
  void write(const std::string& line);

  std::string path_;
  RunInfo info_;
  std::vector<Trial> trials_;
  std::map<TrialKey, std::size_t> index_;  // of trials_
  std::ofstream out_;                      // closed after read() and a failed write
  std::uintmax_t size_ = 0;                // of the whole lines, in bytes
};

}  // namespace morphkv::eval

// What `morphkv run` reports: the JSON record and the table on standard error.
#pragma once

#include <cstdint>
#include <string>

#include "morphkv/llama_cpp/session.h"

namespace morphkv::cli {

struct RunRecord {
  std::string model;
  ResolvedSettings settings;
  llama_cpp::SessionOptions options;
  llama_cpp::SessionResult result;
  std::string text;
  std::int64_t peak_rss_bytes = 0;
};

// Most memory that this process has had resident, in bytes.
std::int64_t peak_rss_bytes();

// Fields and units: docs/run.md.
std::string to_json(const RunRecord& record);
std::string to_table(const RunRecord& record);

// Throws std::invalid_argument when a file cannot be written at `path`, given with `option`;
// touches nothing that is there.
void require_writable(const std::string& path, const std::string& option = "--json");
// Writes beside the file and renames: a reader never sees half a record (a device or a pipe is
// written directly). Throws std::runtime_error.
void write_file(const std::string& path, const std::string& text);

}  // namespace morphkv::cli

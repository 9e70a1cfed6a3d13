// Whole files: read at once, and replaced so that nobody ever sees half of one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace morphkv {

inline constexpr std::uint64_t kMostFileBytes = std::uint64_t{1} << 40;

// Writes the bytes to a file of another name in the same folder, waits until they are on the disk,
// and renames it to `path`. A reader finds the old file or the new one, and so does the next start
// after a crash; when this throws, what was at `path` is there still and nothing else is left.
// Throws std::runtime_error with the reason, also where `path` is no regular file.
void write_file_atomically(const std::string& path, std::string_view bytes);

// All bytes of the file. Throws std::runtime_error with the reason, also for a file of more than
// `most_bytes`.
std::string read_file(const std::string& path, std::uint64_t most_bytes = kMostFileBytes);

}  // namespace morphkv

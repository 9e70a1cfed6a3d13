// The file of a saved cache: an archive of every field of CacheState in order. A file is checked as
// a whole before any of it is used.
#include <stdexcept>

#include "morphkv/archive.h"
#include "morphkv/cache.h"
#include "morphkv/file.h"

namespace morphkv {
namespace {

constexpr FileKind kCacheFile{{'m', 'o', 'r', 'p', 'h', 'k', 'v', '\n'}, 1, "morphkv cache file"};

// One list of the fields serves both directions.
template <typename Archive, typename State>
void fields(Archive& archive, State& s) {
  config_fields(archive, s.config);
  archive.value(s.batch);
  archive.value(s.heads);
  archive.value(s.dim);
  archive.value(s.dtype);
  archive.value(s.offset);
  archive.value(s.saturated);
  archive.list(s.positions);
  archive.list(s.keys);
  archive.list(s.values);
}

std::string to_bytes(const CacheState& state) {
  Writer body;
  fields(body, state);
  body.value(static_cast<std::uint64_t>(state.memory.size()));
  for (const auto& memory : state.memory) body.list(memory);
  return seal(kCacheFile, body.bytes());
}

CacheState from_bytes(std::string_view bytes) {
  const std::string_view body = unseal(kCacheFile, bytes);
  Reader reader(body);
  CacheState state;
  fields(reader, state);
  std::uint64_t heads = 0;
  reader.value(heads);
  if (heads > body.size()) throw std::invalid_argument("it has more heads than bytes");
  state.memory.resize(heads);
  for (auto& memory : state.memory) reader.list(memory);
  if (!reader.at_end()) throw std::invalid_argument("it has bytes that belong to nothing");
  return state;
}

}  // namespace

void KVCache::save(const std::string& path) const {
  write_file_atomically(path, to_bytes(state()));
}

void KVCache::load(const std::string& path) {
  const std::string bytes = read_file(path);
  try {
    set_state(from_bytes(bytes));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("cache file '" + path + "': " + error.what());
  }
}

}  // namespace morphkv

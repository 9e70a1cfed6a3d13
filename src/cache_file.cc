// The file of a saved cache: magic, version, length of the rest, checksum, then every field of
// CacheState in order. Little-endian. A file is checked as a whole before any of it is used.
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "morphkv/cache.h"

namespace morphkv {
namespace {

static_assert(std::endian::native == std::endian::little, "cache files are little-endian");

constexpr char kMagic[8] = {'m', 'o', 'r', 'p', 'h', 'k', 'v', '\n'};
constexpr std::uint32_t kVersion = 1;

// FNV-1a, 64 bits: each step is a bijection of the hash, so no single changed byte goes unnoticed.
std::uint64_t checksum(std::string_view bytes) {
  std::uint64_t hash = 0xCBF29CE484222325ull;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001B3ull;
  return hash;
}

class Writer {
 public:
  template <typename T>
  void value(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  template <typename Items>
  void list(const Items& items) {
    value(static_cast<std::uint64_t>(items.size()));
    bytes_.append(reinterpret_cast<const char*>(items.data()),
                  items.size() * sizeof(*items.data()));
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  void value(T& value) {
    take(&value, sizeof value);
  }
  template <typename Items>
  void list(Items& items) {
    std::uint64_t n = 0;
    value(n);
    const std::uint64_t size = sizeof(typename Items::value_type);
    if (n > rest_.size() / size) throw std::invalid_argument("a list is longer than the file");
    items.resize(n);
    take(items.data(), n * size);
  }
  bool at_end() const { return rest_.empty(); }

 private:
  void take(void* out, std::size_t n) {
    if (n > rest_.size()) throw std::invalid_argument("it ends too early");
    if (n > 0) std::memcpy(out, rest_.data(), n);
    rest_.remove_prefix(n);
  }
  std::string_view rest_;
};

// One list of the fields serves both directions.
template <typename Archive, typename State>
void fields(Archive& archive, State& s) {
  archive.value(s.config.budget);
  archive.value(s.config.n_sink);
  archive.value(s.config.window);
  archive.value(s.config.recent);
  archive.value(s.config.pool);
  archive.value(s.config.fusion);
  archive.value(s.config.queries);
  archive.list(s.config.policy);
  archive.value(s.config.seed);
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
  Writer file;
  file.value(kMagic);
  file.value(kVersion);
  file.value(static_cast<std::uint64_t>(body.bytes().size()));
  file.value(checksum(body.bytes()));
  return file.bytes() + body.bytes();
}

CacheState from_bytes(std::string_view bytes) {
  Reader header(bytes);
  char magic[8];
  std::uint32_t version = 0;
  std::uint64_t size = 0;
  std::uint64_t sum = 0;
  header.value(magic);
  if (std::memcmp(magic, kMagic, sizeof magic) != 0)
    throw std::invalid_argument("it is no morphkv cache file");
  header.value(version);
  if (version != kVersion) {
    throw std::invalid_argument("its version is " + std::to_string(version) +
                                ", this program reads version " + std::to_string(kVersion));
  }
  header.value(size);
  header.value(sum);
  const std::string_view body =
      bytes.substr(sizeof kMagic + sizeof version + sizeof size + sizeof sum);
  if (body.size() != size) {
    throw std::invalid_argument("it has " + std::to_string(body.size()) + " bytes of state, " +
                                std::to_string(size) + " are due");
  }
  if (checksum(body) != sum)
    throw std::invalid_argument("its checksum does not match: the file is damaged");

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
  const std::string bytes = to_bytes(state());
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(temporary, path, error);
  if (!file || error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw std::runtime_error("cache file '" + path +
                             "' cannot be written: check its folder, permissions and free space");
  }
}

void KVCache::load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  if (!file && bytes.empty()) throw std::runtime_error("cache file '" + path + "' cannot be read");
  try {
    set_state(from_bytes(bytes));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("cache file '" + path + "': " + error.what());
  }
}

}  // namespace morphkv

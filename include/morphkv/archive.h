// What files and saved texts are made of: values and lists, written and read in order, and the
// envelope around them: magic, version, length of the rest, checksum. Little-endian.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "morphkv/config.h"

namespace morphkv {

static_assert(std::endian::native == std::endian::little, "saved files are little-endian");

// FNV-1a, 64 bits: each step is a bijection of the hash, so no single changed byte goes unnoticed.
inline std::uint64_t checksum(std::string_view bytes) {
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
    static_assert(std::is_trivially_copyable_v<typename Items::value_type>);
    value(static_cast<std::uint64_t>(items.size()));
    bytes_.append(reinterpret_cast<const char*>(items.data()),
                  items.size() * sizeof(*items.data()));
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Throws std::invalid_argument where the bytes end before what is asked for.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  void value(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
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
  std::size_t left() const { return rest_.size(); }

 private:
  void take(void* out, std::size_t n) {
    if (n > rest_.size()) throw std::invalid_argument("it ends too early");
    if (n > 0) std::memcpy(out, rest_.data(), n);
    rest_.remove_prefix(n);
  }
  std::string_view rest_;
};

// The fields of a CacheConfig. One list serves both directions.
template <typename Archive, typename Config>
void config_fields(Archive& archive, Config& config) {
  for_each_cache_field([&](const auto& field) {
    auto& value = config.*field.member;
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, std::string>) {
      archive.list(value);
    } else {
      archive.value(value);
    }
  });
}

// What a file is, for its first bytes and for messages.
struct FileKind {
  char magic[8];
  std::uint32_t version;
  std::string_view name;     // "morphkv cache file"
  std::uint32_t oldest = 0;  // version that can still be read; 0 = only this one
};

inline std::string seal(const FileKind& kind, std::string_view body) {
  Writer file;
  file.value(kind.magic);
  file.value(kind.version);
  file.value(static_cast<std::uint64_t>(body.size()));
  file.value(checksum(body));
  std::string bytes = file.bytes();
  bytes += body;
  return bytes;
}

// The body, and its version. Throws std::invalid_argument that says what is wrong with "it".
inline std::string_view unseal(const FileKind& kind, std::string_view bytes,
                               std::uint32_t* its_version = nullptr) {
  Reader header(bytes);
  char magic[8];
  std::uint32_t version = 0;
  std::uint64_t size = 0;
  std::uint64_t sum = 0;
  header.value(magic);
  if (std::memcmp(magic, kind.magic, sizeof magic) != 0)
    throw std::invalid_argument("it is no " + std::string(kind.name));
  header.value(version);
  const std::uint32_t oldest = kind.oldest == 0 ? kind.version : kind.oldest;
  if (version < oldest || version > kind.version) {
    const std::string from = oldest == kind.version ? "" : std::to_string(oldest) + " to ";
    throw std::invalid_argument("its version is " + std::to_string(version) +
                                ", this program reads version " + from +
                                std::to_string(kind.version));
  }
  if (its_version != nullptr) *its_version = version;
  header.value(size);
  header.value(sum);
  const std::string_view body = bytes.substr(bytes.size() - header.left());
  if (body.size() != size) {
    throw std::invalid_argument("it has " + std::to_string(body.size()) + " bytes of state, " +
                                std::to_string(size) + " are due");
  }
  if (checksum(body) != sum)
    throw std::invalid_argument("its checksum does not match: the file is damaged");
  return body;
}

}  // namespace morphkv

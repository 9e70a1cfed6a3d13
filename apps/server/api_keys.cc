#include "api_keys.h"

#include <algorithm>
#include <fstream>
#include <stdexcept>

namespace morphkv::server {
namespace {

constexpr std::size_t kLeastLength = 8;
constexpr std::string_view kScheme = "Bearer ";

// Takes as long for any `given` of a length, whatever the key is.
bool equal_in_constant_time(std::string_view given, std::string_view key) {
  unsigned difference = given.size() == key.size() ? 0 : 1;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const char of_key = key[i % key.size()];
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(of_key);
  }
  return difference == 0;
}

}  // namespace

ApiKeys ApiKeys::read(const std::string& path) {
  const auto refuse = [&](const std::string& what) {
    throw std::invalid_argument("--api-key-file '" + path + "'" + what);
  };
  std::ifstream file(path);
  if (!file) refuse(" cannot be read: check the path and its permissions");
  ApiKeys keys;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    if (line.empty() || line.front() == '#') continue;
    const std::string where = ", line " + std::to_string(number) + ": the key ";
    if (line.size() < kLeastLength) {
      refuse(where + "has " + std::to_string(line.size()) + " characters, at least " +
             std::to_string(kLeastLength) + " are needed");
    }
    if (!std::ranges::all_of(line, [](unsigned char c) { return c > 0x20 && c < 0x7F; })) {
      refuse(where + "has a character that is no printable ASCII");
    }
    keys.keys_.push_back(line);
  }
  if (keys.empty()) refuse(" has no key: write one per line");
  return keys;
}

bool ApiKeys::allow(std::string_view authorization) const {
  if (empty()) return true;
  if (!authorization.starts_with(kScheme)) return false;
  const std::string_view given = authorization.substr(kScheme.size());
  bool found = false;
  for (const std::string& key : keys_) found |= equal_in_constant_time(given, key);
  return found;
}

}  // namespace morphkv::server

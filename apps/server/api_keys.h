// The keys that may use the server. They are compared in constant time and never shown.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace morphkv::server {

class ApiKeys {
 public:
  // None: everybody may.
  ApiKeys() = default;
  // One key per line of the file; empty lines and lines that begin with # are left out. Throws
  // std::invalid_argument for a file that cannot be read, has no key, or one that is shorter than 8
  // characters or not printable ASCII.
  static ApiKeys read(const std::string& path);

  bool empty() const { return keys_.empty(); }
  // Whether the value of the header Authorization ("Bearer KEY") names one of them.
  bool allow(std::string_view authorization) const;

 private:
  std::vector<std::string> keys_;
};

}  // namespace morphkv::server

// Reading a JSON object field by field, with errors that name the field, the value and the limit.
#pragma once

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "request.h"

namespace morphkv::server {

using Json = nlohmann::json;

// A value as an error shows it: shortened.
inline std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

// The object that the body is. Throws BadRequest, which names the field that was being read.
Json parse_object(std::string_view body);

class RequestReader::Fields {
 public:
  explicit Fields(const Json& object, std::string path = "")
      : object_(object), path_(std::move(path)) {}

  [[noreturn]] void refuse(const std::string& name, const std::string& what) const {
    const std::string field = path_ + name;
    throw BadRequest(field, field + " " + what);
  }

  // The value, or null when it is absent or null.
  const Json* find(const std::string& name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  std::optional<bool> flag(const std::string& name) const {
    const Json* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) refuse(name, shown(*value) + " is not true or false");
    return value->get<bool>();
  }

  template <class Number>
  std::optional<Number> number(const std::string& name, Number low, Number high) const {
    const Json* value = find(name);
    if (value == nullptr) return std::nullopt;
    const auto bad = [&] {
      std::ostringstream what;
      what << shown(*value) << " is not a" << (std::is_integral_v<Number> ? " whole" : "")
           << " number from " << low << " to " << high;
      refuse(name, what.str());
    };
    if (!value->is_number()) bad();
    const auto number = value->get<double>();
    if (!(number >= static_cast<double>(low) && number <= static_cast<double>(high))) bad();
    if (std::is_integral_v<Number> && number != std::floor(number)) bad();
    if constexpr (std::is_integral_v<Number>) {
      if (value->is_number_integer()) return value->get<Number>();
    }
    return static_cast<Number>(number);
  }

  std::optional<std::string> text(const std::string& name) const {
    const Json* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) refuse(name, shown(*value) + " is no text");
    return checked_text(name, value->get<std::string>());
  }

  // Engines would cut a text at a NUL.
  std::string checked_text(const std::string& name, std::string text) const {
    const auto nul = text.find('\0');
    if (nul != std::string::npos) {
      refuse(name, "has a NUL character at byte " + std::to_string(nul) + ": give plain text");
    }
    return text;
  }

 private:
  const Json& object_;
  std::string path_;
};

}  // namespace morphkv::server

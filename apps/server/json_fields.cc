#include "json_fields.h"

#include <algorithm>
#include <vector>

namespace morphkv::server {
namespace {

constexpr int kMostDepth = 64;

// "messages.content", from the keys [depth] under which the parser is.
std::string field_of(const std::vector<std::string>& keys) {
  std::string field;
  for (const std::string& key : keys) {
    if (!key.empty()) field += (field.empty() ? "" : ".") + key.substr(0, 60);
  }
  return field;
}

std::string behind(const std::string& field) {
  return field.empty() ? "" : ", in or behind the field '" + field + "'";
}

}  // namespace

Json parse_object(std::string_view body) {
  // The parser would take a NUL for the end, and leave alone what is behind it.
  if (const auto nul = body.find('\0'); nul != std::string_view::npos) {
    throw BadRequest("", "the body has a NUL character at byte " + std::to_string(nul + 1) +
                             ": send JSON text alone");
  }
  std::vector<std::string> keys;
  const auto follow = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMostDepth) {
      throw BadRequest(field_of(keys), "the JSON is nested deeper than " +
                                           std::to_string(kMostDepth) + " levels" +
                                           behind(field_of(keys)) + ": flatten it");
    }
    const auto level = static_cast<std::size_t>(depth);
    if (event == Json::parse_event_t::key) {
      keys.resize(level);
      keys.back() = value.get<std::string>();
    } else if (event == Json::parse_event_t::object_end) {
      keys.resize(std::min(keys.size(), level));
    }
    return true;
  };
  Json json;
  try {
    json = Json::parse(body, follow);
  } catch (const Json::parse_error& error) {
    throw BadRequest(field_of(keys), "the body is no valid JSON, at byte " +
                                         std::to_string(error.byte) + behind(field_of(keys)) +
                                         ": check quotes, commas, numbers and that the text is "
                                         "UTF-8");
  } catch (const Json::exception&) {
    throw BadRequest(field_of(keys), "the body has a number that is beyond any limit" +
                                         behind(field_of(keys)) + ": lower it");
  }
  if (!json.is_object()) {
    throw BadRequest(
        "", "the body is of type " + std::string(json.type_name()) + ": send a JSON object");
  }
  return json;
}

}  // namespace morphkv::server

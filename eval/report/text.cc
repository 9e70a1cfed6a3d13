#include "text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace morphkv::eval {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

std::string format(const char* pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

std::string without_unit(double value, Form form) {
  switch (form) {
    case Form::kPercent:
      return format("%.0f", 100.0 * value);
    case Form::kPerplexity:
      return four_figures(value);
    case Form::kNumber:
      break;
  }
  return format("%.3f", value);
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  const auto handler = nlohmann::json::error_handler_t::replace;
  const std::string json = nlohmann::json(std::string(text)).dump(-1, ' ', false, handler);
  return nlohmann::json::parse(json).get<std::string>();
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : valid_utf8(text)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        if (is_control(c)) {
          out += kReplacement;
        } else {
          out += c;
        }
    }
  }
  return out;
}

std::string attribute(std::string_view name, std::string_view value) {
  std::string out = " ";
  out.append(name).append("=\"").append(value).append("\"");
  return out;
}

std::string printable(std::string_view text) {
  std::string out = valid_utf8(text);
  std::replace_if(out.begin(), out.end(), is_control, '?');
  return out;
}

int columns(std::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

std::string with_commas(long long number) {
  std::string digits = std::to_string(number);
  const int first = digits[0] == '-' ? 1 : 0;
  for (int i = static_cast<int>(digits.size()) - 3; i > first; i -= 3) digits.insert(i, ",");
  return digits;
}

std::string four_figures(double value) {
  if (!std::isfinite(value)) return format("%f", value);
  const double size = std::fabs(value);
  if (size >= 999999.5) return format("%.3g", value);
  if (size >= 999.95) return format("%.0f", value);
  if (size >= 99.995) return format("%.1f", value);
  return format(size >= 9.9995 ? "%.2f" : "%.3f", value);
}

std::string to_text(double value, Form form) {
  return without_unit(value, form) + (form == Form::kPercent ? "%" : "");
}

std::string to_text(const Estimate& estimate, Form form) {
  return to_text(estimate.mean, form) + " [" + without_unit(estimate.low, form) + "-" +
         without_unit(estimate.high, form) + "]";
}

}  // namespace morphkv::eval

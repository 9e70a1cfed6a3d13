// Figures and names as text, for the reports.
#pragma once

#include <string>
#include <string_view>

#include "summary.h"

namespace morphkv::eval {

// The text with everything that is no UTF-8 replaced by U+FFFD.
std::string valid_utf8(std::string_view text);
// For HTML and SVG, inside elements and double quotes. Control characters become U+FFFD.
std::string escaped(std::string_view text);
// ` name="value"`, of a value that needs no escapes.
std::string attribute(std::string_view name, std::string_view value);
// For a terminal: valid UTF-8 without control characters.
std::string printable(std::string_view text);
// Columns on a terminal, one for each code point.
int columns(std::string_view text);

std::string with_commas(long long number);
// As many places as four figures need: 1.234, 12.34, 123.4, 1234.
std::string four_figures(double value);

// How the figures of a column are written.
enum class Form { kPercent, kPerplexity, kNumber };
std::string to_text(double value, Form form);
// "97% [92-99]", without the sign inside.
std::string to_text(const Estimate& estimate, Form form);

}  // namespace morphkv::eval

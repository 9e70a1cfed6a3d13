// Options whose errors name the value, the limit and what there is to choose from.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

namespace morphkv::cli {

// An option whose text must be a number in [low, high]; the message names all three. `take` gets
// it.
template <typename Number, typename Low, typename High, typename Take>
requires std::is_invocable_v<Take, Number> CLI::Option* add_number(
    CLI::App* app, const std::string& names, Number initial, Low low, High high,
    const std::string& help, Take take) {
  const std::string name =
      names.substr(names.find("--"), names.find(',', names.find("--")) - names.find("--"));
  auto parse = [take, low, high, name](const std::string& text) {
    Number value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool number = error == std::errc() && end == text.data() + text.size();
    if (!number || !(value >= static_cast<Number>(low)) || !(value <= static_cast<Number>(high))) {
      std::ostringstream message;
      message << name << " '" << text << "' is not a"
              << (std::is_integral_v<Number> ? " whole" : "") << " number from " << low << " to "
              << high;
      throw CLI::ValidationError(message.str());
    }
    take(value);
  };
  std::ostringstream shown;
  shown << initial;
  return app->add_option_function<std::string>(names, parse, help)
      ->type_name(std::is_integral_v<Number> ? "N" : "X")
      ->default_str(shown.str());
}
template <typename Number, typename Low, typename High>
CLI::Option* add_number(CLI::App* app, const std::string& names, Number& target, Low low, High high,
                        const std::string& help) {
  return add_number(app, names, target, low, high, help, [&target](Number n) { target = n; });
}

template <typename Value>
using Choices = std::vector<std::pair<std::string, Value>>;

// An option that takes one of a few words. `take` gets what it stands for.
template <typename Value, typename Take>
requires std::is_invocable_v<Take, Value> CLI::Option* add_choice(
    CLI::App* app, const std::string& names, const Value& initial, const Choices<Value>& choices,
    const std::string& help, Take take) {
  std::string words;
  std::string shown;
  for (const auto& [word, value] : choices) {
    words += (words.empty() ? "" : ", ") + word;
    if (value == initial && shown.empty()) shown = word;
  }
  const std::string name = names.substr(names.find("--"));
  auto parse = [take, choices, name, words](const std::string& text) {
    const auto found = std::find_if(choices.begin(), choices.end(),
                                    [&](const auto& choice) { return choice.first == text; });
    if (found == choices.end()) {
      throw CLI::ValidationError(name + " '" + text + "' is not one of " + words);
    }
    take(found->second);
  };
  return app->add_option_function<std::string>(names, parse, help + ": " + words)
      ->type_name("WORD")
      ->default_str(shown);
}
template <typename Value>
CLI::Option* add_choice(CLI::App* app, const std::string& names, Value& target,
                        const Choices<Value>& choices, const std::string& help) {
  return add_choice(app, names, target, choices, help,
                    [&target](const Value& value) { target = value; });
}

// An option whose text may be empty, which is not the same as absent.
inline CLI::Option* add_text(CLI::App* app, const std::string& names,
                             std::optional<std::string>& target, const std::string& help) {
  return app->add_option_function<std::string>(
      names, [&target](const std::string& text) { target = text; }, help);
}

}  // namespace morphkv::cli

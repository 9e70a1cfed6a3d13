#include "results.h"

#include <cmath>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "text.h"

namespace morphkv::eval {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int kFormat = 1;
constexpr const char* kFormatName = "morphkv_eval";
constexpr std::string_view kTrialStart = R"({"task":")";  // every line but the first

// --- Fields of a line ----------------------------------------------------------------------------

// Reads the fields of one JSON object; throws std::runtime_error that names the field.
class Fields {
 public:
  explicit Fields(const std::string& line) : json_(Json::parse(line)) {
    if (!json_.is_object()) throw std::runtime_error("it is no JSON object");
  }

  void get(const char* name, std::string& out) const {
    const Json& value = at(name);
    if (!value.is_string()) wrong(name, value, "a text");
    out = value.get<std::string>();
  }
  void get(const char* name, double& out) const { out = number(name, at(name)); }
  void get(const char* name, int& out) const { out = integer<int>(name); }
  void get(const char* name, std::int64_t& out) const { out = integer<std::int64_t>(name); }
  void get(const char* name, std::uint64_t& out) const {
    const Json& value = at(name);
    if (!value.is_number_unsigned()) wrong(name, value, "a whole number from 0");
    out = value.get<std::uint64_t>();
  }
  void get(const char* name, std::map<std::string, double>& out) const {
    const Json& value = at(name);
    if (!value.is_object()) wrong(name, value, "an object");
    for (const auto& [key, entry] : value.items()) out[key] = number(key.c_str(), entry);
  }

 private:
  const Json& at(const char* name) const {
    const auto found = json_.find(name);
    if (found == json_.end()) throw std::runtime_error("it has no \"" + std::string(name) + "\"");
    return *found;
  }
  [[noreturn]] static void wrong(const char* name, const Json& value, const char* wanted) {
    throw std::runtime_error("its \"" + std::string(name) + "\" is " + value.dump() + ", not " +
                             wanted);
  }
  static double number(const char* name, const Json& value) {
    if (!value.is_number()) wrong(name, value, "a number");
    return value.get<double>();
  }
  template <class Int>
  Int integer(const char* name) const {
    const Json& value = at(name);
    const bool fits =
        value.is_number_unsigned()
            ? std::in_range<Int>(value.get<std::uint64_t>())
            : value.is_number_integer() && std::in_range<Int>(value.get<std::int64_t>());
    if (!fits) wrong(name, value, "a whole number in range");
    return value.get<Int>();
  }

  Json json_;
};

// Calls visit(name, member) for every field, in the order of the line. One list for both ways.
template <class Info, class Visit>
void each_info_field(Info& info, Visit&& visit) {
  visit("model", info.model);
  visit("model_fingerprint", info.model_fingerprint);
  visit("model_description", info.model_description);
  visit("version", info.version);
  visit("engine", info.engine);
  visit("cpu", info.cpu);
  visit("seed", info.seed);
}

template <class AnyTrial, class Visit>
void each_trial_field(AnyTrial& trial, Visit&& visit) {
  visit("task", trial.key.task);
  visit("mode", trial.key.mode);
  visit("tokens", trial.key.tokens);
  visit("arm", trial.key.arm);
  visit("budget", trial.key.budget);
  visit("document", trial.key.document);
  visit("question", trial.key.question);
  visit("score", trial.score);
  visit("measures", trial.measures);
  visit("text", trial.text);
  visit("depth", trial.depth);
  visit("prompt_tokens", trial.prompt_tokens);
  visit("tokens_judged", trial.tokens_judged);
  visit("rows_kept", trial.rows_kept);
  visit("kv_bytes_kept", trial.kv_bytes_kept);
  visit("kv_bytes_allocated", trial.kv_bytes_allocated);
  visit("read_ms", trial.read_ms);
  visit("step_ms", trial.step_ms);
  visit("evict_ms", trial.evict_ms);
  visit("threads", trial.threads);
}

// --- Lines ---------------------------------------------------------------------------------------

std::string to_line(const RunInfo& info) {
  Json json = {{kFormatName, kFormat}};
  each_info_field(info, [&](const char* name, const auto& value) { json[name] = value; });
  // A file name need not be UTF-8, JSON must be.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string described(const TrialKey& key) {
  return key.task + ", " + key.mode + ", " + std::to_string(key.tokens) + " tokens, " + key.arm +
         ", budget " + std::to_string(key.budget) + ", document " + std::to_string(key.document) +
         ", question " + std::to_string(key.question);
}

void require_finite(const Trial& trial) {
  const auto check = [&](const std::string& name, double value) {
    if (std::isfinite(value)) return;
    throw std::invalid_argument("a trial (" + described(trial.key) + ") has " +
                                std::to_string(value) + " as \"" + name +
                                "\": only finite numbers can be stored; leave the measure out or "
                                "bound it");
  };
  each_trial_field(trial, [&](const char* name, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, double>) {
      check(name, value);
    } else if constexpr (std::is_same_v<Value, std::map<std::string, double>>) {
      for (const auto& [measure, number] : value) check(measure, number);
    }
  });
}

std::string to_line(const Trial& trial) {
  require_finite(trial);
  Json json;
  each_trial_field(trial, [&](const char* name, const auto& value) { json[name] = value; });
  json["text"] = valid_utf8(trial.text);
  try {
    return json.dump() + "\n";
  } catch (const Json::type_error&) {
    throw std::invalid_argument("a trial (" + valid_utf8(described(trial.key)) +
                                ") has a name that is no UTF-8: rename its task, arm or measure");
  }
}

RunInfo info_of(const std::string& line) {
  const Fields fields(line);
  int format = 0;
  fields.get(kFormatName, format);
  if (format != kFormat) {
    throw std::runtime_error("it is of format " + std::to_string(format) + ", this morphkv knows " +
                             std::to_string(kFormat));
  }
  RunInfo info;
  each_info_field(info, [&](const char* name, auto& value) { fields.get(name, value); });
  return info;
}

Trial trial_of(const std::string& line) {
  const Fields fields(line);
  Trial trial;
  each_trial_field(trial, [&](const char* name, auto& value) { fields.get(name, value); });
  return trial;
}

// --- Files ---------------------------------------------------------------------------------------

[[noreturn]] void refuse(const std::string& path, int line, const std::string& what,
                         const std::string& fix) {
  throw std::runtime_error("'" + path + "', line " + std::to_string(line) + ": " + what + "; " +
                           fix);
}

// Nothing where there is no file.
std::optional<std::string> read_file(const std::string& path) {
  const fs::file_status status = fs::status(path);
  if (!fs::exists(status)) return std::nullopt;
  if (!fs::is_regular_file(status)) {
    throw std::runtime_error("'" + path + "' is no regular file; give the path of one");
  }
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw std::runtime_error("cannot read '" + path + "': check that it is yours");
  return text;
}

// The beginning of a line of ours.
bool may_be_cut(std::string_view tail) {
  return kTrialStart.starts_with(tail) || tail.starts_with(kTrialStart);
}

void require_same(const std::string& path, const RunInfo& theirs, const RunInfo& mine) {
  const std::string place = "'" + path + "', line 1: ";
  const std::string fix = "; give the path of another file";
  const bool same_model = theirs.model_fingerprint == mine.model_fingerprint &&
                          (!mine.model_fingerprint.empty() || theirs.model == mine.model);
  if (!same_model) {
    throw std::invalid_argument(place + "its trials are of model '" + theirs.model + "' (" +
                                theirs.model_fingerprint + "), not of '" + mine.model + "' (" +
                                mine.model_fingerprint + ")" + fix);
  }
  if (theirs.seed != mine.seed) {
    throw std::invalid_argument(place + "its seed is " + std::to_string(theirs.seed) + ", not " +
                                std::to_string(mine.seed) + fix + " or the same seed");
  }
}

}  // namespace

Results::Results(std::string path, const RunInfo& info) : path_(std::move(path)) {
  const std::string header = to_line(info);
  const std::string text = read_file(path_).value_or("");
  // A run that was stopped in its very first line left nothing else.
  if (text.size() < header.size() && header.starts_with(text)) {
    info_ = info_of(header);
    start(header);
    return;
  }
  load(text);
  require_same(path_, info_, info_of(header));
  out_.open(path_, std::ios::binary | std::ios::app);
  std::error_code error;
  if (out_ && size_ < text.size()) fs::resize_file(path_, size_, error);
  if (!out_ || error) {
    throw std::runtime_error("cannot write to '" + path_ + "': check that it is yours");
  }
}

Results Results::read(const std::string& path) {
  Results results;
  results.path_ = path;
  const auto text = read_file(path);
  if (!text) throw std::runtime_error("there is no file '" + path + "'");
  results.load(*text);
  return results;
}

void Results::load(const std::string& text) {
  const std::string not_ours =
      "give the path of a file that `morphkv eval` wrote, or of one that is not there yet";
  int number = 0;
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = text.substr(begin, end - begin);
    ++number;
    try {
      if (number == 1) {
        info_ = info_of(line);
        continue;
      }
      trials_.push_back(trial_of(line));
    } catch (const std::exception& error) {  // of nlohmann::json, too
      refuse(
          path_, number,
          std::string(number == 1 ? "no results of morphkv eval: " : "no trial: ") + error.what(),
          number == 1 ? not_ours : "delete this line to have its trial made again");
    }
    if (!index_.emplace(trials_.back().key, trials_.size() - 1).second) {
      refuse(path_, number, "a second trial of " + described(trials_.back().key),
             "delete one of the two lines");
    }
  }
  if (number == 0) refuse(path_, 1, "no results of morphkv eval: no whole line", not_ours);
  if (!may_be_cut(std::string_view(text).substr(begin))) {
    refuse(path_, number + 1, "no trial, nor the beginning of one", "delete this line");
  }
  size_ = begin;
}

void Results::start(const std::string& header) {
  out_.open(path_, std::ios::binary | std::ios::trunc);
  if (!out_) {
    throw std::runtime_error("cannot create '" + path_ +
                             "': check that its folder exists and is yours");
  }
  write(header);
}

const Trial* Results::find(const TrialKey& key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &trials_[found->second];
}

void Results::add(const Trial& trial) {
  if (has(trial.key)) {
    throw std::logic_error("'" + path_ + "' has a trial of " + described(trial.key));
  }
  if (!out_.is_open()) throw std::logic_error("'" + path_ + "' is not open for writing");
  write(to_line(trial));
  index_.emplace(trial.key, trials_.size());
  trials_.push_back(trial);
}

void Results::write(const std::string& line) {
  out_ << line << std::flush;
  if (out_) {
    size_ += line.size();
    return;
  }
  // What got through of the line must not stand before the next one.
  out_.close();
  std::error_code ignored;
  fs::resize_file(path_, size_, ignored);
  throw std::runtime_error("cannot write to '" + path_ +
                           "': make room on its disk and run again; its trials are kept");
}

}  // namespace morphkv::eval

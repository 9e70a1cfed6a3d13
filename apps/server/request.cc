#include "request.h"

#include <algorithm>
#include <cctype>

#include "json_fields.h"
#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/policy.h"

namespace morphkv::server {
namespace {

using llama_cpp::ChatMessage;

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr std::size_t kMostMessages = 4096;
constexpr std::size_t kMostStops = 16;
constexpr std::size_t kMostStopBytes = 256;
constexpr std::size_t kMostFileName = 128;

std::string at(const std::string& list, std::size_t i) {
  return list + "[" + std::to_string(i) + "]";
}

}  // namespace

namespace {

// Bytes of the longest token where every byte of a text is in some token; 0 where the tokenizer may
// leave some out.
std::size_t longest_token(const llama_model* model) {
  const llama_vocab* vocab = llama_model_get_vocab(model);
  const auto type = llama_vocab_type(vocab);
  if (type != LLAMA_VOCAB_TYPE_BPE && type != LLAMA_VOCAB_TYPE_SPM) return 0;
  std::size_t longest = 0;
  for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
    longest = std::max(longest, llama_cpp::token_text(model, token, true).size());
  }
  return longest;
}

}  // namespace

RequestReader::RequestReader(const llama_model* model, Render render, RequestDefaults defaults)
    : model_(model),
      render_(std::move(render)),
      defaults_(std::move(defaults)),
      longest_token_(longest_token(model)) {}

// A text that is much too long is refused before the time that its tokens would take.
std::vector<llama_token> RequestReader::tokens_of(const std::string& text, bool parse_special,
                                                  bool allow_past_training) const {
  const auto trained = static_cast<std::size_t>(std::max(0, llama_model_n_ctx_train(model_)));
  const std::size_t least = longest_token_ > 0 ? text.size() / longest_token_ : 0;
  if (trained > 0 && least > trained && !allow_past_training) {
    throw llama_cpp::TooLong("the prompt has " + std::to_string(text.size()) +
                                 " bytes, which are at least " + std::to_string(least) +
                                 " tokens, the model was trained for " + std::to_string(trained) +
                                 ": shorten it, or go beyond knowingly with allow_past_training",
                             static_cast<int>(least), static_cast<int>(trained));
  }
  return llama_cpp::tokenize(model_, text, parse_special);
}

namespace {

// Fields that would change the answer and are not supported: only their neutral values pass.
template <class Fields>
void refuse_unsupported(const Fields& fields) {
  const auto empty = [](const Json& v) { return (v.is_array() || v.is_object()) && v.empty(); };
  for (const char* name : {"tools", "functions", "logit_bias"}) {
    const Json* value = fields.find(name);
    if (value != nullptr && !empty(*value)) fields.refuse(name, "is not supported: leave it out");
  }
  if (const Json* choice = fields.find("tool_choice");
      choice != nullptr && *choice != "none" && *choice != "auto") {
    fields.refuse("tool_choice", "is not supported: leave it out");
  }
  if (const Json* format = fields.find("response_format"); format != nullptr) {
    if (!format->is_object() || format->value("type", Json()) != "text") {
      fields.refuse("response_format", "is not supported but for {\"type\": \"text\"}");
    }
  }
  for (const char* name : {"n", "best_of"}) {
    if (const auto count = fields.template number<int>(name, 0, kMaxInt); count && *count != 1) {
      fields.refuse(name, std::to_string(*count) + " is not supported: one answer is given");
    }
  }
  if (fields.flag("echo").value_or(false)) fields.refuse("echo", "is not supported");
  if (!fields.text("suffix").value_or("").empty()) fields.refuse("suffix", "is not supported");
}

template <class Fields>
std::vector<std::string> read_stops(const Fields& fields) {
  const Json* value = fields.find("stop");
  if (value == nullptr) return {};
  const Json list = value->is_array() ? *value : Json::array({*value});
  if (list.size() > kMostStops) {
    fields.refuse("stop", "has " + std::to_string(list.size()) + " texts, at most " +
                              std::to_string(kMostStops) + " are taken");
  }
  std::vector<std::string> stops;
  for (const Json& stop : list) {
    if (!stop.is_string()) fields.refuse("stop", shown(stop) + " is no text");
    stops.push_back(fields.checked_text("stop", stop.get<std::string>()));
    if (stops.back().empty() || stops.back().size() > kMostStopBytes) {
      fields.refuse("stop", "has a text of " + std::to_string(stops.back().size()) +
                                " bytes: give 1 to " + std::to_string(kMostStopBytes));
    }
  }
  return stops;
}

template <class Fields>
void read_sampling(const Fields& fields, llama_cpp::SamplingOptions& s) {
  // Without a field of its own: the defaults of `morphkv run`, not OpenAI's temperature of 1.
  s.temperature =
      fields.template number<float>("temperature", 0.0f, 100.0f).value_or(s.temperature);
  s.top_p = fields.template number<float>("top_p", 0.0f, 1.0f).value_or(s.top_p);
  s.top_k = fields.template number<int>("top_k", 0, kMaxInt).value_or(s.top_k);
  s.min_p = fields.template number<float>("min_p", 0.0f, 1.0f).value_or(s.min_p);
  s.presence_penalty =
      fields.template number<float>("presence_penalty", -2.0f, 2.0f).value_or(s.presence_penalty);
  s.frequency_penalty =
      fields.template number<float>("frequency_penalty", -2.0f, 2.0f).value_or(s.frequency_penalty);
  s.repeat_penalty =
      fields.template number<float>("repeat_penalty", 0.01f, 100.0f).value_or(s.repeat_penalty);
  const auto seed = fields.template number<std::int64_t>("seed", -1, (std::int64_t{1} << 53));
  // The engine's sign for a random seed is no seed of a request.
  if (seed.value_or(-1) >= 0) s.seed = static_cast<std::uint32_t>(*seed % LLAMA_DEFAULT_SEED);
}

// One setting of the request, if it is there. `most`: the server's own budget.
template <class Fields>
void read_setting(const Fields& fields, const CacheField<int>& field, int most,
                  Settings& settings) {
  const bool budget = field.name == kBudgetField.name;
  const auto value =
      fields.template number<int>(std::string(field.name), field.least, budget ? most : field.most);
  if (value) settings.set(field, *value);
}

template <class Fields>
void read_setting(const Fields& fields, const CacheField<std::string>& field, int,
                  Settings& settings) {
  const std::string name(field.name);
  const auto policy = fields.text(name);
  if (!policy) return;
  if (!is_policy_name(*policy) || !make_policy({.policy = *policy})->traits().evicts) {
    fields.refuse(name, "'" + *policy + "' is not one of " +
                            policy_names_text(&PolicyTraits::evicts) +
                            ": for a cache that does not evict, ask for strict");
  }
  settings.set(field, *policy);
}

template <class Fields, class Choice>
std::optional<Choice> read_choice(const Fields& fields, std::string_view name) {
  const auto word = fields.text(std::string(name));
  if (!word) return std::nullopt;
  try {
    return choice_of<Choice>(name, *word);
  } catch (const std::invalid_argument& error) {
    throw BadRequest(std::string(name), error.what());
  }
}

template <class Fields, class Choice>
requires std::is_enum_v<Choice>
void read_setting(const Fields& fields, const CacheField<Choice>& field, int, Settings& settings) {
  if (const auto value = read_choice<Fields, Choice>(fields, field.name)) {
    settings.set(field, *value);
  }
}

template <class Fields>
std::string content_of(const Fields& message, const std::string& path) {
  const Json* content = message.find("content");
  if (content == nullptr) message.refuse("content", "is missing: give a text");
  if (content->is_string()) return message.checked_text("content", content->get<std::string>());
  if (!content->is_array()) message.refuse("content", shown(*content) + " is no text");
  std::string text;
  for (std::size_t i = 0; i < content->size(); ++i) {
    const Json& part = (*content)[i];
    const std::string where = at("content", i);
    if (!part.is_object()) message.refuse(where, shown(part) + " is no object");
    const Fields fields(part, path + where + ".");
    const std::string type = fields.text("type").value_or("");
    if (type != "text") fields.refuse("type", "'" + type + "' is not supported: give \"text\"");
    const auto piece = fields.text("text");
    if (!piece) fields.refuse("text", "is missing");
    text += *piece;
  }
  return text;
}

template <class Fields>
std::vector<ChatMessage> read_messages(const Fields& fields) {
  const Json* list = fields.find("messages");
  if (list == nullptr) fields.refuse("messages", "is missing: give a list of messages");
  if (!list->is_array() || list->empty()) {
    fields.refuse("messages", shown(*list) + " is no list with at least one message");
  }
  if (list->size() > kMostMessages) {
    fields.refuse("messages", "has " + std::to_string(list->size()) + " messages, at most " +
                                  std::to_string(kMostMessages) + " are taken");
  }
  std::vector<ChatMessage> messages;
  for (std::size_t i = 0; i < list->size(); ++i) {
    const Json& entry = (*list)[i];
    const std::string where = at("messages", i);
    if (!entry.is_object()) fields.refuse(where, shown(entry) + " is no message");
    const Fields message(entry, where + ".");
    if (const Json* calls = message.find("tool_calls"); calls != nullptr && !calls->empty()) {
      message.refuse("tool_calls", "is not supported: leave it out");
    }
    const auto role = message.text("role");
    if (!role || role->empty()) message.refuse("role", "is missing: give user, say");
    messages.push_back({*role, content_of(message, where + ".")});
  }
  return messages;
}

// The given field that an error of Settings::resolve() speaks of first, else where the settings
// come from.
template <class Fields>
std::string field_at_fault(const std::string& what, const Fields& fields) {
  std::string fault = fields.find("profile") != nullptr ? "profile" : "budget";
  std::size_t first = std::string::npos;
  const auto look_for = [&](std::string_view name) {
    const std::size_t place = what.find(std::string(name) + " ");
    if (fields.find(std::string(name)) == nullptr || place >= first) return;
    first = place;
    fault = name;
  };
  for_each_cache_field([&](const auto& field) { look_for(field.name); });
  look_for("prefill");
  return fault;
}

}  // namespace

// The server's settings, or within its budget those of a profile, with what the request replaces.
Settings RequestReader::read_settings(const Fields& fields, std::uint32_t seed) const {
  Settings settings = defaults_.settings;
  const int most = settings.cache().budget;
  if (const auto name = fields.text("profile")) {
    try {
      settings = Settings(find_profile(*name));
    } catch (const std::invalid_argument& error) {
      throw BadRequest("profile", error.what());
    }
    settings.set(kBudgetField, most);
  }
  for_each_cache_field([&](const auto& field) {
    // The seed is that of sampling.
    if constexpr (!std::is_same_v<decltype(field), const CacheField<std::uint64_t>&>) {
      read_setting(fields, field, most, settings);
    }
  });
  if (const auto prefill = read_choice<Fields, Prefill>(fields, "prefill")) {
    settings.set_prefill(*prefill);
  }
  if (settings.cache().policy == "random" && seed != LLAMA_DEFAULT_SEED) {
    settings.set(kSeedField, std::uint64_t{seed});
  }
  return settings;
}

Settings RequestReader::read_common(const Fields& fields, ParsedRequest& parsed) const {
  refuse_unsupported(fields);
  static_cast<void>(fields.text("model"));
  llama_cpp::Turn& turn = parsed.request.turn;
  read_sampling(fields, turn.sampling);
  Settings settings = read_settings(fields, turn.sampling.seed);
  try {
    parsed.settings = settings.resolve();
  } catch (const std::invalid_argument& error) {
    throw BadRequest(field_at_fault(error.what(), fields), error.what());
  }
  // Who runs the server decides whether a request may take memory beyond what is reserved.
  if (parsed.settings.prefill == Prefill::kWhole &&
      defaults_.settings.resolve().prefill != Prefill::kWhole) {
    fields.refuse(fields.find("prefill") != nullptr ? "prefill" : "profile",
                  "reads a prompt whole, in a cache as large as the prompt, and the server was "
                  "started without --prefill whole: use guided or stream");
  }
  turn.use(parsed.settings, model_);
  parsed.request.stop = read_stops(fields);
  turn.max_tokens = fields.number<int>("max_tokens", 0, kMaxInt).value_or(-1);
  turn.max_tokens =
      fields.number<int>("max_completion_tokens", 0, kMaxInt).value_or(turn.max_tokens);
  turn.ignore_eos = fields.flag("ignore_eos").value_or(false);
  turn.strict = fields.flag("strict").value_or(false);
  turn.allow_past_training =
      fields.flag("allow_past_training").value_or(defaults_.allow_past_training);
  if (turn.allow_past_training && !defaults_.allow_past_training) {
    fields.refuse("allow_past_training",
                  "true is not allowed here: the server was started without "
                  "--allow-past-training");
  }
  parsed.request.slot = fields.number<int>("slot", 0, defaults_.slots - 1);
  const auto most = static_cast<double>(defaults_.timeout.count()) / 1000.0;
  const auto timeout = fields.number<double>("timeout", 0.001, most > 0 ? most : 1e6);
  parsed.request.timeout =
      timeout ? std::chrono::milliseconds(static_cast<std::int64_t>(*timeout * 1000))
              : defaults_.timeout;
  parsed.stream = fields.flag("stream").value_or(false);
  if (const Json* options = fields.find("stream_options")) {
    if (!options->is_object()) fields.refuse("stream_options", "is no object");
    parsed.include_usage =
        Fields(*options, "stream_options.").flag("include_usage").value_or(false);
  }
  return settings;
}

void RequestReader::pin_system(const std::vector<ChatMessage>& messages, Settings settings,
                               ParsedRequest& parsed) const {
  llama_cpp::Turn& turn = parsed.request.turn;
  if (messages.front().role != "system") {
    throw BadRequest("pin_system", "pin_system has no system message to pin: give one first");
  }
  const int tokens = llama_cpp::tokens_of_first(model_, render_, messages, 1, turn.prompt);
  settings.pin(tokens);
  try {
    parsed.settings = settings.resolve();
  } catch (const std::invalid_argument& error) {
    throw BadRequest("pin_system", "pin_system: the system message takes " +
                                       std::to_string(tokens) + " tokens; " + error.what());
  }
  turn.cache = parsed.settings.cache;
}

ParsedRequest RequestReader::chat(std::string_view body) const {
  const Json json = parse_object(body);
  const Fields fields(json);
  ParsedRequest parsed;
  if (!render_) throw BadRequest("messages", "the model has no chat template: use completions");
  const std::vector<ChatMessage> messages = read_messages(fields);
  Settings settings = read_common(fields, parsed);
  llama_cpp::Turn& turn = parsed.request.turn;
  parsed.logprobs = fields.flag("logprobs").value_or(false);
  const auto top = fields.number<int>("top_logprobs", 0, 20);
  if (top.value_or(0) > 0 && !parsed.logprobs) {
    fields.refuse("top_logprobs", "needs logprobs: true");
  }
  if (parsed.logprobs) turn.top_logprobs = top.value_or(0);
  try {
    turn.prompt = tokens_of(render_(messages, true), true, turn.allow_past_training);
    turn.question = llama_cpp::question_in(model_, render_, messages, turn.prompt);
    if (fields.flag("pin_system").value_or(false)) {
      pin_system(messages, std::move(settings), parsed);
    }
  } catch (const llama_cpp::TooLong&) {
    throw;
  } catch (const std::invalid_argument& error) {
    throw BadRequest("messages", error.what());
  }
  return parsed;
}

ParsedRequest RequestReader::completion(std::string_view body) const {
  const Json json = parse_object(body);
  const Fields fields(json);
  ParsedRequest parsed;
  const Json* prompt = fields.find("prompt");
  if (prompt == nullptr) fields.refuse("prompt", "is missing: give a text");
  const bool one = prompt->is_array() && prompt->size() == 1 && prompt->front().is_string();
  if (one) prompt = &prompt->front();
  read_common(fields, parsed);
  llama_cpp::Turn& turn = parsed.request.turn;
  if (fields.flag("pin_system").value_or(false)) {
    fields.refuse("pin_system", "is about chats: use n_sink");
  }
  if (prompt->is_string()) {
    const std::string text = fields.checked_text("prompt", prompt->get<std::string>());
    if (text.empty()) fields.refuse("prompt", "is empty: give a text");
    turn.prompt = tokens_of(text, false, turn.allow_past_training);
  } else if (prompt->is_array() && !prompt->empty()) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    for (std::size_t i = 0; i < prompt->size(); ++i) {
      const std::string where = at("prompt", i);
      if ((*prompt)[i].is_string() || (*prompt)[i].is_array()) {
        fields.refuse(where, "is one of several prompts: send one at a time");
      }
      const Json entry = {{where, (*prompt)[i]}};
      const auto token = Fields(entry).number<int>(where, 0, n_vocab - 1);
      if (!token) fields.refuse(where, "is no token");
      turn.prompt.push_back(*token);
    }
  } else {
    fields.refuse("prompt", shown(*prompt) + " is no text and no list of tokens");
  }
  if (const auto top = fields.number<int>("logprobs", 0, 5)) {
    turn.top_logprobs = *top;
    parsed.logprobs = true;
  }
  return parsed;
}

std::string RequestReader::tokenize(std::string_view body) const {
  const Json json = parse_object(body);
  const Fields fields(json);
  const auto content = fields.text("content");
  if (!content) fields.refuse("content", "is missing: give a text");
  const bool parse_special = fields.flag("parse_special").value_or(true);
  std::vector<llama_token> tokens = llama_cpp::tokenize(model_, *content, parse_special);
  const bool starts = llama_vocab_get_add_bos(llama_model_get_vocab(model_));
  if (!fields.flag("add_special").value_or(false) && starts && !tokens.empty()) {
    tokens.erase(tokens.begin());
  }
  Json answer = {{"tokens", tokens}};
  if (fields.flag("with_pieces").value_or(false)) {
    Json list = Json::array();
    for (const llama_token token : tokens) {
      list.push_back({{"id", token}, {"piece", llama_cpp::token_text(model_, token, true)}});
    }
    answer["tokens"] = std::move(list);
  }
  return answer.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string RequestReader::detokenize(std::string_view body) const {
  const Json json = parse_object(body);
  const Fields fields(json);
  const Json* tokens = fields.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) {
    fields.refuse("tokens", "is missing: give a list of tokens");
  }
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model_));
  std::string text;
  for (std::size_t i = 0; i < tokens->size(); ++i) {
    const std::string where = at("tokens", i);
    const Json entry = {{where, (*tokens)[i]}};
    const auto token = Fields(entry).number<int>(where, 0, n_vocab - 1);
    if (!token) fields.refuse(where, "is no token");
    text += llama_cpp::token_text(model_, *token, true);
  }
  return Json{{"content", text}}.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string RequestReader::slot_file_name(std::string_view body) {
  const Json json = parse_object(body);
  const Fields fields(json);
  const auto name = fields.text("filename");
  if (!name) fields.refuse("filename", "is missing: give a plain file name");
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
  };
  if (name->empty() || name->size() > kMostFileName || name->front() == '.' ||
      !std::ranges::all_of(*name, plain)) {
    fields.refuse("filename", shown(*name) +
                                  " is no plain file name: give letters, digits, '.', "
                                  "'_' and '-', not beginning with a dot, at most " +
                                  std::to_string(kMostFileName));
  }
  return *name;
}

}  // namespace morphkv::server

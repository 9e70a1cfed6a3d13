// The JSON of a request as what the engine is asked; every field is checked, and an error names it.
// Unknown fields are left alone: clients send many.
#pragma once

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "morphkv/llama_cpp/chat_template.h"
#include "service.h"

namespace morphkv::server {

// What a request gets that says nothing else, and what it may ask for.
struct RequestDefaults {
  Settings settings;  // their budget is the most that a request may ask for
  bool allow_past_training = false;
  std::chrono::milliseconds timeout{0};  // the most that a request may ask for; 0 = none
  int slots = 1;
};

struct ParsedRequest {
  Request request;
  ResolvedSettings settings;  // that the turn runs by
  bool stream = false;
  bool include_usage = false;
  bool logprobs = false;
};

// `param` names the field ("messages[1].content"); empty: the body as a whole.
class BadRequest : public std::runtime_error {
 public:
  BadRequest(std::string field, const std::string& what)
      : std::runtime_error(what), param(std::move(field)) {}
  std::string param;
};

// May be used by several threads at once, if `render` may.
class RequestReader {
 public:
  // Messages as the text of a prompt (llama_cpp::ChatTemplate::render); empty: chats are refused.
  using Render = llama_cpp::RenderChat;

  // The model, for its vocabulary, must outlive the reader.
  RequestReader(const llama_model* model, Render render, RequestDefaults defaults);

  // Bodies of /v1/chat/completions and /v1/completions. Throw BadRequest, and llama_cpp::TooLong
  // for a text whose bytes alone say that it has more tokens than the model was trained for.
  ParsedRequest chat(std::string_view body) const;
  ParsedRequest completion(std::string_view body) const;
  // Bodies of /tokenize and /detokenize; returns the JSON of the answer. Throw BadRequest.
  std::string tokenize(std::string_view body) const;
  std::string detokenize(std::string_view body) const;
  // The plain file name in {"filename": "..."}: letters, digits, '.', '_' and '-', not beginning
  // with a dot, at most 128. Throws BadRequest.
  static std::string slot_file_name(std::string_view body);

 private:
  class Fields;
  // Return the settings that the request asks for.
  Settings read_common(const Fields& fields, ParsedRequest& parsed) const;
  Settings read_settings(const Fields& fields, std::uint32_t seed) const;
  void pin_system(const std::vector<llama_cpp::ChatMessage>& messages, Settings settings,
                  ParsedRequest& parsed) const;

  std::vector<llama_token> tokens_of(const std::string& text, bool parse_special,
                                     bool allow_past_training) const;

  const llama_model* model_;
  Render render_;
  RequestDefaults defaults_;
  std::size_t longest_token_;
};

}  // namespace morphkv::server

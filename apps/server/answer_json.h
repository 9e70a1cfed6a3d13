// What the server says, as JSON in OpenAI's shapes, and the counters as Prometheus text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "service.h"

namespace morphkv::server {

// What all parts of one answer have in common.
struct AnswerHead {
  std::string id;
  std::int64_t created = 0;  // seconds since 1970
  std::string model;
  bool chat = false;
  bool logprobs = false;
  ResolvedSettings settings;  // that the turn runs by
};

std::string new_id(bool chat);  // "chatcmpl-..." or "cmpl-...", random

// Token ids become text with the model's vocabulary.
std::string whole_answer(const AnswerHead& head, const std::vector<Delta>& deltas, const End& end,
                         const llama_model* model);
// The data of one server-sent event each. first_chunk() is of chats only, and tells the slot.
std::string first_chunk(const AnswerHead& head, const Begun& begun);
// `text_offset` counts the characters of the tokens so far; chunk() goes on with it.
std::string chunk(const AnswerHead& head, const Delta& delta, const llama_model* model,
                  std::size_t& text_offset);
std::string last_chunk(const AnswerHead& head, const End& end);
std::string usage_chunk(const AnswerHead& head, const End& end);

std::string error_json(const std::string& message, const std::string& type,
                       const std::string& param = "");
// Type exceed_context_size_error, with n_prompt_tokens and n_ctx.
std::string too_long_json(const llama_cpp::TooLong& error);

// kv_bytes_allocated is that of all slots; each is told its share.
std::string slots_json(const std::vector<SlotInfo>& slots, std::size_t kv_bytes_allocated);
std::string picture_json(const Picture& picture);
std::string models_json(const std::string& name, std::int64_t created);
std::string metrics_text(const Counters& counters, const std::vector<SlotInfo>& slots,
                         std::size_t kv_bytes_allocated);

}  // namespace morphkv::server

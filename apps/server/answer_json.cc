#include "answer_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/version.h"

namespace morphkv::server {
namespace {

using Json = nlohmann::ordered_json;

// Half characters become U+FFFD: an answer is always valid JSON.
std::string text_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string fingerprint() { return "morphkv-" + std::string(kVersion); }

std::string_view finish_detail(EndReason reason) {
  switch (reason) {
    case EndReason::kStop:
      return "stop";
    case EndReason::kStopText:
      return "stop_text";
    case EndReason::kLength:
      return "length";
    case EndReason::kTrainedLength:
      return "trained_length";
    case EndReason::kTimeout:
      return "timeout";
    case EndReason::kError:
      return "error";
  }
  return "";
}

// As OpenAI knows it.
std::string_view finish_reason(EndReason reason) {
  return reason == EndReason::kStop || reason == EndReason::kStopText ? "stop" : "length";
}

Json usage(const End& end) {
  return {{"prompt_tokens", end.stats.prompt_tokens},
          {"completion_tokens", end.stats.generated_tokens},
          {"total_tokens", end.stats.prompt_tokens + end.stats.generated_tokens},
          {"prompt_tokens_details", {{"cached_tokens", end.stats.reused_tokens}}}};
}

Json what_was_kept(const AnswerHead& head, const End& end) {
  return {{"tokens_seen", end.stats.tokens_seen},
          {"rows_kept", end.stats.rows_kept},
          {"rows_evicted", end.stats.rows_evicted},
          {"reused_tokens", end.stats.reused_tokens},
          {"profile", head.settings.profile},
          {"rule", to_text(head.settings)},
          {"prefill_mode", llama_cpp::mode_text(end.stats.prefill_mode)},
          {"slot", end.slot},
          {"budget", end.stats.cache.budget},
          {"finish_detail", finish_detail(end.reason)},
          {"queued_ms", end.queued_ms},
          {"prompt_ms", end.prompt_ms},
          {"generate_ms", end.generate_ms}};
}

Json bytes_of(const std::string& text) {
  Json bytes = Json::array();
  for (const char c : text) bytes.push_back(static_cast<unsigned char>(c));
  return bytes;
}

Json chat_logprob(const llama_cpp::TokenProbability& p, const llama_model* model) {
  const std::string text = llama_cpp::token_text(model, p.token, true);
  return {{"token", text}, {"logprob", p.logprob}, {"bytes", bytes_of(text)}};
}

Json chat_logprobs(const std::vector<const llama_cpp::GeneratedToken*>& tokens,
                   const llama_model* model) {
  Json content = Json::array();
  for (const auto* token : tokens) {
    if (!token->chosen) continue;
    Json entry = chat_logprob(*token->chosen, model);
    entry["top_logprobs"] = Json::array();
    for (const auto& p : token->likeliest) entry["top_logprobs"].push_back(chat_logprob(p, model));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}};
}

// As many as begin in it.
std::size_t characters(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](unsigned char byte) { return (byte & 0xC0) != 0x80; }));
}

Json completion_logprobs(const std::vector<const llama_cpp::GeneratedToken*>& tokens,
                         const llama_model* model, std::size_t& offset) {
  Json out = {{"tokens", Json::array()},
              {"token_logprobs", Json::array()},
              {"top_logprobs", Json::array()},
              {"text_offset", Json::array()}};
  for (const auto* token : tokens) {
    if (!token->chosen) continue;
    out["tokens"].push_back(token->text);
    out["token_logprobs"].push_back(token->chosen->logprob);
    Json likeliest = Json::object();
    for (const auto& p : token->likeliest) {
      likeliest[llama_cpp::token_text(model, p.token, true)] = p.logprob;
    }
    out["top_logprobs"].push_back(std::move(likeliest));
    out["text_offset"].push_back(offset);
    offset += characters(token->text);
  }
  return out;
}

Json logprobs_of(const AnswerHead& head,
                 const std::vector<const llama_cpp::GeneratedToken*>& tokens,
                 const llama_model* model, std::size_t& offset) {
  if (!head.logprobs) return nullptr;
  return head.chat ? chat_logprobs(tokens, model) : completion_logprobs(tokens, model, offset);
}

Json envelope(const AnswerHead& head, const char* object) {
  return {{"id", head.id},
          {"object", object},
          {"created", head.created},
          {"model", head.model},
          {"system_fingerprint", fingerprint()}};
}

const char* chunk_object(const AnswerHead& head) {
  return head.chat ? "chat.completion.chunk" : "text_completion";
}

Json chunk_with(const AnswerHead& head, Json choice, const Json& finish) {
  choice["index"] = 0;
  choice["finish_reason"] = finish;
  Json json = envelope(head, chunk_object(head));
  json["choices"] = Json::array({std::move(choice)});
  return json;
}

std::vector<const llama_cpp::GeneratedToken*> tokens_of(const std::vector<Delta>& deltas) {
  std::vector<const llama_cpp::GeneratedToken*> tokens;
  for (const Delta& delta : deltas) {
    for (const auto& token : delta.tokens) tokens.push_back(&token);
  }
  return tokens;
}

}  // namespace

std::string new_id(bool chat) {
  static constexpr char kDigits[] = "0123456789abcdefghijklmnopqrstuvwxyz";
  thread_local std::mt19937_64 random{std::random_device{}()};
  std::string id = chat ? "chatcmpl-" : "cmpl-";
  for (int i = 0; i < 24; ++i) id += kDigits[random() % 36];
  return id;
}

std::string whole_answer(const AnswerHead& head, const std::vector<Delta>& deltas, const End& end,
                         const llama_model* model) {
  std::string text;
  for (const Delta& delta : deltas) text += delta.text;
  Json choice = {{"index", 0}};
  if (head.chat) {
    choice["message"] = {{"role", "assistant"}, {"content", text}};
  } else {
    choice["text"] = text;
  }
  std::size_t offset = 0;
  choice["logprobs"] = logprobs_of(head, tokens_of(deltas), model, offset);
  choice["finish_reason"] = finish_reason(end.reason);
  Json json = envelope(head, head.chat ? "chat.completion" : "text_completion");
  json["choices"] = Json::array({std::move(choice)});
  json["usage"] = usage(end);
  json["morphkv"] = what_was_kept(head, end);
  return text_of(json);
}

std::string first_chunk(const AnswerHead& head, const Begun& begun) {
  Json json = chunk_with(head, {{"delta", {{"role", "assistant"}, {"content", ""}}}}, nullptr);
  json["morphkv"] = {{"slot", begun.slot}, {"reused_tokens", begun.reused_tokens}};
  return text_of(json);
}

std::string chunk(const AnswerHead& head, const Delta& delta, const llama_model* model,
                  std::size_t& text_offset) {
  Json choice = head.chat ? Json{{"delta", {{"content", delta.text}}}} : Json{{"text", delta.text}};
  std::vector<const llama_cpp::GeneratedToken*> tokens;
  for (const auto& token : delta.tokens) tokens.push_back(&token);
  choice["logprobs"] = logprobs_of(head, tokens, model, text_offset);
  return text_of(chunk_with(head, std::move(choice), nullptr));
}

std::string last_chunk(const AnswerHead& head, const End& end) {
  Json choice = head.chat ? Json{{"delta", Json::object()}} : Json{{"text", ""}};
  Json json = chunk_with(head, std::move(choice), finish_reason(end.reason));
  json["morphkv"] = what_was_kept(head, end);
  return text_of(json);
}

std::string usage_chunk(const AnswerHead& head, const End& end) {
  Json json = envelope(head, chunk_object(head));
  json["choices"] = Json::array();
  json["usage"] = usage(end);
  return text_of(json);
}

std::string error_json(const std::string& message, const std::string& type,
                       const std::string& param) {
  Json error = {{"message", message}, {"type", type}, {"param", nullptr}, {"code", nullptr}};
  if (!param.empty()) error["param"] = param;
  return text_of({{"error", std::move(error)}});
}

std::string too_long_json(const llama_cpp::TooLong& error) {
  return text_of({{"error",
                   {{"message", error.what()},
                    {"type", "exceed_context_size_error"},
                    {"param", "messages"},
                    {"code", "context_length_exceeded"},
                    {"n_prompt_tokens", error.tokens},
                    {"n_ctx", error.limit}}}});
}

std::string slots_json(const std::vector<SlotInfo>& slots, std::size_t kv_bytes_allocated) {
  const std::size_t slots_in_all = std::max<std::size_t>(1, slots.size());
  Json list = Json::array();
  for (const SlotInfo& slot : slots) {
    const llama_cpp::SlotStats& s = slot.stats;
    list.push_back({{"id", slot.id},
                    {"state", s.reading ? "reading"
                              : s.busy  ? "generating"
                                        : "idle"},
                    {"budget", s.cache.budget},
                    {"policy", s.cache.policy},
                    {"tokens_seen", s.tokens_seen},
                    {"rows_kept", s.rows_kept},
                    {"rows_evicted", s.rows_evicted},
                    {"prompt_tokens", s.prompt_tokens},
                    {"prompt_read", s.prompt_read},
                    {"reused_tokens", s.reused_tokens},
                    {"generated_tokens", s.generated_tokens},
                    {"tokens_per_second", slot.tokens_per_second},
                    {"kv_bytes_kept", s.kv_bytes_kept},
                    {"kv_bytes_full", s.kv_bytes_full},
                    {"kv_bytes_allocated", kv_bytes_allocated / slots_in_all}});
  }
  return text_of(list);
}

std::string picture_json(const Picture& picture) {
  return text_of({{"slot", picture.slot},
                  {"tokens_seen", picture.tokens_seen},
                  {"first_token", picture.first_token},
                  {"pieces", picture.pieces},
                  {"layers", picture.layers},
                  {"heads", picture.heads},
                  {"held", picture.held}});
}

std::string models_json(const std::string& name, std::int64_t created) {
  return text_of({{"object", "list"},
                  {"data", Json::array({{{"id", name},
                                         {"object", "model"},
                                         {"created", created},
                                         {"owned_by", "morphkv"}}})}});
}

std::string metrics_text(const Counters& c, const std::vector<SlotInfo>& slots,
                         std::size_t kv_bytes_allocated) {
  std::ostringstream out;
  out.precision(15);
  const auto metric = [&](const char* name, const char* type, const char* help, auto value) {
    out << "# HELP morphkv_" << name << ' ' << help << "\n# TYPE morphkv_" << name << ' ' << type
        << "\nmorphkv_" << name << ' ' << value << '\n';
  };
  metric("requests_begun_total", "counter", "Requests that got a slot.", c.requests_begun);
  metric("requests_finished_total", "counter", "Requests answered.", c.requests_finished);
  metric("requests_cancelled_total", "counter", "Requests whose client left or that were late.",
         c.requests_cancelled);
  metric("requests_refused_total", "counter", "Requests refused because the queue was full.",
         c.requests_refused);
  metric("requests_failed_total", "counter", "Requests that the engine failed.", c.requests_failed);
  metric("prompt_tokens_evaluated_total", "counter", "Prompt tokens evaluated.",
         c.prompt_tokens_evaluated);
  metric("prompt_tokens_reused_total", "counter", "Prompt tokens that a slot had seen already.",
         c.prompt_tokens_reused);
  metric("tokens_generated_total", "counter", "Tokens generated.", c.tokens_generated);
  metric("rows_evicted_total", "counter", "Rows evicted, per KV head.", c.rows_evicted);
  metric("steps_total", "counter", "Batches evaluated.", c.steps);
  metric("prompt_seconds_total", "counter", "Seconds in batches that read prompts.",
         c.prompt_seconds);
  metric("generate_seconds_total", "counter", "Seconds in batches that only generate.",
         c.generate_seconds);
  metric("requests_waiting", "gauge", "Requests that wait for a slot.", c.waiting);
  metric("slots_busy", "gauge", "Slots that answer.", c.busy_slots);
  metric("slots", "gauge", "Slots.", slots.size());
  metric("kv_bytes_allocated", "gauge", "Bytes of K and V reserved at the start.",
         kv_bytes_allocated);
  out << "# HELP morphkv_slot_rows_kept Rows per KV head that a slot holds.\n"
         "# TYPE morphkv_slot_rows_kept gauge\n";
  for (const SlotInfo& slot : slots) {
    out << "morphkv_slot_rows_kept{slot=\"" << slot.id << "\"} " << slot.stats.rows_kept << '\n';
  }
  return out.str();
}

}  // namespace morphkv::server

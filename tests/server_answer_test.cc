// What the server says, in the shapes that OpenAI's clients read.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "answer_json.h"
#include "tiny_model.h"

namespace morphkv::server {
namespace {

using Json = nlohmann::json;

const llama_model* model() {
  static const llama_cpp::ModelPtr kModel = [] {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    return test::make_tiny_model({});
  }();
  return kModel.get();
}

AnswerHead head_of(bool chat, bool logprobs = false) {
  return {.id = "x-1",
          .created = 1234,
          .model = "tiny",
          .chat = chat,
          .logprobs = logprobs,
          .settings = Settings().resolve()};
}

End end_of(EndReason reason) {
  End end;
  end.reason = reason;
  end.slot = 3;
  end.stats.tokens_seen = 17;
  end.stats.rows_kept = 12;
  end.stats.rows_evicted = 5;
  end.stats.prompt_tokens = 10;
  end.stats.generated_tokens = 7;
  end.stats.reused_tokens = 4;
  end.stats.cache.budget = 96;
  return end;
}

Delta delta_of(const std::string& text, llama_token token = 1) {
  llama_cpp::GeneratedToken generated{token, text, {}, {}};
  generated.chosen = llama_cpp::TokenProbability{token, -0.5f};
  generated.likeliest = {{token, -0.5f}, {2, -1.5f}};
  return {text, {generated}};
}

TEST(ServerAnswer, OfAChatIsAChatCompletion) {
  const Json json = Json::parse(whole_answer(head_of(true), {delta_of("Hello"), delta_of(" you")},
                                             end_of(EndReason::kStop), model()));
  EXPECT_EQ(json["object"], "chat.completion");
  EXPECT_EQ(json["id"], "x-1");
  EXPECT_EQ(json["created"], 1234);
  EXPECT_EQ(json["model"], "tiny");
  EXPECT_TRUE(json["system_fingerprint"].get<std::string>().starts_with("morphkv-"));
  ASSERT_EQ(json["choices"].size(), 1u);
  const Json& choice = json["choices"][0];
  EXPECT_EQ(choice["index"], 0);
  EXPECT_EQ(choice["message"], Json({{"role", "assistant"}, {"content", "Hello you"}}));
  EXPECT_TRUE(choice["logprobs"].is_null());
  EXPECT_EQ(choice["finish_reason"], "stop");
}

TEST(ServerAnswer, TellsWhatWasEvaluatedAndKept) {
  const Json json = Json::parse(
      whole_answer(head_of(false), {delta_of("x")}, end_of(EndReason::kLength), model()));
  EXPECT_EQ(json["object"], "text_completion");
  EXPECT_EQ(json["choices"][0]["text"], "x");
  EXPECT_EQ(json["usage"], Json({{"prompt_tokens", 10},
                                 {"completion_tokens", 7},
                                 {"total_tokens", 17},
                                 {"prompt_tokens_details", {{"cached_tokens", 4}}}}));
  const Json& kept = json["morphkv"];
  EXPECT_EQ(kept["tokens_seen"], 17);
  EXPECT_EQ(kept["rows_kept"], 12);
  EXPECT_EQ(kept["rows_evicted"], 5);
  EXPECT_EQ(kept["reused_tokens"], 4);
  EXPECT_EQ(kept["profile"], "document");
  EXPECT_EQ(kept["slot"], 3);
  EXPECT_EQ(kept["budget"], 96);
}

TEST(ServerAnswer, NamesTheReasonAsOpenAiDoesAndItsOwnBeside) {
  const std::vector<std::tuple<EndReason, std::string, std::string>> reasons = {
      {EndReason::kStop, "stop", "stop"},
      {EndReason::kStopText, "stop", "stop_text"},
      {EndReason::kLength, "length", "length"},
      {EndReason::kTrainedLength, "length", "trained_length"},
      {EndReason::kTimeout, "length", "timeout"}};
  for (const auto& [reason, name, detail] : reasons) {
    for (const std::string& text : {whole_answer(head_of(true), {}, end_of(reason), model()),
                                    last_chunk(head_of(true), end_of(reason))}) {
      const Json json = Json::parse(text);
      EXPECT_EQ(json["choices"][0]["finish_reason"], name);
      EXPECT_EQ(json["morphkv"]["finish_detail"], detail);
    }
  }
}

TEST(ServerAnswer, OfAStreamIsChunksThatShareTheirHead) {
  std::size_t offset = 0;
  const AnswerHead head = head_of(true);
  const Json first = Json::parse(first_chunk(head, {3, 5}));
  const Json middle = Json::parse(chunk(head, delta_of("Hi"), model(), offset));
  const Json last = Json::parse(last_chunk(head, end_of(EndReason::kStop)));
  const Json counted = Json::parse(usage_chunk(head, end_of(EndReason::kStop)));
  for (const Json& json : {first, middle, last, counted}) {
    EXPECT_EQ(json["id"], "x-1");
    EXPECT_EQ(json["object"], "chat.completion.chunk");
    EXPECT_EQ(json["created"], 1234);
  }
  EXPECT_EQ(first["choices"][0]["delta"], Json({{"role", "assistant"}, {"content", ""}}));
  EXPECT_EQ(first["morphkv"], Json({{"slot", 3}, {"reused_tokens", 5}}));
  EXPECT_EQ(middle["choices"][0]["delta"], Json({{"content", "Hi"}}));
  EXPECT_TRUE(middle["choices"][0]["finish_reason"].is_null());
  EXPECT_EQ(last["choices"][0]["delta"], Json::object());
  EXPECT_EQ(last["choices"][0]["finish_reason"], "stop");
  EXPECT_TRUE(counted["choices"].empty());
  EXPECT_TRUE(counted["choices"].is_array());
  EXPECT_EQ(counted["usage"]["total_tokens"], 17);
  const Json text = Json::parse(chunk(head_of(false), delta_of("Hi"), model(), offset));
  EXPECT_EQ(text["object"], "text_completion");
  EXPECT_EQ(text["choices"][0]["text"], "Hi");
}

TEST(ServerAnswer, CarriesTheProbabilitiesOfAChat) {
  const Json json = Json::parse(
      whole_answer(head_of(true, true), {delta_of("A")}, end_of(EndReason::kStop), model()));
  const Json& content = json["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 1u);
  EXPECT_TRUE(content[0]["token"].is_string());
  EXPECT_TRUE(content[0]["bytes"].is_array());
  EXPECT_FLOAT_EQ(content[0]["logprob"].get<float>(), -0.5f);
  ASSERT_EQ(content[0]["top_logprobs"].size(), 2u);
  EXPECT_FLOAT_EQ(content[0]["top_logprobs"][1]["logprob"].get<float>(), -1.5f);
}

TEST(ServerAnswer, CarriesTheProbabilitiesOfACompletionWithOffsetsInCharacters) {
  const AnswerHead head = head_of(false, true);
  const std::vector<Delta> deltas = {delta_of("\xC3\xA4"
                                              "b"),
                                     delta_of("cd", 2), delta_of("e", 3)};
  const Json whole = Json::parse(whole_answer(head, deltas, end_of(EndReason::kStop), model()));
  const Json& logprobs = whole["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["tokens"], Json({"\xC3\xA4"
                                      "b",
                                      "cd", "e"}));
  EXPECT_EQ(logprobs["text_offset"], Json({0, 2, 4}));
  EXPECT_EQ(logprobs["token_logprobs"].size(), 3u);
  EXPECT_TRUE(logprobs["top_logprobs"][0].is_object());
  std::size_t offset = 0;
  std::vector<int> offsets;
  for (const Delta& delta : deltas) {
    const Json piece = Json::parse(chunk(head, delta, model(), offset));
    offsets.push_back(piece["choices"][0]["logprobs"]["text_offset"][0].get<int>());
  }
  EXPECT_EQ(offsets, (std::vector<int>{0, 2, 4}));
}

TEST(ServerAnswer, IsValidJsonWhateverTheBytesOfATokenAre) {
  const Delta delta = delta_of("half \xE2\x82");
  for (const bool chat : {true, false}) {
    std::size_t offset = 0;
    EXPECT_TRUE(Json::accept(chunk(head_of(chat, true), delta, model(), offset)));
  }
}

TEST(ServerAnswer, HasAnIdOfItsOwn) {
  EXPECT_TRUE(new_id(true).starts_with("chatcmpl-"));
  EXPECT_TRUE(new_id(false).starts_with("cmpl-"));
  EXPECT_NE(new_id(true), new_id(true));
}

TEST(ServerAnswer, SaysWhatWasWrongAsOpenAiDoes) {
  const Json error = Json::parse(error_json("top_k 5 is bad", "invalid_request_error", "top_k"));
  EXPECT_EQ(error, Json({{"error",
                          {{"message", "top_k 5 is bad"},
                           {"type", "invalid_request_error"},
                           {"param", "top_k"},
                           {"code", nullptr}}}}));
  EXPECT_TRUE(Json::parse(error_json("x", "y"))["error"]["param"].is_null());
  const Json long_one = Json::parse(too_long_json(llama_cpp::TooLong("too long", 900, 512)));
  EXPECT_EQ(long_one["error"]["type"], "exceed_context_size_error");
  EXPECT_EQ(long_one["error"]["n_prompt_tokens"], 900);
  EXPECT_EQ(long_one["error"]["n_ctx"], 512);
}

TEST(ServerAnswer, ShowsEachSlotItsShareOfTheMemory) {
  std::vector<SlotInfo> slots(2);
  slots[0].stats.busy = true;
  slots[1].id = 1;
  const Json json = Json::parse(slots_json(slots, 4096));
  ASSERT_EQ(json.size(), 2u);
  EXPECT_EQ(json[0]["state"], "generating");
  EXPECT_EQ(json[1]["state"], "idle");
  EXPECT_EQ(json[1]["id"], 1);
  EXPECT_EQ(json[1]["kv_bytes_allocated"], 2048);
  EXPECT_EQ(slots_json({}, 4096), "[]");
}

TEST(ServerAnswer, CountsInTheFormatOfPrometheus) {
  Counters counters;
  counters.requests_begun = 123456789012;
  counters.prompt_seconds = 1234567.25;
  std::vector<SlotInfo> slots(2);
  slots[1].id = 1;
  const std::string text = metrics_text(counters, slots, std::size_t{5} << 30);
  const std::regex comment("# (HELP morphkv_[a-z_]+ .+|TYPE morphkv_[a-z_]+ (counter|gauge))");
  const std::regex sample("morphkv_[a-z_]+(\\{slot=\"\\d+\"\\})? [0-9.e+]+");
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_TRUE(std::regex_match(line, comment) || std::regex_match(line, sample)) << line;
  }
  EXPECT_EQ(text.back(), '\n');
  for (const char* line :
       {"\nmorphkv_requests_begun_total 123456789012\n", "\nmorphkv_slots 2\n",
        "\nmorphkv_kv_bytes_allocated 5368709120\n", "\nmorphkv_prompt_seconds_total 1234567.25\n",
        "\nmorphkv_slot_rows_kept{slot=\"1\"} 0\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line;
  }
}

}  // namespace
}  // namespace morphkv::server

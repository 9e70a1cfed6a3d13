// What a request asks the engine for, field by field, and what is refused: each error names the
// field.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>

#include "json_fields.h"
#include "morphkv/llama_cpp/chat_template.h"
#include "morphkv/llama_cpp/model_file.h"
#include "request.h"

namespace morphkv::server {
namespace {

using namespace std::chrono_literals;

const llama_model* vocabulary() {
  static const llama_cpp::ModelPtr kModel = [] {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    const char* path = std::getenv("MORPHKV_TEST_MODEL");
    if (path == nullptr) throw std::runtime_error("MORPHKV_TEST_MODEL does not name a GGUF model");
    return llama_cpp::load_model(path, {.vocab_only = true, .progress = {}});
  }();
  return kModel.get();
}

std::string render(const std::vector<llama_cpp::ChatMessage>& messages, bool add_assistant) {
  static const llama_cpp::ChatTemplate kTemplate(vocabulary());
  return kTemplate.render(messages, add_assistant);
}

RequestDefaults defaults() {
  return {.settings = Settings(), .allow_past_training = false, .timeout = 60s, .slots = 4};
}

RequestReader reader(const RequestDefaults& with = defaults()) {
  return {vocabulary(), render, with};
}

// {"messages": [a question], <fields>}
std::string chat_with(const std::string& fields) {
  return R"({"messages": [{"role": "user", "content": "Hello"}])" +
         (fields.empty() ? "" : ", " + fields) + "}";
}
std::string completion_with(const std::string& fields) {
  return R"({"prompt": "Hello there")" + (fields.empty() ? "" : ", " + fields) + "}";
}

ParsedRequest chat(const std::string& fields) { return reader().chat(chat_with(fields)); }
ParsedRequest completion(const std::string& fields) {
  return reader().completion(completion_with(fields));
}

std::string text_of(const std::vector<llama_token>& tokens) {
  std::string text;
  for (const llama_token token : tokens) text += llama_cpp::token_text(vocabulary(), token, true);
  return text;
}

struct Refused {
  std::string body;
  std::string param;  // of the error
  std::string says;   // part of its message; empty: the name of the field
};

void expect_refused(const Refused& bad, const std::function<void()>& read) {
  try {
    read();
    ADD_FAILURE() << "accepted: " << bad.body.substr(0, 300);
  } catch (const BadRequest& error) {
    EXPECT_EQ(error.param, bad.param) << bad.body.substr(0, 300) << "\n" << error.what();
    const std::string& says = bad.says.empty() ? bad.param : bad.says;
    EXPECT_NE(std::string(error.what()).find(says), std::string::npos)
        << bad.body.substr(0, 300) << "\n"
        << error.what();
  }
}

void expect_refused_chats(const std::vector<Refused>& all) {
  const RequestReader r = reader();
  for (const Refused& bad : all) expect_refused(bad, [&] { static_cast<void>(r.chat(bad.body)); });
}

std::string nested(int depth) {
  return R"({"messages": )" + std::string(static_cast<std::size_t>(depth), '[') +
         std::string(static_cast<std::size_t>(depth), ']') + "}";
}

TEST(ServerRequest, ThatIsNoJsonObjectIsRefusedWithTheByteOrTheField) {
  expect_refused_chats({
      {"", "", "byte 1"},
      {"{", "", "byte 2"},
      {"{}x", "", "byte 3"},
      {"[]", "", "array"},
      {"null", "", "null"},
      {"\"messages\"", "", "string"},
      {R"({"messages": [}])", "messages", "byte 15"},
      {R"({"temperature": NaN})", "temperature", "byte"},
      {R"({"temperature": Infinity})", "temperature", "byte"},
      {R"({"temperature": 1e999})", "temperature", "beyond any limit"},
      {R"({"temperature": -1e999})", "temperature", "beyond any limit"},
      {R"({"seed": 0x10})", "seed", "byte"},
      {R"({"seed": 01})", "seed", "byte"},
      {R"({"messages": [{"role": "user", "content": "a)"
       "\xFF"
       R"("}]})",
       "messages.content", "UTF-8"},
      {R"({"messages": [{"role": "user", "content": "\ud800"}]})", "messages.content", "byte"},
      {"{\"stop\": \"a\nb\"}", "stop", "byte"},
      {nested(100), "messages", "64"},
      {nested(2000000), "messages", "64"},
      {std::string(1000000, '['), "", "64"},
  });
}

TEST(ServerRequest, WithWrongMessagesIsRefusedByTheNameOfTheFirstWrongOne) {
  std::string many = R"({"messages": [)";
  for (int i = 0; i < 5000; ++i) many += R"({"role":"user","content":"x"},)";
  many.back() = ']';
  many += "}";
  expect_refused_chats({
      {"{}", "messages", "missing"},
      {R"({"messages": null})", "messages", "missing"},
      {R"({"messages": "hello"})", "messages", ""},
      {R"({"messages": {}})", "messages", ""},
      {R"({"messages": []})", "messages", "at least one"},
      {many, "messages", "4096"},
      {R"({"messages": ["hello"]})", "messages[0]", ""},
      {R"({"messages": [{"content": "x"}]})", "messages[0].role", ""},
      {R"({"messages": [{"role": "", "content": "x"}]})", "messages[0].role", ""},
      {R"({"messages": [{"role": 5, "content": "x"}]})", "messages[0].role", ""},
      {R"({"messages": [{"role": ["user"], "content": "x"}]})", "messages[0].role", ""},
      {R"({"messages": [{"role": "user"}]})", "messages[0].content", ""},
      {R"({"messages": [{"role": "user", "content": null}]})", "messages[0].content", ""},
      {R"({"messages": [{"role": "user", "content": 5}]})", "messages[0].content", ""},
      {R"({"messages": [{"role": "user", "content": {"text": "x"}}]})", "messages[0].content", ""},
      {R"({"messages": [{"role": "user", "content": "a\u0000b"}]})", "messages[0].content", "NUL"},
      {R"({"messages": [{"role": "us\u0000er", "content": "x"}]})", "messages[0].role", "NUL"},
      {R"({"messages": [{"role": "user", "content": ["x"]}]})", "messages[0].content[0]", ""},
      {R"({"messages": [{"role": "user", "content": [{"text": "x"}]}]})",
       "messages[0].content[0].type", ""},
      {R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})",
       "messages[0].content[0].text", ""},
      {R"({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]})",
       "messages[0].content[0].text", ""},
      {R"({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content":
          [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "x"}}]}]})",
       "messages[1].content[1].type", "image_url"},
      {R"({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]})",
       "messages[0].tool_calls", ""},
  });
}

TEST(ServerRequest, WithAWrongFieldIsRefusedByItsName) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"model", "5"},
      {"model", "[\"x\"]"},
      {"max_tokens", "\"5\""},
      {"max_tokens", "1.5"},
      {"max_tokens", "-5"},
      {"max_tokens", "99999999999"},
      {"max_tokens", "true"},
      {"max_completion_tokens", "1e30"},
      {"max_completion_tokens", "[1]"},
      {"temperature", "-0.1"},
      {"temperature", "100.5"},
      {"temperature", "\"hot\""},
      {"temperature", "false"},
      {"temperature", "1e300"},
      {"top_p", "1.01"},
      {"top_p", "-1"},
      {"top_k", "-1"},
      {"top_k", "0.5"},
      {"top_k", "18446744073709551616"},
      {"min_p", "2"},
      {"seed", "1.5"},
      {"seed", "\"random\""},
      {"seed", "-7"},
      {"presence_penalty", "2.5"},
      {"frequency_penalty", "-3"},
      {"repeat_penalty", "0"},
      {"stop", "5"},
      {"stop", "\"\""},
      {"stop", "[\"a\", \"\"]"},
      {"stop", "[\"a\", 5]"},
      {"stop", "{\"a\": 1}"},
      {"stop", "[[\"a\"]]"},
      {"stop", "\"a\\u0000\""},
      {"stop", "\"" + std::string(257, 'x') + "\""},
      {"stop", "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]"},
      {"stream", "1"},
      {"stream", "\"true\""},
      {"stream_options", "true"},
      {"stream_options", "[]"},
      {"logprobs", "3"},
      {"logprobs", "\"yes\""},
      {"top_logprobs", "5"},  // without logprobs
      {"ignore_eos", "0"},
      {"n", "2"},
      {"n", "0"},
      {"n", "1.5"},
      {"best_of", "3"},
      {"echo", "true"},
      {"suffix", "\"end\""},
      {"tools", "[{\"type\": \"function\"}]"},
      {"tools", "\"all\""},
      {"tool_choice", "\"required\""},
      {"functions", "[{}]"},
      {"logit_bias", "{\"5\": -100}"},
      {"response_format", "{\"type\": \"json_object\"}"},
      {"response_format", "\"json\""},
      {"response_format", "{}"},
      {"budget", "0"},
      {"budget", "513"},
      {"budget", "96.5"},
      {"budget", "\"96\""},
      {"n_sink", "-1"},
      {"n_sink", "512"},
      {"n_sink", "99999999999999999999"},
      {"window", "0"},
      {"window", "600"},
      {"recent", "-1"},
      {"recent", "3"},  // below the window
      {"recent", "511"},
      {"pool", "4"},
      {"pool", "0"},
      {"policy", "\"full\""},
      {"policy", "\"best\""},
      {"policy", "7"},
      {"prefill", "\"fast\""},
      {"prefill", "\"whole\""},  // the server was not started with it
      {"profile", "\"paper\""},
      {"fusion", "\"sum\""},
      {"queries", "7"},
      {"prefill", "true"},
      {"profile", "\"nobody\""},
      {"profile", "{}"},
      {"strict", "\"yes\""},
      {"pin_system", "1"},
      {"pin_system", "true"},  // without a system message
      {"allow_past_training", "true"},
      {"allow_past_training", "1"},
      {"slot", "4"},
      {"slot", "-1"},
      {"slot", "0.5"},
      {"slot", "\"0\""},
      {"timeout", "0"},
      {"timeout", "-1"},
      {"timeout", "61"},
      {"timeout", "\"10\""},
  };
  for (const auto& [field, value] : bad) {
    const std::string body = chat_with("\"" + field + "\": " + value);
    expect_refused({body, field, field}, [&] { static_cast<void>(reader().chat(body)); });
  }
  expect_refused_chats({
      {chat_with(R"("logprobs": true, "top_logprobs": 21)"), "top_logprobs", "20"},
      {chat_with(R"("logprobs": true, "top_logprobs": -1)"), "top_logprobs", ""},
      {chat_with(R"("stream_options": {"include_usage": 1})"), "stream_options.include_usage", ""},
      {chat_with(R"("budget": 16, "n_sink": 10)"), "n_sink", "budget 16"},
      {chat_with(R"("budget": 16, "window": 16)"), "window", "budget"},
  });
}

TEST(ServerRequest, OfACompletionIsRefusedByTheNameOfItsField) {
  const std::vector<Refused> bad = {
      {"{}", "prompt", ""},
      {R"({"prompt": null})", "prompt", ""},
      {R"({"prompt": ""})", "prompt", "empty"},
      {R"({"prompt": []})", "prompt", ""},
      {R"({"prompt": 5})", "prompt", ""},
      {R"({"prompt": {"text": "x"}})", "prompt", ""},
      {R"({"prompt": "a\u0000b"})", "prompt", "NUL"},
      {R"({"prompt": ["a", "b"]})", "prompt[0]", "one at a time"},
      {R"({"prompt": [[1, 2]]})", "prompt[0]", "one at a time"},
      {R"({"prompt": [1, null]})", "prompt[1]", ""},
      {R"({"prompt": [1, -1]})", "prompt[1]", ""},
      {R"({"prompt": [1, 2, 1.5]})", "prompt[2]", ""},
      {R"({"prompt": [999999999]})", "prompt[0]", ""},
      {R"({"prompt": [true]})", "prompt[0]", ""},
      {completion_with(R"("logprobs": true)"), "logprobs", ""},
      {completion_with(R"("logprobs": 6)"), "logprobs", "5"},
      {completion_with(R"("pin_system": true)"), "pin_system", "n_sink"},
      {completion_with(R"("max_tokens": {})"), "max_tokens", ""},
  };
  const RequestReader r = reader();
  for (const Refused& one : bad) {
    expect_refused(one, [&] { static_cast<void>(r.completion(one.body)); });
  }
}

TEST(ServerRequest, ThatSaysNothingGetsTheDefaults) {
  const ParsedRequest parsed = chat("");
  const llama_cpp::Turn& turn = parsed.request.turn;
  EXPECT_EQ(turn.cache, default_profile().with_budget(512));
  EXPECT_EQ(turn.prefill, Prefill::kGuided);
  EXPECT_EQ(parsed.settings.profile, "document");
  EXPECT_LT(turn.max_tokens, 0);
  EXPECT_LT(turn.top_logprobs, 0);
  EXPECT_FALSE(turn.strict || turn.ignore_eos || turn.allow_past_training);
  EXPECT_FALSE(parsed.stream || parsed.include_usage || parsed.logprobs);
  EXPECT_EQ(parsed.request.slot, std::nullopt);
  EXPECT_TRUE(parsed.request.stop.empty());
  EXPECT_EQ(parsed.request.timeout, 60s);
  EXPECT_EQ(turn.sampling.seed, LLAMA_DEFAULT_SEED);
  EXPECT_TRUE(turn.guides.empty());
}

TEST(ServerRequest, HandsEveryFieldOn) {
  const ParsedRequest parsed = chat(
      R"("max_tokens": 9, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 42,
         "presence_penalty": -1, "frequency_penalty": 1.5, "repeat_penalty": 1.1,
         "stop": ["\n\n", "END"], "stream": true, "stream_options": {"include_usage": true},
         "logprobs": true, "top_logprobs": 7, "ignore_eos": true, "n": 1, "budget": 100,
         "n_sink": 2, "window": 4, "recent": 20, "pool": 5, "policy": "h2o", "prefill": "stream",
         "strict": true, "slot": 3, "timeout": 2.5)");
  const llama_cpp::Turn& turn = parsed.request.turn;
  EXPECT_EQ(turn.max_tokens, 9);
  EXPECT_EQ(turn.sampling.temperature, 0.0f);
  EXPECT_EQ(turn.sampling.top_p, 0.5f);
  EXPECT_EQ(turn.sampling.top_k, 3);
  EXPECT_EQ(turn.sampling.min_p, 0.1f);
  EXPECT_EQ(turn.sampling.seed, 42u);
  EXPECT_EQ(turn.sampling.presence_penalty, -1.0f);
  EXPECT_EQ(turn.sampling.frequency_penalty, 1.5f);
  EXPECT_EQ(turn.sampling.repeat_penalty, 1.1f);
  EXPECT_EQ(parsed.request.stop, (std::vector<std::string>{"\n\n", "END"}));
  EXPECT_TRUE(parsed.stream && parsed.include_usage && parsed.logprobs);
  EXPECT_EQ(turn.top_logprobs, 7);
  EXPECT_TRUE(turn.ignore_eos && turn.strict);
  EXPECT_EQ(turn.cache.budget, 100);
  EXPECT_EQ(turn.cache.n_sink, 2);
  EXPECT_EQ(turn.cache.window, 4);
  EXPECT_EQ(turn.cache.recent, 20);
  EXPECT_EQ(turn.cache.pool, 5);
  EXPECT_EQ(turn.cache.policy, "h2o");
  EXPECT_EQ(turn.prefill, Prefill::kStream);
  EXPECT_EQ(parsed.request.slot, 3);
  EXPECT_EQ(parsed.request.timeout, 2500ms);
}

TEST(ServerRequest, LeavesAloneWhatItDoesNotKnowAndWhatSaysNothing) {
  const ParsedRequest parsed = chat(
      R"("user": "me", "store": true, "metadata": {"a": [1]}, "reasoning_effort": "low",
         "seed": null, "stop": null, "max_tokens": null, "temperature": null, "tools": [],
         "tool_choice": "none", "logit_bias": {}, "response_format": {"type": "text"},
         "best_of": 1, "echo": false, "suffix": "", "stream_options": null, "stop": [],
         "budget": null, "slot": null, "profile": null, "logprobs": false)");
  EXPECT_EQ(parsed.request.turn.cache, default_profile().with_budget(512));
  EXPECT_TRUE(parsed.request.stop.empty());
  EXPECT_EQ(chat(R"("max_tokens": 5, "max_tokens": 6)").request.turn.max_tokens, 6);
  EXPECT_EQ(chat(R"("max_tokens": 5, "max_completion_tokens": 6)").request.turn.max_tokens, 6);
  EXPECT_EQ(chat(R"("max_tokens": 5.0)").request.turn.max_tokens, 5);
  EXPECT_EQ(chat(R"("stop": "x")").request.stop, std::vector<std::string>{"x"});
}

TEST(ServerRequest, WithASeedIsNeverRandom) {
  for (const char* seed : {"0", "4294967295", "4294967296", "9007199254740991"}) {
    const ParsedRequest parsed = chat(std::string(R"("policy": "random", "seed": )") + seed);
    EXPECT_NE(parsed.request.turn.sampling.seed, LLAMA_DEFAULT_SEED) << seed;
    EXPECT_EQ(parsed.request.turn.cache.seed, parsed.request.turn.sampling.seed) << seed;
  }
}

TEST(ServerRequest, WithAnotherBudgetKeepsTheProfilesShareOfIt) {
  for (const int budget : {64, 100, 512}) {
    const auto cache = chat(R"("budget": )" + std::to_string(budget)).request.turn.cache;
    EXPECT_EQ(cache, default_profile().with_budget(budget)) << budget;
  }
}

TEST(ServerRequest, WithAProfileGetsItsRuleAndItsGuide) {
  const ParsedRequest parsed = chat(R"("profile": "chat", "budget": 200)");
  EXPECT_EQ(parsed.settings.profile, "chat");
  EXPECT_EQ(parsed.request.turn.cache, find_profile("chat").with_budget(200));
  ASSERT_EQ(parsed.request.turn.guides.size(), 1u);
  EXPECT_EQ(text_of(parsed.request.turn.guides[0]), find_profile("chat").guide_text);
  EXPECT_TRUE(parsed.request.turn.end_guides_too);
  RequestDefaults whole = defaults();
  whole.settings.set_prefill(Prefill::kWhole);
  const ParsedRequest paper = reader(whole).chat(chat_with(R"("profile": "paper")"));
  EXPECT_EQ(paper.request.turn.prefill, Prefill::kWhole);
  EXPECT_EQ(paper.request.turn.cache, find_profile("paper").with_budget(512));
  EXPECT_EQ(paper.request.turn.cache.budget, 512);
}

TEST(ServerRequest, OfAChatIsThePromptThatTheTemplateMakes) {
  const std::string body =
      R"({"messages": [{"role": "system", "content": "Be brief."},
          {"role": "user", "content": [{"type": "text", "text": "One "},
                                       {"type": "text", "text": "two"}]}]})";
  const ParsedRequest parsed = reader().chat(body);
  const std::string text = render({{"system", "Be brief."}, {"user", "One two"}}, true);
  EXPECT_EQ(parsed.request.turn.prompt, llama_cpp::tokenize(vocabulary(), text, true));
}

TEST(ServerRequest, KnowsWhereTheNewestQuestionBegins) {
  const std::string body =
      R"({"messages": [{"role": "user", "content": "First question"},
          {"role": "assistant", "content": "An answer"},
          {"role": "user", "content": "Second question"}]})";
  const llama_cpp::Turn turn = reader().chat(body).request.turn;
  ASSERT_LT(turn.question, turn.prompt.size());
  const auto begin = turn.prompt.begin() + static_cast<std::ptrdiff_t>(turn.question);
  const std::string before = text_of({turn.prompt.begin(), begin});
  const std::string after = text_of({begin, turn.prompt.end()});
  EXPECT_TRUE(before.ends_with("An answer<|im_end|>\n")) << before;
  EXPECT_TRUE(after.starts_with("<|im_start|>user\nSecond question")) << after;
  // No user message at all: the whole prompt is the question.
  EXPECT_EQ(reader()
                .chat(R"({"messages": [{"role": "assistant", "content": "x"}]})")
                .request.turn.question,
            0u);
}

TEST(ServerRequest, PinsTheWholeSystemMessage) {
  const std::string system = "You are the harbour master of Lower Quay and answer in one word.";
  const auto body = [&](const std::string& more) {
    return R"({"pin_system": true, "messages": [{"role": "system", "content": ")" + system +
           R"("}, {"role": "user", "content": "Who are you?"}])" + more + "}";
  };
  const llama_cpp::Turn turn = reader().chat(body("")).request.turn;
  const auto end = turn.prompt.begin() + turn.cache.n_sink;
  const std::string sinks = text_of({turn.prompt.begin(), end});
  EXPECT_EQ(sinks, "<|im_start|>system\n" + system + "<|im_end|>\n");
  EXPECT_EQ(reader().chat(body(R"(, "n_sink": 100)")).request.turn.cache.n_sink, 100);
  expect_refused({body(R"(, "budget": 24)"), "pin_system", "system message takes"},
                 [&] { static_cast<void>(reader().chat(body(R"(, "budget": 24)"))); });
}

TEST(ServerRequest, WhoseMessagesTheTemplateRefusesIsRefused) {
  const RequestReader::Render refuse = [](const auto&, bool) -> std::string {
    throw std::invalid_argument("roles must alternate");
  };
  const RequestReader r(vocabulary(), refuse, defaults());
  expect_refused({chat_with(""), "messages", "roles must alternate"},
                 [&] { static_cast<void>(r.chat(chat_with(""))); });
  const RequestReader none(vocabulary(), {}, defaults());
  expect_refused({chat_with(""), "messages", "no chat template"},
                 [&] { static_cast<void>(none.chat(chat_with(""))); });
}

TEST(ServerRequest, OfACompletionTakesTextOrTokens) {
  const auto expected = llama_cpp::tokenize(vocabulary(), "Hello there", false);
  EXPECT_EQ(completion("").request.turn.prompt, expected);
  EXPECT_EQ(reader().completion(R"({"prompt": ["Hello there"]})").request.turn.prompt, expected);
  const std::string tokens = nlohmann::json(expected).dump();
  EXPECT_EQ(reader().completion(R"({"prompt": )" + tokens + "}").request.turn.prompt, expected);
  EXPECT_EQ(completion(R"("logprobs": 0)").request.turn.top_logprobs, 0);
  EXPECT_TRUE(completion(R"("logprobs": 0)").logprobs);
}

TEST(ServerRequest, MayGoBeyondTheTrainedLengthOnlyWhereTheServerAllowsIt) {
  RequestDefaults with = defaults();
  with.allow_past_training = true;
  EXPECT_TRUE(reader(with).chat(chat_with("")).request.turn.allow_past_training);
  const std::string no = chat_with(R"("allow_past_training": false)");
  EXPECT_FALSE(reader(with).chat(no).request.turn.allow_past_training);
}

TEST(ServerRequest, ForTokensIsAnsweredAndTokensBecomeTextAgain) {
  using nlohmann::json;
  const json tokens = json::parse(reader().tokenize(R"({"content": "Hello there"})"))["tokens"];
  const json again = json::parse(reader().detokenize(json{{"tokens", tokens}}.dump()))["content"];
  EXPECT_EQ(again, "Hello there");
  const json pieces = json::parse(
      reader().tokenize(R"({"content": "Hello \u20ac", "with_pieces": true})"))["tokens"];
  ASSERT_TRUE(pieces.is_array() && !pieces.empty());
  EXPECT_TRUE(pieces[0]["id"].is_number_integer());
  EXPECT_TRUE(pieces[0]["piece"].is_string());
  EXPECT_EQ(json::parse(reader().tokenize(R"({"content": ""})"))["tokens"], json::array());
  const std::vector<Refused> bad_text = {
      {"{}", "content", ""},
      {R"({"content": 5})", "content", ""},
      {R"({"content": "x", "add_special": 1})", "add_special", ""},
      {R"({"content": "a\u0000"})", "content", "NUL"}};
  for (const Refused& bad : bad_text) {
    expect_refused(bad, [&] { static_cast<void>(reader().tokenize(bad.body)); });
  }
  const std::vector<Refused> bad_tokens = {{"{}", "tokens", ""},
                                           {R"({"tokens": "x"})", "tokens", ""},
                                           {R"({"tokens": [1, "x"]})", "tokens[1]", ""},
                                           {R"({"tokens": [-1]})", "tokens[0]", ""},
                                           {R"({"tokens": [1e9]})", "tokens[0]", ""}};
  for (const Refused& bad : bad_tokens) {
    expect_refused(bad, [&] { static_cast<void>(reader().detokenize(bad.body)); });
  }
}

TEST(ServerRequest, NamesSlotFilesPlainly) {
  const auto name = [](const std::string& text) {
    return RequestReader::slot_file_name(nlohmann::json{{"filename", text}}.dump());
  };
  for (const std::string& good : {std::string("a"), std::string("chat-1.slot"),
                                  std::string("-A_b.C"), std::string(128, 'x')}) {
    EXPECT_EQ(name(good), good);
  }
  for (const std::string bad : {"", "../x", "..", ".", ".hidden", "/etc/passwd", "a/b", "a\\b",
                                "a b", "a\nb", "\xC3\xA4", "a:b", "~", "a*", "%2e%2e"}) {
    expect_refused({bad, "filename", "plain file name"}, [&] { static_cast<void>(name(bad)); });
  }
  for (const std::string& bad : {std::string(129, 'x'), std::string(300, 'x')}) {
    expect_refused({bad, "filename", "128"}, [&] { static_cast<void>(name(bad)); });
  }
  expect_refused({"{}", "filename", "missing"},
                 [&] { static_cast<void>(RequestReader::slot_file_name("{}")); });
  expect_refused({"NUL", "filename", "NUL"}, [&] {
    static_cast<void>(RequestReader::slot_file_name(R"({"filename": "a\u0000"})"));
  });
}

}  // namespace
}  // namespace morphkv::server

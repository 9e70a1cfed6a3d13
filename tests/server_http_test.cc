// The server as its clients meet it: answers, streams, refusals, who leaves, start and stop.
#include "server_fixture.h"

namespace morphkv::server {
namespace {

using namespace std::chrono_literals;
using test::RawClient;

TEST_F(ServerHttp, AnswersAChatAtOnce) {
  service.answer_with([](const Request&) { return hello(); });
  start();
  const auto reply = post(kChat, chat(R"(, "max_tokens": 5)"));
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 200);
  EXPECT_EQ(reply->get_header_value("Content-Type"), "application/json");
  const Json json = Json::parse(reply->body);
  EXPECT_EQ(json["object"], "chat.completion");
  EXPECT_EQ(json["model"], "tiny");
  EXPECT_EQ(json["choices"][0]["message"]["content"], "Hello");
  ASSERT_EQ(service.requests().size(), 1u);
  EXPECT_EQ(service.requests()[0].turn.max_tokens, 5);
  EXPECT_EQ(json["usage"]["completion_tokens"], 2);
  EXPECT_EQ(post(kText, text())->status, 200);
}

TEST_F(ServerHttp, StreamsAChatAsServerSentEvents) {
  service.answer_with([](const Request&) { return hello(); });
  start();
  for (const bool usage : {false, true}) {
    const auto reply =
        post(kChat, chat(std::string(R"(, "stream": true)") +
                         (usage ? R"(, "stream_options": {"include_usage": true})" : "")));
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->status, 200);
    EXPECT_EQ(reply->get_header_value("Content-Type"), "text/event-stream");
    EXPECT_EQ(reply->get_header_value("Cache-Control"), "no-store");
    const std::vector<std::string> events = events_of(reply->body);
    ASSERT_EQ(events.size(), usage ? 6u : 5u) << reply->body;
    EXPECT_EQ(Json::parse(events[0])["choices"][0]["delta"]["role"], "assistant");
    EXPECT_EQ(Json::parse(events[1])["choices"][0]["delta"]["content"], "Hel");
    EXPECT_EQ(Json::parse(events[2])["choices"][0]["delta"]["content"], "lo");
    EXPECT_EQ(Json::parse(events[3])["choices"][0]["finish_reason"], "stop");
    EXPECT_TRUE(Json::parse(events[3]).contains("morphkv"));
    if (usage) {
      EXPECT_EQ(Json::parse(events[4])["usage"]["completion_tokens"], 2);
    }
    EXPECT_EQ(events.back(), "[DONE]");
  }
}

TEST_F(ServerHttp, StreamsACompletion) {
  service.answer_with([](const Request&) { return hello(EndReason::kLength); });
  start();
  const auto reply = post(kText, text(R"(, "stream": true)"));
  ASSERT_TRUE(reply);
  const std::vector<std::string> events = events_of(reply->body);
  ASSERT_EQ(events.size(), 4u) << reply->body;
  EXPECT_EQ(Json::parse(events[0])["choices"][0]["text"], "Hel");
  EXPECT_EQ(Json::parse(events[2])["choices"][0]["finish_reason"], "length");
}

TEST_F(ServerHttp, SaysInAnErrorWhatTheEngineFailedAt) {
  service.answer_with([](const Request&) {
    End end = end_of(EndReason::kError);
    end.error = "llama_decode failed";
    return Script{{delta_of("Hel"), end}};
  });
  start();
  expect_error(post(kChat, chat()), 500, "server_error", "llama_decode failed");
  const auto reply = post(kChat, chat(R"(, "stream": true)"));
  ASSERT_TRUE(reply);
  const std::vector<std::string> events = events_of(reply->body);
  ASSERT_EQ(events.size(), 4u) << reply->body;
  EXPECT_EQ(Json::parse(events[2])["error"]["message"], "llama_decode failed");
  EXPECT_EQ(events[3], "[DONE]");
}

TEST_F(ServerHttp, TellsATimeOutBeforeTheFirstTokenFromOneAfterIt) {
  service.answer_with([](const Request& request) {
    Script script{{end_of(EndReason::kTimeout)}};
    if (request.turn.max_tokens == 2) script.events.insert(script.events.begin(), delta_of("x"));
    return script;
  });
  start();
  expect_error(post(kChat, chat()), 504, "timeout_error", "before the first token");
  const auto events = events_of(post(kChat, chat(R"(, "stream": true)"))->body);
  EXPECT_EQ(Json::parse(events.at(1))["error"]["type"], "timeout_error");
  const auto reply = post(kChat, chat(R"(, "max_tokens": 2)"));
  EXPECT_EQ(reply->status, 200);
  const Json json = Json::parse(reply->body);
  EXPECT_EQ(json["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(json["morphkv"]["finish_detail"], "timeout");
  const auto late = events_of(post(kChat, chat(R"(, "max_tokens": 2, "stream": true)"))->body);
  EXPECT_EQ(Json::parse(late.at(2))["morphkv"]["finish_detail"], "timeout");
}

TEST_F(ServerHttp, GivesEachRefusalItsStatusAlsoForAStream) {
  start();
  for (const std::string& more : {std::string(), std::string(R"(, "stream": true)")}) {
    service.answer_with([](const Request&) -> Script { throw QueueFull(64, 7); });
    const auto full = post(kChat, chat(more));
    expect_error(full, 429, "rate_limit_error", "64");
    EXPECT_EQ(full->get_header_value("Retry-After"), "7");
    service.answer_with([](const Request&) -> Script { throw Stopping("the server is stopping"); });
    expect_error(post(kChat, chat(more)), 503, "server_error", "stopping");
    service.answer_with([](const Request&) -> Script {
      throw llama_cpp::TooLong("900 tokens, 512 rows", 900, 512);
    });
    const auto too_long = post(kChat, chat(more));
    expect_error(too_long, 400, "exceed_context_size_error", "900");
    EXPECT_EQ(Json::parse(too_long->body)["error"]["n_prompt_tokens"], 900);
    EXPECT_EQ(Json::parse(too_long->body)["error"]["n_ctx"], 512);
    service.answer_with([](const Request&) -> Script { throw std::invalid_argument("budget 1"); });
    expect_error(post(kText, text(more)), 400, "invalid_request_error", "budget 1");
    service.answer_with([](const Request&) -> Script { throw std::runtime_error("disk on fire"); });
    expect_error(post(kText, text(more)), 500, "server_error", "disk on fire");
    expect_error(post(kChat, chat(more + R"(, "top_k": "x")")), 400, "invalid_request_error",
                 "top_k");
  }
  EXPECT_EQ(service.requests().size(), 0u);
}

// --- Clients that leave -------------------------------------------------------------------------

struct Leaver {
  const char* name;
  bool stream;
  bool tokens;  // come fast and without end
};

class ServerHttpLeavers : public ServerHttp, public ::testing::WithParamInterface<Leaver> {};

TEST_P(ServerHttpLeavers, AreNoticedSoonAndAloneLoseTheirAnswer) {
  const Leaver who = GetParam();
  service.answer_with([who](const Request&) {
    Script script;
    if (who.tokens) script = {std::vector<Event>(2000, delta_of("x")), 5ms};
    return script;
  });
  start();
  RawClient stays(port);
  stays.post(kChat, chat(who.stream ? R"(, "stream": true)" : ""));
  ASSERT_TRUE(service.tally->wait_for(service.tally->begun, 1, 2s));
  RawClient leaves(port);
  leaves.post(kChat, chat(who.stream ? R"(, "stream": true)" : ""));
  ASSERT_TRUE(service.tally->wait_for(service.tally->begun, 2, 2s));
  std::this_thread::sleep_for(150ms);
  EXPECT_FALSE(service.tally->wait_for(service.tally->dropped, 1, 0ms));
  leaves.leave();
  EXPECT_TRUE(service.tally->wait_for(service.tally->dropped, 1, 1s));
  EXPECT_FALSE(service.tally->wait_for(service.tally->dropped, 2, 300ms));
  stays.leave();
  EXPECT_TRUE(service.tally->wait_for(service.tally->dropped, 2, 1s));
}

INSTANTIATE_TEST_SUITE_P(All, ServerHttpLeavers,
                         ::testing::Values(Leaver{"PlainWaiting", false, false},
                                           Leaver{"PlainAnswering", false, true},
                                           Leaver{"StreamWaiting", true, false},
                                           Leaver{"StreamAnswering", true, true}),
                         [](const auto& one) { return one.param.name; });

TEST_F(ServerHttp, IsHealthyWhileManyWait) {
  HttpOptions o = options();
  o.threads = 12;
  start(o);
  std::vector<std::unique_ptr<RawClient>> waiting;
  for (int i = 0; i < 10; ++i) {
    waiting.push_back(std::make_unique<RawClient>(port));
    waiting.back()->post(kChat, chat());
  }
  ASSERT_TRUE(service.tally->wait_for(service.tally->begun, 10, 5s));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(get("/health")->status, 200);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 1s);
}

// --- Start and stop -----------------------------------------------------------------------------

TEST_F(ServerHttp, DoesNotShareItsPort) {
  start();
  HttpOptions o = options();
  o.port = port;
  HttpServer second(model(), service, render, o);
  try {
    second.bind();
    ADD_FAILURE() << "two servers on one port";
  } catch (const std::runtime_error& error) {
    const std::string why = error.what();
    EXPECT_NE(why.find("127.0.0.1:" + std::to_string(port)), std::string::npos) << why;
    EXPECT_NE(why.find("in use"), std::string::npos) << why;
  }
}

TEST_F(ServerHttp, StopsBeforeItListensAndWhileItAnswers) {
  {
    HttpServer early(model(), service, render, options());
    early.bind();
    early.stop();
    early.listen();  // returns
  }
  service.answer_with([](const Request&) {
    return Script{{delta_of("a"), delta_of("b"), end_of(EndReason::kStop)}, 100ms};
  });
  start();
  RawClient client(port);
  client.post(kChat, chat(R"(, "stream": true)"));
  // Once its head is there the answer is one that runs, which a submitted request is not yet.
  ASSERT_NE(client.receive("\r\n\r\n").find("text/event-stream"), std::string::npos);
  std::thread stopper([this] { stop(); });
  const std::string answer = client.receive("[DONE]");
  stopper.join();
  EXPECT_NE(answer.find("[DONE]"), std::string::npos) << answer;  // what runs is finished
}

}  // namespace
}  // namespace morphkv::server

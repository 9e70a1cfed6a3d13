// Who may use the server, and what HTTP itself refuses.
#include "server_fixture.h"

namespace morphkv::server {
namespace {

using namespace std::chrono_literals;
using test::RawClient;

// --- Keys ---------------------------------------------------------------------------------------

TEST_F(ServerHttp, AsksForAKeyEverywhereButAtTheDoor) {
  const Folder folder;
  HttpOptions o = options();
  o.api_key_file = folder.file("keys", "a-good-key-1\n");
  service.answer_with([](const Request&) { return hello(); });
  start(o);
  const std::vector<std::string> gets = {"/v1/models", "/metrics", "/slots", "/slots/0/picture",
                                         "/nothing"};
  const std::vector<std::string> posts = {kChat, kText, "/tokenize", "/detokenize",
                                          "/slots/0?action=erase"};
  const httplib::Headers good = {{"Authorization", "Bearer a-good-key-1"}};
  for (const httplib::Headers& bad :
       {httplib::Headers{}, httplib::Headers{{"Authorization", "Bearer another-key"}},
        httplib::Headers{{"Authorization", "a-good-key-1"}}}) {
    for (const auto& path : gets) expect_error(get(path, bad), 401, "authentication_error", "key");
    for (const auto& path : posts) {
      expect_error(post(path, chat(), bad), 401, "authentication_error", "key");
    }
  }
  for (const std::string path : {"/health", "/", "/page.css", "/page.js", "/page.svg"}) {
    EXPECT_EQ(get(path)->status, 200) << path;
  }
  EXPECT_EQ(get("/slots", good)->status, 200);
  EXPECT_EQ(post(kChat, chat(), good)->status, 200);
  EXPECT_EQ(service.requests().size(), 1u);
}

TEST_F(ServerHttp, ReadsTheNextRequestOfAConnectionAfterOneWithoutAKey) {
  const Folder folder;
  HttpOptions o = options();
  o.api_key_file = folder.file("keys", "a-good-key-1\n");
  start(o);
  RawClient client(port);
  client.post(kChat, "GET /slots HTTP/1.1\r\n\r\n");  // a body that looks like a request
  EXPECT_NE(client.receive("\"error\"").find("401"), std::string::npos);
  client.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
  const std::string next = client.receive("\"ok\"", 1s);
  EXPECT_TRUE(next.empty() || next.find("\"ok\"") != std::string::npos)
      << next;  // closed, or right
}

TEST_F(ServerHttp, RefusesPagesOfOtherSites) {
  service.answer_with([](const Request&) { return hello(); });
  start(options());
  expect_error(post(kChat, chat(), {{"Sec-Fetch-Site", "cross-site"}}), 403, "permission_error",
               "other sites");
  EXPECT_EQ(post(kChat, chat(), {{"Sec-Fetch-Site", "same-origin"}})->status, 200);
  EXPECT_EQ(service.requests().size(), 1u);
}

TEST_F(ServerHttp, ListensBeyondThisMachineOnlyWithAKeyOrWhenTold) {
  const Folder folder;
  const auto refusal = [&](const std::string& host, bool insecure, bool key) -> std::string {
    HttpOptions o = options();
    o.host = host;
    o.insecure = insecure;
    if (key) o.api_key_file = folder.file("keys", "a-good-key-1\n");
    try {
      const HttpServer server(model(), service, render, o);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  for (const std::string host :
       {"127.0.0.1", "127.8.9.10", "localhost", "::1", "0:0:0:0:0:0:0:1"}) {
    EXPECT_EQ(refusal(host, false, false), "") << host;
  }
  for (const std::string host : {"0.0.0.0", "::", "", "192.168.1.5", "127.0.0.1.example.org",
                                 "128.0.0.1", "localhost.example.org"}) {
    const std::string why = refusal(host, false, false);
    for (const std::string& part :
         {"'" + host + "'", std::string("--api-key-file"), std::string("--insecure")}) {
      EXPECT_NE(why.find(part), std::string::npos) << host << ": " << why;
    }
    EXPECT_EQ(refusal(host, true, false), "") << host;
    EXPECT_EQ(refusal(host, false, true), "") << host;
  }
}

// --- What HTTP refuses --------------------------------------------------------------------------

TEST_F(ServerHttp, SaysWhatIsNotThereAndWhatTakesAnotherMethod) {
  start();
  for (const std::string path :
       {"/nothing", "/v1", "/v1/embeddings", "/slots/", "/slots/0/pictures", "/page.txt",
        "/slots/0/picture/1", "/../etc/passwd", "/%2e%2e/etc/passwd"}) {
    expect_error(get(path), 404, "invalid_request_error", "nothing here");
  }
  for (const std::string& path : {std::string(kChat), std::string(kText), std::string("/tokenize"),
                                  std::string("/detokenize"), std::string("/slots/0")}) {
    const auto reply = get(path);
    expect_error(reply, 405, "invalid_request_error", path);
    EXPECT_EQ(reply->get_header_value("Allow"), "POST");
  }
  for (const std::string path :
       {"/", "/health", "/metrics", "/slots", "/v1/models", "/page.css", "/slots/0/picture"}) {
    const auto reply = post(path, "{}");
    expect_error(reply, 405, "invalid_request_error", path);
    EXPECT_EQ(reply->get_header_value("Allow"), "GET");
  }
  EXPECT_EQ(client().Delete("/slots/0")->status, 405);
  EXPECT_EQ(client().Put(kChat, "{}", "application/json")->status, 405);
}

TEST_F(ServerHttp, BoundsWhatAClientSends) {
  start();
  expect_error(post(kText, text(R"(, "user": ")" + std::string(17u << 20, 'x') + "\"")), 413,
               "invalid_request_error", "16777216");
  const std::string form(2000000, 'x');
  expect_error(client().Post(kText, form, "application/x-www-form-urlencoded"), 413,
               "invalid_request_error", "application/json");
  for (const std::string& line :
       {std::string("nonsense\r\n\r\n"), std::string("GET /health HTTP/9.9\r\n\r\n"),
        "GET /" + std::string(20000, 'x') + " HTTP/1.1\r\n\r\n",
        "GET /health HTTP/1.1\r\nX: " + std::string(20000, 'x') + "\r\n\r\n"}) {
    RawClient bad(port);
    bad.send(line);
    const std::string reply = bad.receive("}", 2s);
    EXPECT_TRUE(reply.empty() || reply.starts_with("HTTP/1.1 4")) << reply.substr(0, 200);
  }
  EXPECT_EQ(get("/health")->status, 200);
  EXPECT_EQ(service.requests().size(), 0u);
}

TEST_F(ServerHttp, AnswersHalfABodyOrNoneWithAnErrorAndGoesOn) {
  start();
  expect_error(post(kChat, ""), 400, "invalid_request_error", "byte 1");
  expect_error(post(kChat, "{\"messages\": [\xFF]}"), 400, "invalid_request_error", "messages");
  {
    RawClient half(port);
    half.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"pro");
  }
  EXPECT_EQ(get("/health")->status, 200);
}

}  // namespace
TEST_F(ServerHttp, ClientsWhoseBytesDripInHoldNobodyUp) {
  HttpOptions o = options();
  o.threads = 2;
  o.request_timeout = 300ms;
  start(o);
  RawClient header(port);
  RawClient body(port);
  body.send("POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{");
  std::atomic<bool> answered = false;
  std::thread drip([&] {
    header.send("GET /health HTTP/1.1\r\nX-Long: ");
    while (!answered) {
      header.send("a");
      body.send(" ");
      std::this_thread::sleep_for(20ms);
    }
  });
  const httplib::Result reply = get("/health");
  answered = true;
  drip.join();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 200);
  // A client that is quick enough may take as long as it likes between two requests.
  RawClient quick(port);
  for (int i = 0; i < 2; ++i) {
    std::this_thread::sleep_for(400ms);
    quick.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_NE(quick.receive("ok").find("200 OK"), std::string::npos);
  }
}

}  // namespace morphkv::server

// The other paths: what the server shows of itself, the page, and slots on disk.
#include <map>

#include "server_fixture.h"

namespace morphkv::server {
namespace {

// --- The other paths ----------------------------------------------------------------------------

TEST_F(ServerHttp, ShowsItselfItsModelItsSlotsAndItsCounters) {
  start();
  EXPECT_EQ(Json::parse(get("/health")->body), Json({{"status", "ok"}}));
  const Json models = Json::parse(get("/v1/models")->body);
  EXPECT_EQ(models["object"], "list");
  EXPECT_EQ(models["data"][0]["id"], "tiny");
  EXPECT_EQ(models["data"][0]["object"], "model");
  const Json slots = Json::parse(get("/slots")->body);
  ASSERT_EQ(slots.size(), 2u);
  EXPECT_EQ(slots[0]["state"], "idle");
  EXPECT_EQ(slots[1]["state"], "reading");
  EXPECT_EQ(slots[1]["tokens_seen"], 300);
  EXPECT_EQ(slots[1]["rows_kept"], 96);
  EXPECT_EQ(slots[1]["rows_evicted"], 204);
  EXPECT_EQ(slots[1]["kv_bytes_allocated"], 2048);
  const auto metrics = get("/metrics");
  EXPECT_EQ(metrics->get_header_value("Content-Type"), "text/plain; version=0.0.4");
  EXPECT_NE(metrics->body.find("\nmorphkv_requests_begun_total 7\n"), std::string::npos);
}

TEST_F(ServerHttp, ShowsWhatASlotHolds) {
  start();
  const Json picture = Json::parse(get("/slots/1/picture")->body);
  EXPECT_EQ(picture, Json({{"slot", 1},
                           {"tokens_seen", 5},
                           {"first_token", 3},
                           {"pieces", {"x", "x"}},
                           {"layers", {0, 2}},
                           {"heads", 1},
                           {"held", {{{0, 3}}, {{3, 4}}}}}));
  EXPECT_EQ(Json::parse(get("/slots/1/picture?tokens=1")->body)["pieces"].size(), 1u);
  for (const std::string slot : {"2", "-1", "x", "0x0", "99999999999999", "1.0", "%20"}) {
    expect_error(get("/slots/" + slot + "/picture"), 400, "invalid_request_error", "slot");
  }
  for (const std::string tokens : {"0", "-1", "x", "", "8193", "1e3"}) {
    expect_error(get("/slots/0/picture?tokens=" + tokens), 400, "invalid_request_error", "tokens");
  }
}

TEST_F(ServerHttp, TokenizesAndBack) {
  start();
  const Json tokens = Json::parse(post("/tokenize", R"({"content": "Hello world"})")->body);
  ASSERT_FALSE(tokens["tokens"].empty());
  EXPECT_EQ(post("/detokenize", tokens.dump())->status, 200);
  expect_error(post("/tokenize", R"({"content": 5})"), 400, "invalid_request_error", "content");
  expect_error(post("/detokenize", R"({"tokens": ["x"]})"), 400, "invalid_request_error",
               "tokens[0]");
}

TEST_F(ServerHttp, ServesThePageUnderAPolicyOfItsOwn) {
  start();
  for (const auto& [path, type] :
       std::map<std::string, std::string>{{"/", "text/html; charset=utf-8"},
                                          {"/page.css", "text/css; charset=utf-8"},
                                          {"/page.js", "text/javascript; charset=utf-8"},
                                          {"/page.svg", "image/svg+xml"}}) {
    const auto reply = get(path);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->status, 200) << path;
    EXPECT_EQ(reply->get_header_value("Content-Type"), type);
    EXPECT_TRUE(
        reply->get_header_value("Content-Security-Policy").starts_with("default-src 'self'"));
    EXPECT_EQ(reply->get_header_value("X-Content-Type-Options"), "nosniff");
    EXPECT_FALSE(reply->has_header("Access-Control-Allow-Origin"));
    EXPECT_FALSE(reply->body.empty());
  }
}

// --- Saved slots --------------------------------------------------------------------------------

TEST_F(ServerHttp, SavesRestoresAndErasesASlot) {
  const Folder folder;
  HttpOptions o = options();
  o.slot_dir = folder.slots();
  start(o);
  const std::string name = R"({"filename": "chat-1.slot"})";
  expect_error(post("/slots/0?action=restore", name), 404, "not_found_error", "no saved slot");
  const auto saved = post("/slots/0?action=save", name);
  EXPECT_EQ(saved->status, 200) << saved->body;
  EXPECT_EQ(Json::parse(saved->body).size(), 2u);  // the slots, as they are now
  EXPECT_EQ(post("/slots/1?action=restore", name)->status, 200);
  EXPECT_EQ(post("/slots/1?action=erase", "")->status, 200);
  EXPECT_EQ(service.done(), (std::vector<std::string>{"save 0", "restore 1", "erase 1"}));
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder.slots())) {
    files.push_back(entry.path().filename().string());
  }
  EXPECT_EQ(files, std::vector<std::string>{"chat-1.slot"});  // nothing else is left

  folder.file("slots/bad.slot", "other bytes");
  expect_error(post("/slots/0?action=restore", R"({"filename": "bad.slot"})"), 400,
               "invalid_request_error", "damaged");
  std::filesystem::create_directory(folder.slots() + "/folder");
  EXPECT_EQ(post("/slots/0?action=restore", R"({"filename": "folder"})")->status, 404);
  EXPECT_GE(post("/slots/0?action=save", R"({"filename": "folder"})")->status, 400);
}

TEST_F(ServerHttp, TakesOnlyPlainNamesOfSavedSlots) {
  const Folder folder;
  folder.file("outside", FakeService::kSaved);
  HttpOptions o = options();
  o.slot_dir = folder.slots();
  start(o);
  for (const std::string& name :
       {std::string("../outside"), std::string("/etc/passwd"), std::string("a/b"),
        std::string(".hidden"), std::string(".."), std::string(), std::string(300, 'x'),
        std::string("a\\b"), std::string("a b"), std::string("\xC3\xA4")}) {
    for (const std::string action : {"save", "restore"}) {
      expect_error(post("/slots/0?action=" + action, Json{{"filename", name}}.dump()), 400,
                   "invalid_request_error", "filename");
    }
  }
  for (const std::string body : {"", "{}", "[]", R"({"filename": 5})", R"({"filename": null})"}) {
    EXPECT_EQ(post("/slots/0?action=save", body)->status, 400) << body;
  }
  EXPECT_TRUE(service.done().empty());
  EXPECT_TRUE(std::filesystem::is_empty(folder.slots()));
}

TEST_F(ServerHttp, RefusesWhatCannotBeDoneWithASlot) {
  const Folder folder;
  HttpOptions o = options();
  o.slot_dir = folder.slots();
  start(o);
  const std::string name = R"({"filename": "x"})";
  for (const std::string query : {"", "?action=", "?action=forget", "?action=SAVE", "?act=save"}) {
    expect_error(post("/slots/0" + query, name), 400, "invalid_request_error", "action");
  }
  for (const std::string slot : {"2", "-1", "x", "1e0"}) {
    expect_error(post("/slots/" + slot + "?action=save", name), 400, "invalid_request_error",
                 "slot");
  }
  service.hold();
  for (const std::string action : {"save", "erase"}) {
    expect_error(post("/slots/0?action=" + action, name), 409, "conflict_error", "busy");
  }
}

TEST_F(ServerHttp, WithoutAFolderSavesNothing) {
  start();
  for (const std::string action : {"save", "restore"}) {
    expect_error(post("/slots/0?action=" + action, R"({"filename": "x"})"), 501, "not_supported",
                 "--slot-dir");
  }
  EXPECT_EQ(post("/slots/0?action=erase", "")->status, 200);
  HttpOptions o = options();
  o.slot_dir = "/nowhere/at/all";
  EXPECT_THROW(HttpServer(model(), service, render, o), std::invalid_argument);
}

}  // namespace
}  // namespace morphkv::server

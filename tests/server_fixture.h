// A server that runs on a FakeService, and its clients.
#pragma once

#include <gtest/gtest.h>
#include <httplib.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "fake_service.h"
#include "http_server.h"
#include "raw_client.h"
#include "tiny_model.h"

namespace morphkv::server {

using Json = nlohmann::json;

inline const llama_model* model() {
  static const llama_cpp::ModelPtr kModel = [] {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    return test::make_tiny_model({});
  }();
  return kModel.get();
}

inline std::string render(const std::vector<llama_cpp::ChatMessage>& messages, bool) {
  std::string text;
  for (const auto& message : messages) text += message.role + ": " + message.content + "\n";
  return text;
}

inline HttpOptions options() {
  HttpOptions o;
  o.port = 0;
  o.model_name = "tiny";
  o.defaults.settings.set(kBudgetField, 96);
  o.defaults.slots = 2;
  return o;
}

inline Delta delta_of(const std::string& text) { return {text, {{1, text, {}, {}}}}; }

inline End end_of(EndReason reason, int generated = 2) {
  End end;
  end.reason = reason;
  end.stats.generated_tokens = generated;
  return end;
}

inline Script hello(EndReason reason = EndReason::kStop) {
  return {{delta_of("Hel"), delta_of(""), delta_of("lo"), end_of(reason)}};
}

// A folder of this process with another in it for saved slots, gone afterwards.
class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              ("morphkv-http-" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_ / "slots");
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return (path_ / name).string();
  }
  std::string slots() const { return (path_ / "slots").string(); }

 private:
  std::filesystem::path path_;
};

// A server that runs, and its clients.
class ServerHttp : public ::testing::Test {
 protected:
  void start(HttpOptions with = options()) {
    server_ = std::make_unique<HttpServer>(model(), service, render, std::move(with));
    port = server_->bind();
    thread_ = std::thread([this] { server_->listen(); });
  }
  void stop() {
    if (!thread_.joinable()) return;
    server_->stop();
    thread_.join();
  }
  ~ServerHttp() override { stop(); }

  httplib::Client client() const {
    httplib::Client client("127.0.0.1", port);
    client.set_read_timeout(10, 0);
    return client;
  }
  httplib::Result post(const std::string& path, const std::string& body,
                       const httplib::Headers& headers = {}) const {
    return client().Post(path, headers, body, "application/json");
  }
  httplib::Result get(const std::string& path, const httplib::Headers& headers = {}) const {
    return client().Get(path, headers);
  }

  static constexpr const char* kChat = "/v1/chat/completions";
  static constexpr const char* kText = "/v1/completions";
  static std::string chat(const std::string& more = "") {
    return R"({"messages": [{"role": "user", "content": "Hello"}])" + more + "}";
  }
  static std::string text(const std::string& more = "") {
    return R"({"prompt": "Hello")" + more + "}";
  }

  FakeService service;
  int port = 0;

 private:
  std::unique_ptr<HttpServer> server_;
  std::thread thread_;
};

// The data of each event; every event must be "data: ...\n\n".
inline std::vector<std::string> events_of(std::string_view body) {
  std::vector<std::string> events;
  while (!body.empty()) {
    EXPECT_TRUE(body.starts_with("data: ")) << body;
    const std::size_t end = body.find("\n\n");
    if (!body.starts_with("data: ") || end == std::string_view::npos) break;
    events.emplace_back(body.substr(6, end - 6));
    body.remove_prefix(end + 2);
  }
  return events;
}

inline void expect_error(const httplib::Result& reply, int status, const std::string& type,
                         const std::string& says) {
  ASSERT_TRUE(reply) << httplib::to_string(reply.error());
  EXPECT_EQ(reply->status, status) << reply->body;
  EXPECT_EQ(reply->get_header_value("Content-Type"), "application/json");
  const Json error = Json::parse(reply->body, nullptr, false);
  ASSERT_TRUE(error.is_object() && error.contains("error")) << reply->body;
  EXPECT_EQ(error["error"]["type"], type) << reply->body;
  EXPECT_NE(error["error"]["message"].get<std::string>().find(says), std::string::npos)
      << reply->body;
  EXPECT_TRUE(error["error"].contains("param") && error["error"].contains("code"));
}

}  // namespace morphkv::server

// HTTP in front of a Service: routes, keys, limits, server-sent events, and clients that leave.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "request.h"
#include "service.h"

namespace morphkv::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8080;  // 0 = any that is free
  std::optional<std::string> api_key_file = std::nullopt;
  bool insecure = false;  // listen beyond loopback without a key
  std::optional<std::string> slot_dir = std::nullopt;
  std::string model_name;
  RequestDefaults defaults;
  std::chrono::milliseconds request_timeout{60'000};  // for a client to send a request
  int threads = 16;  // connections served at once: above the requests that may run and wait
};

class HttpServer {
 public:
  // Throws std::invalid_argument: a host beyond loopback without keys, a key file or a folder that
  // cannot be used. `render`: RequestReader. Model and service must outlive the server.
  HttpServer(const llama_model* model, Service& service, RequestReader::Render render,
             HttpOptions options);
  ~HttpServer();

  // Takes the port and returns its number. Throws std::runtime_error that names host and port.
  int bind();
  // Serves until stop().
  void listen();
  // Takes no more connections; from any thread.
  void stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace morphkv::server

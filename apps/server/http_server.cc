#include "http_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <ctime>
#include <filesystem>
#include <functional>
#include <system_error>
#include <thread>

#include "answer_json.h"
#include "api_keys.h"
#include "morphkv/file.h"
#include "page.h"
#include "timed_server.h"

namespace morphkv::server {
namespace {

constexpr std::size_t kMostBodyBytes = 16u << 20;
constexpr int kMostPictureTokens = 8192;
constexpr std::chrono::milliseconds kPatience{50};  // until a client that left is noticed
constexpr const char* kTooLate = "the time-out came before the first token";
constexpr const char* kJson = "application/json";

// An answer that is no success.
struct Failure {
  int status;
  std::string body;
};

Failure failure(int status, const std::string& message, const std::string& type,
                const std::string& param = "") {
  return {status, error_json(message, type, param)};
}

Failure bad_request(const std::string& message, const std::string& param = "") {
  return failure(400, message, "invalid_request_error", param);
}

bool is_loopback(const std::string& host) {
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6{};
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

// "12" in the path or the query, or nothing for anything else.
std::optional<int> number_of(const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The method that the path takes, or null for a path that is not there.
const char* method_of(const std::string& path) {
  for (const char* get :
       {"/v1/models", "/health", "/metrics", "/slots", "/", "/page.css", "/page.js", "/page.svg"}) {
    if (path == get) return "GET";
  }
  for (const char* post : {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}) {
    if (path == post) return "POST";
  }
  constexpr std::string_view kSlots = "/slots/";
  if (!path.starts_with(kSlots) || path.size() == kSlots.size()) return nullptr;
  const std::size_t end = path.find('/', kSlots.size());
  if (end == std::string::npos) return "POST";
  return path.substr(end) == "/picture" ? "GET" : nullptr;
}

// A request on its way out: kept by the connection that writes it.
struct Exchange {
  AnswerHead head;
  bool include_usage = false;
  std::unique_ptr<Answer> answer;
  bool answered = false;        // something of the answer came
  std::size_t text_offset = 0;  // characters of the tokens so far
};

std::string event(const std::string& data) { return "data: " + data + "\n\n"; }

}  // namespace

class HttpServer::Impl {
 public:
  Impl(const llama_model* model, Service& service, RequestReader::Render render,
       HttpOptions options)
      : model_(model),
        service_(service),
        options_(std::move(options)),
        reader_(model, std::move(render), options_.defaults),
        started_(std::time(nullptr)) {
    if (options_.api_key_file) keys_ = ApiKeys::read(*options_.api_key_file);
    if (!is_loopback(options_.host) && keys_.empty() && !options_.insecure) {
      throw std::invalid_argument("--host '" + options_.host +
                                  "' can be reached from other machines: give --api-key-file, or "
                                  "--insecure to let everybody in");
    }
    if (options_.slot_dir && !std::filesystem::is_directory(*options_.slot_dir)) {
      throw std::invalid_argument("--slot-dir '" + *options_.slot_dir +
                                  "' is no folder: make it first");
    }
    limit();
    route();
  }

  int bind() {
    errno = 0;
    const int port = options_.port == 0
                         ? http_.bind_to_any_port(options_.host)
                         : (http_.bind_to_port(options_.host, options_.port) ? options_.port : -1);
    if (port < 0) {
      throw std::runtime_error(
          "cannot listen on " + options_.host + ":" + std::to_string(options_.port) + ": " +
          (errno != 0 ? std::generic_category().message(errno) : "the host is not this machine's") +
          ": give another --host or --port");
    }
    return port;
  }
  void listen() { http_.listen_after_bind(); }
  void stop() {
    // httplib cuts streams off when it stops: those whose answer is there are written first.
    for (int i = 0; i < 500 && streams_ > 0; ++i) std::this_thread::sleep_for(kPatience / 5);
    http_.stop();
  }

 private:
  using Http = httplib::Request;
  using Reply = httplib::Response;
  using Handler = std::function<void(const Http&, Reply&)>;

  void limit();
  static void explain(const Http& request, Reply& reply);
  void route();
  void guard(const Http& request, Reply& reply, const Handler& handler) const;
  void answer(const Http& request, Reply& reply, bool chat);
  void answer_whole(const Http& request, Reply& reply, Exchange exchange);
  void stream(Reply& reply, std::shared_ptr<Exchange> exchange);
  bool write_event(httplib::DataSink& sink, Exchange& exchange) const;
  void slot_action(const Http& request, Reply& reply);
  void send_picture(const Http& request, Reply& reply) const;
  std::string slot_file(const Http& request) const;

  const llama_model* model_;
  Service& service_;
  HttpOptions options_;
  RequestReader reader_;
  std::int64_t started_;
  ApiKeys keys_;
  std::atomic<int> streams_ = 0;
  TimedServer http_;
};

// What a client may take of us: bytes, time, connections.
void HttpServer::Impl::limit() {
  const auto threads = static_cast<std::size_t>(options_.threads);
  // All of them from the start: httplib's pool counts a thread as idle that has been woken for
  // another connection, and would let the next one wait for as long as an answer takes.
  http_.new_task_queue = [threads] {
    return new httplib::ThreadPool(threads, threads, 4 * threads);
  };
  // Not SO_REUSEPORT, httplib's default: two servers would share a port without knowing.
  http_.set_socket_options(
      [](int socket) { httplib::set_socket_opt(socket, SOL_SOCKET, SO_REUSEADDR, 1); });
  http_.set_payload_max_length(kMostBodyBytes);
  http_.set_request_timeout(options_.request_timeout);
  http_.set_write_timeout(30, 0);
  http_.set_keep_alive_max_count(100);
  http_.set_keep_alive_timeout(5);
  http_.set_tcp_nodelay(true);
  http_.set_pre_routing_handler([this](const Http& request, Reply& reply) {
    // A page of another site, in the browser of somebody who may reach this server.
    if (request.get_header_value("Sec-Fetch-Site") == "cross-site") {
      reply.status = 403;
      reply.set_content(
          error_json("requests from pages of other sites are refused", "permission_error"), kJson);
      return httplib::Server::HandlerResponse::Handled;
    }
    const bool open =
        request.path == "/health" || request.path == "/" || request.path.starts_with("/page.");
    if (open || keys_.allow(request.get_header_value("Authorization"))) {
      return httplib::Server::HandlerResponse::Unhandled;
    }
    reply.status = 401;
    reply.set_header("WWW-Authenticate", "Bearer");
    reply.set_content(error_json("a valid key is needed: send 'Authorization: Bearer KEY'",
                                 "authentication_error"),
                      kJson);
    return httplib::Server::HandlerResponse::Handled;
  });
  http_.set_error_handler([](const Http& request, Reply& reply) {
    if (!reply.body.empty()) return httplib::Server::HandlerResponse::Unhandled;
    explain(request, reply);
    return httplib::Server::HandlerResponse::Handled;
  });
}

// Whatever HTTP itself refuses is said in JSON as well.
void HttpServer::Impl::explain(const Http& request, Reply& reply) {
  const std::string what = request.method + " " + request.path;
  std::string message = "HTTP status " + std::to_string(reply.status);
  if (reply.status == 404) {
    message = what + ": there is nothing here";
    if (const char* method = method_of(request.path); method != nullptr) {
      reply.status = 405;
      reply.set_header("Allow", method);
      message = what + ": this path takes " + method;
    }
  } else if (reply.status == 413) {
    const bool form = request.get_header_value("Content-Type").starts_with("application/x-www");
    message =
        form ? "the body is too long for a form: send 'Content-Type: application/json'"
             : "the body is longer than " + std::to_string(kMostBodyBytes) + " bytes: shorten it";
  }
  reply.set_content(error_json(message, "invalid_request_error"), kJson);
}

void HttpServer::Impl::route() {
  const auto add = [this](const std::string& path, bool post, Handler handler) {
    auto guarded = [this, handler = std::move(handler)](const Http& request, Reply& reply) {
      guard(request, reply, handler);
    };
    if (post) {
      http_.Post(path, guarded);
    } else {
      http_.Get(path, guarded);
    }
  };
  const auto get = [&](const std::string& path, const char* type,
                       std::function<std::string()> text) {
    add(path, false, [type, text = std::move(text)](const Http&, Reply& reply) {
      reply.set_content(text(), type);
    });
  };
  get("/health", kJson, [] { return R"({"status":"ok"})"; });
  get("/v1/models", kJson, [this] { return models_json(options_.model_name, started_); });
  get("/slots", kJson,
      [this] { return slots_json(service_.slots(), service_.kv_bytes_allocated()); });
  get("/metrics", "text/plain; version=0.0.4", [this] {
    return metrics_text(service_.counters(), service_.slots(), service_.kv_bytes_allocated());
  });
  const auto page = [&](const std::string& path, const char* type, std::string_view text) {
    add(path, false, [type, text](const Http&, Reply& reply) {
      reply.set_header("Content-Security-Policy", std::string(kPagePolicy));
      reply.set_header("X-Content-Type-Options", "nosniff");
      reply.set_content(std::string(text), type);
    });
  };
  page("/", "text/html; charset=utf-8", page_html());
  page("/page.css", "text/css; charset=utf-8", page_css());
  page("/page.js", "text/javascript; charset=utf-8", page_js());
  page("/page.svg", "image/svg+xml", page_icon());
  add("/tokenize", true, [this](const Http& request, Reply& reply) {
    reply.set_content(reader_.tokenize(request.body), kJson);
  });
  add("/detokenize", true, [this](const Http& request, Reply& reply) {
    reply.set_content(reader_.detokenize(request.body), kJson);
  });
  add("/v1/chat/completions", true,
      [this](const Http& request, Reply& reply) { answer(request, reply, true); });
  add("/v1/completions", true,
      [this](const Http& request, Reply& reply) { answer(request, reply, false); });
  add(R"(/slots/([^/]+)/picture)", false,
      [this](const Http& request, Reply& reply) { send_picture(request, reply); });
  add(R"(/slots/([^/]+))", true,
      [this](const Http& request, Reply& reply) { slot_action(request, reply); });
}

// What a handler throws becomes the answer that it means.
void HttpServer::Impl::guard(const Http& request, Reply& reply, const Handler& handler) const {
  Failure failed{0, ""};
  try {
    handler(request, reply);
    return;
  } catch (const Failure& e) {
    failed = e;
  } catch (const BadRequest& e) {
    failed = bad_request(e.what(), e.param);
  } catch (const llama_cpp::TooLong& e) {
    failed = {400, too_long_json(e)};
  } catch (const std::invalid_argument& e) {
    failed = bad_request(e.what());
  } catch (const QueueFull& e) {
    failed = failure(429, e.what(), "rate_limit_error");
    reply.set_header("Retry-After", std::to_string(e.retry_after_s));
  } catch (const Stopping& e) {
    failed = failure(503, e.what(), "server_error");
  } catch (const SlotBusy& e) {
    failed = failure(409, e.what(), "conflict_error");
  } catch (const std::exception& e) {
    failed = failure(500, e.what(), "server_error");
  }
  reply.status = failed.status;
  reply.set_content(failed.body, kJson);
}

void HttpServer::Impl::answer(const Http& request, Reply& reply, bool chat) {
  ParsedRequest parsed = chat ? reader_.chat(request.body) : reader_.completion(request.body);
  Exchange exchange;
  exchange.head = {.id = new_id(chat),
                   .created = std::time(nullptr),
                   .model = options_.model_name,
                   .chat = chat,
                   .logprobs = parsed.logprobs,
                   .settings = parsed.settings};
  exchange.include_usage = parsed.include_usage;
  exchange.answer = service_.submit(std::move(parsed.request));
  if (parsed.stream) {
    stream(reply, std::make_shared<Exchange>(std::move(exchange)));
  } else {
    answer_whole(request, reply, std::move(exchange));
  }
}

void HttpServer::Impl::answer_whole(const Http& request, Reply& reply, Exchange exchange) {
  std::vector<Delta> deltas;
  auto looked = std::chrono::steady_clock::now();
  while (true) {
    std::optional<Event> next = exchange.answer->next(kPatience);
    const auto now = std::chrono::steady_clock::now();
    if (now - looked >= kPatience) {  // however fast the tokens come
      looked = now;
      if (request.is_connection_closed()) return;  // dropping the answer cancels it
    }
    if (!next) continue;
    if (std::holds_alternative<Begun>(*next)) continue;
    if (auto* delta = std::get_if<Delta>(&*next)) {
      deltas.push_back(std::move(*delta));
      continue;
    }
    const End& end = std::get<End>(*next);
    if (end.reason == EndReason::kError) throw failure(500, end.error, "server_error");
    if (end.reason == EndReason::kTimeout && deltas.empty()) {
      throw failure(504, kTooLate, "timeout_error");
    }
    reply.set_content(whole_answer(exchange.head, deltas, end, model_), kJson);
    return;
  }
}

void HttpServer::Impl::stream(Reply& reply, std::shared_ptr<Exchange> exchange) {
  ++streams_;
  reply.set_header("Cache-Control", "no-store");
  reply.set_chunked_content_provider(
      "text/event-stream",
      [this, exchange](std::size_t, httplib::DataSink& sink) {
        return sink.is_writable() && write_event(sink, *exchange);
      },
      // The connection may outlive the answer.
      [this, exchange](bool) {
        exchange->answer.reset();
        --streams_;
      });
}

// The next event, if there is one soon. False when the client is gone.
bool HttpServer::Impl::write_event(httplib::DataSink& sink, Exchange& exchange) const {
  const std::optional<Event> next = exchange.answer->next(kPatience);
  if (!next) return true;
  const auto write = [&](const std::string& text) { return sink.write(text.data(), text.size()); };
  if (const auto* begun = std::get_if<Begun>(&*next)) {
    return !exchange.head.chat || write(event(first_chunk(exchange.head, *begun)));
  }
  if (const auto* delta = std::get_if<Delta>(&*next)) {
    exchange.answered = true;
    if (delta->text.empty() && !exchange.head.logprobs) return true;
    return write(event(chunk(exchange.head, *delta, model_, exchange.text_offset)));
  }
  const End& end = std::get<End>(*next);
  std::string text;
  if (end.reason == EndReason::kError) {
    text = event(error_json(end.error, "server_error"));
  } else if (end.reason == EndReason::kTimeout && !exchange.answered) {
    text = event(error_json(kTooLate, "timeout_error"));
  } else {
    text = event(last_chunk(exchange.head, end));
    if (exchange.include_usage) text += event(usage_chunk(exchange.head, end));
  }
  if (!write(text + event("[DONE]"))) return false;
  sink.done();
  return true;
}

void HttpServer::Impl::send_picture(const Http& request, Reply& reply) const {
  const std::optional<int> slot = number_of(request.matches[1]);
  if (!slot) throw bad_request("slot '" + request.matches[1].str() + "' is no number", "slot");
  int most = kMostPictureTokens;
  if (request.has_param("tokens")) {
    const auto wanted = number_of(request.get_param_value("tokens"));
    if (!wanted || *wanted < 1 || *wanted > kMostPictureTokens) {
      throw bad_request("tokens '" + request.get_param_value("tokens") +
                            "' is not a whole number from 1 to " +
                            std::to_string(kMostPictureTokens),
                        "tokens");
    }
    most = *wanted;
  }
  reply.set_content(picture_json(service_.picture(*slot, most)), kJson);
}

std::string HttpServer::Impl::slot_file(const Http& request) const {
  if (!options_.slot_dir) {
    throw failure(501, "this server saves no slots: start it with --slot-dir", "not_supported");
  }
  const std::string name = reader_.slot_file_name(request.body);
  return (std::filesystem::path(*options_.slot_dir) / name).string();
}

void HttpServer::Impl::slot_action(const Http& request, Reply& reply) {
  const std::optional<int> slot = number_of(request.matches[1]);
  if (!slot) throw bad_request("slot '" + request.matches[1].str() + "' is no number", "slot");
  const std::string action = request.get_param_value("action");
  if (action == "save") {
    const std::string path = slot_file(request);
    write_file_atomically(path, service_.save(*slot));
  } else if (action == "restore") {
    const std::string path = slot_file(request);
    std::error_code ignored;
    if (!std::filesystem::is_regular_file(path, ignored)) {
      throw failure(404, "there is no saved slot of that name", "not_found_error", "filename");
    }
    service_.restore(*slot, read_file(path, llama_cpp::kMostSavedBytes));
  } else if (action == "erase") {
    service_.erase(*slot);
  } else {
    throw bad_request("action '" + action + "' is not one of save, restore, erase", "action");
  }
  reply.set_content(slots_json(service_.slots(), service_.kv_bytes_allocated()), kJson);
}

HttpServer::HttpServer(const llama_model* model, Service& service, RequestReader::Render render,
                       HttpOptions options)
    : impl_(std::make_unique<Impl>(model, service, std::move(render), std::move(options))) {}
HttpServer::~HttpServer() = default;
int HttpServer::bind() { return impl_->bind(); }
void HttpServer::listen() { impl_->listen(); }
void HttpServer::stop() { impl_->stop(); }

}  // namespace morphkv::server

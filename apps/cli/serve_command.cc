// `morphkv serve`: many sessions, each in constant memory, behind an OpenAI-compatible API.
#include "commands.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "cache_options.h"
#include "engine_log.h"
#include "engine_service.h"
#include "http_server.h"
#include "morphkv/llama_cpp/chat_template.h"
#include "options.h"
#include "progress.h"

namespace morphkv::cli {

using namespace llama_cpp;  // NOLINT: the whole file is about its types

struct ServeOptions {
  std::string model;
  std::string alias;
  CacheOptions cache;
  ResolvedSettings settings;  // of a request that says nothing else
  SlotsOptions slots{.slots = 4};
  int max_queue = 64;
  double timeout = 600;
  server::HttpOptions http;
  int n_gpu_layers = -1;
  bool allow_past_training = false;
  bool verbose = false;
};

namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

void add_server_options(CLI::App* app, ServeOptions& o) {
  auto* group = app->add_option_group("Server");
  group
      ->add_option("-m,--model", o.model,
                   "GGUF model file (`make model` prints the path of a small one)")
      ->type_name("FILE");
  group
      ->add_option("--alias", o.alias, "name of the model in answers; the file's name if not given")
      ->type_name("TEXT");
  group->add_option("--host", o.http.host, "address to listen on")->capture_default_str();
  add_number(group, "--port", o.http.port, 0, 65535, "port; 0 = any that is free");
  add_text(group, "--api-key-file", o.http.api_key_file,
           "file with the keys that clients may use, one per line")
      ->type_name("FILE");
  group->add_flag("--insecure", o.http.insecure,
                  "listen beyond this machine without a key: everybody may use it");
  add_number(group, "--slots", o.slots.slots, 1, llama_cpp::kMostSequences,
             "sessions that are answered at once, each with the whole budget");
  add_number(group, "--max-queue", o.max_queue, 0, 1000,
             "requests that may wait for a slot; beyond that they are refused with 429");
  add_number(group, "--timeout", o.timeout, 0.001, 1e6,
             "seconds that a request may take, waiting included");
  add_text(group, "--slot-dir", o.http.slot_dir, "folder for saved slots; without it none is saved")
      ->type_name("DIR");
  group->add_flag("-v,--verbose", o.verbose, "show the engine's log");
}

void add_engine_options(CLI::App* app, ServeOptions& o) {
  auto* group = app->add_option_group("Engine", "As in llama.cpp's own tools");
  add_number(group, "-b,--batch-size", o.slots.batch_tokens, 32, 1 << 16,
             "most tokens evaluated in one step, over all slots: a smaller one lets short requests "
             "pass long prompts sooner");
  add_number(group, "--piece", o.slots.piece, 32, 1 << 16,
             "most tokens of a prompt between two evictions");
  add_number(group, "-t,--threads", o.slots.threads, 0, 1024, "threads; 0 = one per core");
  add_number(group, "--n-gpu-layers,--gpu-layers", o.n_gpu_layers, -1, kMaxInt,
             "(-ngl) layers on a GPU, if there is one; -1 = all");
  group->add_flag("--allow-past-training", o.allow_past_training,
                  "requests may go on beyond the length the model was trained for");
}

void settle(ServeOptions& o) {
  if (o.model.empty()) {
    throw std::invalid_argument(
        "no model: give a GGUF file with -m (`make model` prints the path of a small one)");
  }
  o.settings = o.cache.settings.resolve();
  o.slots.budget = o.settings.cache.budget;
  o.slots.type_k = o.cache.type_k;
  o.slots.type_v = o.cache.type_v;
  o.http.model_name = o.alias.empty() ? std::filesystem::path(o.model).stem().string() : o.alias;
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(o.timeout * 1000));
  o.http.defaults = {.settings = o.cache.settings,
                     .allow_past_training = o.allow_past_training,
                     .timeout = timeout,
                     .slots = o.slots.slots};
  o.http.threads = o.slots.slots + o.max_queue + 16;
}

// What every request without settings of its own asks for must be possible.
void check_defaults(const llama_model* model, const Slots& slots, const ServeOptions& o) {
  Turn turn;
  turn.use(o.settings, model);
  turn.prompt = {0};
  slots.check(turn);
}

std::string megabytes(std::size_t bytes) {
  return std::to_string((bytes + (1u << 19)) >> 20) + " MiB";
}

// Requests are refused from the first signal on; those that run end in peace. The second signal
// ends the process.
void serve(server::HttpServer& http, server::EngineService& engine) {
  std::thread watch([&] {
    while (!interrupted()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::fputs("stopping: requests that run are finished first (once more: at once)\n", stderr);
    engine.drain();
    while (!engine.idle()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    http.stop();
  });
  http.listen();
  watch.join();
}

}  // namespace

namespace {

class ServeCommand final : public Command {
 public:
  explicit ServeCommand(CLI::App& app);
  int run() override;

 private:
  ServeOptions options_;
};

}  // namespace

ServeCommand::ServeCommand(CLI::App& app)
    : Command(app.add_subcommand(
          "serve", "Answer many clients over HTTP (OpenAI-compatible), each in constant memory.")) {
  add_server_options(command_, options_);
  add_cache_options(command_->add_option_group("Cache", "What each KV head of a slot keeps"),
                    options_.cache);
  add_engine_options(command_, options_);
}

namespace {

// glibc gives each of many threads a heap of its own, and every one grows to the largest request
// that it ever had; and after the first large block it takes the next ones from a heap too, which
// does not shrink.
void keep_heaps_small() {
#ifdef __GLIBC__
  mallopt(M_ARENA_MAX, 2);
  mallopt(M_MMAP_THRESHOLD, 128 << 10);
#endif
}

}  // namespace

int ServeCommand::run() {
  keep_heaps_small();
  ServeOptions& o = options_;
  EngineLog log;
  log.verbose = o.verbose;
  log.install();
  llama_backend_init();
  return guarded(log, [&]() -> int {
    settle(o);
    install_interrupt();
    const ModelPtr model = load_weights(o.model, o.n_gpu_layers);
    if (!model) return 130;
    log.opened();
    std::optional<ChatTemplate> chat;
    try {
      chat.emplace(model.get());
    } catch (const BadModelFile& error) {
      std::fprintf(stderr, "note: no chats, only completions: %s\n", error.what());
    }
    server::RequestReader::Render render;
    if (chat) {
      render = [&chat](const std::vector<ChatMessage>& messages, bool add_assistant) {
        return chat->render(messages, add_assistant);
      };
    }
    server::EngineService engine(model.get(), {.slots = o.slots, .max_queue = o.max_queue});
    check_defaults(model.get(), engine.engine_slots(), o);
    server::HttpServer http(model.get(), engine, render, o.http);
    const int port = http.bind();
    const std::string host =
        o.http.host.find(':') == std::string::npos ? o.http.host : "[" + o.http.host + "]";
    std::fprintf(stderr,
                 "listening on http://%s:%d, %d slots of %d rows, %s of KV cache reserved\n",
                 host.c_str(), port, o.slots.slots, o.slots.budget,
                 megabytes(engine.kv_bytes_allocated()).c_str());
    serve(http, engine);
    return 0;
  });
}

std::unique_ptr<Command> make_serve_command(CLI::App& app) {
  return std::make_unique<ServeCommand>(app);
}

}  // namespace morphkv::cli

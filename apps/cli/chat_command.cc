#include "chat_command.h"

#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>

#include "cache_options.h"
#include "engine_log.h"
#include "line_input.h"
#include "morphkv/file.h"
#include "morphkv/llama_cpp/chat_template.h"
#include "morphkv/llama_cpp/slots.h"
#include "options.h"
#include "progress.h"
#include "prompt_text.h"
#include "sampling_options.h"
#include "text_stream.h"

namespace morphkv::cli {

using namespace llama_cpp;  // NOLINT: the whole file is about its types

struct ChatOptions {
  std::string model;
  std::string system;
  std::string load;
  CacheOptions cache;
  SlotsOptions slots{.batch_tokens = 256};
  SamplingFlags sampling;
  int max_tokens = -1;
  int n_gpu_layers = -1;
  bool allow_past_training = false;
  bool verbose = false;
};

namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr std::uint64_t kMostFileBytes = std::uint64_t{4} << 30;
constexpr const char* kHelp =
    "/stats        what is remembered\n"
    "/save FILE    write the conversation and its memory to a file\n"
    "/load FILE    go on with a conversation that was saved\n"
    "/reset        forget everything but the system message\n"
    "/exit         end (as Ctrl-D)\n"
    "A line that ends in \\ goes on; lines between two lines of \"\"\" are one message.\n"
    "Ctrl-C stops an answer.\n";

// A conversation and the slot that remembers it.
class Conversation {
 public:
  Conversation(const llama_model* model, ChatOptions& options)
      : model_(model), options_(options), template_(model), slots_(model, with_budget(options)) {
    reset();
    slots_.check(turn());
  }

  void reset() {
    slots_.erase(0);
    messages_.clear();
    if (!options_.system.empty()) messages_.push_back({"system", options_.system});
  }

  // Prints the answer as it comes. The message stays, whatever comes of it.
  void say(const std::string& text) {
    messages_.push_back({"user", text});
    try {
      answer();
    } catch (...) {
      messages_.pop_back();  // what cannot be answered was not said
      throw;
    }
  }

  std::string stats() const {
    const SlotStats s = slots_.stats(0);
    char text[512];
    std::snprintf(text, sizeof text,
                  "%lld tokens seen, %d rows kept per KV head (budget %d), %lld evicted; %.1f MiB "
                  "of K and V kept, %.1f MiB in full; last answer: %d tokens, %.1f per second; %d "
                  "of %d tokens of the prompt were seen before\n",
                  static_cast<long long>(s.tokens_seen), s.rows_kept, s.cache.budget,
                  static_cast<long long>(s.rows_evicted), mib(s.kv_bytes_kept),
                  mib(s.kv_bytes_full), s.generated_tokens, tokens_per_second_, s.reused_tokens,
                  s.prompt_tokens);
    return text;
  }

  // The messages as one line of JSON, then what the slot holds.
  void save(const std::string& path) const {
    nlohmann::json list = nlohmann::json::array();
    for (const ChatMessage& m : messages_) {
      list.push_back({{"role", m.role}, {"content", m.content}});
    }
    write_file_atomically(path, list.dump() + "\n" + slots_.save(0));
  }

  void load(const std::string& path) {
    const std::string bytes = read_file(path, kMostFileBytes);
    const auto end = bytes.find('\n');
    const auto list = nlohmann::json::parse(bytes.substr(0, end), nullptr, false);
    if (end == std::string::npos || !list.is_array()) {
      throw std::invalid_argument("'" + path +
                                  "' is no saved conversation: give one that /save "
                                  "has written");
    }
    std::vector<ChatMessage> messages;
    for (const auto& m : list) {
      if (!m.is_object() || !m["role"].is_string() || !m["content"].is_string()) {
        throw std::invalid_argument("'" + path + "' has a message without role or content");
      }
      messages.push_back({m["role"], m["content"]});
    }
    try {
      slots_.restore(0, std::string_view(bytes).substr(end + 1));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("'" + path + "': " + error.what());
    }
    messages_ = std::move(messages);
  }

 private:
  static double mib(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

  static SlotsOptions with_budget(ChatOptions& options) {
    SlotsOptions slots = options.slots;
    slots.budget = options.cache.settled().budget;
    slots.type_k = options.cache.type_k;
    slots.type_v = options.cache.type_v;
    return slots;
  }

  Turn turn() const {
    Turn turn;
    turn.prompt = {0};
    turn.cache = options_.cache.cache;
    turn.prefill = options_.cache.prefill;
    turn.sampling = options_.sampling.options;
    turn.max_tokens = options_.max_tokens;
    turn.allow_past_training = options_.allow_past_training;
    if (!options_.cache.guide_text.empty()) {
      turn.guides.push_back(tokenize_continuation(model_, options_.cache.guide_text));
      turn.end_guides_too = true;
    }
    return turn;
  }

  void answer() {
    Turn next = turn();
    next.prompt = tokenize(model_, template_.render(messages_), true);
    next.question = static_cast<std::size_t>(slots_.reusable(0, next));  // what is new
    TextStream stream;
    std::string text;
    std::optional<FinishReason> reason;
    std::string error;
    const auto print = [&](const std::string& piece) {
      text += piece;
      std::fputs(piece.c_str(), stdout);
      std::fflush(stdout);
    };
    Progress progress;
    const int total = static_cast<int>(next.prompt.size());
    slots_.begin(0, std::move(next),
                 {.on_token = [&](GeneratedToken t) { print(stream.push(t.text)); },
                  .on_end = [&](FinishReason r) { reason = r; },
                  .on_error = [&](const std::string& what) { error = what; }});
    auto start = std::chrono::steady_clock::now();
    while (!take_interrupt()) {
      if (!slots_.step()) break;
      const SlotStats s = slots_.stats(0);
      if (s.reading) {
        progress.show("reading", s.prompt_read, total);
        start = std::chrono::steady_clock::now();
      } else {
        progress.clear();
      }
    }
    progress.clear();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    tokens_per_second_ = slots_.stats(0).generated_tokens / std::max(1e-9, seconds.count());
    if (!error.empty()) throw EngineError(error);
    const bool stopped = !reason && slots_.stats(0).busy;
    slots_.end(0);
    print(stream.finish());
    std::fputs("\n", stdout);
    if (stopped) std::fputs("(stopped)\n", stderr);
    if (reason == FinishReason::kTrainedLength) {
      std::fputs(
          "(the length that the model was trained for is reached: /reset, or start with "
          "--allow-past-training)\n",
          stderr);
    }
    messages_.push_back({"assistant", text});
  }

  const llama_model* model_;
  ChatOptions& options_;
  ChatTemplate template_;
  Slots slots_;
  std::vector<ChatMessage> messages_;
  double tokens_per_second_ = 0.0;
};

// False ends the program.
bool obey(Conversation& conversation, const std::string& line) {
  const auto space = line.find(' ');
  const std::string command = line.substr(0, space);
  const std::string argument = space == std::string::npos ? "" : line.substr(space + 1);
  const bool takes_file = command == "/save" || command == "/load";
  if (takes_file && argument.empty()) {
    std::fprintf(stderr, "%s needs a file name\n", command.c_str());
  } else if (command == "/exit" || command == "/quit") {
    return false;
  } else if (command == "/stats") {
    std::fputs(conversation.stats().c_str(), stdout);
  } else if (command == "/reset") {
    conversation.reset();
    std::fputs("forgotten\n", stdout);
  } else if (command == "/save") {
    conversation.save(argument);
    std::fputs("saved\n", stdout);
  } else if (command == "/load") {
    conversation.load(argument);
    std::fputs("loaded\n", stdout);
  } else {
    std::fputs(kHelp, command == "/help" ? stdout : stderr);
  }
  std::fflush(stdout);
  return true;
}

void converse(Conversation& conversation) {
  LineInput input;
  if (input.terminal()) std::fputs("/help shows the commands; Ctrl-D ends\n", stderr);
  while (const std::optional<std::string> line = input.read()) {
    if (line->empty()) continue;
    try {
      if (line->front() == '/') {
        if (!obey(conversation, *line)) return;
      } else {
        require_text("the message", *line);
        conversation.say(*line);
      }
    } catch (const std::exception& error) {  // the conversation is as before
      std::fprintf(stderr, "error: %s\n", error.what());
    }
  }
}

}  // namespace

ChatCommand::ChatCommand(CLI::App& app)
    : command_(app.add_subcommand(
          "chat", "Talk with a model in the terminal; memory stays constant however long.")),
      options_(std::make_unique<ChatOptions>()) {
  ChatOptions& o = *options_;
  auto* group = command_->add_option_group("Conversation");
  group
      ->add_option("-m,--model", o.model,
                   "GGUF model file (`make model` prints the path of a small one)")
      ->type_name("FILE");
  group->add_option("--system-prompt", o.system, "(-sys) system message")->type_name("TEXT");
  group->add_option("--load", o.load, "go on with a conversation that /save has written")
      ->type_name("FILE");
  group->add_flag("-v,--verbose", o.verbose, "show the engine's log");
  add_cache_options(command_->add_option_group("Cache", "What each KV head keeps"), o.cache);
  auto* engine = command_->add_option_group("Generation", "As in llama.cpp's own tools");
  add_number(engine, "-n,--predict,--n-predict", o.max_tokens, -1, kMaxInt,
             "most tokens of an answer; -1 = until the model ends");
  add_number(engine, "-t,--threads", o.slots.threads, 0, 1024, "threads; 0 = one per core");
  add_number(engine, "--n-gpu-layers,--gpu-layers", o.n_gpu_layers, -1, kMaxInt,
             "(-ngl) layers on a GPU, if there is one; -1 = all");
  add_sampling_options(engine, o.sampling);
  engine->add_flag("--allow-past-training", o.allow_past_training,
                   "go on beyond the length the model was trained for");
}

ChatCommand::~ChatCommand() = default;

int ChatCommand::run() {
  ChatOptions& o = *options_;
  EngineLog log;
  log.verbose = o.verbose;
  log.install();
  llama_backend_init();
  return guarded(log, [&]() -> int {
    if (o.model.empty()) {
      throw std::invalid_argument(
          "no model: give a GGUF file with -m (`make model` prints the path of a small one)");
    }
    require_text("--system-prompt", o.system);
    validate(o.cache.settled());
    o.sampling.settle();
    if (o.sampling.seed >= 0) o.cache.cache.seed = static_cast<std::uint64_t>(o.sampling.seed);
    install_interrupt();
    const ModelPtr model = load_weights(o.model, o.n_gpu_layers);
    if (!model) return 130;
    log.opened();
    install_soft_interrupt();
    Conversation conversation(model.get(), o);
    if (!o.load.empty()) conversation.load(o.load);
    converse(conversation);
    return 0;
  });
}

}  // namespace morphkv::cli

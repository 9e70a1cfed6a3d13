// `morphkv chat`: a conversation in the terminal that may go on for ever in constant memory.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "cache_options.h"
#include "commands.h"
#include "engine_log.h"
#include "line_input.h"
#include "morphkv/file.h"
#include "morphkv/llama_cpp/text_session.h"
#include "options.h"
#include "progress.h"
#include "prompt_text.h"
#include "sampling_options.h"

namespace morphkv::cli {

using namespace llama_cpp;  // NOLINT: the whole file is about its types

struct ChatOptions {
  std::string model;
  std::string system;
  std::string load;
  CacheOptions cache;
  SamplingFlags sampling;
  TextSessionOptions session;
  int max_tokens = -1;
  int n_gpu_layers = -1;
  bool verbose = false;
};

namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr const char* kHelp =
    "/stats        what is remembered\n"
    "/save FILE    write the conversation and its memory to a file\n"
    "/load FILE    go on with a conversation that was saved\n"
    "/reset        forget everything but the system message\n"
    "/exit         end (as Ctrl-D)\n"
    "A line that ends in \\ goes on; lines between two lines of \"\"\" are one message.\n"
    "Ctrl-C stops an answer.\n";

// The session of a chat, and what the terminal shows of it.
class Conversation {
 public:
  Conversation(const llama_model* model, const ChatOptions& options)
      : system_(options.system), session_(model, options.session) {
    turn_.sampling = options.sampling.options;
    turn_.max_tokens = options.max_tokens;
    reset();
  }

  void reset() {
    std::vector<ChatMessage> beginning;
    if (!system_.empty()) beginning.push_back({"system", system_});
    session_.reset(std::move(beginning));
  }

  // Prints the answer as it comes. What cannot be answered was not said.
  void say(const std::string& text) {
    session_.say(text, turn_);
    const auto print = [](const std::string& piece) {
      std::fputs(piece.c_str(), stdout);
      std::fflush(stdout);
    };
    Progress progress;
    const int total = session_.stats().prompt_tokens;
    auto start = std::chrono::steady_clock::now();
    while (session_.busy() && !take_interrupt()) {
      print(session_.step());
      const SlotStats s = session_.stats();
      if (s.reading) {
        progress.show("reading", s.prompt_read, total);
        start = std::chrono::steady_clock::now();
      } else {
        progress.clear();
      }
    }
    progress.clear();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    tokens_per_second_ = session_.stats().generated_tokens / std::max(1e-9, seconds.count());
    print(session_.end() + "\n");
    if (session_.finish_reason() == "interrupted") std::fputs("(stopped)\n", stderr);
    if (session_.finish_reason() == to_string(FinishReason::kTrainedLength)) {
      std::fputs(
          "(the length that the model was trained for is reached: /reset, or start with "
          "--allow-past-training)\n",
          stderr);
    }
  }

  std::string stats() const {
    const SlotStats s = session_.stats();
    char text[512];
    std::snprintf(text, sizeof text,
                  "%lld tokens seen, %d rows kept per KV head (budget %d), %lld evicted; %.1f MiB "
                  "of K and V kept, %.1f MiB in full; last answer: %d tokens, %.1f per second; %d "
                  "of %d tokens of the prompt were seen before\n",
                  static_cast<long long>(s.tokens_seen), s.rows_kept, s.cache.budget,
                  static_cast<long long>(s.rows_evicted), mib(s.kv_bytes_kept),
                  mib(s.kv_bytes_full), s.generated_tokens, tokens_per_second_, s.reused_tokens,
                  s.prompt_tokens);
    return text + ("rule: " + to_text(session_.settings())) + "; the last prompt was read " +
           std::string(mode_text(s.prefill_mode)) + "\n";
  }

  void save(const std::string& path) const { write_file_atomically(path, session_.save()); }

  void load(const std::string& path) {
    const std::string bytes = read_file(path, kMostSavedBytes);
    try {
      session_.restore(bytes);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("'" + path + "': " + error.what());
    }
  }

 private:
  static double mib(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

  std::string system_;
  TextTurn turn_;
  TextSession session_;
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

namespace {

class ChatCommand final : public Command {
 public:
  explicit ChatCommand(CLI::App& app);
  int run() override;

 private:
  ChatOptions options_;
};

}  // namespace

ChatCommand::ChatCommand(CLI::App& app)
    : Command(app.add_subcommand(
          "chat", "Talk with a model in the terminal; memory stays constant however long.")) {
  ChatOptions& o = options_;
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
  add_number(engine, "-t,--threads", o.session.threads, 0, 1024, "threads; 0 = one per core");
  add_number(engine, "--n-gpu-layers,--gpu-layers", o.n_gpu_layers, -1, kMaxInt,
             "(-ngl) layers on a GPU, if there is one; -1 = all");
  add_sampling_options(engine, o.sampling);
  engine->add_flag("--allow-past-training", o.session.allow_past_training,
                   "go on beyond the length the model was trained for");
}

int ChatCommand::run() {
  ChatOptions& o = options_;
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
    o.sampling.settle(o.cache.settings);
    o.session.settings = o.cache.settings.resolve();
    o.session.type_k = o.cache.type_k;
    o.session.type_v = o.cache.type_v;
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

std::unique_ptr<Command> make_chat_command(CLI::App& app) {
  return std::make_unique<ChatCommand>(app);
}

}  // namespace morphkv::cli

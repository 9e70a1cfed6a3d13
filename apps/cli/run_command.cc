// `morphkv run`: one prompt, one answer, in constant memory.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "cache_options.h"
#include "commands.h"
#include "engine_log.h"
#include "morphkv/file.h"
#include "morphkv/llama_cpp/chat_template.h"
#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/llama_cpp/saved_text.h"
#include "morphkv/llama_cpp/session.h"
#include "morphkv/llama_cpp/text_stream.h"
#include "morphkv/policy.h"
#include "options.h"
#include "progress.h"
#include "prompt_text.h"
#include "run_record.h"
#include "sampling_options.h"

namespace morphkv::cli {

using namespace llama_cpp;  // NOLINT: the whole file is about its types

struct RunOptions {
  std::string model;
  CacheOptions cache;
  SamplingFlags sampling;
  std::optional<std::string> prompt;
  std::optional<std::string> file;
  std::string system;
  std::optional<std::string> messages;
  std::optional<std::string> json;
  std::optional<std::string> load_session;
  std::optional<std::string> save_session;
  SessionOptions session;
  ResolvedSettings settings;  // that the session runs by
  std::vector<std::string> guide_texts;
  int n_gpu_layers = -1;
  bool chat = false;
  bool pin_system = false;
  bool flash_attention = true;
  bool verbose = false;
};

namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

struct ShortOption {
  std::string_view short_name;
  std::string_view long_name;
};
constexpr std::array kShortOptions = {
    ShortOption{"-ub", "--ubatch-size"},   ShortOption{"-ctk", "--cache-type-k"},
    ShortOption{"-ctv", "--cache-type-v"}, ShortOption{"-ngl", "--n-gpu-layers"},
    ShortOption{"-fa", "--flash-attn"},    ShortOption{"-sys", "--system-prompt"},
};

void add_input_options(CLI::App* app, RunOptions& o) {
  auto* group = app->add_option_group("Input and output");
  group
      ->add_option("-m,--model", o.model,
                   "GGUF model file (`make model` prints the path of a small one)")
      ->type_name("FILE");
  add_text(group, "-p,--prompt", o.prompt,
           "prompt; with -f it follows the file's text. Without -p and -f: standard input")
      ->type_name("TEXT");
  add_text(group, "-f,--file", o.file, "file with the prompt; - is standard input")
      ->type_name("FILE");
  group->add_option("--system-prompt", o.system, "(-sys) system message of --chat")
      ->type_name("TEXT");
  group->add_flag("--chat", o.chat, "put the prompt into the model's chat template");
  add_text(group, "--messages", o.messages,
           "JSON file of earlier messages, [{\"role\": ..., \"content\": ...}]; implies --chat")
      ->type_name("FILE");
  add_text(group, "--load-session", o.load_session,
           "go on from this file of --save-session: the prompt follows what was read and answered, "
           "with --chat as the next message")
      ->type_name("FILE");
  add_text(group, "--save-session", o.save_session,
           "write what was read and answered to this file, to go on from")
      ->type_name("FILE");
  add_text(group, "--json", o.json, "write a record of the run to this file")->type_name("FILE");
  group->add_flag("-v,--verbose", o.verbose, "show the engine's log");
}

void add_reading_options(CLI::App* app, RunOptions& o) {
  auto* group = app->add_option_group("Cache", "What each KV head keeps");
  add_cache_options(group, o.cache);
  add_number(group, "--guide", o.session.guide, 0, kMaxBudget,
             "last tokens of the prompt that guide; 0 = 24, fewer with a small micro-batch");
  group
      ->add_option(
          "--guide-text", o.guide_texts,
          "what to look for while reading, in place of the prompt's end; several times for "
          "several questions, which share the budget")
      ->type_name("TEXT")
      ->allow_extra_args(false);
  group->add_flag("--pin-system", o.pin_system, "make the whole system message sinks");
}

void add_engine_options(CLI::App* app, RunOptions& o) {
  SessionOptions& s = o.session;
  auto* group = app->add_option_group("Generation", "As in llama.cpp's own tools");
  add_number(group, "-n,--predict,--n-predict", s.max_tokens, -1, kMaxInt,
             "tokens to generate; -1 = until the model ends or its trained length");
  add_number(group, "-t,--threads", s.threads, 0, 1024, "threads; 0 = one per core");
  add_number(group, "--ubatch-size", s.micro_batch, 1, 1 << 20,
             "(-ub) most tokens evaluated at once");
  add_number(group, "--n-gpu-layers,--gpu-layers", o.n_gpu_layers, -1, kMaxInt,
             "(-ngl) layers on a GPU, if there is one; -1 = all");
  add_choice<bool>(group, "--flash-attn", o.flash_attention,
                   {{"on", true}, {"auto", true}, {"off", false}},
                   "(-fa) flash attention; off is refused");
  add_sampling_options(group, o.sampling);
  group->add_flag("--ignore-eos", s.ignore_eos, "go on when the model wants to end");
  group->add_flag("--allow-past-training", s.allow_past_training,
                  "go on beyond the length the model was trained for");
}

// On one line, whatever the token is: a newline as \n, other control characters and half
// characters as U+FFFD.
std::string printable(const std::string& token) {
  TextStream stream;
  std::string out;
  for (const char c : stream.push(token) + stream.finish()) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += kReplacement;
    } else {
      out += c;
    }
  }
  return out;
}

void pin(int system_tokens, RunOptions& o) {
  o.cache.settings.pin(system_tokens);
  try {
    validate(o.cache.settings.cache());
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("--pin-system: the system message takes " +
                                std::to_string(system_tokens) + " tokens; " + error.what());
  }
}

std::string sinks_text(const llama_model* model, std::span<const llama_token> prompt, int n_sink) {
  std::string out = "sinks:";
  for (const llama_token token :
       prompt.first(std::min(prompt.size(), static_cast<std::size_t>(n_sink)))) {
    out += " [" + printable(token_text(model, token, true)) + "]";
  }
  return out;
}

// The turn, and the session that it goes on from.
struct PreparedTurn {
  Turn turn;
  std::optional<SavedText> session;

  Prompt prompt() const { return {turn.prompt, turn.guides, turn.end_guides_too, turn.question}; }
  // What the text begins with: the sinks are among it.
  std::span<const llama_token> beginning() const {
    return session && !session->tokens.empty() ? std::span(session->tokens)
                                               : std::span(turn.prompt);
  }
};

void check_combinations(const RunOptions& o) {
  if (!o.chat && (!o.system.empty() || o.pin_system)) {
    throw std::invalid_argument(
        "--system-prompt and --pin-system are about chat templates: add --chat");
  }
  const Settings& settings = o.cache.settings;
  const Prefill prefill = settings.prefill().value_or(settings.profile().prefill);
  const bool guides = o.session.guide > 0 || !o.guide_texts.empty();
  if (prefill != Prefill::kGuided && guides) {
    throw std::invalid_argument("--guide and --guide-text are about --prefill guided, not " +
                                std::string(to_string(prefill)));
  }
  const CacheConfig cache = settings.cache();
  validate(cache);
  const bool asked = guides || settings.prefill() == Prefill::kGuided;
  if (asked && !make_policy(cache)->traits().guided) {
    throw std::invalid_argument("--policy '" + cache.policy + "' takes no guide: use --policy " +
                                policy_names_text(&PolicyTraits::guided) +
                                ", or leave out --prefill guided, --guide and --guide-text");
  }
  if (!o.flash_attention) {
    throw std::invalid_argument(
        "--flash-attn 'off': V is then stored transposed and queries cannot be read; use on or "
        "auto");
  }
  require_text("--system-prompt", o.system);
  for (const std::string& text : o.guide_texts) {
    require_text("--guide-text", text);
    if (text.empty()) throw std::invalid_argument("--guide-text '' is empty: say what to look for");
  }
  if (o.json) require_writable(*o.json);
  if (o.save_session) {
    require_writable(*o.save_session, "--save-session");
    std::error_code ignored;
    const auto status = std::filesystem::status(*o.save_session, ignored);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
      throw std::invalid_argument("--save-session '" + *o.save_session +
                                  "' is a device or a pipe; give the path of a file");
    }
  }
  if (o.load_session && (o.messages || !o.system.empty() || o.pin_system)) {
    throw std::invalid_argument(
        "--messages, --system-prompt and --pin-system are about how a text begins, and that of "
        "--load-session has begun: leave them out");
  }
}

// Throws std::invalid_argument for a file that cannot be read or is damaged.
SavedText load_session(const std::string& path) {
  try {
    return SavedText::from_bytes(read_file(path, kMostSavedBytes));
  } catch (const std::runtime_error& error) {
    throw std::invalid_argument("--load-session: " + std::string(error.what()) +
                                "; give a file that --save-session wrote");
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("--load-session '" + path + "': " + error.what());
  }
}

// A session goes on under the rule it was saved with; what the user gave must not contradict it.
void use_rule(const CacheConfig& saved, const CLI::App& command, RunOptions& o) {
  Settings& settings = o.cache.settings;
  // A profile speaks for all that is not given but for the budget and the sinks.
  const bool profile = command.count("--profile") > 0;
  for_each_cache_field([&](const auto& field) {
    const bool apart = field.name == kBudgetField.name || field.name == kSinkField.name;
    if (!settings.has(field.name) && (apart || !profile)) settings.set(field, saved.*field.member);
  });
  settings.set(kSeedField, saved.seed);  // -s is about sampling alone
  if (const CacheConfig given = settings.cache(); given != saved) {
    throw std::invalid_argument("--load-session '" + *o.load_session +
                                "' was saved with another cache: " + differences(saved, given) +
                                "; leave out the options of the cache that say otherwise");
  }
}

// The messages of a chat: the system message, earlier ones, the newest.
std::vector<ChatMessage> gather_messages(const RunOptions& o) {
  std::vector<ChatMessage> messages;
  if (!o.system.empty()) messages.push_back({"system", o.system});
  if (o.messages) {
    for (ChatMessage& message : read_messages(*o.messages)) {
      if (message.role == "system" && !messages.empty() && messages.front().role == "system") {
        throw std::invalid_argument("--messages '" + *o.messages +
                                    "' has a system message beside another: give one of them");
      }
      messages.push_back(std::move(message));
    }
  }
  if (!o.messages || o.prompt || o.file)
    messages.push_back({"user", gather_prompt(o.file, o.prompt)});
  return messages;
}

// The prompt's tokens and where its question begins.
void read_prompt(const llama_model* model, RunOptions& o, PreparedTurn& prepared) {
  Turn& turn = prepared.turn;
  if (prepared.session) {
    std::string text = gather_prompt(o.file, o.prompt);
    if (o.chat) text = ChatTemplate(model).next_turn(text);
    turn.prompt = tokenize_continuation(model, text, o.chat);
    return;
  }
  if (!o.chat) {
    turn.prompt = tokenize(model, gather_prompt(o.file, o.prompt), false);
    return;
  }
  const std::vector<ChatMessage> messages = gather_messages(o);
  if (o.pin_system && messages.front().role != "system") {
    throw std::invalid_argument(
        "--pin-system has no system message to pin: give one with --system-prompt");
  }
  const ChatTemplate chat(model);
  const RenderChat render = [&chat](const auto& list, bool add_assistant) {
    return chat.render(list, add_assistant);
  };
  turn.prompt = tokenize(model, render(messages, true), true);
  turn.question = question_in(model, render, messages, turn.prompt);
  if (o.pin_system) pin(tokens_of_first(model, render, messages, 1, turn.prompt), o);
}

// Everything that can be wrong is found before the weights are loaded.
PreparedTurn prepare(const CLI::App& command, RunOptions& o) {
  if (o.model.empty()) {
    throw std::invalid_argument(
        "no model: give a GGUF file with -m (`make model` prints the path of a small one)");
  }
  o.sampling.settle(o.cache.settings);
  PreparedTurn prepared;
  if (o.load_session) {
    prepared.session = load_session(*o.load_session);
    use_rule(prepared.session->checkpoint.config(), command, o);
  }
  o.chat = o.chat || o.messages;
  check_combinations(o);
  const ModelPtr vocabulary = load_model(o.model, {.vocab_only = true, .progress = {}});
  read_prompt(vocabulary.get(), o, prepared);
  o.settings = o.cache.settings.resolve();
  Turn& turn = prepared.turn;
  turn.use(o.settings, vocabulary.get(), o.guide_texts);
  o.session.cache = turn.cache;
  o.session.prefill = turn.prefill;
  o.session.sampling = o.sampling.options;
  o.session.type_k = o.cache.type_k;
  o.session.type_v = o.cache.type_v;
  std::span<const llama_token> before;
  if (prepared.session) before = prepared.session->tokens;
  check_prompt(prepared.prompt(), o.session, vocabulary.get(), before);
  return prepared;
}

// Standard output, written through at once, until the first failure.
class Output {
 public:
  void write(std::string_view text) {
    if (failed() || text.empty()) return;
    const bool good = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
    if (!good || std::fflush(stdout) != 0) error_ = errno;
  }
  bool failed() const { return error_ != 0; }
  // A reader that has seen enough is no failure of the run.
  bool broken() const { return failed() && error_ != EPIPE; }
  std::string reason() const { return std::generic_category().message(error_); }

 private:
  int error_ = 0;
};

RunRecord record_of(const RunOptions& o) {
  RunRecord record;
  record.model = o.model;
  record.settings = o.settings;
  record.options = o.session;
  record.peak_rss_bytes = peak_rss_bytes();
  return record;
}

// `saved`: what --save-session is to write.
RunRecord answer(const RunOptions& o, const llama_model* model, PreparedTurn& prepared,
                 Output& output, EngineLog& log, std::string& saved) {
  Session session(model, o.session);
  if (prepared.session) {
    try {
      session.resume(std::move(*prepared.session));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("--load-session '" + *o.load_session + "': " + error.what());
    }
  }
  Progress progress;
  TextStream stream;
  RunRecord record = record_of(o);
  const auto print = [&](const std::string& text) {
    record.text += text;
    output.write(text);
  };
  const int budget = o.session.cache.budget;
  SessionCallbacks callbacks;
  callbacks.cancelled = [&] { return log.cancelled = interrupted() || output.failed(); };
  callbacks.on_notice = [](std::string_view text) {
    std::fprintf(stderr, "note: %.*s\n", static_cast<int>(text.size()), text.data());
  };
  callbacks.on_prompt = [&](int done, int total, int rows) {
    if (total <= budget) return;
    progress.show("reading", done, total,
                  std::to_string(done) + " / " + std::to_string(total) + " tokens, " +
                      std::to_string(rows) + " rows kept");
    if (done == total) progress.clear();
  };
  callbacks.on_token = [&](llama_token, std::string_view text, double) {
    print(stream.push(text));
  };
  record.result = session.run(prepared.prompt(), callbacks);
  print(stream.finish());
  if (!record.text.empty() && record.text.back() != '\n') output.write("\n");
  progress.clear();
  record.peak_rss_bytes = peak_rss_bytes();
  if (o.save_session && session.prompt_read()) saved = session.save();
  return record;
}

}  // namespace

std::vector<std::string> expand_short_options(std::vector<std::string> arguments) {
  for (std::string& argument : arguments) {
    for (const ShortOption& option : kShortOptions) {
      if (argument == option.short_name) argument = option.long_name;
    }
  }
  return arguments;
}

namespace {

class RunCommand final : public Command {
 public:
  explicit RunCommand(CLI::App& app);
  int run() override;

 private:
  RunOptions options_;
};

}  // namespace

RunCommand::RunCommand(CLI::App& app)
    : Command(app.add_subcommand("run",
                                 "Answer one prompt; memory stays constant however long it is.")) {
  add_input_options(command_, options_);
  add_reading_options(command_, options_);
  add_engine_options(command_, options_);
}

int RunCommand::run() {
  RunOptions& o = options_;
  EngineLog log;
  log.verbose = o.verbose;
  log.install();
  llama_backend_init();
  return guarded(log, [&]() -> int {
    PreparedTurn prepared = prepare(*command_, o);
    install_interrupt();  // not before: Ctrl-C while the prompt is typed ends at once
    const ModelPtr model = load_weights(o.model, o.n_gpu_layers);
    if (model) log.opened();
    RunRecord record = record_of(o);
    Output output;
    std::string saved;
    if (model) {
      const std::string sinks =
          sinks_text(model.get(), prepared.beginning(), o.session.cache.n_sink);
      std::fprintf(stderr, "%s\n", sinks.c_str());
      record = answer(o, model.get(), prepared, output, log, saved);
    } else {
      record.result.finish_reason = FinishReason::kInterrupted;
      std::fputs("interrupted while the model was loading\n", stderr);
    }
    std::fprintf(stderr, "\n%s", to_table(record).c_str());
    if (o.json) write_file(*o.json, to_json(record));
    if (o.save_session && saved.empty()) {
      std::fputs("the session was not saved: its prompt was not read to the end\n", stderr);
    } else if (o.save_session) {
      write_file_atomically(*o.save_session, saved);
    }
    if (output.broken()) return fail(1, "standard output cannot be written: " + output.reason());
    return 0;
  });
}

std::unique_ptr<Command> make_run_command(CLI::App& app) {
  return std::make_unique<RunCommand>(app);
}

}  // namespace morphkv::cli

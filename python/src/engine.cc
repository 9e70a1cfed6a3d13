// morphkv._engine: what morphkv.Session (python/morphkv/session.py) stands on. Built only with the
// llama.cpp integration.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdio>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "morphkv/file.h"
#include "morphkv/llama_cpp/engine_context.h"
#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/llama_cpp/text_session.h"

namespace morphkv::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;
using llama_cpp::TextSession;

// --- The engine's log: one for the process, silent unless a session wants it
// ----------------------

std::atomic<bool> verbose = false;
thread_local std::string* first_error = nullptr;  // of the model that this thread opens

void log_line(ggml_log_level level, const char* text, void*) {
  if (verbose) {
    std::fputs(text, stderr);
  } else if (level == GGML_LOG_LEVEL_ERROR && first_error != nullptr && first_error->empty()) {
    *first_error = text;
    first_error->erase(std::min(first_error->find('\n'), first_error->size()));
  }
}

// --- Options, as Python gives them
// ----------------------------------------------------------------

int to_int(const char* name, std::int64_t value, int least, int most) {
  if (value < least || value > most) {
    throw std::invalid_argument(std::string(name) + " " + std::to_string(value) +
                                " is out of range: give " + std::to_string(least) + " to " +
                                std::to_string(most));
  }
  return static_cast<int>(value);
}

constexpr int kMostInt = std::numeric_limits<int>::max();

struct EngineOptions {
  std::string profile{default_profile().name};
  nb::dict settings;  // by the names of kCacheFields, and "prefill"
  std::int64_t threads = 0;
  std::string cache_type_k = "f16";
  std::string cache_type_v = "f16";
  std::int64_t n_gpu_layers = -1;
  bool allow_past_training = false;
  bool verbose = false;
};

// The value as C++ has it, or TypeError. What has __index__ is an int.
template <typename T>
T typed(std::string_view name, const nb::handle& value) {
  T out;
  const bool wants_int = std::is_integral_v<T>;
  const bool good = wants_int ? PyIndex_Check(value.ptr()) != 0 : nb::isinstance<nb::str>(value);
  if (!good || !nb::try_cast(value, out)) {
    throw nb::type_error((std::string(name) + " " + nb::repr(value).c_str() + ": give " +
                          (wants_int ? "int" : "str"))
                             .c_str());
  }
  return out;
}

void set(Settings& settings, const CacheField<int>& field, const nb::handle& value) {
  const std::string name(field.name);
  settings.set(field,
               to_int(name.c_str(), typed<std::int64_t>(name, value), field.least, field.most));
}
template <typename T>
void set(Settings& settings, const CacheField<T>& field, const nb::handle& value) {
  if constexpr (std::is_enum_v<T>) {
    settings.set(field, choice_of<T>(field.name, typed<std::string>(field.name, value)));
  } else {
    settings.set(field, typed<T>(field.name, value));
  }
}

ResolvedSettings settings_of(const EngineOptions& o) {
  Settings settings(find_profile(o.profile));
  for_each_cache_field([&](const auto& field) {
    const nb::str name(field.name.data(), field.name.size());
    if (o.settings.contains(name)) set(settings, field, o.settings[name]);
  });
  if (o.settings.contains("prefill")) {
    settings.set_prefill(
        choice_of<Prefill>("prefill", typed<std::string>("prefill", o.settings["prefill"])));
  }
  return settings.resolve();
}

llama_cpp::TextSessionOptions session_options(const EngineOptions& o) {
  return {.settings = settings_of(o),
          .threads = to_int("threads", o.threads, 0, 1024),
          .type_k = llama_cpp::cache_type("cache_type_k", o.cache_type_k),
          .type_v = llama_cpp::cache_type("cache_type_v", o.cache_type_v),
          .allow_past_training = o.allow_past_training};
}

struct TurnOptions {
  std::optional<std::int64_t> max_tokens = 256;
  double temperature = 0.8;
  std::int64_t top_k = 40;
  double top_p = 0.95;
  double min_p = 0.05;
  double repeat_penalty = 1.0;
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  std::optional<std::int64_t> seed;
  std::vector<std::string> stop, guides;
  std::optional<std::string> prefill;
  bool ignore_eos = false;
  bool strict = false;
};

llama_cpp::TextTurn turn_of(const TurnOptions& o) {
  llama_cpp::TextTurn turn;
  if (o.max_tokens) turn.max_tokens = to_int("max_tokens", *o.max_tokens, 0, kMostInt);
  llama_cpp::SamplingOptions& sampling = turn.sampling;
  sampling.temperature = static_cast<float>(o.temperature);
  sampling.top_k = to_int("top_k", o.top_k, 0, kMostInt);
  sampling.top_p = static_cast<float>(o.top_p);
  sampling.min_p = static_cast<float>(o.min_p);
  sampling.repeat_penalty = static_cast<float>(o.repeat_penalty);
  sampling.presence_penalty = static_cast<float>(o.presence_penalty);
  sampling.frequency_penalty = static_cast<float>(o.frequency_penalty);
  if (o.seed) {  // the last number of 32 bits stands for a random seed
    if (*o.seed < 0 || *o.seed >= std::int64_t{LLAMA_DEFAULT_SEED}) {
      throw std::invalid_argument("seed " + std::to_string(*o.seed) +
                                  " is out of range: give 0 to 4294967294");
    }
    sampling.seed = static_cast<std::uint32_t>(*o.seed);
  }
  turn.stop = o.stop;
  turn.guides = o.guides;
  if (o.prefill) turn.prefill = choice_of<Prefill>("prefill", *o.prefill);
  turn.ignore_eos = o.ignore_eos;
  turn.strict = o.strict;
  return turn;
}

// What the system says of a file is OSError in Python.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename Work>
void of_a_file(const Work& work) {
  try {
    work();
  } catch (const std::runtime_error& error) {
    throw FileError(error.what());
  }
}

// --- The session as Python holds it
// ---------------------------------------------------------------

using Messages = std::vector<std::pair<std::string, std::string>>;  // role, content

// The GIL is released while the engine works. Whoever comes meanwhile is refused: from another
// thread, or from a signal handler in this one.
class Engine {
 public:
  Engine(const std::string& path, const EngineOptions& options);

  int begin(const std::variant<std::string, Messages>& prompt, const TurnOptions& options);
  nb::object next(int turn);
  void end(int turn);
  void reset();
  void save(const std::string& path);
  void load(const std::string& path);
  void close();
  bool closed() const { return !session_; }
  nb::dict stats() const;
  std::string rule() const { return rule_; }

 private:
  class InUse {
   public:
    explicit InUse(Engine& engine) : engine_(engine) {
      if (std::exchange(engine.in_use_, true)) {
        throw std::runtime_error(
            "the session is in use at this moment, by another thread or the call that was "
            "interrupted: use it from one thread at a time");
      }
    }
    ~InUse() { engine_.in_use_ = false; }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    Engine& engine_;
  };

  TextSession& open() {
    if (!session_) throw std::runtime_error("the session is closed: make a new one");
    return *session_;
  }
  // Calls work(session) without the GIL, and notes the figures whatever came of it.
  template <typename Work>
  auto use(Work work) {
    const InUse in_use(*this);
    TextSession& session = open();
    const Noted noted(*this);
    const nb::gil_scoped_release no_gil;
    return work(session);
  }
  struct Noted {
    explicit Noted(Engine& e) : engine(e) {}
    ~Noted() { engine.note(); }
    Noted(const Noted&) = delete;
    Noted& operator=(const Noted&) = delete;
    Engine& engine;
  };
  void note() {
    stats_ = session_->stats();
    finish_reason_ = session_->finish_reason();
    rule_ = to_text(session_->settings());
    kv_bytes_allocated_ = session_->kv_bytes_allocated();
    busy_ = session_->busy();
  }
  void refuse_while_busy(const char* what) const {
    if (!busy_) return;
    throw std::runtime_error(std::string(what) +
                             ": an answer is still being generated: read it to its end, or "
                             "close() it");
  }

  // Guarded by the GIL:
  bool in_use_ = false;
  bool busy_ = false;
  int turn_ = 0;
  llama_cpp::SlotStats stats_;
  std::string finish_reason_;
  std::string rule_;
  std::size_t kv_bytes_allocated_ = 0;
  llama_cpp::ModelPtr model_;
  std::unique_ptr<TextSession> session_;  // after the model; its work is guarded by in_use_
};

Engine::Engine(const std::string& path, const EngineOptions& o) {
  const llama_cpp::TextSessionOptions options = session_options(o);
  const int n_gpu_layers = to_int("n_gpu_layers", o.n_gpu_layers, -1, kMostInt);
  if (o.verbose) verbose = true;
  bool interrupted = false;
  std::string error;
  try {
    const nb::gil_scoped_release no_gil;
    first_error = &error;
    model_ = llama_cpp::load_model(
        path, {.n_gpu_layers = n_gpu_layers, .vocab_only = false, .progress = [&](float) {
                 const nb::gil_scoped_acquire gil;
                 interrupted = interrupted || PyErr_CheckSignals() != 0;
                 return !interrupted;
               }});
    if (model_) session_ = std::make_unique<TextSession>(model_.get(), options);
    first_error = nullptr;
  } catch (const llama_cpp::BadModelFile& bad) {
    first_error = nullptr;
    throw std::invalid_argument(bad.what() + (error.empty() ? "" : " (llama.cpp: " + error + ")"));
  } catch (...) {
    first_error = nullptr;
    throw;
  }
  if (!session_) throw nb::python_error();  // the signal handler's
  note();
}

int Engine::begin(const std::variant<std::string, Messages>& prompt, const TurnOptions& options) {
  refuse_while_busy("generate()");
  const llama_cpp::TextTurn turn = turn_of(options);
  use([&](TextSession& session) {
    if (const auto* text = std::get_if<std::string>(&prompt)) return session.begin(*text, turn);
    std::vector<llama_cpp::ChatMessage> messages;
    for (const auto& [role, content] : std::get<Messages>(prompt)) {
      messages.push_back({role, content});
    }
    session.begin(messages, turn);
  });
  return ++turn_;
}

// The next part of the turn's answer, or None at its end.
nb::object Engine::next(int turn) {
  const InUse in_use(*this);
  TextSession& session = open();
  const Noted noted(*this);
  if (turn != turn_) return nb::none();
  while (session.busy()) {
    std::string text;
    {
      const nb::gil_scoped_release no_gil;
      text = session.step();
    }
    if (PyErr_CheckSignals() != 0) {
      session.end();
      throw nb::python_error();
    }
    if (!text.empty()) return nb::str(text.data(), text.size());
  }
  return nb::none();
}

void Engine::end(int turn) {
  if (turn == turn_ && busy_ && !closed()) use([](TextSession& session) { session.end(); });
}

void Engine::reset() {
  use([](TextSession& session) { session.reset(); });
}

void Engine::close() {
  const InUse in_use(*this);
  if (closed()) return;
  session_->end();
  note();
  session_.reset();
  model_.reset();
}

void Engine::save(const std::string& path) {
  refuse_while_busy("save()");
  use([&](TextSession& session) {
    const std::string bytes = session.save();
    of_a_file([&] { write_file_atomically(path, bytes); });
  });
}

void Engine::load(const std::string& path) {
  refuse_while_busy("load()");
  use([&](TextSession& session) {
    std::string bytes;
    of_a_file([&] { bytes = read_file(path, llama_cpp::kMostSavedBytes); });
    session.restore(bytes);
  });
}

nb::dict Engine::stats() const {
  nb::dict d;
  d["tokens_seen"] = stats_.tokens_seen;
  d["rows_kept"] = stats_.rows_kept;
  d["rows_evicted"] = stats_.rows_evicted;
  d["prompt_tokens"] = stats_.prompt_tokens;
  d["reused_tokens"] = stats_.reused_tokens;
  d["generated_tokens"] = stats_.generated_tokens;
  d["prefill_mode"] = llama_cpp::mode_text(stats_.prefill_mode);
  d["finish_reason"] = finish_reason_.empty() ? nb::none() : nb::object(nb::cast(finish_reason_));
  d["kv_bytes_allocated"] = kv_bytes_allocated_;
  return d;
}

void bind_options(nb::module_& m) {
  nb::class_<EngineOptions>(m, "EngineOptions")
      .def(nb::init<>())
      .def_rw("profile", &EngineOptions::profile)
      .def_rw("settings", &EngineOptions::settings)
      .def_rw("threads", &EngineOptions::threads)
      .def_rw("cache_type_k", &EngineOptions::cache_type_k)
      .def_rw("cache_type_v", &EngineOptions::cache_type_v)
      .def_rw("n_gpu_layers", &EngineOptions::n_gpu_layers)
      .def_rw("allow_past_training", &EngineOptions::allow_past_training)
      .def_rw("verbose", &EngineOptions::verbose);
  nb::class_<TurnOptions>(m, "TurnOptions")
      .def(nb::init<>())
      .def_rw("max_tokens", &TurnOptions::max_tokens, nb::arg().none())
      .def_rw("temperature", &TurnOptions::temperature)
      .def_rw("top_k", &TurnOptions::top_k)
      .def_rw("top_p", &TurnOptions::top_p)
      .def_rw("min_p", &TurnOptions::min_p)
      .def_rw("repeat_penalty", &TurnOptions::repeat_penalty)
      .def_rw("presence_penalty", &TurnOptions::presence_penalty)
      .def_rw("frequency_penalty", &TurnOptions::frequency_penalty)
      .def_rw("seed", &TurnOptions::seed, nb::arg().none())
      .def_rw("stop", &TurnOptions::stop)
      .def_rw("guides", &TurnOptions::guides)
      .def_rw("prefill", &TurnOptions::prefill, nb::arg().none())
      .def_rw("ignore_eos", &TurnOptions::ignore_eos)
      .def_rw("strict", &TurnOptions::strict);
}

}  // namespace
}  // namespace morphkv::python

NB_MODULE(_engine, m) {
  using namespace morphkv::python;  // NOLINT: the module is the file's
  m.doc() = "The engine of morphkv.Session.";
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const morphkv::llama_cpp::Unsupported& unsupported) {
      PyErr_SetString(PyExc_ValueError, unsupported.what());
    } catch (const morphkv::llama_cpp::BadModelFile& bad) {
      PyErr_SetString(PyExc_ValueError, bad.what());
    } catch (const FileError& error) {
      PyErr_SetString(PyExc_OSError, error.what());
    }
  });
  llama_log_set(log_line, nullptr);
  llama_backend_init();
  bind_options(m);
  nb::class_<Engine>(m, "Engine")
      .def(nb::init<const std::string&, const EngineOptions&>(), "path"_a, "options"_a)
      .def("begin", &Engine::begin, "prompt"_a, "options"_a,
           "Begins a turn; its number. A prompt is a text, or pairs of role and content.")
      .def("next", &Engine::next, "turn"_a, nb::sig("def next(self, turn: int) -> str | None"),
           "The next part of the turn's answer; None at its end.")
      .def("end", &Engine::end, "turn"_a, "Ends the turn, unless it has ended.")
      .def("reset", &Engine::reset)
      .def("save", &Engine::save, "path"_a)
      .def("load", &Engine::load, "path"_a)
      .def("close", &Engine::close)
      .def_prop_ro("closed", &Engine::closed)
      .def("stats", &Engine::stats, nb::sig("def stats(self) -> dict[str, typing.Any]"))
      .def("rule", &Engine::rule);
}

// What the engine and the commands say on standard error, and the loading of a model.
#pragma once

#include <llama.h>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>

#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/model_file.h"
#include "progress.h"

namespace morphkv::cli {

// The engine's log: everything with --verbose. Else only errors, and those from opening the model
// are kept for the one line that says what is wrong.
struct EngineLog {
  bool verbose = false;
  bool opening = true;
  bool cancelled = false;  // the engine calls an abort that we asked for an error
  std::string error;       // the first one while opening

  void opened() {
    opening = false;
    std::fputs(std::exchange(error, {}).c_str(), stderr);
  }

  void install() {
    llama_log_set(
        [](ggml_log_level level, const char* text, void* data) {
          auto& log = *static_cast<EngineLog*>(data);
          const bool failure = level == GGML_LOG_LEVEL_ERROR && !log.cancelled;
          if (log.verbose || (failure && !log.opening)) {
            std::fputs(text, stderr);
          } else if (failure && log.error.empty()) {
            log.error = text;
          }
        },
        this);
  }
};

inline int fail(int code, const std::string& what, const std::string& engine_error = "") {
  std::string reason = engine_error.substr(0, engine_error.find('\n'));
  if (!reason.empty()) reason = " (llama.cpp: " + reason + ")";
  std::fprintf(stderr, "morphkv: error: %s%s\n", what.c_str(), reason.c_str());
  return code;
}

// Runs a command. What it throws becomes one line and the exit code: 2 for what the user gave, 1
// for a failure on the way.
template <class Body>
int guarded(const EngineLog& log, const Body& body) {
  try {
    return body();
  } catch (const std::invalid_argument& error) {
    return fail(2, error.what(), log.error);
  } catch (const llama_cpp::BadModelFile& error) {
    return fail(2, error.what(), log.error);
  } catch (const llama_cpp::Unsupported& error) {
    return fail(2, error.what(), log.error);
  } catch (const std::exception& error) {
    return fail(1, error.what(), log.error);
  }
}

// Null when the user interrupted it. Throws llama_cpp::BadModelFile.
inline llama_cpp::ModelPtr load_weights(const std::string& path, int n_gpu_layers) {
  Progress progress;
  return llama_cpp::load_model(
      path, {.n_gpu_layers = n_gpu_layers, .vocab_only = false, .progress = [&](float done) {
               progress.show("loading", done, 1.0);
               return !interrupted();
             }});
}

}  // namespace morphkv::cli

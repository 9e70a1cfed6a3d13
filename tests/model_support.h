// What the tests that run llama.cpp share: the model of MORPHKV_TEST_MODEL (loaded once), text, and
// a bounded context with its decode loop.
#pragma once

#include <gtest/gtest.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/llama_cpp/evictor.h"
#include "morphkv/llama_cpp/llama_ptr.h"
#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::test {

// For failure messages: what these tests rely on may differ from one llama.cpp to the next.
inline std::string engine() { return std::string("with llama.cpp ") + llama_version(); }

// Keeps what llama.cpp logs from now on, warnings and errors only unless `all`. One at a time.
class EngineLog {
 public:
  explicit EngineLog(bool all = false) : all_(all) { llama_log_set(write, this); }
  ~EngineLog() { llama_log_set(drop, nullptr); }
  EngineLog(const EngineLog&) = delete;
  EngineLog& operator=(const EngineLog&) = delete;
  const std::string& text() const { return text_; }
  static void drop(ggml_log_level, const char*, void*) {}

 private:
  static void write(ggml_log_level level, const char* text, void* self) {
    auto& log = *static_cast<EngineLog*>(self);
    if (log.all_ || level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
      log.text_ += text;
    }
  }
  bool all_;
  std::string text_;
};

// Nothing is logged unless a test asks for it.
inline const bool kQuiet = (llama_log_set(EngineLog::drop, nullptr), true);

inline llama_model* test_model() {
  static const llama_cpp::ModelPtr kModel = [] {
    const char* path = std::getenv("MORPHKV_TEST_MODEL");
    if (path == nullptr) throw std::runtime_error("MORPHKV_TEST_MODEL does not name a GGUF model");
    return llama_cpp::load_model(path, {});
  }();
  return kModel.get();
}

// English text that the project owns, about 420 tokens of SmolLM2.
inline constexpr std::string_view kProse =
    "The lighthouse on the northern point was built by people who did not trust the sea. Its walls "
    "are as thick as a man is tall, and the door stands twelve feet above the rock, so that "
    "whoever "
    "wants to enter must first climb an iron ladder. For a hundred years a keeper lived there with "
    "his family. Every evening he carried oil up the stairs, trimmed the wicks, and wound the "
    "clock "
    "that turned the lamp. In his log he wrote down the wind, the ships that passed, and the birds "
    "that struck the glass. The pages are still kept in the town hall, and on some of them one can "
    "see the ring that a cup of coffee left behind. When the lamp became electric, the keeper "
    "stayed "
    "for another ten years, because nobody had told him to leave. Then a letter came. He packed "
    "his "
    "books and his tools, locked the door, and took the key to the harbour office, where it hangs "
    "on "
    "a nail beside the tide tables. Today a small computer in the city switches the light on and "
    "off. "
    "It does not write down the birds. Once a year an engineer climbs the ladder, changes the "
    "battery, wipes the salt from the lenses, and eats a sandwich on the gallery. She says that "
    "the "
    "view is the best part of her work. On a clear day you can count the islands to the west, and "
    "if "
    "you are patient you can see the seals come up to breathe. The fishermen do not need the light "
    "any more, since each of their boats has a screen that shows the coast. They look for it all "
    "the "
    "same, and when it failed for two nights last winter, the office received forty calls. A thing "
    "that has always been there is missed most by those who never needed it.";

inline std::vector<llama_token> tokens_of(const llama_model* model, std::string_view text) {
  return llama_cpp::tokenize(model, text, false);
}

// kProse over and over, `n` tokens in all.
inline std::vector<llama_token> prose_tokens(int n) {
  const auto once = tokens_of(test_model(), kProse);
  std::vector<llama_token> tokens;
  for (std::size_t i = 0; tokens.size() < static_cast<std::size_t>(n); ++i) {
    tokens.push_back(once[i % once.size()]);
  }
  return tokens;
}

// So many lines about the topic, and a question: about 11 tokens each.
inline std::vector<llama_token> notes_about(int lines, const std::string& topic) {
  std::string text;
  for (int i = 0; i < lines; ++i) {
    text += "Note " + std::to_string(i) + " about the " + topic + " in the harbour. ";
  }
  return tokens_of(test_model(), text + "What is said about the " + topic + "?");
}

// `n` pseudo-random tokens of a tiny model's vocabulary.
inline std::vector<llama_token> noise_tokens(int n, int n_vocab, std::uint32_t seed = 1) {
  std::vector<llama_token> tokens;
  for (int i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    tokens.push_back(static_cast<llama_token>((seed >> 8) % static_cast<std::uint32_t>(n_vocab)));
  }
  return tokens;
}

// One thread: those of llama.cpp spin while they wait, which is slow beside other work.
inline llama_context_params context_params(int threads = 1) {
  llama_context_params params = llama_context_default_params();
  params.n_threads = threads;
  params.n_threads_batch = threads;
  params.no_perf = true;
  return params;
}

// Aborts the engine's work at the n-th question whether to; the engine asks after each node.
class AbortAfter {
 public:
  explicit AbortAfter(llama_context* context) { llama_set_abort_callback(context, ask, this); }
  AbortAfter(const AbortAfter&) = delete;
  AbortAfter& operator=(const AbortAfter&) = delete;
  void arm(int questions) { left_ = questions; }
  void disarm() { left_ = -1; }
  bool fired() const { return left_ == 0; }
  int left() const { return left_; }

 private:
  static bool ask(void* self) {
    int& left = static_cast<AbortAfter*>(self)->left_;
    if (left > 0) --left;
    return left == 0;
  }
  int left_ = -1;
};

// A context of llama.cpp as anybody would make it, without us; flash attention on, as we need it.
inline llama_cpp::ContextPtr plain_context(llama_model* model, llama_context_params params,
                                           int n_ctx, int n_ubatch) {
  params.n_ctx = static_cast<std::uint32_t>(n_ctx);
  params.n_batch = static_cast<std::uint32_t>(n_ubatch);
  params.n_ubatch = static_cast<std::uint32_t>(n_ubatch);
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  llama_cpp::ContextPtr context(llama_init_from_model(model, params));
  if (!context) throw std::runtime_error("no context " + engine());
  return context;
}

inline int decode(llama_context* context, std::span<const llama_token> tokens) {
  // The engine's batch is not const, it does not write to the tokens.
  return llama_decode(context, llama_batch_get_one(const_cast<llama_token*>(tokens.data()),
                                                   static_cast<std::int32_t>(tokens.size())));
}

inline std::vector<float> logits_of(llama_context* context) {
  const int n = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
  const float* logits = llama_get_logits_ith(context, -1);
  if (logits == nullptr) throw std::runtime_error("no logits " + engine());
  return {logits, logits + n};
}

inline llama_token likeliest(const std::vector<float>& logits) {
  return static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

inline llama_pos newest_label(llama_context* context) {
  return llama_memory_seq_pos_max(llama_get_memory(context), 0);
}

inline llama_pos oldest_label(llama_context* context) {
  return llama_memory_seq_pos_min(llama_get_memory(context), 0);
}

// The smallest limits with which each part of the rule has something to do.
inline CacheConfig small_cache(std::string policy = "morphkv",
                               QuerySource queries = QuerySource::kAttention) {
  return {.budget = 64, .n_sink = 4, .window = 8, .queries = queries, .policy = std::move(policy)};
}

struct BoundOptions {
  CacheConfig cache = small_cache();
  bool poison_freed_rows = false;
  ggml_type type_k = GGML_TYPE_F16;
  ggml_type type_v = GGML_TYPE_F16;
  int micro_batch = 64;
  int call_tokens = 0;
  int n_batch = 0;  // most tokens of one llama_decode(); 0 = the micro-batch
  int guide_tokens = 0;
  int threads = 1;
  ggml_backend_sched_eval_callback cb_eval = nullptr;
  void* cb_eval_user_data = nullptr;
};

// A context whose cache is bounded, as in examples/llama_step.cc.
class Bounded {
 public:
  Bounded(llama_model* model, const BoundOptions& options)
      : model_(model),
        evictor_(model, {.cache = options.cache, .poison_freed_rows = options.poison_freed_rows}) {
    make_context(options);
  }

  // The evictor stays, its context is a new one. For checkpoint() and restore().
  void make_context(const BoundOptions& options) {
    context_.reset();
    llama_context_params params = context_params(options.threads);
    params.type_k = options.type_k;
    params.type_v = options.type_v;
    params.n_batch = static_cast<std::uint32_t>(options.micro_batch);
    params.n_ubatch = static_cast<std::uint32_t>(options.micro_batch);
    params.cb_eval = options.cb_eval;
    params.cb_eval_user_data = options.cb_eval_user_data;
    notice_ = evictor_.attach(params, options.call_tokens, options.guide_tokens);
    if (options.n_batch > 0) params.n_batch = static_cast<std::uint32_t>(options.n_batch);
    context_.reset(llama_init_from_model(model_, params));
    if (!context_) throw std::runtime_error("no context " + engine());
    evictor_.bind(context_.get());
  }
  void drop_context() { context_.reset(); }

  llama_cpp::Evictor& evictor() { return evictor_; }
  llama_context* context() { return context_.get(); }
  const std::string& notice() const { return notice_; }

  void feed(std::span<const llama_token> tokens) {
    const int status = decode(context_.get(), tokens);
    if (status != 0) throw std::runtime_error("llama_decode gave " + std::to_string(status));
    evictor_.after_decode();
  }
  std::vector<float> logits() { return logits_of(context_.get()); }

 private:
  llama_model* model_;
  llama_cpp::Evictor evictor_;
  std::string notice_;
  llama_cpp::ContextPtr context_;  // after evictor_: the context calls it back
};

// Greedy text of `n` tokens after what `bounded` was fed.
inline std::vector<llama_token> generate(Bounded& bounded, int n) {
  std::vector<llama_token> tokens;
  while (static_cast<int>(tokens.size()) < n) {
    tokens.push_back(likeliest(bounded.logits()));
    bounded.feed({&tokens.back(), 1});
  }
  return tokens;
}

// The evictor's and the engine's books agree with themselves and with one another.
inline void expect_consistent(Bounded& bounded, std::string_view when) {
  const auto& evictor = bounded.evictor();
  EXPECT_EQ(evictor.violations(), std::vector<std::string>{}) << when;
  const CacheConfig& cache = evictor.config();
  const auto offset = evictor.offset();
  EXPECT_EQ(newest_label(bounded.context()), offset - 1) << when;
  const int rows = evictor.stats().rows_kept;
  EXPECT_EQ(rows, std::min<Position>(offset, cache.budget)) << when;
  // With sliding windows the engine tells the oldest label of their cells.
  const bool slides = llama_model_n_swa(llama_get_model(bounded.context())) > 0;
  if (offset > 0 && !slides) {
    const Position oldest = cache.n_sink > 0 ? 0 : offset - rows;
    EXPECT_EQ(oldest_label(bounded.context()), oldest) << when;
  }
}

}  // namespace morphkv::test

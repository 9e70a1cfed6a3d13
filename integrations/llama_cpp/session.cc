#include "morphkv/llama_cpp/session.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "morphkv/llama_cpp/model_file.h"
#include "prompt_reader.h"

namespace morphkv::llama_cpp {
namespace {

class Stopwatch {
 public:
  double ms() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_)
        .count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void check_options(const SessionOptions& o) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (o.micro_batch < 1)
    refuse("micro-batch " + std::to_string(o.micro_batch) + " is below 1 token");
  if (o.threads < 0)
    refuse("threads " + std::to_string(o.threads) + " is negative: use 0 for one per core");
  if (o.guide < 0)
    refuse("guide " + std::to_string(o.guide) + " is negative: use 0 for the usual length");
  validate(o.sampling);
}

const SessionOptions& checked(const SessionOptions& options) {
  check_options(options);
  return options;
}

}  // namespace

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kTrainedLength:
      return "trained_length";
    case FinishReason::kInterrupted:
      return "interrupted";
  }
  return "";
}

void check_prompt(const Prompt& prompt, const SessionOptions& options, int trained_length,
                  std::size_t before) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  const std::size_t tokens = prompt.tokens.size();
  if (tokens == 0) refuse("the prompt is empty: give at least one token");
  if (prompt.question >= tokens) {
    refuse("the question begins at token " + std::to_string(prompt.question) + ", the prompt has " +
           std::to_string(tokens) + ": give an index below that, 0 for the whole prompt");
  }
  if (!options.allow_past_training && trained_length > 0 &&
      before + tokens > static_cast<std::size_t>(trained_length)) {
    const std::string behind =
        before == 0 ? "" : " behind a session of " + std::to_string(before) + " tokens";
    refuse("the prompt has " + std::to_string(tokens) + " tokens" + behind +
           ", the model was trained for " + std::to_string(trained_length) +
           ": shorten it, or go beyond knowingly with --allow-past-training");
  }
  const int micro_batch = bounded_micro_batch(options.micro_batch, options.evictor.cache.budget);
  for (const auto& guide : prompt.guides) {
    if (guide.empty()) refuse("a guide is empty: give at least one token");
    if (guide.size() > static_cast<std::size_t>(micro_batch)) {
      refuse("a guide has " + std::to_string(guide.size()) +
             " tokens, the limit is one micro-batch of " + std::to_string(micro_batch) +
             ": shorten it");
    }
  }
}

Session::Session(const llama_model* model, const SessionOptions& options)
    : model_(model),
      options_(checked(options)),
      evictor_(model, options_.evictor),
      sampler_(model, options_.sampling),
      trained_length_(llama_model_n_ctx_train(model)) {
  const auto n_vocab = static_cast<std::size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
  logits_.resize(n_vocab);
}

Session::~Session() = default;

void Session::resume(SavedText text) {
  text.require_model(model_, options_.type_k, options_.type_v);
  const CacheConfig& cache = options_.evictor.cache;
  if (text.checkpoint.config() != cache) {
    throw std::invalid_argument("the session was saved with another configuration: " +
                                differences(text.checkpoint.config(), cache) +
                                "; use the one that it was saved with");
  }
  resumed_ = std::move(text);
}

std::string Session::save() const {
  if (!context_) throw EngineError("save() before read(), which makes the context");
  return SavedText{model_signature(model_, options_.type_k, options_.type_v), text_,
                   evictor_.checkpoint()}
      .to_bytes();
}

SessionResult Session::run(const Prompt& prompt, const SessionCallbacks& callbacks) {
  SessionResult result = read(prompt, callbacks);
  const double evict_before = result.evict_ms;
  const Stopwatch decoding;
  if (result.finish_reason != FinishReason::kInterrupted) {
    active_ = &callbacks;
    result.finish_reason = generate(callbacks, result);
    active_ = nullptr;
  }
  result.decode_ms = decoding.ms();
  result.cache = evictor_.stats();
  result.evict_ms = result.cache.evict_ms;
  result.evict_decode_ms = result.cache.evict_ms - evict_before;
  return result;
}

SessionResult Session::read(const Prompt& given, const SessionCallbacks& callbacks) {
  if (resumed_) text_ = resumed_->tokens;
  check_prompt(given, options_, trained_length_, text_.size());
  active_ = &callbacks;
  SessionResult result;
  if (resumed_) result.reused_tokens = static_cast<int>(resumed_->checkpoint.offset());
  const auto reused = static_cast<std::size_t>(result.reused_tokens);
  Prompt prompt = given;
  prompt.question += text_.size() - reused;
  text_.insert(text_.end(), given.tokens.begin(), given.tokens.end());
  const std::vector<llama_token> unread(text_.begin() + result.reused_tokens, text_.end());
  prompt.tokens = unread;
  const int tokens = static_cast<int>(unread.size());
  const int rows = tokens + (resumed_ ? resumed_->checkpoint.rows() : 0);
  const int budget = options_.evictor.cache.budget;
  const bool full = options_.evictor.cache.policy == "full";
  if (rows > budget && !full) result.prefill_mode = options_.prefill;
  if (result.prefill_mode == Prefill::kGuided && !evictor_.takes_guides()) {
    result.prefill_mode = Prefill::kStream;
  }
  int call_tokens = 0;
  GuidePlan plan;
  if (result.prefill_mode == Prefill::kGuided) {
    const int most = bounded_micro_batch(options_.micro_batch, budget);
    plan = plan_guides(prompt, options_.guide, most);
    call_tokens = plan.piece + plan.guide;
    most_asking_ = plan.most_asking();
    result.guide_tokens = plan.tail;
    for (const auto& guide : prompt.guides) result.guide_tokens += static_cast<int>(guide.size());
  }
  const bool whole = result.prefill_mode == Prefill::kWhole;
  if (whole) call_tokens = rows - budget;
  if (full) call_tokens = most_rows(static_cast<std::int64_t>(text_.size()));
  const std::string notice = make_context(call_tokens);
  if (!notice.empty() && callbacks.on_notice) callbacks.on_notice(notice);
  take_over_resumed();

  const Stopwatch prefill;
  const bool guided = result.prefill_mode == Prefill::kGuided;
  const int micro_batch = static_cast<int>(llama_n_ubatch(context_.get()));
  const bool going =
      read_pieces(guided ? PromptReader(evictor_, 0, prompt, plan)
                         : PromptReader(evictor_, 0, prompt.tokens, whole ? tokens : micro_batch),
                  tokens);
  if (going && whole) move_to_small_context();
  prompt_read_ = going;
  text_.resize(static_cast<std::size_t>(evictor_.offset()));
  result.guide_ms = guide_ms_;
  result.prefill_ms = prefill.ms();
  result.prompt_tokens = static_cast<int>(evictor_.offset()) - result.reused_tokens;
  if (!going) result.finish_reason = FinishReason::kInterrupted;
  result.cache = evictor_.stats();
  result.evict_ms = result.cache.evict_ms;
  result.kv_bytes_peak = kv_bytes_peak_;
  active_ = nullptr;
  return result;
}

// With policy full, of a text of so many tokens and its answer.
int Session::most_rows(std::int64_t tokens) const {
  std::int64_t most = tokens + token_limit();
  const bool ends_at_trained = trained_length_ > 0 && !options_.allow_past_training;
  if (ends_at_trained) most = std::min<std::int64_t>(most, trained_length_);
  if (most > kMaxBudget) {
    throw std::invalid_argument("policy full would hold " + std::to_string(most) +
                                " rows, the limit is " + std::to_string(kMaxBudget) +
                                ": lower the number of tokens to generate");
  }
  return static_cast<int>(most);
}

// The rows of the text that goes on. They are needed once.
void Session::take_over_resumed() {
  if (!resumed_) return;
  try {
    evictor_.restore(resumed_->checkpoint);
  } catch (const EngineError& error) {
    throw std::invalid_argument(std::string("the engine does not take the saved session: ") +
                                error.what());
  }
  resumed_.reset();
}

void Session::feed(std::span<const llama_token> tokens) {
  if (!context_) throw EngineError("feed() before read(), which makes the context");
  decode(tokens);
  evictor_.after_decode();
  text_.insert(text_.end(), tokens.begin(), tokens.end());
}

std::string Session::make_context(int call_tokens) {
  llama_context_params params = llama_context_default_params();
  const int threads = options_.threads > 0
                          ? options_.threads
                          : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  params.n_threads = threads;
  params.n_threads_batch = threads;
  params.n_ubatch = static_cast<std::uint32_t>(options_.micro_batch);
  params.n_batch = params.n_ubatch;
  params.type_k = options_.type_k;
  params.type_v = options_.type_v;
  params.no_perf = true;
  params.flash_attn_type =
      options_.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.abort_callback_data = this;
  params.abort_callback = [](void* self) {
    const auto* callbacks = static_cast<Session*>(self)->active_;
    return callbacks != nullptr && callbacks->cancelled && callbacks->cancelled();
  };
  std::string notice = evictor_.attach(params, call_tokens, most_asking_);
  context_.reset(llama_init_from_model(const_cast<llama_model*>(model_), params));
  if (!context_) {
    throw EngineError("llama.cpp could not make a context of " + std::to_string(params.n_ctx) +
                      " cells; lower the budget or the micro-batch");
  }
  const auto* active = std::exchange(active_, nullptr);  // setting up is not interrupted
  evictor_.bind(context_.get());
  active_ = active;
  kv_bytes_peak_ = std::max(kv_bytes_peak_, evictor_.stats().kv_bytes_allocated);
  return notice;
}

// The larger cache goes before the smaller one comes.
void Session::move_to_small_context() {
  const Checkpoint rows = evictor_.checkpoint();
  context_.reset();
  make_context(0);
  evictor_.restore(rows);
}

bool Session::read_pieces(PromptReader reader, int total) {
  const std::size_t most = llama_n_ubatch(context_.get());
  while (!reader.next().empty()) {
    const bool asking = reader.asking();
    if (!asking) report_progress(reader.done(), total);
    const Stopwatch watch;
    const auto tokens = reader.next().first(std::min(most, reader.next().size()));
    const bool going = reader.last() ? decode(tokens) : evaluate(tokens);
    if (!going) {
      reader.stop();
      return false;
    }
    reader.evaluated(static_cast<int>(tokens.size()));
    if (asking) guide_ms_ += watch.ms();
  }
  report_progress(total, total);
  return true;
}

void Session::report_progress(int done, int total) const {
  if (!active_->on_prompt) return;
  active_->on_prompt(done, total, evictor_.stats().rows_kept);
}

FinishReason Session::generate(const SessionCallbacks& callbacks, SessionResult& result) {
  const llama_vocab* vocab = llama_model_get_vocab(model_);
  const int limit = token_limit();
  while (result.generated_tokens < limit) {
    const Stopwatch step;
    const llama_token token = sampler_.choose(logits_, options_.ignore_eos);
    if (!options_.ignore_eos && llama_vocab_is_eog(vocab, token)) return FinishReason::kStop;
    ++result.generated_tokens;
    text_.push_back(token);
    const bool last = result.generated_tokens == limit;
    const bool trained = !options_.allow_past_training && trained_length_ > 0 &&
                         evictor_.offset() >= trained_length_;
    // The last token needs no step of its own: nothing will ask for its successor.
    const bool going = last || trained || decode({&token, 1});
    if (!last && !trained) evictor_.after_decode();
    if (callbacks.on_token) callbacks.on_token(token, token_text(model_, token, false), step.ms());
    if (trained) return FinishReason::kTrainedLength;
    if (!going || (callbacks.cancelled && callbacks.cancelled())) return FinishReason::kInterrupted;
  }
  return FinishReason::kLength;
}

// Evaluates the tokens and takes over the logits that follow. False if the work was cancelled.
bool Session::decode(std::span<const llama_token> tokens) {
  if (!evaluate(tokens)) return false;
  const float* logits = llama_get_logits_ith(context_.get(), -1);
  if (logits == nullptr) throw EngineError("llama.cpp gave no logits");
  std::copy_n(logits, logits_.size(), logits_.begin());
  return true;
}

bool Session::evaluate(std::span<const llama_token> tokens) {
  // The engine's batch is not const, it does not write to the tokens.
  const llama_batch batch = llama_batch_get_one(const_cast<llama_token*>(tokens.data()),
                                                static_cast<std::int32_t>(tokens.size()));
  const int status = llama_decode(context_.get(), batch);
  if (status == 2) return false;
  if (status != 0) throw EngineError("llama_decode failed with status " + std::to_string(status));
  return active_ == nullptr || !active_->cancelled || !active_->cancelled();
}

int Session::token_limit() const {
  if (options_.max_tokens >= 0) return options_.max_tokens;
  if (options_.allow_past_training || trained_length_ <= 0) return kTokenCap;
  return trained_length_;
}

}  // namespace morphkv::llama_cpp

#include "morphkv/llama_cpp/session.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/policy.h"
#include "prompt_reader.h"

namespace morphkv::llama_cpp {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

const SessionOptions& checked(const SessionOptions& o) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (o.micro_batch < 1)
    refuse("micro-batch " + std::to_string(o.micro_batch) + " is below 1 token");
  if (o.threads < 0)
    refuse("threads " + std::to_string(o.threads) + " is negative: use 0 for one per core");
  if (o.guide < 0)
    refuse("guide " + std::to_string(o.guide) + " is negative: use 0 for the usual length");
  validate(o.sampling);
  return o;
}

// What the callbacks are told of a turn, while the session is in it.
struct Active {
  const SessionCallbacks*& pointer;
  Active(const SessionCallbacks*& p, const SessionCallbacks& callbacks) : pointer(p) {
    pointer = &callbacks;
  }
  ~Active() { pointer = nullptr; }
  Active(const Active&) = delete;
  Active& operator=(const Active&) = delete;
};

// The prompt behind what was read and written before it.
Turn turn_of(const Prompt& prompt, const SessionOptions& o, std::span<const llama_token> before) {
  if (prompt.tokens.empty()) {
    throw std::invalid_argument("the prompt is empty: give at least one token");
  }
  Turn turn;
  turn.prompt.assign(before.begin(), before.end());
  turn.prompt.insert(turn.prompt.end(), prompt.tokens.begin(), prompt.tokens.end());
  turn.cache = o.cache;
  turn.prefill = o.prefill;
  turn.guides = prompt.guides;
  turn.end_guides_too = prompt.end_guides_too;
  turn.question = before.size() + prompt.question;
  turn.guide = o.guide;
  turn.sampling = o.sampling;
  turn.max_tokens = o.max_tokens;
  turn.ignore_eos = o.ignore_eos;
  turn.allow_past_training = o.allow_past_training;
  return turn;
}

bool evicts(const CacheConfig& cache) { return make_policy(cache)->traits().evicts; }

// With policy full: of a text and its answer.
int most_tokens(const Turn& turn, const llama_model* model) {
  const auto prompt = static_cast<std::int64_t>(turn.prompt.size());
  std::int64_t most = prompt + (turn.max_tokens >= 0 ? turn.max_tokens : kTokenCap);
  if (const int trained = trained_length(model); trained > 0 && !turn.allow_past_training) {
    most = turn.max_tokens >= 0 ? std::min<std::int64_t>(most, trained) : trained;
  }
  if (most > kMaxBudget) {
    throw std::invalid_argument("policy full would hold " + std::to_string(most) +
                                " rows, the limit is " + std::to_string(kMaxBudget) +
                                ": lower the number of tokens to generate");
  }
  return static_cast<int>(std::max<std::int64_t>(most, turn.cache.budget));
}

// A guide may take a micro-batch; policy full keeps the whole text.
TurnLimits limits_of(const Turn& turn, const SessionOptions& o, const llama_model* model) {
  if (!evicts(turn.cache)) {
    return {.budget = most_tokens(turn, model), .guide_tokens = o.micro_batch, .evicts = false};
  }
  return {.budget = turn.cache.budget,
          .guide_tokens = bounded_micro_batch(o.micro_batch, turn.cache.budget)};
}

}  // namespace

void check_prompt(const Prompt& prompt, const SessionOptions& options, const llama_model* model,
                  std::span<const llama_token> before) {
  const Turn turn = turn_of(prompt, options, before);
  check_turn(turn, limits_of(turn, options, model), model, before.size());
}

Session::Session(const llama_model* model, const SessionOptions& options)
    : model_(model), options_(checked(options)) {
  const Evictor can_be_bounded(model, {.cache = options_.cache});
}

void Session::resume(SavedText text) {
  text.require_model(model_, options_.type_k, options_.type_v);
  if (text.checkpoint.config() != options_.cache) {
    throw std::invalid_argument("the session was saved with another configuration: " +
                                differences(text.checkpoint.config(), options_.cache) +
                                "; use the one that it was saved with");
  }
  resumed_ = std::move(text);
}

Slots& Session::require_slots(const char* call) const {
  if (!slots_) {
    throw EngineError(std::string(call) + "() before read(), which makes the context");
  }
  return *slots_;
}

// As large as the turn needs it: with room for the longest guide that it has.
void Session::make_slots(const Turn& turn, const SessionCallbacks& callbacks) {
  const TurnLimits limits = limits_of(turn, options_, model_);
  check_turn(turn, limits, model_, resumed_ ? resumed_->tokens.size() : 0);
  SlotsOptions slots{.budget = limits.budget,
                     .piece = options_.micro_batch,
                     .batch_tokens = limits.guide_tokens,
                     .threads = options_.threads,
                     .type_k = options_.type_k,
                     .type_v = options_.type_v,
                     .evicts = limits.evicts,
                     .reserve = false,
                     .cancelled = [this] {
                       return active_ != nullptr && active_->cancelled && active_->cancelled();
                     }};
  if (limits.evicts && turn.prefill == Prefill::kGuided) {
    const Prompt prompt{turn.prompt, turn.guides, turn.end_guides_too, turn.question};
    const GuidePlan plan =
        plan_guides(prompt, turn.guide, limits.guide_tokens, limits.guide_tokens);
    slots.guide_tokens = std::max(plan.guide, plan.tail);
    slots.call_tokens = plan.piece + plan.guide;
  }
  slots_ = std::make_unique<Slots>(model_, slots);
  const std::string notice =
      limits.evicts ? lowered_notice(options_.micro_batch, limits.budget) : "";
  if (!notice.empty() && callbacks.on_notice) callbacks.on_notice(notice);
}

void Session::take_over_resumed() {
  if (!resumed_) return;
  try {
    slots_->restore(0, *resumed_);
  } catch (const EngineError& error) {
    throw std::invalid_argument(std::string("the engine does not take the saved session: ") +
                                error.what());
  }
  resumed_.reset();
}

SessionResult Session::run(const Prompt& prompt, const SessionCallbacks& callbacks) {
  return carry_out(prompt, options_.max_tokens, callbacks);
}

SessionResult Session::read(const Prompt& prompt, const SessionCallbacks& callbacks) {
  SessionResult result = carry_out(prompt, 0, callbacks);
  if (result.finish_reason == FinishReason::kLength) result.finish_reason = FinishReason::kStop;
  return result;
}

SessionResult Session::carry_out(const Prompt& prompt, int max_tokens,
                                 const SessionCallbacks& callbacks) {
  std::vector<llama_token> before;
  if (resumed_) before = resumed_->tokens;
  Turn turn = turn_of(prompt, options_, before);
  turn.max_tokens = max_tokens;
  make_slots(turn, callbacks);
  const Active active(active_, callbacks);
  take_over_resumed();
  SessionResult result;
  std::optional<std::string> error;
  const Clock::time_point start = Clock::now();
  Clock::time_point step = start;
  slots_->begin(0, std::move(turn),
                {.on_token =
                     [&](const GeneratedToken& t) {
                       if (callbacks.on_token) callbacks.on_token(t.token, t.text, ms_since(step));
                     },
                 .on_end = [&](FinishReason reason) { result.finish_reason = reason; },
                 .on_error = [&](const std::string& what) { error = what; }});
  SlotStats now = slots_->stats(0);
  const int reused = now.reused_tokens;
  const int total = now.prompt_tokens - reused;
  const auto report = [&](int done) {
    if (callbacks.on_prompt) callbacks.on_prompt(done, total, now.rows_kept);
  };
  double evict_before = 0.0;
  while (now.busy) {
    if (now.reading && !now.asking) report(now.prompt_read - reused);
    step = Clock::now();
    if (callbacks.cancelled && callbacks.cancelled()) {
      slots_->interrupt(0);
    } else {
      slots_->step();
      result.kv_bytes_peak = std::max(result.kv_bytes_peak, slots_->kv_bytes_allocated());
    }
    now = slots_->stats(0);
    if (error) throw EngineError(*error);
    if (now.reading || prompt_read_) continue;
    result.prefill_ms = ms_since(start);
    evict_before = now.evict_ms;
    result.prompt_tokens =
        static_cast<int>(std::min<std::int64_t>(total, slots_->evictor().offset() - reused));
    prompt_read_ = result.prompt_tokens == total;
    if (prompt_read_) report(total);
  }
  result.decode_ms = ms_since(start) - result.prefill_ms;
  result.reused_tokens = reused;
  result.generated_tokens = now.generated_tokens;
  result.prefill_mode = now.prefill_mode;
  result.guide_tokens = now.guide_tokens;
  result.guide_ms = now.guide_ms;
  result.cache = slots_->evictor().stats();
  result.evict_ms = now.evict_ms;
  result.evict_decode_ms = now.evict_ms - evict_before;
  return result;
}

// A turn without an answer, behind what has been evaluated.
void Session::feed(std::span<const llama_token> tokens) {
  Slots& slots = require_slots("feed");
  Turn turn;
  turn.prompt.assign(slots.tokens_seen(0).begin(), slots.tokens_seen(0).end());
  turn.prompt.insert(turn.prompt.end(), tokens.begin(), tokens.end());
  turn.cache = options_.cache;
  turn.prefill = Prefill::kStream;
  turn.max_tokens = 0;
  turn.allow_past_training = true;
  std::optional<std::string> error;
  slots.begin(0, std::move(turn),
              {.on_token = {}, .on_end = {}, .on_error = [&](const std::string& e) { error = e; }});
  while (slots.step()) {
  }
  if (error) throw EngineError(*error);
}

}  // namespace morphkv::llama_cpp

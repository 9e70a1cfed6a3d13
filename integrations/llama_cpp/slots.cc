#include "morphkv/llama_cpp/slots.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "morphkv/llama_cpp/engine_context.h"
#include "morphkv/llama_cpp/model_file.h"
#include "prompt_reader.h"

namespace morphkv::llama_cpp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostSlice = 63;  // tokens of a prompt in one step, where slots share it
// Tokens of a step that are read: the fewer, the sooner comes who waits for the next one.
constexpr int kLeastStep = 32;
constexpr int kPart = 16;              // for each prompt, while nobody answers
constexpr int kPartBesideAnswers = 8;  // while somebody does

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// The options with the piece lowered to the budget.
SlotsOptions settled(SlotsOptions o) {
  if (o.slots < 1 || o.slots > kMostSequences) {
    refuse("slots " + std::to_string(o.slots) + ": give 1 to " + std::to_string(kMostSequences));
  }
  if (o.piece < 1) refuse("piece " + std::to_string(o.piece) + " is below 1 token");
  if (o.guide_tokens < 1) {
    refuse("guide tokens " + std::to_string(o.guide_tokens) + " are below 1");
  }
  if (o.threads < 0) {
    refuse("threads " + std::to_string(o.threads) + " is negative: use 0 for one per core");
  }
  if (o.evicts) o.piece = bounded_micro_batch(o.piece, o.budget);
  if (o.call_tokens == 0) {
    // A guide longer than half a piece stands behind half a piece, or a prompt's end as long.
    const int behind = std::max((o.piece + 1) / 2, o.guide_tokens);
    o.call_tokens = o.evicts ? std::max(o.piece, behind + o.guide_tokens) : o.budget;
  }
  if (o.batch_tokens < o.slots || (o.slots > 1 && o.batch_tokens < kLeastStep)) {
    refuse("batch size " + std::to_string(o.batch_tokens) + " is below " +
           std::to_string(std::max(kLeastStep, o.slots)) + ": give at least " +
           std::to_string(kLeastStep) + ", and a token for each slot");
  }
  return o;
}

// The rule that stands in a slot until a turn brings its own.
CacheConfig reserved(const SlotsOptions& o) {
  if (!o.evicts) return {.budget = o.budget, .n_sink = 0, .window = 1, .policy = "full"};
  return {.budget = o.budget, .n_sink = 0, .window = 1, .queries = QuerySource::kAttention};
}

struct BatchDeleter {
  void operator()(llama_batch* batch) const {
    llama_batch_free(*batch);
    delete batch;
  }
};

// What a step evaluates. The logits of a token are asked for by its place in it.
class Batch {
 public:
  explicit Batch(int most) : batch_(new llama_batch(llama_batch_init(most, 0, 1))) {}
  void clear() { batch_->n_tokens = 0; }
  int size() const { return batch_->n_tokens; }
  void add(llama_token token, Position position, llama_seq_id sequence, bool logits) {
    const int i = batch_->n_tokens++;
    batch_->token[i] = token;
    batch_->pos[i] = static_cast<llama_pos>(position);
    batch_->n_seq_id[i] = 1;
    batch_->seq_id[i][0] = sequence;
    batch_->logits[i] = logits ? 1 : 0;
  }
  llama_batch get() const { return *batch_; }

 private:
  std::unique_ptr<llama_batch, BatchDeleter> batch_;
};

// A context of its own for a prompt that is read whole.
struct LargerContext {
  Evictor evictor;
  ContextPtr context;  // after the evictor: it calls that back
};

struct Slot {
  std::vector<llama_token> text;  // read and written; all but the end of it is evaluated
  bool busy = false;
  Turn turn;
  Slots::Handler handler;
  std::optional<PromptReader> reader;    // while the prompt is read
  std::unique_ptr<LargerContext> whole;  // while it is read whole
  std::optional<Sampler> sampler;
  int reused = 0;
  int generated = 0;
  int limit = 0;              // of generated tokens
  std::vector<float> logits;  // [vocabulary] of the token that follows
  std::optional<Prefill> mode;
  int guide_tokens = 0;
  double guide_ms = 0.0;
  // In this step:
  int tokens = 0;         // of the prompt or a guide
  int logits_at = -1;     // place in the batch of the logits that are wanted
  bool answered = false;  // the token chosen last is in the batch
  bool asked = false;     // the tokens are a guide's
  bool chooses = false;   // its logits are known, and no token is chosen yet
};

}  // namespace

class Slots::Impl {
 public:
  Impl(const llama_model* model, const SlotsOptions& options)
      : model_(model),
        options_(settled(options)),
        evictor_(model, {.cache = reserved(options_), .sequences = options_.slots}),
        slots_(static_cast<std::size_t>(options_.slots)),
        batch_(options_.batch_tokens),
        trained_length_(trained_length(model)),
        n_vocab_(static_cast<std::size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)))) {
    if (options_.reserve) require_context();
  }

  void check(const Turn& turn) const { check_turn(turn, limits(), model_); }
  int reusable(int slot, const Turn& turn) const;
  void begin(int slot, Turn turn, Handler handler);
  bool step();
  void end(int slot);
  void interrupt(int slot);
  void erase(int slot);
  std::string save(int slot, std::vector<ChatMessage> messages) const;
  void restore(int slot, const SavedText& saved);
  SlotStats stats(int slot) const;
  std::span<const llama_token> seen(const Slot& slot) const;
  std::size_t kv_bytes_allocated() const;

  const Slot& at(int slot) const {
    if (slot < 0 || slot >= options_.slots) {
      refuse("slot " + std::to_string(slot) + " is none of 0 to " +
             std::to_string(options_.slots - 1));
    }
    return slots_[static_cast<std::size_t>(slot)];
  }
  Slot& at(int slot) { return const_cast<Slot&>(std::as_const(*this).at(slot)); }
  const Evictor& evictor() const { return evictor_; }
  llama_context* context() const { return context_.get(); }
  const SlotsOptions& options() const { return options_; }

 private:
  TurnLimits limits() const;
  ContextPtr make_context(Evictor& evictor, int call_tokens, int guide_tokens);
  void require_context();
  bool cancelled() const { return !making_ && options_.cancelled && options_.cancelled(); }
  Evictor& evictor_of(Slot& slot) { return slot.whole ? slot.whole->evictor : evictor_; }
  const Evictor& evictor_of(const Slot& slot) const {
    return slot.whole ? slot.whole->evictor : evictor_;
  }
  llama_seq_id sequence_of(const Slot& slot) const { return slot.whole ? 0 : id_of(slot); }
  int covered(const Slot& slot, std::span<const llama_token> prompt) const;
  std::string token_identity(llama_token token) const;
  void go_on_from(const Slot& slot, int reused, Turn& turn) const;
  int token_limit(const Turn& turn) const;
  void make_reader(Slot& slot);
  void enlarge(Slot& slot, int rows);
  void come_back(Slot& slot);
  void read_whole(Slot& slot);
  void fill_batch();
  Position next_position(const Slot& slot) const;
  void share_out(std::span<const int> readers);
  int most_of(int id, int room) const;
  void add_tokens(int slot, int n);
  void take_over();
  void evaluated(Slot& slot, int tokens);
  void take_logits(Slot& slot, llama_context* context, int at);
  void choose_tokens();
  void choose(Slot& slot);
  void finish(Slot& slot, FinishReason reason);
  void fail(Slot& slot, const std::string& why);
  void go_back_to(int id, const Checkpoint& moment);
  int id_of(const Slot& slot) const { return static_cast<int>(&slot - slots_.data()); }

  const llama_model* model_;
  SlotsOptions options_;
  Evictor evictor_;
  std::vector<Slot> slots_;
  Batch batch_;
  ContextPtr context_;  // after evictor_: the context calls it back
  bool making_ = false;
  int trained_length_;  // 0 = unknown
  std::size_t n_vocab_;
};

// A guide that slides over a window is one micro-batch.
TurnLimits Slots::Impl::limits() const {
  return {.budget = options_.budget,
          .guide_tokens = std::min(options_.guide_tokens, options_.batch_tokens),
          .evicts = options_.evicts};
}

ContextPtr Slots::Impl::make_context(Evictor& evictor, int call_tokens, int guide_tokens) {
  llama_context_params params =
      context_params(options_.threads, options_.batch_tokens, options_.type_k, options_.type_v);
  params.abort_callback_data = this;
  params.abort_callback = [](void* self) { return static_cast<Impl*>(self)->cancelled(); };
  evictor.attach(params, call_tokens, guide_tokens);
  // The batch is bounded by what a step takes, not by the budget: a piece may be several batches.
  params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(options_.batch_tokens);
  making_ = true;  // which is not interrupted
  try {
    ContextPtr context = llama_cpp::make_context(model_, params);
    evictor.bind(context.get());
    making_ = false;
    return context;
  } catch (...) {
    making_ = false;
    throw;
  }
}

void Slots::Impl::require_context() {
  if (!context_) context_ = make_context(evictor_, options_.call_tokens, options_.guide_tokens);
}

std::span<const llama_token> Slots::Impl::seen(const Slot& slot) const {
  const Position offset = evictor_of(slot).offset(sequence_of(slot));
  return std::span(slot.text).first(static_cast<std::size_t>(offset));
}

// How many tokens of the prompt say what the slot has seen, or -1. Generated text may come back cut
// into other tokens: then the texts must agree, and end where a token of the prompt ends.
int Slots::Impl::covered(const Slot& slot, std::span<const llama_token> prompt) const {
  const std::span<const llama_token> seen = this->seen(slot);
  const auto [seen_rest, prompt_rest] =
      std::mismatch(seen.begin(), seen.end(), prompt.begin(), prompt.end());
  auto next = prompt_rest;
  std::string ahead;  // of the prompt, beyond what has been compared
  for (auto token = seen_rest; token != seen.end(); ++token) {
    const std::string text = token_identity(*token);
    while (ahead.size() < text.size() && next != prompt.end()) ahead += token_identity(*next++);
    if (!ahead.starts_with(text)) return -1;
    ahead.erase(0, text.size());
  }
  return ahead.empty() ? static_cast<int>(next - prompt.begin()) : -1;
}

// A token's text; one that is no text, such as the end of a message, is never the same as its name.
std::string Slots::Impl::token_identity(llama_token token) const {
  const llama_vocab* vocab = llama_model_get_vocab(model_);
  if (llama_vocab_is_control(vocab, token)) return '\0' + std::to_string(token) + '\0';
  return token_text(model_, token, true);
}

int Slots::Impl::reusable(int id, const Turn& turn) const {
  const Slot& slot = at(id);
  const bool whole = evictor_.stats(id).rows_evicted == 0 || !turn.strict;
  if (seen(slot).empty() || !whole || evictor_.config(id) != turn.cache) return 0;
  const int tokens = covered(slot, turn.prompt);
  // The last token of a prompt is always evaluated: its logits are wanted.
  return tokens < std::ssize(turn.prompt) ? std::max(0, tokens) : 0;
}

void Slots::Impl::begin(int id, Turn turn, Handler handler) {
  Slot& slot = at(id);
  if (slot.busy) refuse("slot " + std::to_string(id) + " is busy");
  check(turn);
  Sampler sampler(model_, turn.sampling);
  const int reused = reusable(id, turn);
  const int seen_before = reused > 0 ? static_cast<int>(seen(slot).size()) : 0;
  if (reused > 0) go_on_from(slot, reused, turn);
  const int rows = (reused > 0 ? evictor_.stats(id).rows_kept : 0) +
                   static_cast<int>(turn.prompt.size()) - seen_before;
  const bool evicts = make_policy(turn.cache)->traits().evicts;
  std::optional<Prefill> mode;
  if (evicts && rows > turn.cache.budget) mode = turn.prefill;
  const bool whole = mode == Prefill::kWhole;
  if (!whole || reused > 0) require_context();
  if (reused == 0 && context_) evictor_.clear(turn.cache, id);
  slot.reader.reset();
  slot.text = turn.prompt;
  slot.turn = std::move(turn);
  slot.handler = std::move(handler);
  slot.sampler = std::move(sampler);
  slot.mode = mode;
  slot.reused = seen_before;
  slot.generated = slot.guide_tokens = 0;
  slot.guide_ms = 0.0;
  slot.chooses = false;
  slot.limit = token_limit(slot.turn);
  try {
    if (whole) enlarge(slot, rows);
    make_reader(slot);
  } catch (...) {
    erase(id);
    throw;
  }
  slot.busy = true;
}

// The beginning of the prompt becomes the tokens that the slot has seen.
void Slots::Impl::go_on_from(const Slot& slot, int reused, Turn& turn) const {
  const std::span<const llama_token> seen = this->seen(slot);
  turn.prompt.erase(turn.prompt.begin(), turn.prompt.begin() + reused);
  turn.prompt.insert(turn.prompt.begin(), seen.begin(), seen.end());
  if (turn.question >= static_cast<std::size_t>(reused)) {
    turn.question += seen.size() - static_cast<std::size_t>(reused);
  }
}

// Without a limit of the turn's own the trained length ends the answer, or the cap where nobody
// knows it. The last token of an answer needs no row.
int Slots::Impl::token_limit(const Turn& turn) const {
  const bool ends = !turn.allow_past_training && trained_length_ > 0;
  int limit = turn.max_tokens >= 0 ? turn.max_tokens : ends ? trained_length_ : kTokenCap;
  const auto prompt = static_cast<int>(turn.prompt.size());
  if (turn.strict) limit = std::min(limit, turn.cache.budget - prompt + 1);
  if (!options_.evicts) limit = std::min(limit, options_.budget - prompt + 1);
  return limit;
}

void Slots::Impl::make_reader(Slot& slot) {
  const Turn& turn = slot.turn;
  Evictor& evictor = evictor_of(slot);
  const llama_seq_id id = sequence_of(slot);
  const auto first = static_cast<std::size_t>(slot.reused);
  const Prompt prompt{.tokens = std::span(turn.prompt).subspan(first),
                      .guides = turn.guides,
                      .end_guides_too = turn.end_guides_too,
                      .question = std::max(turn.question, first) - first};
  const int most = bounded_micro_batch(options_.piece, turn.cache.budget);
  if (slot.mode == Prefill::kGuided && !evictor.takes_guides(id)) slot.mode = Prefill::kStream;
  if (slot.mode == Prefill::kGuided) {
    const GuidePlan plan = plan_guides(prompt, turn.guide, most, limits().guide_tokens);
    slot.guide_tokens = plan.tail;
    for (const auto& guide : turn.guides) slot.guide_tokens += static_cast<int>(guide.size());
    slot.reader.emplace(evictor, id, prompt, plan);
  } else {
    const auto tokens = static_cast<int>(prompt.tokens.size());
    slot.reader.emplace(evictor, id, prompt.tokens, slot.whole ? tokens : most);
  }
}

// Reads the rest of the prompt in a context that has room for all of it.
void Slots::Impl::enlarge(Slot& slot, int rows) {
  const int id = id_of(slot);
  auto whole = std::make_unique<LargerContext>(
      LargerContext{Evictor(model_, {.cache = slot.turn.cache}), nullptr});
  whole->context = make_context(whole->evictor, rows - slot.turn.cache.budget, 0);
  if (slot.reused > 0) whole->evictor.restore(evictor_.checkpoint(id));
  slot.whole = std::move(whole);
}

// With the rows that are left of a whole prompt. The larger cache goes before a smaller one comes.
void Slots::Impl::come_back(Slot& slot) {
  const Checkpoint rows = slot.whole->evictor.checkpoint();
  slot.whole.reset();
  require_context();
  evictor_.clear(slot.turn.cache, id_of(slot));
  evictor_.restore(rows, id_of(slot));
}

bool Slots::Impl::step() {
  bool worked = false;
  for (Slot& slot : slots_) {
    if (!slot.whole) continue;
    worked = true;
    try {
      read_whole(slot);
    } catch (const EngineError& error) {
      fail(slot, error.what());
    }
  }
  fill_batch();
  if (batch_.size() > 0) {
    worked = true;
    const Clock::time_point start = Clock::now();
    const int status = llama_decode(context_.get(), batch_.get());
    if (status == 2 || (status == 0 && cancelled())) {
      for (Slot& slot : slots_) {
        if (slot.tokens > 0 || slot.answered) interrupt(id_of(slot));
      }
      return true;
    }
    if (status != 0) {
      for (Slot& slot : slots_) {
        if (slot.tokens > 0 || slot.answered) {
          fail(slot, "llama_decode failed with status " + std::to_string(status));
        }
      }
      return true;
    }
    take_over();
    const std::chrono::duration<double, std::milli> ms = Clock::now() - start;
    for (Slot& slot : slots_) {
      if (slot.asked) slot.guide_ms += ms.count() * slot.tokens / batch_.size();
    }
  }
  choose_tokens();
  return worked;
}

// One batch of it; all that is read is decided about at its end.
void Slots::Impl::read_whole(Slot& slot) {
  llama_context* context = slot.whole->context.get();
  const auto tokens = slot.reader->next().first(
      std::min(slot.reader->next().size(), static_cast<std::size_t>(llama_n_ubatch(context))));
  // The engine's batch is not const, it does not write to the tokens.
  const int status =
      llama_decode(context, llama_batch_get_one(const_cast<llama_token*>(tokens.data()),
                                                static_cast<std::int32_t>(tokens.size())));
  if (status == 2 || (status == 0 && cancelled())) return interrupt(id_of(slot));
  if (status != 0) throw EngineError("llama_decode failed with status " + std::to_string(status));
  if (tokens.size() == slot.reader->next().size()) take_logits(slot, context, -1);
  evaluated(slot, static_cast<int>(tokens.size()));
  if (!slot.reader) come_back(slot);
}

// Behind all that the engine holds: tokens of a piece or a guide may wait to be taken over.
Position Slots::Impl::next_position(const Slot& slot) const {
  return llama_memory_seq_pos_max(llama_get_memory(context_.get()), id_of(slot)) + 1;
}

// The tokens chosen last, then a share of the prompts.
void Slots::Impl::fill_batch() {
  batch_.clear();
  std::vector<int> readers;
  for (Slot& slot : slots_) {
    slot.tokens = 0;
    slot.logits_at = -1;
    slot.answered = slot.asked = false;
    if (slot.busy && slot.reader && !slot.whole) readers.push_back(id_of(slot));
  }
  const bool slides = llama_model_n_swa(model_) > 0;
  for (const int id : readers) {
    const PromptReader& reader = *at(id).reader;
    if (slides && reader.asking()) {  // in one micro-batch: nobody else is in it
      add_tokens(id, static_cast<int>(reader.next().size()));
      return;
    }
  }
  for (Slot& slot : slots_) {
    if (!slot.busy || slot.reader || slot.chooses) continue;
    slot.answered = true;
    slot.logits_at = batch_.size();
    batch_.add(slot.text.back(), next_position(slot), id_of(slot), true);
  }
  share_out(readers);
}

// A prompt that ends in this step goes first, and alone: a short request passes a long prompt. Else
// all get equal parts, which the engine evaluates together.
void Slots::Impl::share_out(std::span<const int> readers) {
  const auto n = static_cast<int>(readers.size());
  const bool others_answer = batch_.size() > 0;
  const int shared = std::max(kLeastStep, n * (others_answer ? kPartBesideAnswers : kPart));
  const int wanted = options_.slots > 1 ? shared : options_.batch_tokens;
  const auto room = [&, end = batch_.size() + wanted] {
    return std::min(end, options_.batch_tokens) - batch_.size();
  };
  const auto rest = [&](int id) {
    return static_cast<int>(at(id).turn.prompt.size()) - at(id).reused - at(id).reader->done();
  };
  const auto shortest = std::ranges::min_element(readers, {}, rest);
  if (n > 1 && rest(*shortest) <= room()) {
    add_tokens(*shortest, most_of(*shortest, room()));
    return;
  }
  for (int i = 0; i < n; ++i) {
    const int id = readers[static_cast<std::size_t>(i)];
    add_tokens(id, most_of(id, room() / (n - i)));
  }
}

// From 64 queries of a sequence on the engine rounds in another way (its tiles for attention on a
// CPU): with several slots the answers would depend on who else is there.
int Slots::Impl::most_of(int id, int room) const {
  const int slice = options_.slots > 1 ? kMostSlice : options_.batch_tokens;
  return std::min({static_cast<int>(at(id).reader->next().size()), room, slice});
}

void Slots::Impl::add_tokens(int id, int n) {
  Slot& slot = at(id);
  const std::span<const llama_token> tokens = slot.reader->next();
  Position position = next_position(slot);
  slot.asked = slot.reader->asking();
  const bool end = slot.reader->last() && n == static_cast<int>(tokens.size());
  for (int t = 0; t < n; ++t) {
    const bool logits = end && t == n - 1;
    if (logits) slot.logits_at = batch_.size();
    batch_.add(tokens[static_cast<std::size_t>(t)], position++, id, logits);
  }
  slot.tokens = n;
}

// The rule decides about what was evaluated.
void Slots::Impl::take_over() {
  std::vector<llama_seq_id> answering;
  for (Slot& slot : slots_) {
    if (slot.answered) answering.push_back(id_of(slot));
  }
  try {
    evictor_.after_decode(answering);
  } catch (const EngineError& error) {
    for (const llama_seq_id id : answering) fail(at(id), error.what());
  }
  for (Slot& slot : slots_) {
    if (!slot.busy) continue;
    try {
      if (slot.logits_at >= 0) take_logits(slot, context_.get(), slot.logits_at);
      if (slot.tokens > 0) evaluated(slot, slot.tokens);
    } catch (const EngineError& error) {
      fail(slot, error.what());
    }
  }
}

// Guides may still ask about a prompt whose logits are there.
void Slots::Impl::evaluated(Slot& slot, int tokens) {
  slot.reader->evaluated(tokens);
  if (slot.reader->next().empty()) slot.reader.reset();
}

void Slots::Impl::take_logits(Slot& slot, llama_context* context, int at) {
  const float* logits = llama_get_logits_ith(context, at);
  if (logits == nullptr) throw EngineError("llama.cpp gave no logits");
  slot.logits.assign(logits, logits + n_vocab_);
  slot.chooses = true;
}

void Slots::Impl::choose_tokens() {
  for (Slot& slot : slots_) {
    if (!slot.busy || slot.reader || !slot.chooses) continue;
    slot.chooses = false;
    try {
      choose(slot);
    } catch (const EngineError& error) {
      fail(slot, error.what());
    }
  }
}

void Slots::Impl::choose(Slot& slot) {
  const Turn& turn = slot.turn;
  if (slot.limit <= slot.generated) return finish(slot, FinishReason::kLength);
  const llama_token token = slot.sampler->choose(slot.logits, turn.ignore_eos);
  if (!turn.ignore_eos && llama_vocab_is_eog(llama_model_get_vocab(model_), token)) {
    return finish(slot, FinishReason::kStop);
  }
  ++slot.generated;
  GeneratedToken generated{token, token_text(model_, token, false), {}, {}};
  if (turn.top_logprobs >= 0) {
    generated.chosen = probability_of(token, slot.logits);
    generated.likeliest = likeliest(turn.top_logprobs, slot.logits);
  }
  slot.text.push_back(token);
  if (slot.handler.on_token) slot.handler.on_token(std::move(generated));
  if (!turn.allow_past_training && trained_length_ > 0 &&
      evictor_.offset(id_of(slot)) >= trained_length_) {
    return finish(slot, FinishReason::kTrainedLength);
  }
  if (slot.generated == slot.limit) finish(slot, FinishReason::kLength);
}

void Slots::Impl::finish(Slot& slot, FinishReason reason) {
  slot.busy = false;
  const Handler handler = std::exchange(slot.handler, {});
  if (handler.on_end) handler.on_end(reason);
}

void Slots::Impl::fail(Slot& slot, const std::string& why) {
  const Handler handler = std::exchange(slot.handler, {});
  slot.busy = false;
  erase(id_of(slot));
  if (handler.on_error) handler.on_error(why);
}

void Slots::Impl::end(int id) {
  Slot& slot = at(id);
  if (!slot.busy) return;
  slot.busy = false;
  slot.handler = {};
  if (slot.reader) erase(id);
}

// The engine may have evaluated more, or less, than the reader and the text know.
void Slots::Impl::interrupt(int id) {
  Slot& slot = at(id);
  if (!slot.busy) return;
  try {
    if (slot.reader) {
      slot.reader->stop();
      slot.reader.reset();
      const Position read = evictor_of(slot).offset(sequence_of(slot));
      slot.text.resize(static_cast<std::size_t>(read));
      if (slot.whole) come_back(slot);
    } else {
      evictor_.after_decode({&id, 1});
    }
  } catch (const EngineError& error) {
    return fail(slot, error.what());
  }
  finish(slot, FinishReason::kInterrupted);
}

void Slots::Impl::erase(int id) {
  Slot& slot = at(id);
  if (slot.busy) refuse("slot " + std::to_string(id) + " is busy");
  slot.reader.reset();
  slot.whole.reset();
  slot.text.clear();
  slot.logits.clear();
  slot.reused = slot.generated = 0;
  slot.turn.prompt.clear();
  if (context_) evictor_.clear(id);
}

std::string Slots::Impl::save(int id, std::vector<ChatMessage> messages) const {
  const Slot& slot = at(id);
  if (slot.busy) refuse("slot " + std::to_string(id) + " is busy: end its turn first");
  return SavedText{model_signature(model_, options_.type_k, options_.type_v), slot.text,
                   evictor_.checkpoint(id), std::move(messages)}
      .to_bytes();
}

void Slots::Impl::restore(int id, const SavedText& saved) {
  Slot& slot = at(id);
  if (slot.busy) refuse("slot " + std::to_string(id) + " is busy: end its turn first");
  saved.require_model(model_, options_.type_k, options_.type_v);
  const CacheConfig& cache = saved.checkpoint.config();
  if (cache.budget > options_.budget) {
    refuse("its budget " + std::to_string(cache.budget) + " is above " +
           std::to_string(options_.budget) + ", what is reserved: reserve more");
  }
  if (options_.evicts && !make_policy(cache)->traits().evicts) {
    refuse("it has policy '" + cache.policy + "', which evicts nothing: no slot has room for that");
  }
  require_context();
  go_back_to(id, saved.checkpoint);
  slot.text = saved.tokens;
  slot.reader.reset();
  slot.logits.clear();
  slot.reused = slot.generated = 0;
  slot.turn.prompt.clear();
}

// Whatever refuses the checkpoint at last, the sequence then is as it was.
void Slots::Impl::go_back_to(int id, const Checkpoint& moment) {
  const Checkpoint before = evictor_.checkpoint(id);
  const auto restore = [&](const Checkpoint& checkpoint) {
    evictor_.clear(checkpoint.config(), id);
    evictor_.restore(checkpoint, id);
  };
  try {
    restore(moment);
  } catch (const std::exception& error) {
    try {
      restore(before);
    } catch (const std::exception&) {
      erase(id);
      throw EngineError(std::string(error.what()) + "; the slot is empty now");
    }
    refuse(std::string("the engine does not take it: ") + error.what());
  }
}

SlotStats Slots::Impl::stats(int id) const {
  const Slot& slot = at(id);
  const EvictorStats cache = evictor_of(slot).stats(sequence_of(slot));
  SlotStats s;
  s.busy = slot.busy;
  s.reading = slot.busy && slot.reader.has_value();
  s.asking = s.reading && slot.reader->asking();
  s.tokens_seen = cache.tokens_seen;
  s.rows_kept = cache.rows_kept;
  s.rows_evicted = cache.rows_evicted;
  s.kv_bytes_kept = cache.kv_bytes_kept;
  s.kv_bytes_full = cache.kv_bytes_full;
  s.prompt_tokens = static_cast<int>(slot.turn.prompt.size());
  s.reused_tokens = slot.reused;
  s.prompt_read =
      s.reading ? slot.reused + slot.reader->done() : static_cast<int>(slot.turn.prompt.size());
  s.generated_tokens = slot.generated;
  s.prefill_mode = slot.mode;
  s.guide_tokens = slot.guide_tokens;
  s.guide_ms = slot.guide_ms;
  s.evict_ms = cache.evict_ms;
  s.cache = evictor_of(slot).config(sequence_of(slot));
  return s;
}

std::size_t Slots::Impl::kv_bytes_allocated() const {
  std::size_t bytes = evictor_.stats(0).kv_bytes_allocated;
  for (const Slot& slot : slots_) {
    if (slot.whole) bytes += slot.whole->evictor.stats().kv_bytes_allocated;
  }
  return bytes;
}

Slots::Slots(const llama_model* model, const SlotsOptions& options)
    : impl_(std::make_unique<Impl>(model, options)) {}
Slots::~Slots() = default;

void Slots::check(const Turn& turn) const { impl_->check(turn); }
int Slots::reusable(int slot, const Turn& turn) const { return impl_->reusable(slot, turn); }
void Slots::begin(int slot, Turn turn, Handler handler) {
  impl_->begin(slot, std::move(turn), std::move(handler));
}
bool Slots::step() { return impl_->step(); }
void Slots::end(int slot) { impl_->end(slot); }
void Slots::interrupt(int slot) { impl_->interrupt(slot); }
void Slots::erase(int slot) { impl_->erase(slot); }
std::string Slots::save(int slot, std::vector<ChatMessage> messages) const {
  return impl_->save(slot, std::move(messages));
}
SavedText Slots::restore(int slot, std::string_view bytes) {
  SavedText saved = SavedText::from_bytes(bytes, impl_->options().budget);
  impl_->restore(slot, saved);
  return saved;
}
void Slots::restore(int slot, const SavedText& saved) { impl_->restore(slot, saved); }
int Slots::slots() const { return impl_->options().slots; }
SlotStats Slots::stats(int slot) const { return impl_->stats(slot); }
std::span<const llama_token> Slots::text(int slot) const { return impl_->at(slot).text; }
std::span<const llama_token> Slots::tokens_seen(int slot) const {
  return impl_->seen(impl_->at(slot));
}
std::span<const float> Slots::logits(int slot) const { return impl_->at(slot).logits; }
std::vector<BoundLayer> Slots::snapshot(int slot) const {
  static_cast<void>(impl_->at(slot));
  return impl_->evictor().snapshot(slot);
}
std::size_t Slots::kv_bytes_allocated() const { return impl_->kv_bytes_allocated(); }
const SlotsOptions& Slots::options() const { return impl_->options(); }
const Evictor& Slots::evictor() const { return impl_->evictor(); }
llama_context* Slots::context() const { return impl_->context(); }

}  // namespace morphkv::llama_cpp

#include "morphkv/llama_cpp/slots.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "bounded_sequence.h"
#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/llama_cpp/saved_text.h"
#include "prompt_reader.h"
#include "turn_check.h"

namespace morphkv::llama_cpp {
namespace {

constexpr int kMostSlice = 63;  // tokens of a prompt in one step, where slots share it
// Tokens of a step that are read: the fewer, the sooner comes who waits for the next one.
constexpr int kLeastStep = 32;
constexpr int kPart = 16;              // for each prompt, while nobody answers
constexpr int kPartBesideAnswers = 8;  // while somebody does

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

const SlotsOptions& checked(const SlotsOptions& o) {
  if (o.slots < 1 || o.slots > kMostSequences) {
    refuse("slots " + std::to_string(o.slots) + ": give 1 to " + std::to_string(kMostSequences));
  }
  if (o.piece < 32) refuse("piece " + std::to_string(o.piece) + " is below 32 tokens");
  if (o.batch_tokens < o.slots || o.batch_tokens < 32) {
    refuse("batch size " + std::to_string(o.batch_tokens) + " is below " +
           std::to_string(std::max(32, o.slots)) + ": give at least 32, and a token for each slot");
  }
  if (o.threads < 0) refuse("threads " + std::to_string(o.threads) + " is negative");
  return o;
}

// The rule that stands in a slot until a turn brings its own.
CacheConfig reserved(int budget) {
  return {.budget = budget, .n_sink = 0, .window = 1, .queries = QuerySource::kAttention};
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

struct Slot {
  std::vector<llama_token> seen;  // evaluated and taken over
  bool busy = false;
  Turn turn;
  Slots::Handler handler;
  std::optional<PromptReader> reader;  // while the prompt is read
  std::optional<Sampler> sampler;
  llama_token pending = 0;  // chosen, not evaluated yet
  int reused = 0;
  int generated = 0;
  int limit = 0;              // of generated tokens
  std::vector<float> logits;  // [vocabulary] of the next token, once they are known
  // In this step:
  int tokens = 0;      // of the prompt or a guide
  int logits_at = -1;  // place in the batch of the logits that are wanted
};

}  // namespace

class Slots::Impl {
 public:
  Impl(const llama_model* model, const SlotsOptions& options)
      : model_(model),
        options_(checked(options)),
        evictor_(model, {.cache = reserved(options.budget),
                         .sequences = options.slots,
                         .poison_freed_rows = std::nullopt}),
        slots_(static_cast<std::size_t>(options.slots)),
        batch_(options.batch_tokens),
        trained_length_(llama_model_n_ctx_train(model)),
        n_vocab_(static_cast<std::size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)))) {
    make_context();
  }

  void check(const Turn& turn) const { check_turn(turn, options_, model_); }
  int reusable(int slot, const Turn& turn) const;
  void begin(int slot, Turn turn, Handler handler);
  bool step();
  void end(int slot);
  void erase(int slot);
  std::string save(int slot) const;
  void restore(int slot, std::string_view bytes);
  SlotStats stats(int slot) const;

  const Slot& at(int slot) const {
    if (slot < 0 || slot >= options_.slots) {
      refuse("slot " + std::to_string(slot) + " is none of 0 to " +
             std::to_string(options_.slots - 1));
    }
    return slots_[static_cast<std::size_t>(slot)];
  }
  Slot& at(int slot) { return const_cast<Slot&>(std::as_const(*this).at(slot)); }
  const Evictor& evictor() const { return evictor_; }
  const SlotsOptions& options() const { return options_; }

 private:
  void make_context();
  int covered(const Slot& slot, std::span<const llama_token> prompt) const;
  std::string token_identity(llama_token token) const;
  static void go_on_from(const Slot& slot, int reused, Turn& turn);
  Prompt prompt_of(const Turn& turn, int begin) const;
  void make_reader(int slot);
  void fill_batch();
  Position next_position(int id) const;
  void share_out(std::span<const int> readers);
  int most_of(int id, int room) const;
  void add_tokens(int slot, int n);
  void take_over();
  void choose_tokens();
  void choose(int slot);
  void finish(int slot, FinishReason reason);
  void fail(int slot, const std::string& why);
  void go_back_to(int id, const Checkpoint& moment);
  int id_of(const Slot& slot) const { return static_cast<int>(&slot - slots_.data()); }

  const llama_model* model_;
  SlotsOptions options_;
  Evictor evictor_;
  std::vector<Slot> slots_;
  Batch batch_;
  ContextPtr context_;  // after evictor_: the context calls it back
  int trained_length_;  // 0 = unknown
  std::size_t n_vocab_;
};

void Slots::Impl::make_context() {
  llama_context_params params = llama_context_default_params();
  const int threads = options_.threads > 0
                          ? options_.threads
                          : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  params.n_threads = params.n_threads_batch = threads;
  params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(options_.batch_tokens);
  params.type_k = options_.type_k;
  params.type_v = options_.type_v;
  params.no_perf = true;
  params.n_seq_max = static_cast<std::uint32_t>(options_.slots);
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  evictor_.attach(params, options_.piece, kMostGuide);
  // The batch is bounded by what a step takes, not by the budget: a piece is several batches.
  params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(options_.batch_tokens);
  context_.reset(llama_init_from_model(const_cast<llama_model*>(model_), params));
  if (!context_) {
    throw EngineError("llama.cpp could not make a context of " + std::to_string(params.n_ctx) +
                      " cells; lower the number of slots or the budget");
  }
  evictor_.bind(context_.get());
}

// How many tokens of the prompt say what the slot has seen, or -1. Generated text may come back cut
// into other tokens: then the texts must agree, and end where a token of the prompt ends.
int Slots::Impl::covered(const Slot& slot, std::span<const llama_token> prompt) const {
  const auto [seen_rest, prompt_rest] =
      std::mismatch(slot.seen.begin(), slot.seen.end(), prompt.begin(), prompt.end());
  auto next = prompt_rest;
  std::string ahead;  // of the prompt, beyond what has been compared
  for (auto token = seen_rest; token != slot.seen.end(); ++token) {
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
  if (slot.seen.empty() || !whole || evictor_.config(id) != turn.cache) return 0;
  const int tokens = covered(slot, turn.prompt);
  // The last token of a prompt is always evaluated: its logits are wanted.
  return tokens < std::ssize(turn.prompt) ? std::max(0, tokens) : 0;
}

void Slots::Impl::begin(int id, Turn turn, Handler handler) {
  Slot& slot = at(id);
  if (slot.busy) refuse("slot " + std::to_string(id) + " is busy");
  check(turn);
  Sampler sampler(model_, turn.sampling);
  if (const int reused = reusable(id, turn); reused > 0) {
    go_on_from(slot, reused, turn);
  } else {
    evictor_.clear(turn.cache, id);
    slot.seen.clear();
  }
  slot.turn = std::move(turn);
  slot.handler = std::move(handler);
  slot.sampler = std::move(sampler);
  slot.reused = static_cast<int>(slot.seen.size());
  slot.generated = 0;
  slot.logits.clear();
  slot.limit = slot.turn.max_tokens >= 0 ? slot.turn.max_tokens : kTokenCap;
  if (slot.turn.strict) {  // the last token needs no row
    const auto room = slot.turn.cache.budget - static_cast<int>(slot.turn.prompt.size()) + 1;
    slot.limit = std::min(slot.limit, room);
  }
  slot.busy = true;
  make_reader(id);
}

// The beginning of the prompt becomes the tokens that the slot has seen.
void Slots::Impl::go_on_from(const Slot& slot, int reused, Turn& turn) {
  turn.prompt.erase(turn.prompt.begin(), turn.prompt.begin() + reused);
  turn.prompt.insert(turn.prompt.begin(), slot.seen.begin(), slot.seen.end());
  if (turn.question >= static_cast<std::size_t>(reused)) {
    turn.question += slot.seen.size() - static_cast<std::size_t>(reused);
  }
}

Prompt Slots::Impl::prompt_of(const Turn& turn, int begin) const {
  const auto first = static_cast<std::size_t>(begin);
  return {.tokens = std::span(turn.prompt).subspan(first),
          .guides = turn.guides,
          .end_guides_too = turn.end_guides_too,
          .question = std::max(turn.question, first) - first};
}

void Slots::Impl::make_reader(int id) {
  Slot& slot = at(id);
  const Turn& turn = slot.turn;
  const Prompt prompt = prompt_of(turn, slot.reused);
  const int rows = evictor_.stats(id).rows_kept + static_cast<int>(prompt.tokens.size());
  const int most = std::min(options_.piece, std::max(32, turn.cache.budget));
  if (turn.prefill == Prefill::kGuided && evictor_.takes_guides(id) && rows > turn.cache.budget) {
    GuidePlan plan = plan_guides(prompt, 0, most);
    slot.reader.emplace(evictor_, id, prompt, plan);
  } else {
    slot.reader.emplace(evictor_, id, prompt.tokens, most);
  }
}

bool Slots::Impl::step() {
  fill_batch();
  if (batch_.size() == 0) return false;
  const int status = llama_decode(context_.get(), batch_.get());
  if (status != 0) {
    for (Slot& slot : slots_) {
      if (slot.tokens > 0 || slot.logits_at >= 0) {
        fail(id_of(slot), "llama_decode failed with status " + std::to_string(status));
      }
    }
    return true;
  }
  take_over();
  choose_tokens();
  return true;
}

// Behind all that the engine holds: tokens of a piece or a guide may wait to be taken over.
Position Slots::Impl::next_position(int id) const {
  return llama_memory_seq_pos_max(llama_get_memory(context_.get()), id) + 1;
}

// The tokens chosen last, then a share of the prompts.
void Slots::Impl::fill_batch() {
  batch_.clear();
  std::vector<int> readers;
  for (Slot& slot : slots_) {
    slot.tokens = 0;
    slot.logits_at = -1;
    if (slot.busy && slot.reader) readers.push_back(id_of(slot));
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
    if (!slot.busy || slot.reader) continue;
    slot.logits_at = batch_.size();
    batch_.add(slot.pending, next_position(id_of(slot)), id_of(slot), true);
  }
  share_out(readers);
}

// A prompt that ends in this step goes first, and alone: a short request passes a long prompt. Else
// all get equal parts, which the engine evaluates together.
void Slots::Impl::share_out(std::span<const int> readers) {
  const auto n = static_cast<int>(readers.size());
  const bool others_answer = batch_.size() > 0;
  const int wanted = std::max(kLeastStep, n * (others_answer ? kPartBesideAnswers : kPart));
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
  Position position = next_position(id);
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
    if (slot.busy && !slot.reader && slot.logits_at >= 0) answering.push_back(id_of(slot));
  }
  try {
    evictor_.after_decode(answering);
    for (const llama_seq_id id : answering) at(id).seen.push_back(at(id).pending);
  } catch (const EngineError& error) {
    for (const llama_seq_id id : answering) fail(id, error.what());
  }
  for (Slot& slot : slots_) {
    if (slot.tokens == 0) continue;
    const int id = id_of(slot);
    try {
      slot.reader->evaluated(slot.tokens);
      const auto done = static_cast<std::size_t>(slot.reused + slot.reader->done());
      slot.seen.assign(slot.turn.prompt.begin(),
                       slot.turn.prompt.begin() + static_cast<std::ptrdiff_t>(done));
    } catch (const EngineError& error) {
      fail(id, error.what());
    }
  }
}

void Slots::Impl::choose_tokens() {
  for (Slot& slot : slots_) {
    if (!slot.busy) continue;
    try {
      if (slot.logits_at >= 0) {
        const float* logits = llama_get_logits_ith(context_.get(), slot.logits_at);
        if (logits == nullptr) throw EngineError("llama.cpp gave no logits");
        slot.logits.assign(logits, logits + n_vocab_);
      }
      // Guides may still ask about the prompt whose logits are there.
      const bool read = !slot.reader || slot.reader->next().empty();
      if (!read || slot.logits.empty()) continue;
      slot.reader.reset();
      choose(id_of(slot));
      slot.logits.clear();
    } catch (const EngineError& error) {
      fail(id_of(slot), error.what());
    }
  }
}

void Slots::Impl::choose(int id) {
  Slot& slot = at(id);
  const Turn& turn = slot.turn;
  if (slot.limit <= slot.generated) return finish(id, FinishReason::kLength);
  const llama_token token = slot.sampler->choose(slot.logits, turn.ignore_eos);
  if (!turn.ignore_eos && llama_vocab_is_eog(llama_model_get_vocab(model_), token)) {
    return finish(id, FinishReason::kStop);
  }
  ++slot.generated;
  GeneratedToken generated{token, token_text(model_, token, false), {}, {}};
  if (turn.top_logprobs >= 0) {
    generated.chosen = probability_of(token, slot.logits);
    generated.likeliest = likeliest(turn.top_logprobs, slot.logits);
  }
  slot.pending = token;
  if (slot.handler.on_token) slot.handler.on_token(std::move(generated));
  if (slot.generated == slot.limit) return finish(id, FinishReason::kLength);
  if (!turn.allow_past_training && trained_length_ > 0 && evictor_.offset(id) >= trained_length_) {
    return finish(id, FinishReason::kTrainedLength);
  }
}

void Slots::Impl::finish(int id, FinishReason reason) {
  Slot& slot = at(id);
  slot.busy = false;
  slot.reader.reset();
  const Handler handler = std::exchange(slot.handler, {});
  if (handler.on_end) handler.on_end(reason);
}

void Slots::Impl::fail(int id, const std::string& why) {
  Slot& slot = at(id);
  const Handler handler = std::exchange(slot.handler, {});
  slot.busy = false;
  erase(id);
  if (handler.on_error) handler.on_error(why);
}

// A prompt that was read in part leaves nothing behind: the rest would be read in other pieces.
void Slots::Impl::end(int id) {
  Slot& slot = at(id);
  if (!slot.busy) return;
  slot.busy = false;
  slot.handler = {};
  if (slot.reader) erase(id);
}

void Slots::Impl::erase(int id) {
  Slot& slot = at(id);
  if (slot.busy) refuse("slot " + std::to_string(id) + " is busy");
  slot.reader.reset();
  slot.seen.clear();
  slot.reused = slot.generated = 0;
  slot.turn.prompt.clear();
  evictor_.clear(id);
}

std::string Slots::Impl::save(int id) const {
  const Slot& slot = at(id);
  if (slot.busy) refuse("slot " + std::to_string(id) + " is busy: end its turn first");
  return SavedText{model_signature(model_, options_.type_k, options_.type_v), slot.seen,
                   evictor_.checkpoint(id)}
      .to_bytes();
}

void Slots::Impl::restore(int id, std::string_view bytes) {
  Slot& slot = at(id);
  if (slot.busy) refuse("slot " + std::to_string(id) + " is busy: end its turn first");
  SavedText saved = SavedText::from_bytes(bytes, options_.budget);
  saved.require_model(model_, options_.type_k, options_.type_v);
  const CacheConfig& cache = saved.checkpoint.config();
  if (!make_policy(cache)->traits().evicts) {
    refuse("it has policy '" + cache.policy + "', which evicts nothing: no slot has room for that");
  }
  go_back_to(id, saved.checkpoint);
  slot.seen = std::move(saved.tokens);
  slot.seen.resize(static_cast<std::size_t>(evictor_.offset(id)));  // the rest was not evaluated
  slot.reader.reset();
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
  const EvictorStats cache = evictor_.stats(id);
  SlotStats s;
  s.busy = slot.busy;
  s.reading = slot.busy && slot.reader.has_value();
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
  s.cache = evictor_.config(id);
  return s;
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
void Slots::erase(int slot) { impl_->erase(slot); }
std::string Slots::save(int slot) const { return impl_->save(slot); }
void Slots::restore(int slot, std::string_view bytes) { impl_->restore(slot, bytes); }
int Slots::slots() const { return impl_->options().slots; }
SlotStats Slots::stats(int slot) const { return impl_->stats(slot); }
std::span<const llama_token> Slots::tokens_seen(int slot) const { return impl_->at(slot).seen; }
std::vector<BoundLayer> Slots::snapshot(int slot) const {
  static_cast<void>(impl_->at(slot));
  return impl_->evictor().snapshot(slot);
}
std::size_t Slots::kv_bytes_allocated() const {
  return impl_->evictor().stats(0).kv_bytes_allocated;
}
const SlotsOptions& Slots::options() const { return impl_->options(); }

}  // namespace morphkv::llama_cpp

#include "morphkv/llama_cpp/evictor.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <utility>

#include "bounded_sequence.h"
#include "engine_threads.h"
#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::llama_cpp {
namespace {

constexpr int kMinMicroBatch = 32;
#ifdef NDEBUG
constexpr bool kDebugBuild = false;
#else
constexpr bool kDebugBuild = true;
#endif

// The engine makes no context for such a type, and does not say why.
void require_whole_blocks(const llama_model* model, const std::string& what, ggml_type type) {
  const int given = architecture_number(model, "attention." + what + "_length");
  const int heads = llama_model_n_head(model);
  const int dim = given > 0 || heads == 0 ? given : llama_model_n_embd(model) / heads;
  const auto block = static_cast<int>(ggml_blck_size(type));
  if (dim % block != 0) {
    throw Unsupported(what + " type " + ggml_type_name(type) + " stores blocks of " +
                      std::to_string(block) + " numbers, and the model's head dimension " +
                      std::to_string(dim) + " is no multiple of that: use f16");
  }
}

// The engine rounds the number of cells up to this.
constexpr int kCellGranularity = 256;
constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

using Clock = std::chrono::steady_clock;

}  // namespace

int bounded_micro_batch(int asked, int budget) {
  return std::min(asked, std::max(budget, kMinMicroBatch));
}

std::string lowered_notice(int asked, int budget) {
  const int micro_batch = bounded_micro_batch(asked, budget);
  if (micro_batch == asked) return "";
  return "micro-batch lowered from " + std::to_string(asked) + " to " +
         std::to_string(micro_batch) + " tokens, to suit a budget of " + std::to_string(budget) +
         " rows";
}

Position Checkpoint::offset() const { return state_->ledger.offset(); }
int Checkpoint::rows() const { return static_cast<int>(state_->cells.size()); }
std::size_t Checkpoint::bytes() const { return state_->engine.bytes.size(); }
const CacheConfig& Checkpoint::config() const { return state_->config; }

class Evictor::Impl {
 public:
  Impl(const llama_model* model, EvictorOptions options)
      : model_(model), options_(std::move(options)), rule_(Rule(model, options_.cache)) {
    if (options_.sequences < 1 || options_.sequences > kMostSequences) {
      throw std::invalid_argument(std::to_string(options_.sequences) + " sequences: give 1 to " +
                                  std::to_string(kMostSequences));
    }
  }

  std::string attach(llama_context_params& params, int call_tokens, int guide_tokens);
  void bind(llama_context* context);
  void after_decode() { after_decode(all_); }
  void after_decode(std::span<const llama_seq_id> ids);
  void hold(int asking, llama_seq_id id);
  void guide(llama_seq_id id);
  void evict(llama_seq_id id);
  bool takes_guides(llama_seq_id id) const { return rule(id).traits.guided; }
  void clear(llama_seq_id id) { sequence("clear", id).clear(); }
  void clear(const CacheConfig& cache, llama_seq_id id) {
    sequence("clear", id).clear(Rule(model_, cache));
  }
  std::shared_ptr<const Checkpoint::State> checkpoint(llama_seq_id id) const {
    return sequence("checkpoint", id).checkpoint();
  }
  void restore(const Checkpoint::State& state, llama_seq_id id) {
    sequence("restore", id).restore(state);
  }

  Position offset(llama_seq_id id) const { return find(id) == nullptr ? 0 : find(id)->offset(); }
  EvictorStats stats(llama_seq_id id) const;
  const CacheConfig& config(llama_seq_id id) const { return rule(id).config; }
  std::vector<BoundLayer> snapshot(llama_seq_id id) const {
    return find(id) == nullptr ? std::vector<BoundLayer>() : find(id)->snapshot();
  }
  std::vector<std::string> violations() const;

 private:
  void require_bound(const char* call) const;
  const BoundedSequence& sequence(const char* call, llama_seq_id id) const;
  BoundedSequence& sequence(const char* call, llama_seq_id id) {
    return const_cast<BoundedSequence&>(std::as_const(*this).sequence(call, id));
  }
  const BoundedSequence* find(llama_seq_id id) const;
  const Rule& rule(llama_seq_id id) const {
    return find(id) == nullptr ? rule_.value() : find(id)->rule();
  }
  void evaluate_one_token(llama_context* context) const;
  void allocate(llama_context* context);
  void require_guided(llama_seq_id id) const;
  template <class Body>
  void for_each_layer(std::span<BoundedSequence* const> sequences, const Body& body);

  const llama_model* model_;
  EvictorOptions options_;
  std::optional<Rule> rule_;  // until the sequences are made
  TensorTap tap_;
  llama_context* context_ = nullptr;
  int n_cells_ = 0;       // of one sequence
  int guide_tokens_ = 0;  // most that ask at once

  std::vector<BoundedSequence> sequences_;  // [sequence]
  std::size_t swa_bytes_per_cell_ = 0;      // of the layers that are not bounded
  int swa_cells_ = 0;                       // how many cells they have for a sequence
  std::size_t bytes_allocated_ = 0;

  std::optional<EngineThreads> threads_;
  std::vector<Worker> workers_;  // [thread]
  std::vector<BoundedSequence*> called_;
  std::vector<llama_seq_id> all_;
};

std::string Evictor::Impl::attach(llama_context_params& params, int call_tokens, int guide_tokens) {
  if (params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
    throw Unsupported(
        "flash attention is off: V is then stored transposed and queries cannot be read; "
        "switch flash attention on");
  }
  if (params.n_seq_max > 1 && params.n_seq_max != static_cast<std::uint32_t>(options_.sequences)) {
    throw Unsupported("n_seq_max " + std::to_string(params.n_seq_max) +
                      ": this evictor bounds as many sequences as its options say; use n_seq_max " +
                      std::to_string(options_.sequences) + ", or EvictorOptions::sequences");
  }
  require_whole_blocks(model_, "key", params.type_k);
  require_whole_blocks(model_, "value", params.type_v);
  const int budget = options_.cache.budget;
  // As the engine reads them: a micro-batch is no larger than a batch, 0 = as large as the batch.
  const std::uint32_t batch = params.n_batch == 0 ? params.n_ubatch : params.n_batch;
  const int asked =
      static_cast<int>(params.n_ubatch == 0 ? batch : std::min(params.n_ubatch, batch));
  const bool evicts = rule(0).traits.evicts;
  const int micro_batch = evicts ? bounded_micro_batch(asked, budget) : asked;
  const int call = std::max(micro_batch, call_tokens);
  int cells = round_up(evicts ? budget + call : call, kCellGranularity);
  const int n_swa = llama_model_n_swa(model_);
  if (n_swa > 0 && cells <= round_up(n_swa + micro_batch, kCellGranularity)) {
    cells += kCellGranularity;  // so that the bounded layers can be told from the sliding ones
  }
  params.n_ctx = static_cast<std::uint32_t>(cells * options_.sequences);
  params.n_ubatch = static_cast<std::uint32_t>(micro_batch);
  params.n_batch = static_cast<std::uint32_t>(micro_batch);
  params.n_seq_max = static_cast<std::uint32_t>(options_.sequences);
  params.kv_unified = false;  // each sequence in cells of its own
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.swa_full = false;
  guide_tokens_ = guide_tokens;
  tap_.install(params);
  return evicts ? lowered_notice(asked, budget) : "";
}

void Evictor::Impl::bind(llama_context* context) {
  context_ = nullptr;
  n_cells_ = static_cast<int>(llama_n_ctx_seq(context));
  tap_.start_survey();
  evaluate_one_token(context);
  const std::string problem =
      tap_.finish_survey(llama_get_memory(context), n_cells_, options_.sequences);
  if (!problem.empty()) {
    throw Unsupported("this model cannot be bounded with llama.cpp " +
                      std::string(llama_version()) + ": " + problem);
  }
  for (const TappedLayer& layer : tap_.layers()) {
    const std::string why = KvStore::unsupported(layer);
    if (!why.empty()) throw Unsupported("this model cannot be bounded: " + why);
  }
  allocate(context);
  context_ = context;
}

void Evictor::Impl::require_bound(const char* call) const {
  if (context_ == nullptr) {
    throw EngineError(std::string(call) + "() before bind(), which needs the context");
  }
}

const BoundedSequence& Evictor::Impl::sequence(const char* call, llama_seq_id id) const {
  require_bound(call);
  if (const BoundedSequence* found = find(id)) return *found;
  throw std::invalid_argument("sequence " + std::to_string(id) + " is none of 0 to " +
                              std::to_string(options_.sequences - 1));
}

const BoundedSequence* Evictor::Impl::find(llama_seq_id id) const {
  const auto i = static_cast<std::size_t>(id);
  return id >= 0 && i < sequences_.size() ? &sequences_[i] : nullptr;
}

void Evictor::Impl::evaluate_one_token(llama_context* context) const {
  const llama_vocab* vocab = llama_model_get_vocab(model_);
  llama_token token = llama_vocab_bos(vocab);
  if (token == LLAMA_TOKEN_NULL) token = 0;
  const int status = llama_decode(context, llama_batch_get_one(&token, 1));
  llama_synchronize(context);
  llama_memory_clear(llama_get_memory(context), true);
  if (status != 0) {
    throw EngineError("llama_decode of one token failed with status " + std::to_string(status));
  }
}

void Evictor::Impl::allocate(llama_context* context) {
  bytes_allocated_ = 0;
  swa_bytes_per_cell_ = 0;
  swa_cells_ = 0;
  for (const TappedLayer& tapped : tap_.all_layers()) {
    const KvStore store(tapped, 0);
    bytes_allocated_ += store.allocated_bytes();
    if (tapped.k->ne[1] != n_cells_) {
      swa_cells_ = static_cast<int>(tapped.k->ne[1]);
      swa_bytes_per_cell_ += store.row_bytes() * static_cast<std::size_t>(tapped.n_head_kv);
    }
  }
  int max_group = 1;
  int max_dim = 1;
  bool in_host_memory = true;
  for (const TappedLayer& tapped : tap_.layers()) {
    max_group = std::max(max_group, tapped.group);
    max_dim = std::max(max_dim, tapped.dim_k);
    in_host_memory = in_host_memory && KvStore(tapped, 0).in_host_memory();
  }
  std::vector<Rule> rules;  // that the sequences have had, in another context
  for (int id = 0; id < options_.sequences; ++id) {
    rules.emplace_back(model_, find(id) == nullptr ? options_.cache : find(id)->rule().config);
  }
  sequences_.clear();
  all_.clear();
  for (int id = 0; id < options_.sequences; ++id) {
    sequences_.emplace_back(context, id, tap_, std::move(rules[static_cast<std::size_t>(id)]),
                            guide_tokens_, options_.poison_freed_rows.value_or(kDebugBuild));
    all_.push_back(id);
  }
  called_.reserve(sequences_.size());
  // Calls of a device's backend come from one thread.
  threads_.emplace(
      in_host_memory ? std::max(llama_n_threads(context), llama_n_threads_batch(context)) : 1);
  workers_.clear();
  for (int i = 0; i < threads_->threads(); ++i) {
    workers_.push_back({.workspace = Workspace(n_cells_, max_group, max_dim),
                        .scratch = {},
                        .cells_held = {},
                        .queries = {},
                        .moves = std::vector<RowMove>(static_cast<std::size_t>(n_cells_))});
  }
}

namespace {

// Adds the time of its life to what the sequences have taken, in equal parts.
class Timed {
 public:
  explicit Timed(std::span<BoundedSequence* const> sequences) : sequences_(sequences) {}
  ~Timed() {
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start_).count();
    for (BoundedSequence* sequence : sequences_) {
      sequence->add_evict_ms(ms / static_cast<double>(sequences_.size()));
    }
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  std::span<BoundedSequence* const> sequences_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace

// One call of the rule for each sequence that has new tokens: note their cells, append their rows,
// and let the excess leave.
void Evictor::Impl::after_decode(std::span<const llama_seq_id> ids) {
  require_bound("after_decode");
  called_.clear();
  for (const llama_seq_id id : ids) {
    BoundedSequence& called = sequence("after_decode", id);
    called.find_new_cells();
    if (called.new_tokens() > 0) {
      called_.push_back(&called);
    } else {
      called.end_call();
    }
  }
  const Timed timed(called_);
  for (BoundedSequence* sequence : called_) {
    sequence->adopt(0);
    sequence->plan_free();
  }
  for_each_layer(called_, [](BoundedSequence& sequence, int layer, Worker& worker) {
    sequence.append(layer, worker);
  });
  for (BoundedSequence* sequence : called_) {
    sequence->free_cells();
    sequence->end_call();
  }
}

void Evictor::Impl::hold(int asking, llama_seq_id id) {
  BoundedSequence* const called = &sequence("hold", id);
  if (asking > 0) require_guided(id);
  const Timed timed({&called, 1});
  called->find_new_cells();
  if (called->new_tokens() > 0) {
    called->adopt(asking);
    for_each_layer({&called, 1}, [](BoundedSequence& sequence, int layer, Worker& worker) {
      sequence.extend(layer, worker);
    });
  }
  called->end_call();
}

void Evictor::Impl::guide(llama_seq_id id) {
  BoundedSequence* const called = &sequence("guide", id);
  require_guided(id);
  const Timed timed({&called, 1});
  called->find_new_cells();
  called->require_sliding_rows_intact();
  if (called->new_tokens() > 0) {
    for_each_layer({&called, 1}, [](BoundedSequence& sequence, int layer, Worker& worker) {
      sequence.guide(layer, worker);
    });
    called->remove_guide();
  }
  called->end_call();
}

void Evictor::Impl::evict(llama_seq_id id) {
  BoundedSequence* const called = &sequence("evict", id);
  const Timed timed({&called, 1});
  called->plan_free();
  for_each_layer({&called, 1}, [](BoundedSequence& sequence, int layer, Worker& worker) {
    sequence.evict(layer, worker);
  });
  called->free_cells();
}

void Evictor::Impl::require_guided(llama_seq_id id) const {
  if (!takes_guides(id)) {
    throw std::invalid_argument("policy '" + config(id).policy + "' takes no guide: use policy " +
                                policy_names_text(&PolicyTraits::guided));
  }
}

// Calls body(sequence, layer, worker) for every layer of each sequence, on as many threads as the
// engine has for such a call.
template <class Body>
void Evictor::Impl::for_each_layer(std::span<BoundedSequence* const> sequences, const Body& body) {
  if (sequences.empty()) return;
  int tokens = 0;
  for (const BoundedSequence* sequence : sequences) tokens += sequence->new_tokens();
  const int threads = tokens == 1 ? llama_n_threads(context_) : llama_n_threads_batch(context_);
  const int layers = sequences.front()->n_layers();
  const auto turn = [&](int i, int worker) {
    body(*sequences[static_cast<std::size_t>(i / layers)], i % layers,
         workers_[static_cast<std::size_t>(worker)]);
  };
  // By reference: a copy would not fit into the function object without an allocation.
  threads_->for_each(static_cast<int>(sequences.size()) * layers, threads, std::cref(turn));
}

EvictorStats Evictor::Impl::stats(llama_seq_id id) const {
  EvictorStats s = find(id) == nullptr ? EvictorStats() : find(id)->stats();
  s.kv_bytes_allocated = bytes_allocated_;
  const auto in_windows = static_cast<std::size_t>(std::min<Position>(s.tokens_seen, swa_cells_));
  s.kv_bytes_kept += swa_bytes_per_cell_ * in_windows;
  s.kv_bytes_full += swa_bytes_per_cell_ * static_cast<std::size_t>(s.tokens_seen);
  return s;
}

std::vector<std::string> Evictor::Impl::violations() const {
  std::vector<std::string> out;
  for (std::size_t id = 0; id < sequences_.size(); ++id) {
    const std::string whose = sequences_.size() > 1 ? "sequence " + std::to_string(id) + ": " : "";
    for (const std::string& what : sequences_[id].violations()) out.push_back(whose + what);
  }
  return out;
}

Evictor::Evictor(const llama_model* model, EvictorOptions options)
    : impl_(std::make_unique<Impl>(model, std::move(options))) {}
Evictor::~Evictor() = default;
Evictor::Evictor(Evictor&&) noexcept = default;
Evictor& Evictor::operator=(Evictor&&) noexcept = default;

std::string Evictor::attach(llama_context_params& params, int call_tokens, int guide_tokens) {
  return impl_->attach(params, call_tokens, guide_tokens);
}
void Evictor::bind(llama_context* context) { impl_->bind(context); }
void Evictor::after_decode() { impl_->after_decode(); }
void Evictor::after_decode(std::span<const llama_seq_id> sequences) {
  impl_->after_decode(sequences);
}
void Evictor::hold(int asking, llama_seq_id id) { impl_->hold(asking, id); }
void Evictor::guide(llama_seq_id id) { impl_->guide(id); }
void Evictor::evict(llama_seq_id id) { impl_->evict(id); }
bool Evictor::takes_guides(llama_seq_id id) const { return impl_->takes_guides(id); }
void Evictor::clear(llama_seq_id id) { impl_->clear(id); }
void Evictor::clear(const CacheConfig& cache, llama_seq_id id) { impl_->clear(cache, id); }
Checkpoint Evictor::checkpoint(llama_seq_id id) const { return Checkpoint(impl_->checkpoint(id)); }
void Evictor::restore(const Checkpoint& checkpoint, llama_seq_id id) {
  impl_->restore(*checkpoint.state_, id);
}
Position Evictor::offset(llama_seq_id id) const { return impl_->offset(id); }
EvictorStats Evictor::stats(llama_seq_id id) const { return impl_->stats(id); }
const CacheConfig& Evictor::config(llama_seq_id id) const { return impl_->config(id); }
std::vector<BoundLayer> Evictor::snapshot(llama_seq_id id) const { return impl_->snapshot(id); }
std::vector<std::string> Evictor::violations() const { return impl_->violations(); }

}  // namespace morphkv::llama_cpp

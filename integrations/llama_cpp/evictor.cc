#include "morphkv/llama_cpp/evictor.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "cell_ledger.h"
#include "engine_threads.h"
#include "kv_store.h"
#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/policy.h"
#include "morphkv/retention.h"
#include "tensor_tap.h"

namespace morphkv::llama_cpp {
namespace {

constexpr llama_seq_id kSequence = 0;
constexpr int kMinMicroBatch = 32;
constexpr float kPoison = 3e4f;
#ifdef NDEBUG
constexpr bool kDebugBuild = false;
#else
constexpr bool kDebugBuild = true;
#endif

void check_model(const llama_model* model, const CacheConfig& config, bool evicts) {
  const auto refuse = [](const std::string& why) {
    throw Unsupported("this model cannot be bounded: " + why);
  };
  if (llama_model_is_recurrent(model)) refuse("it is recurrent and has no KV cache of rows");
  if (llama_model_is_hybrid(model)) refuse("it is a hybrid with recurrent layers");
  if (llama_model_is_diffusion(model)) refuse("it is a diffusion model");
  if (llama_model_has_encoder(model)) refuse("it has an encoder");
  if (!llama_model_has_decoder(model)) refuse("it has no decoder");
  const int n_swa = llama_model_n_swa(model);
  if (evicts && n_swa > config.budget - config.n_sink) {
    refuse("its sliding window of " + std::to_string(n_swa) +
           " tokens is larger than budget - n_sink = " +
           std::to_string(config.budget - config.n_sink) + "; use a budget of at least " +
           std::to_string(n_swa + config.n_sink));
  }
}

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

[[noreturn]] void refuse_foreign_edit(const std::string& seen) {
  throw EngineError(seen +
                    ": positions must be consecutive, after_decode() must follow every "
                    "llama_decode(), and no other code may edit the memory");
}

}  // namespace

int bounded_micro_batch(int asked, int budget) {
  return std::min(asked, std::max(budget, kMinMicroBatch));
}

struct Checkpoint::State {
  CacheConfig config;
  CellLedger ledger;
  std::vector<LayerRetention> layers;
  TensorTap::Call call;
  std::vector<int> cells;            // all in use, ascending
  std::vector<std::uint8_t> engine;  // llama_state_seq_get_data
  std::int64_t rows_evicted = 0;
  double evict_ms = 0.0;
};

Position Checkpoint::offset() const { return state_->ledger.offset(); }
int Checkpoint::rows() const { return static_cast<int>(state_->cells.size()); }
std::size_t Checkpoint::bytes() const { return state_->engine.size(); }

class Evictor::Impl {
 public:
  Impl(const llama_model* model, EvictorOptions options)
      : model_(model), options_(std::move(options)), policy_(make_policy(options_.cache)) {
    check_model(model, options_.cache, policy_->traits().evicts);
  }

  std::string attach(llama_context_params& params, int call_tokens, int guide_tokens);
  void bind(llama_context* context);
  void after_decode();
  void hold(int asking);
  void guide();
  void evict();
  bool takes_guides() const { return policy_->traits().guided; }
  void clear();
  void clear(const CacheConfig& cache);
  std::shared_ptr<const Checkpoint::State> checkpoint() const;
  void restore(const Checkpoint::State& state);

  Position offset() const { return ledger_ ? ledger_->offset() : 0; }
  EvictorStats stats() const;
  const CacheConfig& config() const { return options_.cache; }
  std::vector<BoundLayer> snapshot() const;
  std::vector<std::string> violations() const;

 private:
  // A layer that is bounded: where its rows lie and who decides about them.
  struct Layer {
    TappedLayer tapped;
    KvStore store;
    LayerRetention retention;
  };
  // What one thread needs to work on a layer.
  struct Worker {
    Workspace workspace;
    KvScratch scratch;
    std::vector<int> cells_held;  // before the call, and its new ones
    std::vector<QueriesView> queries;
    std::vector<RowMove> moves;
  };

  void require_bound(const char* call) const;
  void evaluate_one_token(llama_context* context) const;
  void allocate(llama_context* context);
  LayerRetention make_retention(const TappedLayer& tapped) const;
  int queries_kept(const llama_context* context) const;
  void require_fitting(const Checkpoint::State& state) const;
  void require_guided() const;
  void require_sliding_rows_intact() const;
  bool poisons() const { return options_.poison_freed_rows.value_or(kDebugBuild); }
  void find_new_cells();
  LayerCall call_of(Layer& layer, Position first_position, std::span<const int> slots,
                    Worker& worker);
  template <class Body>
  void for_each_layer(const Body& body);
  void plan_free();
  void empty_cells(Layer& layer, Worker& worker);
  void free_cells();
  void remove_labels(Position first, Position last);

  const llama_model* model_;
  EvictorOptions options_;
  std::unique_ptr<Policy> policy_;
  TensorTap tap_;
  llama_context* context_ = nullptr;
  int n_cells_ = 0;
  int guide_tokens_ = 0;  // most that ask at once

  std::optional<CellLedger> ledger_;
  std::vector<Layer> layers_;
  std::size_t swa_bytes_per_cell_ = 0;  // of the layers that are not bounded
  int swa_cells_ = 0;                   // how many cells they have
  std::size_t bytes_allocated_ = 0;

  std::optional<EngineThreads> threads_;
  std::vector<Worker> workers_;  // [thread]
  std::vector<int> new_cells_;
  std::vector<int> asking_cells_;
  FreePlan plan_;
  std::int64_t rows_evicted_ = 0;
  double evict_ms_ = 0.0;
};

std::string Evictor::Impl::attach(llama_context_params& params, int call_tokens, int guide_tokens) {
  if (params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
    throw Unsupported(
        "flash attention is off: V is then stored transposed and queries cannot be read; "
        "switch flash attention on");
  }
  if (params.n_seq_max > 1) {
    throw Unsupported("n_seq_max " + std::to_string(params.n_seq_max) +
                      ": one sequence per context can be bounded; use n_seq_max 1");
  }
  require_whole_blocks(model_, "key", params.type_k);
  require_whole_blocks(model_, "value", params.type_v);
  const int budget = options_.cache.budget;
  std::string notice;
  // As the engine reads them: a micro-batch is no larger than a batch, 0 = as large as the batch.
  const std::uint32_t batch = params.n_batch == 0 ? params.n_ubatch : params.n_batch;
  const int asked =
      static_cast<int>(params.n_ubatch == 0 ? batch : std::min(params.n_ubatch, batch));
  const bool evicts = policy_->traits().evicts;
  const int micro_batch = evicts ? bounded_micro_batch(asked, budget) : asked;
  if (micro_batch < asked) {
    notice = "micro-batch lowered from " + std::to_string(asked) + " to " +
             std::to_string(micro_batch) + " tokens, to suit a budget of " +
             std::to_string(budget) + " rows";
  }
  const int call = std::max(micro_batch, call_tokens);
  int cells = round_up(evicts ? budget + call : call, kCellGranularity);
  const int n_swa = llama_model_n_swa(model_);
  if (n_swa > 0 && cells <= round_up(n_swa + micro_batch, kCellGranularity)) {
    cells += kCellGranularity;  // so that the bounded layers can be told from the sliding ones
  }
  params.n_ctx = static_cast<std::uint32_t>(cells);
  params.n_ubatch = static_cast<std::uint32_t>(micro_batch);
  params.n_batch = static_cast<std::uint32_t>(micro_batch);
  params.n_seq_max = 1;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.swa_full = false;
  guide_tokens_ = guide_tokens;
  tap_.install(params);
  return notice;
}

void Evictor::Impl::bind(llama_context* context) {
  context_ = nullptr;
  n_cells_ = static_cast<int>(llama_n_ctx_seq(context));
  tap_.start_survey();
  evaluate_one_token(context);
  const std::string problem = tap_.finish_survey(llama_get_memory(context), n_cells_);
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

LayerRetention Evictor::Impl::make_retention(const TappedLayer& tapped) const {
  return {options_.cache, *policy_, tapped.index, tapped.n_head_kv, n_cells_};
}

// Of how many tokens of a call the policy sees the queries.
int Evictor::Impl::queries_kept(const llama_context* context) const {
  const PolicyTraits traits = policy_->traits();
  if (!traits.needs_queries) return 0;
  return std::max({options_.cache.window, guide_tokens_,
                   traits.every_query ? static_cast<int>(llama_n_ubatch(context)) : 0});
}

void Evictor::Impl::allocate(llama_context* context) {
  ledger_.emplace(n_cells_, options_.cache.n_sink);
  rows_evicted_ = 0;
  evict_ms_ = 0.0;
  tap_.keep_queries(queries_kept(context));
  layers_.clear();
  bytes_allocated_ = 0;
  swa_bytes_per_cell_ = 0;
  swa_cells_ = 0;
  int max_group = 1;
  int max_dim = 1;
  for (const TappedLayer& tapped : tap_.all_layers()) {
    const KvStore store(tapped);
    bytes_allocated_ += store.allocated_bytes();
    if (tapped.k->ne[1] != n_cells_) {
      swa_cells_ = static_cast<int>(tapped.k->ne[1]);
      swa_bytes_per_cell_ += store.row_bytes() * static_cast<std::size_t>(tapped.n_head_kv);
    }
  }
  for (const TappedLayer& tapped : tap_.layers()) {
    max_group = std::max(max_group, tapped.group);
    max_dim = std::max(max_dim, tapped.dim_k);
    layers_.push_back({tapped, KvStore(tapped), make_retention(tapped)});
  }
  // Calls of a device's backend come from one thread.
  const bool in_host_memory =
      std::ranges::all_of(layers_, [](const Layer& l) { return l.store.in_host_memory(); });
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
  new_cells_.reserve(static_cast<std::size_t>(n_cells_));
}

namespace {

// Adds the time of its life to a sum.
class Timed {
 public:
  explicit Timed(double& sum_ms) : sum_ms_(sum_ms) {}
  ~Timed() { sum_ms_ += std::chrono::duration<double, std::milli>(Clock::now() - start_).count(); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  double& sum_ms_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace

// One call of the rule: note the cells of the new tokens, append their rows, and let the excess
// leave.
void Evictor::Impl::after_decode() {
  require_bound("after_decode");
  const Timed timed(evict_ms_);
  const Position first_position = offset();
  find_new_cells();
  if (!new_cells_.empty()) {
    for (const int cell : new_cells_) ledger_->append(cell);
    plan_free();
    for_each_layer([&](Layer& layer, Worker& worker) {
      layer.retention.append(call_of(layer, first_position, new_cells_, worker), worker.workspace);
      empty_cells(layer, worker);
    });
    free_cells();
  }
  tap_.clear_call();
}

void Evictor::Impl::hold(int asking) {
  require_bound("hold");
  if (asking > 0) require_guided();
  const Timed timed(evict_ms_);
  const Position first_position = offset();
  find_new_cells();
  if (!new_cells_.empty()) {
    for (const int cell : new_cells_) ledger_->append(cell);
    asking_cells_.assign(
        new_cells_.end() - std::min<std::ptrdiff_t>(asking, std::ssize(new_cells_)),
        new_cells_.end());
    for_each_layer([&](Layer& layer, Worker& worker) {
      LayerCall call = call_of(layer, first_position, new_cells_, worker);
      layer.retention.extend(call, worker.workspace);
      call.slots = asking_cells_;
      if (asking > 0) layer.retention.guide(call, worker.workspace);
    });
  }
  tap_.clear_call();
}

void Evictor::Impl::guide() {
  require_bound("guide");
  require_guided();
  const Timed timed(evict_ms_);
  find_new_cells();
  require_sliding_rows_intact();
  if (!new_cells_.empty()) {
    for_each_layer([&](Layer& layer, Worker& worker) {
      layer.retention.guide(call_of(layer, offset(), new_cells_, worker), worker.workspace);
      if (poisons()) layer.store.poison(new_cells_, kPoison, worker.scratch);
    });
    remove_labels(offset(), offset() + std::ssize(new_cells_));
  }
  tap_.clear_call();
}

void Evictor::Impl::evict() {
  require_bound("evict");
  const Timed timed(evict_ms_);
  plan_free();
  for_each_layer([&](Layer& layer, Worker& worker) {
    layer.retention.evict(worker.workspace);
    empty_cells(layer, worker);
  });
  free_cells();
}

void Evictor::Impl::require_guided() const {
  if (!takes_guides()) {
    throw std::invalid_argument("policy '" + options_.cache.policy +
                                "' takes no guide: use policy morphkv or rkv");
  }
}

// In a sliding-window layer the engine writes a micro-batch over rows that its first token does not
// see. Only the guide's first one does no harm: later ones reach rows that the text still needs.
void Evictor::Impl::require_sliding_rows_intact() const {
  const int n_swa = llama_model_n_swa(model_);
  const int first = tap_.first_micro_batch();
  const int tokens = static_cast<int>(tap_.cells().size());
  if (n_swa == 0 || tokens <= first) return;
  throw EngineError("a guide of " + std::to_string(tokens) +
                    " tokens took more than one micro-batch (" + std::to_string(first) +
                    " tokens, at most " + std::to_string(llama_n_ubatch(context_)) +
                    "): rows of the model's sliding window of " + std::to_string(n_swa) +
                    " tokens are lost; clear(), and give the guide in one micro-batch");
}

// Notes in new_cells_ where the tokens lie that the engine has kept since the last call: all that
// were evaluated, or fewer after an error or an abort.
void Evictor::Impl::find_new_cells() {
  llama_synchronize(context_);
  const llama_pos newest = llama_memory_seq_pos_max(llama_get_memory(context_), kSequence);
  const Position tokens = newest + 1 - offset();
  const auto evaluated = static_cast<Position>(tap_.cells().size());
  if (tokens < 0 || tokens > evaluated) {
    refuse_foreign_edit("the engine holds tokens up to position " + std::to_string(newest) + ", " +
                        std::to_string(evaluated) + " were evaluated since position " +
                        std::to_string(offset()));
  }
  new_cells_.clear();
  for (Position t = 0; t < evaluated; ++t) {
    const llama_pos label = tap_.labels()[static_cast<std::size_t>(t)];
    const int cell = static_cast<int>(tap_.cells()[static_cast<std::size_t>(t)]);
    if (label != offset() + t) {
      refuse_foreign_edit("a token was evaluated at position " + std::to_string(label) + ", " +
                          std::to_string(offset() + t) + " is due");
    }
    if (t >= tokens) continue;
    if (!ledger_->is_free(cell)) {
      refuse_foreign_edit("the engine wrote position " + std::to_string(label) + " to cell " +
                          std::to_string(cell) + ", which holds another row");
    }
    new_cells_.push_back(cell);
  }
}

// What the new tokens bring to one layer, those in `slots` its rows; the rows held are readable
// too.
LayerCall Evictor::Impl::call_of(Layer& layer, Position first_position, std::span<const int> slots,
                                 Worker& worker) {
  const PolicyTraits traits = policy_->traits();
  LayerCall call{.slots = slots,
                 .first_position = first_position,
                 .keys = {},
                 .queries = {},
                 .scale = layer.tapped.scale,
                 .softcap = layer.tapped.softcap};
  if (traits.needs_keys) {
    const auto held = layer.retention.keep(0).slots();
    worker.cells_held.assign(held.begin(), held.end());
    worker.cells_held.insert(worker.cells_held.end(), new_cells_.begin(), new_cells_.end());
    call.keys = layer.store.keys(worker.cells_held, worker.scratch);
  }
  worker.queries.clear();
  if (traits.needs_queries) {
    const auto i = static_cast<std::size_t>(&layer - layers_.data());
    for (int h = 0; h < layer.tapped.n_head_kv; ++h) {
      worker.queries.push_back(tap_.queries(i, h, static_cast<int>(new_cells_.size())));
    }
    call.queries = worker.queries;
  }
  return call;
}

void Evictor::Impl::remove_labels(Position first, Position last) {
  if (!llama_memory_seq_rm(llama_get_memory(context_), kSequence, static_cast<llama_pos>(first),
                           static_cast<llama_pos>(last))) {
    throw EngineError("llama_memory_seq_rm refused positions " + std::to_string(first) + " to " +
                      std::to_string(last - 1));
  }
}

// Calls body(layer, worker) for every layer, on as many threads as the engine has for such a call.
template <class Body>
void Evictor::Impl::for_each_layer(const Body& body) {
  const int threads =
      new_cells_.size() == 1 ? llama_n_threads(context_) : llama_n_threads_batch(context_);
  threads_->for_each(static_cast<int>(layers_.size()), threads, [&](int i, int worker) {
    body(layers_[static_cast<std::size_t>(i)], workers_[static_cast<std::size_t>(worker)]);
  });
}

// Which cells are to be empty when the heads are down to the budget.
void Evictor::Impl::plan_free() {
  const int excess = policy_->traits().evicts ? ledger_->rows() - options_.cache.budget : 0;
  ledger_->plan_free(std::max(0, excess), plan_);
}

// The rows in those cells go where the heads have given up rows.
void Evictor::Impl::empty_cells(Layer& layer, Worker& worker) {
  if (plan_.cells.empty()) return;
  for (int h = 0; h < layer.tapped.n_head_kv; ++h) {
    const int n_moves = layer.retention.plan_moves(h, plan_.cells, worker.moves);
    const auto moves = std::span(worker.moves).first(static_cast<std::size_t>(n_moves));
    layer.store.apply(h, moves, worker.scratch);
    layer.retention.apply_moves(h, moves);
  }
  if (poisons()) layer.store.poison(plan_.cells, kPoison, worker.scratch);
}

// The engine may use them again.
void Evictor::Impl::free_cells() {
  if (plan_.cells.empty()) return;
  remove_labels(plan_.first, plan_.last);
  ledger_->free(plan_);
  rows_evicted_ += std::ssize(plan_.cells);
}

void Evictor::Impl::clear() {
  require_bound("clear");
  llama_memory_clear(llama_get_memory(context_), true);
  ledger_->clear();
  for (Layer& layer : layers_) layer.retention.clear();
  tap_.clear_call();
  rows_evicted_ = 0;
  evict_ms_ = 0.0;
}

void Evictor::Impl::clear(const CacheConfig& cache) {
  require_bound("clear");
  std::unique_ptr<Policy> policy = make_policy(cache);
  check_model(model_, cache, policy->traits().evicts);
  const int micro_batch = static_cast<int>(llama_n_ubatch(context_));
  const int room = n_cells_ - bounded_micro_batch(micro_batch, cache.budget);
  if (policy->traits().evicts && cache.budget > room) {
    throw std::invalid_argument("budget " + std::to_string(cache.budget) + " is above " +
                                std::to_string(room) + ", what a context of " +
                                std::to_string(n_cells_) +
                                " cells leaves beside a micro-batch: lower it, or make a larger "
                                "context");
  }
  options_.cache = cache;
  policy_ = std::move(policy);
  clear();
  ledger_.emplace(n_cells_, cache.n_sink);
  tap_.keep_queries(queries_kept(context_));
  for (Layer& layer : layers_) layer.retention = make_retention(layer.tapped);
}

std::shared_ptr<const Checkpoint::State> Evictor::Impl::checkpoint() const {
  require_bound("checkpoint");
  llama_synchronize(context_);
  const llama_pos newest = llama_memory_seq_pos_max(llama_get_memory(context_), kSequence);
  Checkpoint::State state{.config = options_.cache,
                          .ledger = *ledger_,
                          .layers = {},
                          .call = tap_.call(),
                          .cells = ledger_->cells_in_use(),
                          .engine = {},
                          .rows_evicted = rows_evicted_,
                          .evict_ms = evict_ms_};
  if (newest + 1 != offset() + std::ssize(state.call.cells)) {
    refuse_foreign_edit("the engine holds tokens up to position " + std::to_string(newest));
  }
  state.cells.insert(state.cells.end(), state.call.cells.begin(), state.call.cells.end());
  std::sort(state.cells.begin(), state.cells.end());
  for (const Layer& layer : layers_) state.layers.push_back(layer.retention.copy());
  state.engine.resize(llama_state_seq_get_size(context_, kSequence));
  state.engine.resize(
      llama_state_seq_get_data(context_, state.engine.data(), state.engine.size(), kSequence));
  if (state.engine.empty()) throw EngineError("llama_state_seq_get_data gave nothing");
  return std::make_shared<const Checkpoint::State>(std::move(state));
}

void Evictor::Impl::require_fitting(const Checkpoint::State& state) const {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  bool same_model = state.layers.size() == layers_.size();
  for (std::size_t i = 0; same_model && i < layers_.size(); ++i) {
    same_model = state.layers[i].n_heads() == layers_[i].retention.n_heads();
  }
  if (!same_model) refuse("the checkpoint is of another model");
  if (std::ssize(state.cells) > n_cells_) {
    refuse("the checkpoint holds " + std::to_string(state.cells.size()) +
           " rows, the context has " + std::to_string(n_cells_) + " cells: make a larger one");
  }
  if (state.ledger.offset() > 0) {
    if (state.config != options_.cache) {
      refuse("the checkpoint was made with another configuration: clear() to that one first");
    }
    return;
  }
  const int asking = std::min<int>(options_.cache.window, static_cast<int>(state.cells.size()));
  if (policy_->traits().needs_queries && state.call.window < asking) {
    refuse("the checkpoint holds the queries of " + std::to_string(state.call.window) +
           " tokens, the rule asks with " + std::to_string(asking) +
           ": take it with a window as large");
  }
}

void Evictor::Impl::restore(const Checkpoint::State& state) {
  require_bound("restore");
  require_fitting(state);
  clear();
  if (llama_state_seq_set_data(context_, state.engine.data(), state.engine.size(), kSequence) ==
      0) {
    llama_memory_clear(llama_get_memory(context_), true);
    throw EngineError("llama_state_seq_set_data refused " + std::to_string(state.engine.size()) +
                      " bytes: nothing is held now");
  }
  // The engine writes the cells in use to the first cells of an empty memory, in order.
  std::vector<RowMove> moves;
  for (std::size_t i = 0; i < state.cells.size(); ++i) {
    if (state.cells[i] != static_cast<int>(i))
      moves.push_back({state.cells[i], static_cast<int>(i)});
  }
  const auto compacted = [&](std::int64_t cell) {
    return std::lower_bound(state.cells.begin(), state.cells.end(), cell) - state.cells.begin();
  };
  TensorTap::Call call = state.call;
  for (std::int64_t& cell : call.cells) cell = compacted(cell);
  tap_.go_on(call);
  if (state.ledger.offset() == 0) return;
  ledger_ = state.ledger;
  ledger_->compact(state.cells, n_cells_);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].retention = state.layers[i].copy();
    layers_[i].retention.transfer(moves, n_cells_);
  }
  rows_evicted_ = state.rows_evicted;
  evict_ms_ = state.evict_ms;
}

EvictorStats Evictor::Impl::stats() const {
  EvictorStats s;
  s.tokens_seen = offset();
  s.rows_evicted = rows_evicted_;
  s.kv_bytes_allocated = bytes_allocated_;
  s.evict_ms = evict_ms_;
  if (layers_.empty()) return s;
  s.rows_kept = layers_.front().retention.keep(0).size();
  for (const Layer& layer : layers_) {
    for (int h = 0; h < layer.tapped.n_head_kv; ++h) {
      s.kv_bytes_kept +=
          layer.store.row_bytes() * static_cast<std::size_t>(layer.retention.keep(h).size());
      s.kv_bytes_full += layer.store.row_bytes() * static_cast<std::size_t>(offset());
    }
  }
  s.kv_bytes_kept +=
      swa_bytes_per_cell_ * static_cast<std::size_t>(std::min<Position>(offset(), swa_cells_));
  s.kv_bytes_full += swa_bytes_per_cell_ * static_cast<std::size_t>(offset());
  return s;
}

std::vector<BoundLayer> Evictor::Impl::snapshot() const {
  std::vector<BoundLayer> out;
  for (const Layer& layer : layers_) {
    out.push_back({layer.tapped.index, take_snapshot(layer.retention, offset(), n_cells_)});
  }
  return out;
}

std::vector<std::string> Evictor::Impl::violations() const {
  if (!ledger_) return {};
  std::vector<std::string> out = llama_cpp::violations(ledger_->snapshot());
  const std::vector<int> in_use = ledger_->cells_in_use();
  for (const BoundLayer& layer : snapshot()) {
    const std::string name = "layer " + std::to_string(layer.index) + ": ";
    for (const std::string& what : morphkv::violations(layer.rows)) out.push_back(name + what);
    auto slots = layer.rows.heads.front().slots;
    std::sort(slots.begin(), slots.end());
    if (slots != in_use) out.push_back(name + "the rows lie in other cells than the ledger's");
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
void Evictor::hold(int asking) { impl_->hold(asking); }
void Evictor::guide() { impl_->guide(); }
void Evictor::evict() { impl_->evict(); }
bool Evictor::takes_guides() const { return impl_->takes_guides(); }
void Evictor::clear() { impl_->clear(); }
void Evictor::clear(const CacheConfig& cache) { impl_->clear(cache); }
Checkpoint Evictor::checkpoint() const { return Checkpoint(impl_->checkpoint()); }
void Evictor::restore(const Checkpoint& checkpoint) { impl_->restore(*checkpoint.state_); }
Position Evictor::offset() const { return impl_->offset(); }
EvictorStats Evictor::stats() const { return impl_->stats(); }
const CacheConfig& Evictor::config() const { return impl_->config(); }
std::vector<BoundLayer> Evictor::snapshot() const { return impl_->snapshot(); }
std::vector<std::string> Evictor::violations() const { return impl_->violations(); }

}  // namespace morphkv::llama_cpp

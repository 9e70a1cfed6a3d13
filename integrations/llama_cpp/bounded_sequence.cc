#include "bounded_sequence.h"

#include <algorithm>
#include <utility>

namespace morphkv::llama_cpp {
namespace {

constexpr float kPoison = 3e4f;

[[noreturn]] void refuse_foreign_edit(const std::string& seen) {
  throw EngineError(seen +
                    ": positions must be consecutive, after_decode() must follow every "
                    "llama_decode(), and no other code may edit the memory");
}

}  // namespace

BoundedSequence::BoundedSequence(llama_context* context, llama_seq_id id, TensorTap& tap, Rule rule,
                                 int guide_tokens, bool poisons)
    : context_(context),
      id_(id),
      tap_(tap),
      rule_(std::move(rule)),
      guide_tokens_(guide_tokens),
      poisons_(poisons),
      n_cells_(static_cast<int>(llama_n_ctx_seq(context))),
      ledger_(n_cells_, rule_.config.n_sink) {
  tap_.keep_queries(id_, queries_kept());
  for (const TappedLayer& tapped : tap_.layers()) {
    layers_.push_back({tapped, KvStore(tapped, id_), make_retention(tapped)});
  }
  new_cells_.reserve(static_cast<std::size_t>(n_cells_));
}

LayerRetention BoundedSequence::make_retention(const TappedLayer& tapped) const {
  return {rule_.config, *rule_.policy, tapped.index, tapped.n_head_kv, n_cells_};
}

// Of how many tokens of a call the policy sees the queries.
int BoundedSequence::queries_kept() const {
  if (!rule_.traits.needs_queries) return 0;
  return std::max({rule_.config.window, guide_tokens_,
                   rule_.traits.every_query ? static_cast<int>(llama_n_ubatch(context_)) : 0});
}

// The memory of a single sequence is emptied as a whole: then the engine begins at its first cell
// again whatever sliding-window layers have done. Of several, only this one's; the engine then
// begins at the first cell too, since all cells below the next one are in use.
void BoundedSequence::forget() {
  llama_memory_t memory = llama_get_memory(context_);
  if (llama_n_seq_max(context_) == 1) {
    llama_memory_clear(memory, true);
  } else {
    llama_memory_seq_rm(memory, id_, -1, -1);
  }
}

void BoundedSequence::clear() {
  forget();
  ledger_.clear();
  for (Layer& layer : layers_) layer.retention.clear();
  tap_.clear_call(id_);
  rows_evicted_ = 0;
  evict_ms_ = 0.0;
}

void BoundedSequence::clear(Rule rule) {
  const int micro_batch = static_cast<int>(llama_n_ubatch(context_));
  const int budget = rule.config.budget;
  const int room = n_cells_ - bounded_micro_batch(micro_batch, budget);
  if (rule.traits.evicts && budget > room) {
    throw std::invalid_argument("budget " + std::to_string(budget) + " is above " +
                                std::to_string(room) + ", what a context of " +
                                std::to_string(n_cells_) +
                                " cells leaves beside a micro-batch: lower it, or make a larger "
                                "context");
  }
  rule_ = std::move(rule);
  clear();
  ledger_ = CellLedger(n_cells_, rule_.config.n_sink);
  tap_.keep_queries(id_, queries_kept());
  for (Layer& layer : layers_) layer.retention = make_retention(layer.tapped);
}

llama_pos BoundedSequence::newest_label() const {
  llama_synchronize(context_);
  return llama_memory_seq_pos_max(llama_get_memory(context_), id_);
}

void BoundedSequence::find_new_cells() {
  const llama_pos newest = newest_label();
  const Position tokens = newest + 1 - offset();
  const auto evaluated = static_cast<Position>(tap_.cells(id_).size());
  if (tokens < 0 || tokens > evaluated) {
    refuse_foreign_edit("the engine holds tokens up to position " + std::to_string(newest) + ", " +
                        std::to_string(evaluated) + " were evaluated since position " +
                        std::to_string(offset()));
  }
  first_position_ = offset();
  new_cells_.clear();
  for (Position t = 0; t < evaluated; ++t) {
    const llama_pos label = tap_.labels(id_)[static_cast<std::size_t>(t)];
    const int cell = static_cast<int>(tap_.cells(id_)[static_cast<std::size_t>(t)]);
    if (label != offset() + t) {
      refuse_foreign_edit("a token was evaluated at position " + std::to_string(label) + ", " +
                          std::to_string(offset() + t) + " is due");
    }
    if (t >= tokens) continue;
    if (!ledger_.is_free(cell)) {
      refuse_foreign_edit("the engine wrote position " + std::to_string(label) + " to cell " +
                          std::to_string(cell) + ", which holds another row");
    }
    new_cells_.push_back(cell);
  }
}

void BoundedSequence::adopt(int asking) {
  for (const int cell : new_cells_) ledger_.append(cell);
  asking_cells_.assign(new_cells_.end() - std::min<std::ptrdiff_t>(asking, std::ssize(new_cells_)),
                       new_cells_.end());
}

// What the new tokens bring to one layer, those in `slots` its rows; the rows held are readable
// too.
LayerCall BoundedSequence::call_of(Layer& layer, Position first_position,
                                   std::span<const int> slots, Worker& worker) {
  const PolicyTraits& traits = rule_.traits;
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
      worker.queries.push_back(tap_.queries(id_, i, h, static_cast<int>(new_cells_.size())));
    }
    call.queries = worker.queries;
  }
  return call;
}

void BoundedSequence::plan_free() {
  const int excess = rule_.traits.evicts ? ledger_.rows() - rule_.config.budget : 0;
  ledger_.plan_free(std::max(0, excess), plan_);
}

void BoundedSequence::append(int i, Worker& worker) {
  Layer& layer = layers_[static_cast<std::size_t>(i)];
  layer.retention.append(call_of(layer, first_position_, new_cells_, worker), worker.workspace);
  empty_cells(layer, worker);
}

void BoundedSequence::extend(int i, Worker& worker) {
  Layer& layer = layers_[static_cast<std::size_t>(i)];
  LayerCall call = call_of(layer, first_position_, new_cells_, worker);
  layer.retention.extend(call, worker.workspace);
  call.slots = asking_cells_;
  if (!asking_cells_.empty()) layer.retention.guide(call, worker.workspace);
}

void BoundedSequence::guide(int i, Worker& worker) {
  Layer& layer = layers_[static_cast<std::size_t>(i)];
  layer.retention.guide(call_of(layer, offset(), new_cells_, worker), worker.workspace);
  if (poisons_) layer.store.poison(new_cells_, kPoison, worker.scratch);
}

void BoundedSequence::evict(int i, Worker& worker) {
  Layer& layer = layers_[static_cast<std::size_t>(i)];
  layer.retention.evict(worker.workspace);
  empty_cells(layer, worker);
}

// The rows in those cells go where the heads have given up rows.
void BoundedSequence::empty_cells(Layer& layer, Worker& worker) {
  if (plan_.cells.empty()) return;
  for (int h = 0; h < layer.tapped.n_head_kv; ++h) {
    const int n_moves = layer.retention.plan_moves(h, plan_.cells, worker.moves);
    const auto moves = std::span(worker.moves).first(static_cast<std::size_t>(n_moves));
    layer.store.apply(h, moves, worker.scratch);
    layer.retention.apply_moves(h, moves);
  }
  if (poisons_) layer.store.poison(plan_.cells, kPoison, worker.scratch);
}

void BoundedSequence::free_cells() {
  if (plan_.cells.empty()) return;
  remove_labels(plan_.first, plan_.last);
  ledger_.free(plan_);
  rows_evicted_ += std::ssize(plan_.cells);
}

void BoundedSequence::remove_guide() {
  if (!new_cells_.empty()) remove_labels(offset(), offset() + std::ssize(new_cells_));
}

void BoundedSequence::remove_labels(Position first, Position last) {
  if (!llama_memory_seq_rm(llama_get_memory(context_), id_, static_cast<llama_pos>(first),
                           static_cast<llama_pos>(last))) {
    throw EngineError("llama_memory_seq_rm refused positions " + std::to_string(first) + " to " +
                      std::to_string(last - 1));
  }
}

// In a sliding-window layer the engine writes a micro-batch over rows that its first token does not
// see. Only the guide's first one does no harm: later ones reach rows that the text still needs.
void BoundedSequence::require_sliding_rows_intact() const {
  const int n_swa = llama_model_n_swa(llama_get_model(context_));
  const int first = tap_.first_micro_batch(id_);
  const int tokens = static_cast<int>(tap_.cells(id_).size());
  if (n_swa == 0 || tokens <= first) return;
  throw EngineError("a guide of " + std::to_string(tokens) +
                    " tokens took more than one micro-batch (" + std::to_string(first) +
                    " tokens, at most " + std::to_string(llama_n_ubatch(context_)) +
                    "): rows of the model's sliding window of " + std::to_string(n_swa) +
                    " tokens are lost; clear(), and give the guide in one micro-batch");
}

std::shared_ptr<const Checkpoint::State> BoundedSequence::checkpoint() const {
  const llama_pos newest = newest_label();
  Checkpoint::State state{.config = rule_.config,
                          .ledger = ledger_,
                          .layers = {},
                          .layer_indices = {},
                          .call = tap_.call(id_),
                          .cells = ledger_.cells_in_use(),
                          .engine = {},
                          .rows_evicted = rows_evicted_,
                          .evict_ms = evict_ms_};
  if (newest + 1 != offset() + std::ssize(state.call.cells)) {
    refuse_foreign_edit("the engine holds tokens up to position " + std::to_string(newest));
  }
  state.cells.insert(state.cells.end(), state.call.cells.begin(), state.call.cells.end());
  std::sort(state.cells.begin(), state.cells.end());
  for (const Layer& layer : layers_) {
    state.layers.push_back(layer.retention.copy());
    state.layer_indices.push_back(layer.tapped.index);
  }
  state.engine = get_engine_state(context_, id_);
  return std::make_shared<const Checkpoint::State>(std::move(state));
}

void BoundedSequence::require_fitting(const Checkpoint::State& state) const {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  bool same_model = state.layers.size() == layers_.size();
  for (std::size_t i = 0; same_model && i < layers_.size(); ++i) {
    same_model = state.layers[i].n_heads() == layers_[i].retention.n_heads() &&
                 state.layer_indices[i] == layers_[i].tapped.index;
  }
  if (!same_model) refuse("the checkpoint is of another model");
  if (std::ssize(state.cells) > n_cells_) {
    refuse("the checkpoint holds " + std::to_string(state.cells.size()) +
           " rows, the context has " + std::to_string(n_cells_) + " cells: make a larger one");
  }
  if (state.ledger.offset() > 0) {
    if (state.config != rule_.config) {
      refuse("the checkpoint was made with another configuration: clear() to that one first");
    }
    return;
  }
  const int asking = std::min<int>(rule_.config.window, static_cast<int>(state.cells.size()));
  if (rule_.traits.needs_queries && state.call.window < asking) {
    refuse("the checkpoint holds the queries of " + std::to_string(state.call.window) +
           " tokens, the rule asks with " + std::to_string(asking) +
           ": take it with a window as large");
  }
}

void BoundedSequence::restore(const Checkpoint::State& state) {
  require_fitting(state);
  clear();
  const std::vector<std::uint8_t> engine =
      bytes_for(state.engine, static_cast<int>(llama_n_seq_max(context_)));
  const std::size_t read = llama_state_seq_set_data(context_, engine.data(), engine.size(), id_);
  const Position tokens = state.ledger.offset() + std::ssize(state.call.cells);
  if (engine.empty() || read != engine.size() || newest_label() + 1 != tokens) {
    forget();
    throw EngineError("llama_state_seq_set_data refused " + std::to_string(engine.size()) +
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
  tap_.go_on(id_, call);
  if (state.ledger.offset() == 0) return;
  ledger_ = state.ledger;
  ledger_.compact(state.cells, n_cells_);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].retention = state.layers[i].copy();
    layers_[i].retention.transfer(moves, n_cells_);
  }
  rows_evicted_ = state.rows_evicted;
  evict_ms_ = state.evict_ms;
}

EvictorStats BoundedSequence::stats() const {
  EvictorStats s;
  s.tokens_seen = offset();
  s.rows_evicted = rows_evicted_;
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
  return s;
}

std::vector<BoundLayer> BoundedSequence::snapshot() const {
  std::vector<BoundLayer> out;
  for (const Layer& layer : layers_) {
    out.push_back({layer.tapped.index, take_snapshot(layer.retention, offset(), n_cells_)});
  }
  return out;
}

std::vector<std::string> BoundedSequence::violations() const {
  std::vector<std::string> out = llama_cpp::violations(ledger_.snapshot());
  const std::vector<int> in_use = ledger_.cells_in_use();
  for (const BoundLayer& layer : snapshot()) {
    const std::string name = "layer " + std::to_string(layer.index) + ": ";
    for (const std::string& what : morphkv::violations(layer.rows)) out.push_back(name + what);
    auto slots = layer.rows.heads.front().slots;
    std::sort(slots.begin(), slots.end());
    if (slots != in_use) out.push_back(name + "the rows lie in other cells than the ledger's");
  }
  return out;
}

}  // namespace morphkv::llama_cpp

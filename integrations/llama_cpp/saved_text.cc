// The rows are numbered without gaps, as the engine will place them: the file of a text does not
// depend on the cells that it had.
#include "morphkv/llama_cpp/saved_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "bounded_sequence.h"
#include "morphkv/archive.h"
#include "morphkv/policy.h"
#include "morphkv/snapshot.h"

namespace morphkv::llama_cpp {
namespace {

constexpr FileKind kSavedText{
    {'m', 'k', 'v', 't', 'e', 'x', 't', '\n'}, 2, "saved morphkv session", 1};
constexpr std::uint32_t kWithMessages = 2;  // the first version that has them

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

struct SavedHead {
  std::vector<int> slots;           // [rank] a permutation
  std::vector<Position> positions;  // [rank]
  std::vector<float> memory;        // HeadPolicy::save()
};

struct SavedLayer {
  int index = 0;  // in the model
  std::vector<SavedHead> heads;
};

// All fields in order, of both directions.
struct Saved {
  std::string model;
  std::vector<llama_token> tokens;
  std::vector<ChatMessage> messages;
  CacheConfig config;
  Position offset = 0;
  std::vector<int> cells;  // of the labels, ascending
  std::vector<SavedLayer> layers;
  EngineState engine;

  std::size_t rows() const { return cells.size(); }
};

// Each list of fields serves both directions.
template <typename Archive, typename Head>
void head_fields(Archive& archive, Head& head) {
  archive.list(head.slots);
  archive.list(head.positions);
  archive.list(head.memory);
}

template <typename Archive, typename State>
void engine_fields(Archive& archive, State& engine) {
  archive.value(engine.sequences);
  archive.value(engine.sequence);
  archive.value(engine.swa_bytes);
  archive.list(engine.bytes);
}

template <typename Archive, typename Message>
void message_fields(Archive& archive, Message& message) {
  archive.list(message.role);
  archive.list(message.content);
}

void write(Writer& out, const Saved& s) {
  out.list(s.model);
  out.list(s.tokens);
  out.value(static_cast<std::uint64_t>(s.messages.size()));
  for (const ChatMessage& message : s.messages) message_fields(out, message);
  config_fields(out, s.config);
  out.value(s.offset);
  out.list(s.cells);
  out.value(static_cast<std::uint64_t>(s.layers.size()));
  for (const SavedLayer& layer : s.layers) {
    out.value(layer.index);
    out.value(static_cast<std::uint64_t>(layer.heads.size()));
    for (const SavedHead& head : layer.heads) head_fields(out, head);
  }
  engine_fields(out, s.engine);
}

void check_config(const CacheConfig& config, int most_budget) {
  require(config.fusion <= Fusion::kMax && config.queries <= QuerySource::kAttention,
          "its fusion or query source does not exist");
  validate(config);
  require(config.budget <= most_budget, "its budget " + std::to_string(config.budget) +
                                            " is above " + std::to_string(most_budget) +
                                            ", what is reserved: reserve more");
}

// The invariants of its rows.
void check_rows(const Saved& s) {
  constexpr Position kMostTokens = std::numeric_limits<llama_pos>::max();
  require(s.offset >= 0 && s.offset <= kMostTokens && s.offset <= std::ssize(s.tokens),
          "it has seen " + std::to_string(s.offset) + " tokens of a text of " +
              std::to_string(s.tokens.size()));
  const bool evicts = make_policy(s.config)->traits().evicts;
  const Position due = evicts ? std::min<Position>(s.config.budget, s.offset) : s.offset;
  require(std::ssize(s.cells) == due, "it has " + std::to_string(s.cells.size()) +
                                          " rows per head, " + std::to_string(due) + " are due");
  const auto n_cells = static_cast<int>(s.rows());
  LedgerSnapshot ledger{n_cells, s.config.n_sink, s.offset, {}, s.cells};
  const auto sinks = std::min<Position>(s.config.n_sink, due);
  for (Position i = 0; i < due; ++i) ledger.labels.push_back(i < sinks ? i : s.offset - due + i);
  const auto refuse_first = [](const std::string& where, const std::vector<std::string>& broken) {
    require(broken.empty(), where + (broken.empty() ? "" : broken.front()));
  };
  refuse_first("its cells: ", violations(ledger));
  require(!s.layers.empty(), "it has no layers");
  int last = -1;
  for (const SavedLayer& layer : s.layers) {
    const std::string name = "its layer " + std::to_string(layer.index) + ": ";
    require(layer.index > last, name + "it stands behind layer " + std::to_string(last));
    last = layer.index;
    require(!layer.heads.empty(), name + "it has no heads");
    LayerSnapshot rows{s.config, evicts, s.offset, n_cells, {}};
    for (const SavedHead& head : layer.heads) {
      require(head.slots.size() == s.rows() && head.positions.size() == s.rows(),
              name + "a head has other rows than the cells");
      require(std::ranges::none_of(head.memory, [](float x) { return std::isnan(x); }),
              name + "what its policy remembers contains NaN");
      rows.heads.push_back({head.slots, head.positions});
    }
    refuse_first(name, violations(rows));
  }
}

Saved read(Reader& in, std::uint32_t version, int most_budget) {
  Saved s;
  in.list(s.model);
  in.list(s.tokens);
  std::uint64_t messages = 0;
  if (version >= kWithMessages) in.value(messages);
  for (std::uint64_t i = 0; i < messages; ++i) message_fields(in, s.messages.emplace_back());
  config_fields(in, s.config);
  check_config(s.config, most_budget);
  in.value(s.offset);
  in.list(s.cells);
  std::uint64_t layers = 0;
  in.value(layers);
  for (std::uint64_t i = 0; i < layers; ++i) {
    SavedLayer& layer = s.layers.emplace_back();
    std::uint64_t heads = 0;
    in.value(layer.index);
    in.value(heads);
    for (std::uint64_t h = 0; h < heads; ++h) head_fields(in, layer.heads.emplace_back());
  }
  engine_fields(in, s.engine);
  require(in.at_end(), "it has bytes that belong to nothing");
  require(!s.engine.bytes.empty(), "it has no rows of the engine");
  require(s.engine.sequence >= 0 && s.engine.sequence < s.engine.sequences &&
              s.engine.sequences <= kMostSequences && s.engine.swa_bytes < s.engine.bytes.size(),
          "its sequence " + std::to_string(s.engine.sequence) + " is none of " +
              std::to_string(s.engine.sequences));
  check_rows(s);
  return s;
}

std::vector<std::string> parts(const std::string& signature) {
  std::vector<std::string> out(1);
  for (const char c : signature) {
    if (c == ',') {
      out.emplace_back();
    } else if (c != ' ' || !out.back().empty()) {
      out.back() += c;
    }
  }
  return out;
}

// "2 layers (here 30 layers), K f16 (here K q8_0)"; whole where the parts do not correspond.
std::string signature_differences(const std::string& saved, const std::string& here) {
  const auto a = parts(saved);
  const auto b = parts(here);
  if (a.size() != b.size()) return saved + " (here " + here + ")";
  std::string out;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) out += (out.empty() ? "" : ", ") + a[i] + " (here " + b[i] + ")";
  }
  return out;
}

}  // namespace

std::string SavedText::to_bytes() const {
  const Checkpoint::State& state = *checkpoint.state_;
  require(state.call.cells.empty(),
          std::to_string(state.call.cells.size()) +
              " tokens have been evaluated and not decided about: call after_decode() first");
  const auto row_of = [&](int cell) {
    return static_cast<int>(std::ranges::lower_bound(state.cells, cell) - state.cells.begin());
  };
  Saved s{.model = model,
          .tokens = tokens,
          .messages = messages,
          .config = state.config,
          .offset = state.ledger.offset(),
          .cells = {},
          .layers = {},
          .engine = state.engine};
  for (const int cell : state.ledger.snapshot().cells) s.cells.push_back(row_of(cell));
  for (std::size_t i = 0; i < state.layers.size(); ++i) {
    const LayerRetention& rows = state.layers[i];
    SavedLayer& layer = s.layers.emplace_back();
    layer.index = state.layer_indices[i];
    for (int h = 0; h < rows.n_heads(); ++h) {
      SavedHead& head = layer.heads.emplace_back();
      for (const int slot : rows.keep(h).slots()) head.slots.push_back(row_of(slot));
      const auto positions = rows.keep(h).positions();
      head.positions.assign(positions.begin(), positions.end());
      rows.save(h, head.memory);
    }
  }
  Writer body;
  write(body, s);
  return seal(kSavedText, body.bytes());
}

SavedText SavedText::from_bytes(std::string_view bytes, int most_budget) {
  std::uint32_t version = 0;
  Reader reader(unseal(kSavedText, bytes, &version));
  Saved s = read(reader, version, most_budget);
  const auto n_cells = static_cast<int>(s.rows());
  Checkpoint::State state{.config = s.config,
                          .ledger = CellLedger(n_cells, s.config.n_sink),
                          .layers = {},
                          .layer_indices = {},
                          .call = {},
                          .cells = {},
                          .engine = std::move(s.engine),
                          .rows_evicted = s.offset - n_cells,
                          .evict_ms = 0.0};
  state.ledger.load(s.offset, s.cells);
  state.cells = state.ledger.cells_in_use();
  const auto policy = make_policy(s.config);
  for (const SavedLayer& layer : s.layers) {
    const auto heads = static_cast<int>(layer.heads.size());
    LayerRetention& rows =
        state.layers.emplace_back(s.config, *policy, layer.index, heads, std::max(1, n_cells));
    for (int h = 0; h < heads; ++h) {
      const SavedHead& head = layer.heads[static_cast<std::size_t>(h)];
      require(rows.load(h, head.slots, head.positions, head.memory),
              "its layer " + std::to_string(layer.index) + ": what the policy of head " +
                  std::to_string(h) + " remembers does not fit");
    }
    state.layer_indices.push_back(layer.index);
  }
  state.call.queries.resize(state.layers.size());
  return {std::move(s.model), std::move(s.tokens),
          Checkpoint(std::make_shared<const Checkpoint::State>(std::move(state))),
          std::move(s.messages)};
}

void SavedText::require_model(const llama_model* m, ggml_type type_k, ggml_type type_v) const {
  const std::string here = model_signature(m, type_k, type_v);
  if (model != here) {
    throw std::invalid_argument(
        "it was saved with another model or cell type: " + signature_differences(model, here) +
        "; use the one that it was saved with");
  }
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(m));
  for (const llama_token token : tokens) {
    require(token >= 0 && token < n_vocab, "its token " + std::to_string(token) +
                                               " is none of 0 to " + std::to_string(n_vocab - 1));
  }
}

std::string model_signature(const llama_model* model, ggml_type type_k, ggml_type type_v) {
  std::array<char, 256> text{};
  const bool named = llama_model_meta_val_str(model, "general.name", text.data(), text.size()) > 0;
  const std::string out = (named ? text.data() : std::string("without a name")) + ", ";
  text.fill('\0');
  llama_model_desc(model, text.data(), text.size());
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  return out + text.data() + ", " + std::to_string(llama_model_n_params(model)) + " parameters, " +
         std::to_string(llama_model_size(model)) + " bytes, " +
         std::to_string(llama_model_n_layer(model)) + " layers, embedding " +
         std::to_string(llama_model_n_embd(model)) + ", vocabulary " + std::to_string(n_vocab) +
         ", K " + ggml_type_name(type_k) + ", V " + ggml_type_name(type_v) +
         ", engine state version " + std::to_string(LLAMA_STATE_SEQ_VERSION);
}

}  // namespace morphkv::llama_cpp

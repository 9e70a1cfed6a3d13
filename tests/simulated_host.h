// A host as the retention core sees it: K and V of every head in slots, rows written where slots
// are free, freed slots of its own choice, moves carried out on the memory. Feeds a stream and
// checks what lies where.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "generators.h"
#include "morphkv/policy.h"
#include "morphkv/retention.h"
#include "morphkv/snapshot.h"

namespace morphkv::test {

// Which slots a host empties.
enum class Freeing { kHighest, kOldest, kRandom };

struct HostOptions {
  int max_slots = 0;
  StoreLayout keys = {};
  Freeing freeing = Freeing::kHighest;
  bool shuffled = false;      // new rows go to free slots in random order, else to the lowest
  bool poison = true;         // write kPoison into freed rows
  int queries_per_call = -1;  // queries shown per call, the last ones; -1 = all
  float scale = 1.0f;
  float softcap = 0.0f;
  int layer = 0;
  std::uint64_t seed = 1;  // of the host's own choices
};

class SimulatedHost {
 public:
  SimulatedHost(const CacheConfig& config, const Stream& stream, const HostOptions& options)
      : stream_(stream),
        options_(options),
        random_(options.seed),
        layer_(config, *make_policy(config), options.layer, stream.heads, options.max_slots),
        workspace_(options.max_slots, std::max(1, stream.group), stream.dim),
        traits_(make_policy(config)->traits()) {
    make_store(options.max_slots);
  }

  const LayerRetention& layer() const { return layer_; }
  int offset() const { return offset_; }
  int max_slots() const { return static_cast<int>(label_.size()); }
  std::vector<Position> positions(int head) const {
    const auto positions = layer_.keep(head).positions();
    return {positions.begin(), positions.end()};
  }
  std::vector<std::vector<Position>> all_positions() const {
    std::vector<std::vector<Position>> all;
    for (int h = 0; h < stream_.heads; ++h) all.push_back(positions(h));
    return all;
  }
  std::vector<std::string> broken_invariants() const {
    return violations(take_snapshot(layer_, offset_, max_slots()));
  }

  // One call of the next `tokens` tokens of the stream.
  void feed(int tokens) {
    const std::vector<int> slots = write_new_rows(tokens);
    const Shown shown = show(stream_, offset_, tokens);
    layer_.append(call_of(slots, shown), workspace_);
    offset_ += tokens;
    use_victims();
  }

  // The same in parts: nothing leaves in extend().
  void extend(int tokens) {
    const std::vector<int> slots = write_new_rows(tokens);
    const Shown shown = show(stream_, offset_, tokens);
    layer_.extend(call_of(slots, shown), workspace_);
    offset_ += tokens;
  }
  // The rows of a guide lie in free slots while it asks.
  void guide(const Stream& guide) {
    const std::vector<int> slots = take_free_slots(guide.tokens);
    for (int t = 0; t < guide.tokens; ++t) {
      for (int h = 0; h < guide.heads; ++h) {
        keys_[static_cast<std::size_t>(h)].set(slots[static_cast<std::size_t>(t)], guide.key(t, h));
      }
    }
    const Shown shown = show(guide, 0, guide.tokens);
    layer_.guide(call_of(slots, shown), workspace_);
    for (const int slot : slots) free_slot(slot);
  }
  // The last `tokens` tokens are the guide: at most those of the last extend().
  void guide_by_last(int tokens) {
    const auto slots = layer_.keep(0).slots().last(static_cast<std::size_t>(tokens));
    const Shown shown = show(stream_, offset_ - tokens, tokens);
    layer_.guide(call_of(slots, shown), workspace_);
  }
  void evict() {
    layer_.evict(workspace_);
    use_victims();
  }

  // Calls of these sizes until the stream ends or `sizes` gives 0.
  template <class Sizes>
  void feed_all(const Sizes& sizes) {
    while (offset_ < stream_.tokens) feed(std::min(sizes(), stream_.tokens - offset_));
  }

  // All rows into a new store: rows in use go to slots 0, 1, ... of it.
  void transfer(int max_slots) {
    std::vector<RowMove> moves;
    int next = 0;
    for (int slot = 0; slot < this->max_slots(); ++slot) {
      if (label_[static_cast<std::size_t>(slot)] < 0) continue;
      if (slot != next) moves.push_back({slot, next});
      ++next;
    }
    const auto old_keys = keys_;
    const auto old_values = values_;
    const auto old_label = label_;
    make_store(max_slots);
    next = 0;
    for (std::size_t slot = 0; slot < old_label.size(); ++slot) {
      if (old_label[slot] < 0) continue;
      for (std::size_t h = 0; h < keys_.size(); ++h) {
        keys_[h].set(next, old_keys[h].get(static_cast<int>(slot)));
        values_[h].set(next, old_values[h].get(static_cast<int>(slot)));
      }
      label_[static_cast<std::size_t>(next++)] = old_label[slot];
    }
    layer_.transfer(moves, max_slots);
    workspace_ = Workspace(max_slots, std::max(1, stream_.group), stream_.dim);
  }

  // Forgets all; the next token is the first of the stream.
  void clear() {
    layer_.clear();
    make_store(max_slots());
    offset_ = 0;
  }

  // Every row lies where the core says, in each head, and the slots in use are the host's.
  void expect_rows_in_place() const {
    std::vector<int> used;
    for (int slot = 0; slot < max_slots(); ++slot) {
      if (label_[static_cast<std::size_t>(slot)] >= 0) used.push_back(slot);
    }
    for (int h = 0; h < stream_.heads; ++h) {
      const KeepSet& keep = layer_.keep(h);
      std::vector<int> slots(keep.slots().begin(), keep.slots().end());
      for (int rank = 0; rank < keep.size(); ++rank) {
        const auto token = static_cast<int>(keep.positions()[static_cast<std::size_t>(rank)]);
        const int slot = slots[static_cast<std::size_t>(rank)];
        const auto key = stream_.key(token, h);
        ASSERT_EQ(keys_[static_cast<std::size_t>(h)].get(slot),
                  std::vector<float>(key.begin(), key.end()))
            << "key of position " << token << ", head " << h << ", slot " << slot;
        ASSERT_EQ(values_[static_cast<std::size_t>(h)].get(slot), value_of(token, h));
      }
      std::sort(slots.begin(), slots.end());
      ASSERT_EQ(slots, used) << "head " << h;
    }
  }

 private:
  static std::vector<float> value_of(int token, int head) {
    return {static_cast<float>(token), static_cast<float>(head)};
  }

  void make_store(int max_slots) {
    const auto heads = static_cast<std::size_t>(stream_.heads);
    keys_.assign(heads, StoredRows(options_.keys, max_slots, stream_.dim));
    values_.assign(heads, StoredRows({.dtype = DType::kF32}, max_slots, 2));
    label_.assign(static_cast<std::size_t>(max_slots), -1);
  }

  std::vector<int> take_free_slots(int n) {
    std::vector<int> slots;
    for (int slot = 0; slot < max_slots(); ++slot) {
      if (label_[static_cast<std::size_t>(slot)] < 0) slots.push_back(slot);
    }
    if (options_.shuffled) random_.shuffle(slots);
    slots.resize(static_cast<std::size_t>(n));
    return slots;
  }

  void write_row(int token, int slot) {
    for (int h = 0; h < stream_.heads; ++h) {
      keys_[static_cast<std::size_t>(h)].set(slot, stream_.key(token, h));
      values_[static_cast<std::size_t>(h)].set(slot, value_of(token, h));
    }
    label_[static_cast<std::size_t>(slot)] = token;
  }

  std::vector<int> write_new_rows(int tokens) {
    std::vector<int> slots = take_free_slots(tokens);
    for (int t = 0; t < tokens; ++t) write_row(offset_ + t, slots[static_cast<std::size_t>(t)]);
    return slots;
  }

  void use_victims() {
    const std::vector<int> freed = choose_freed(static_cast<int>(layer_.victims(0).size()));
    for (int h = 0; h < stream_.heads; ++h) carry_out_moves(h, freed);
    for (const int slot : freed) free_slot(slot);
  }

  // What the policy is shown of a call: [head].
  struct Shown {
    std::vector<RowsView> keys = {};
    std::vector<QueriesView> queries = {};
  };

  Shown show(const Stream& of, int first, int tokens) const {
    const int asking =
        options_.queries_per_call < 0 ? tokens : std::min(tokens, options_.queries_per_call);
    Shown shown;
    for (int h = 0; h < of.heads; ++h) {
      if (traits_.needs_keys) shown.keys.push_back(keys_[static_cast<std::size_t>(h)].view());
      if (traits_.needs_queries) {
        shown.queries.push_back({.data = of.query_data(first + tokens - asking, h),
                                 .token_stride = of.query_token_stride,
                                 .group_stride = of.query_group_stride,
                                 .tokens = asking,
                                 .group = of.group,
                                 .dim = of.dim});
      }
    }
    return shown;
  }

  LayerCall call_of(std::span<const int> slots, const Shown& shown) const {
    return {.slots = slots,
            .first_position = offset_,
            .keys = shown.keys,
            .queries = shown.queries,
            .scale = options_.scale,
            .softcap = options_.softcap};
  }

  std::vector<int> choose_freed(int n) {
    std::vector<int> slots;
    for (int slot = 0; slot < max_slots(); ++slot) {
      const int label = label_[static_cast<std::size_t>(slot)];
      const bool may_go = options_.freeing != Freeing::kOldest || label >= layer_.config().n_sink;
      if (label >= 0 && may_go) slots.push_back(slot);
    }
    if (options_.freeing == Freeing::kRandom) random_.shuffle(slots);
    if (options_.freeing == Freeing::kHighest) std::reverse(slots.begin(), slots.end());
    if (options_.freeing == Freeing::kOldest) {
      std::sort(slots.begin(), slots.end(), [this](int a, int b) {
        return label_[static_cast<std::size_t>(a)] < label_[static_cast<std::size_t>(b)];
      });
    }
    slots.resize(static_cast<std::size_t>(n));
    std::sort(slots.begin(), slots.end());
    return slots;
  }

  void carry_out_moves(int head, const std::vector<int>& freed) {
    ASSERT_EQ(layer_.victims(head).size(), freed.size());
    std::vector<RowMove> moves(freed.size());
    moves.resize(static_cast<std::size_t>(layer_.plan_moves(head, freed, moves)));
    for (const RowMove& move : moves) {
      keys_[static_cast<std::size_t>(head)].copy(move.from, move.to);
      values_[static_cast<std::size_t>(head)].copy(move.from, move.to);
    }
    layer_.apply_moves(head, moves);
  }

  void free_slot(int slot) {
    label_[static_cast<std::size_t>(slot)] = -1;
    if (!options_.poison) return;
    for (auto& rows : keys_) rows.fill(slot, kPoison);
    for (auto& rows : values_) rows.fill(slot, kPoison);
  }

  const Stream& stream_;
  HostOptions options_;
  Random random_;
  LayerRetention layer_;
  Workspace workspace_;
  PolicyTraits traits_;
  int offset_ = 0;
  std::vector<StoredRows> keys_;    // [head]
  std::vector<StoredRows> values_;  // [head]
  std::vector<int> label_;          // [slot] the token that was written there first; -1 = free
};

}  // namespace morphkv::test

// Which rows a guide keeps: those that a rule in double precision keeps, from the queries and keys
// of a second context that is given the rows held and evaluates the guide apart. After each piece
// the tensors hold these rows bit for bit and no others, and in the answer the window of the text's
// own queries decides.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "kv_probe.h"
#include "model_support.h"
#include "oracle.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::BoundLayer;
using llama_cpp::ContextPtr;
using llama_cpp::ModelPtr;
using Positions = std::vector<Position>;
using Tokens = std::vector<llama_token>;
using Vectors = std::vector<std::vector<double>>;

constexpr int kVocab = 96;
// Layers 0 and 2 see a window of 40 tokens, layers 1 and 3 everything.
const TinyModel kSliding{.architecture = "gemma3", .n_layer = 4, .sliding_window = 40};

// The keys of one head in some cells, as numbers.
Vectors keys_in(const ProbedLayer& layer, int head, const std::vector<int>& cells) {
  const std::string bytes = KvProbe::whole(layer.k);
  const std::size_t head_bytes = ggml_row_size(layer.k->type, layer.dim_k);
  std::vector<float> key(static_cast<std::size_t>(layer.dim_k));
  Vectors keys;
  for (const int cell : cells) {
    const char* row = bytes.data() + static_cast<std::size_t>(cell) * layer.k->nb[1] +
                      static_cast<std::size_t>(head) * head_bytes;
    ggml_get_type_traits(layer.k->type)->to_float(row, key.data(), layer.dim_k);
    keys.emplace_back(key.begin(), key.end());
  }
  return keys;
}

// What asks in the name of a token: its queries [group][dim], or its stored key.
struct Asking {
  Vectors queries;
  std::size_t visible = 0;  // of the keys, the first so many
};

std::vector<double> scores_by(const CacheConfig& cache, const ProbedLayer& layer,
                              const std::vector<Asking>& asking, const Vectors& keys,
                              std::size_t held) {
  const bool own = cache.queries == QuerySource::kAttention;
  const double scale = own ? layer.scale : 1.0 / std::sqrt(static_cast<double>(layer.dim_k));
  std::vector<double> scores(held, 0.0);
  for (const Asking& token : asking) {
    const Vectors seen(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(token.visible));
    for (const auto& query : token.queries) {
      const auto weights = softmax_of(query, seen, scale, own ? layer.softcap : 0.0);
      for (std::size_t rank = 0; rank < std::min(held, weights.size()); ++rank) {
        scores[rank] = std::max(scores[rank], weights[rank]);
      }
    }
  }
  return pooled(scores, cache.pool);
}

// places[rank] among the rows that may leave, 0 = the best; of equal scores the later row is the
// better.
std::vector<int> places_of(const CacheConfig& cache, const std::vector<double>& scores) {
  const auto protected_rows = static_cast<std::size_t>(cache.n_sink + cache.protected_tail());
  std::vector<int> order(scores.size() - std::min(scores.size(), protected_rows));
  std::iota(order.begin(), order.end(), cache.n_sink);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const double sa = scores[static_cast<std::size_t>(a)];
    const double sb = scores[static_cast<std::size_t>(b)];
    return sa != sb ? sa > sb : a > b;
  });
  std::vector<int> places(scores.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    places[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  }
  return places;
}

Positions difference(const Positions& a, const Positions& b) {
  Positions out;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(out));
  return out;
}

// The two contexts add the same numbers up in different orders, so what they compute differs by
// rounding to f16 here and there. Scores closer than this are a tie.
constexpr double kTie = 1e-3;
constexpr double kQueryTolerance = 1e-3;

class GuidedStream {
 public:
  GuidedStream(llama_model* model, const std::set<int>& layers, BoundOptions options)
      : probe_(layers),
        apart_probe_(layers),
        options_(watched(options)),
        bounded_(model, options_),
        book_(probe_, bounded_.evictor()) {
    llama_context_params params = context_params();
    params.type_k = options.type_k;
    params.type_v = options.type_v;
    params.cb_eval = KvProbe::callback;
    params.cb_eval_user_data = &apart_probe_;
    apart_ = plain_context(model, params, 512, options.micro_batch);
    for (const int layer : layers) {
      const ProbedLayer& probed = probe_.layer(layer);
      for (int h = 0; h < probed.n_heads; ++h) {
        oracles_[layer].emplace_back(options.cache, probed.scale, probed.softcap);
      }
    }
    probe_.forget();
  }

  // A piece of a text, then guides, then the eviction. `tail` last tokens of the piece ask as well.
  void read(std::span<const llama_token> piece, const std::vector<Tokens>& guides, int tail = 0) {
    const Position first = bounded_.evictor().offset();
    take(piece, first);
    std::map<int, std::vector<std::vector<Asking>>> tail_asks;
    if (tail > 0) {
      for (const auto& [layer, oracles] : oracles_) {
        for (int h = 0; h < static_cast<int>(oracles.size()); ++h) {
          tail_asks[layer].push_back(asking(probe_, layer, h, static_cast<std::size_t>(tail)));
        }
      }
    }
    probe_.forget();
    bounded_.evictor().hold(tail);
    places_.clear();
    scores_.clear();
    held_ = bounded_.evictor().snapshot();
    if (tail > 0) rank_by_tail(tail_asks);
    for (const Tokens& guide : guides) ask(guide);
    bounded_.evictor().evict();
    expect_rule("after the piece at token " + std::to_string(first));
  }

  // A token of the answer: the window of the text's own queries decides.
  void step() {
    const llama_token token = likeliest(logits_);
    take({&token, 1}, bounded_.evictor().offset());
    probe_.forget();
    bounded_.evictor().after_decode();
    for (const BoundLayer& layer : bounded_.evictor().snapshot()) {
      if (!oracles_.contains(layer.index)) continue;
      for (std::size_t h = 0; h < layer.rows.heads.size(); ++h) {
        HeadOracle& oracle = oracles_[layer.index][h];
        const Positions left = difference(oracle.positions(), layer.rows.heads[h].positions);
        ++evictions_;
        if (left != oracle.victims()) {
          ++near_ties_;
          EXPECT_TRUE(oracle.is_near_tie_with(left))
              << "layer " << layer.index << ", head " << h << ", a step of the answer";
        }
        oracle.evict(left);
      }
    }
    check("after a step");
  }

  Bounded& bounded() { return bounded_; }
  int evictions() const { return evictions_; }
  int near_ties() const { return near_ties_; }
  double query_difference() const { return query_difference_; }

 private:
  BoundOptions& watched(BoundOptions& options) {
    options.poison_freed_rows = true;
    probe_.install(options);
    return options;
  }

  // Evaluates tokens of the text; the engine's mask shows them the rows held and one another.
  void take(std::span<const llama_token> tokens, Position first) {
    const auto before = bounded_.evictor().snapshot();
    ASSERT_EQ(decode(bounded_.context(), tokens), 0);
    logits_ = bounded_.logits();
    expect_sees(before);
    book_.record(first, tokens.size());
    for (auto& [layer, oracles] : oracles_) {
      const ProbedLayer& probed = probe_.layer(layer);
      const auto& cells = probe_.cells(layer);
      for (int h = 0; h < static_cast<int>(oracles.size()); ++h) {
        const Vectors keys = keys_in(probed, h, {cells.begin(), cells.end()});
        for (std::size_t t = 0; t < tokens.size(); ++t) {
          HeadOracle& oracle = oracles[static_cast<std::size_t>(h)];
          oracle.append(std::vector<float>(keys[t].begin(), keys[t].end()));
          oracle.ask(queries_of(probe_, layer, h, t));
        }
      }
    }
  }

  void expect_sees(const std::vector<BoundLayer>& before) const {
    for (const BoundLayer& layer : before) {
      std::vector<int> expected = layer.rows.heads.front().slots;
      for (const auto cell : probe_.cells(layer.index)) expected.push_back(static_cast<int>(cell));
      std::sort(expected.begin(), expected.end());
      ASSERT_EQ(probe_.visible(layer.index), expected) << "layer " << layer.index;
    }
  }

  Vectors queries_of(const KvProbe& probe, int layer, int head, std::size_t token) const {
    const auto& query = probe.queries(layer).at(token);
    const std::size_t group = query.size() / oracles_.at(layer).size();
    const auto first = query.begin() + static_cast<std::ptrdiff_t>(group) * head;
    return {first, first + static_cast<std::ptrdiff_t>(group)};
  }

  // The last `n` tokens that a probe saw; what they see is set by the caller.
  std::vector<Asking> asking(const KvProbe& probe, int layer, int head, std::size_t n) const {
    std::vector<Asking> out;
    const auto& cells = probe.cells(layer);
    const bool keys_ask = options_.cache.queries == QuerySource::kKeys;
    for (std::size_t t = cells.size() - n; t < cells.size(); ++t) {
      out.push_back({keys_ask ? keys_in(probe.layer(layer), head, {static_cast<int>(cells[t])})
                              : queries_of(probe, layer, head, t)});
    }
    return out;
  }

  void rank(int layer, std::size_t head, const std::vector<double>& scores) {
    const std::vector<int> places = places_of(options_.cache, scores);
    auto& best = places_[layer];
    best.resize(std::max(best.size(), head + 1));
    if (best[head].empty()) best[head] = places;
    for (std::size_t i = 0; i < places.size(); ++i) {
      best[head][i] = std::min(best[head][i], places[i]);
    }
    scores_[layer].resize(best.size());
    scores_[layer][head].push_back(scores);
  }

  void rank_by_tail(std::map<int, std::vector<std::vector<Asking>>>& asks) {
    for (const BoundLayer& layer : held_) {
      if (!oracles_.contains(layer.index)) continue;
      for (std::size_t h = 0; h < layer.rows.heads.size(); ++h) {
        const auto& slots = layer.rows.heads[h].slots;
        const Vectors keys = keys_in(probe_.layer(layer.index), static_cast<int>(h), slots);
        auto& tokens = asks[layer.index][h];
        for (std::size_t t = 0; t < tokens.size(); ++t) {
          tokens[t].visible = keys.size() - (tokens.size() - 1 - t);
        }
        rank(layer.index, h,
             scores_by(options_.cache, probe_.layer(layer.index), tokens, keys, keys.size()));
      }
    }
  }

  // The guide in the other context, which is given the rows held, and in the evictor's.
  void ask(const Tokens& guide) {
    std::vector<std::uint8_t> state(llama_state_seq_get_size(bounded_.context(), 0));
    llama_state_seq_get_data(bounded_.context(), state.data(), state.size(), 0);
    llama_memory_clear(llama_get_memory(apart_.get()), true);
    ASSERT_GT(llama_state_seq_set_data(apart_.get(), state.data(), state.size(), 0), 0u);
    apart_probe_.forget();
    ASSERT_EQ(decode(apart_.get(), guide), 0);
    for (const BoundLayer& layer : held_) {
      if (oracles_.contains(layer.index)) rank_apart(layer, guide.size());
    }

    ASSERT_EQ(decode(bounded_.context(), guide), 0);
    expect_sees(held_);
    compare_queries();
    bounded_.evictor().guide();
    probe_.forget();
    ASSERT_EQ(newest_label(bounded_.context()), bounded_.evictor().offset() - 1);
  }

  void rank_apart(const BoundLayer& layer, std::size_t tokens) {
    const ProbedLayer& probed = apart_probe_.layer(layer.index);
    std::vector<int> in_use = layer.rows.heads.front().slots;
    std::sort(in_use.begin(), in_use.end());
    for (std::size_t h = 0; h < layer.rows.heads.size(); ++h) {
      std::vector<int> cells;  // of the rows held in rank order, then of the guide
      for (const int slot : layer.rows.heads[h].slots) {
        const auto at = std::lower_bound(in_use.begin(), in_use.end(), slot);
        cells.push_back(static_cast<int>(at - in_use.begin()));
      }
      const std::size_t held = cells.size();
      for (const auto c : apart_probe_.cells(layer.index)) cells.push_back(static_cast<int>(c));
      ASSERT_EQ(cells.size(), held + tokens);
      auto asks = asking(apart_probe_, layer.index, static_cast<int>(h), tokens);
      for (std::size_t t = 0; t < tokens; ++t) asks[t].visible = held + t + 1;
      const Vectors keys = keys_in(probed, static_cast<int>(h), cells);
      rank(layer.index, h, scores_by(options_.cache, probed, asks, keys, held));
    }
  }

  // The guide saw the same in both contexts.
  void compare_queries() {
    for (const auto& [layer, oracles] : oracles_) {
      double apart = 0.0;
      double size = 0.0;
      for (std::size_t t = 0; t < probe_.queries(layer).size(); ++t) {
        const auto& a = probe_.queries(layer)[t];
        const auto& b = apart_probe_.queries(layer)[t];
        for (std::size_t h = 0; h < a.size(); ++h) {
          for (std::size_t i = 0; i < a[h].size(); ++i) {
            apart += (a[h][i] - b[h][i]) * (a[h][i] - b[h][i]);
            size += a[h][i] * a[h][i];
          }
        }
      }
      query_difference_ = std::max(query_difference_, std::sqrt(apart / size));
    }
  }

  void expect_rule(const std::string& when) {
    for (const BoundLayer& layer : bounded_.evictor().snapshot()) {
      if (!oracles_.contains(layer.index)) continue;
      for (std::size_t h = 0; h < layer.rows.heads.size(); ++h) {
        HeadOracle& oracle = oracles_[layer.index][h];
        const Positions left = difference(oracle.positions(), layer.rows.heads[h].positions);
        const auto victims = victims_of(oracle.positions(), layer.index, h);
        evictions_ += static_cast<int>(victims.size());
        if (left != victims)
          expect_near_tie(oracle.positions(), layer.index, h, left, victims, when);
        oracle.evict(left);
        EXPECT_EQ(oracle.positions(), layer.rows.heads[h].positions) << when;
      }
    }
    check(when);
  }

  Positions victims_of(const Positions& held, int layer, std::size_t head) const {
    const CacheConfig& cache = options_.cache;
    const int rows = static_cast<int>(held.size());
    if (rows <= cache.budget) return {};
    std::vector<int> order;
    for (int r = cache.n_sink; r < rows - cache.protected_tail(); ++r) order.push_back(r);
    const auto& places = places_.at(layer)[head];
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return places[static_cast<std::size_t>(a)] > places[static_cast<std::size_t>(b)];
    });
    Positions out;
    for (int i = 0; i < rows - cache.budget; ++i) {
      out.push_back(held[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])]);
    }
    std::sort(out.begin(), out.end());
    return out;
  }

  // What left wrongly and what stayed wrongly look alike to one of the guides.
  void expect_near_tie(const Positions& held, int layer, std::size_t head, const Positions& left,
                       const Positions& victims, const std::string& when) {
    const Positions wrongly_left = difference(left, victims);
    const Positions wrongly_kept = difference(victims, left);
    near_ties_ += static_cast<int>(wrongly_left.size());
    ASSERT_EQ(wrongly_left.size(), wrongly_kept.size()) << when;
    const auto rank_of = [&](Position position) {
      return static_cast<std::size_t>(std::lower_bound(held.begin(), held.end(), position) -
                                      held.begin());
    };
    const auto& by_guide = scores_.at(layer)[head];
    for (std::size_t i = 0; i < wrongly_left.size(); ++i) {
      double least = std::numeric_limits<double>::infinity();
      for (const auto& scores : by_guide) {
        for (const Position kept : wrongly_kept) {
          const double a = scores[rank_of(wrongly_left[i])];
          const double b = scores[rank_of(kept)];
          least = std::min(least, std::fabs(a - b) / std::max({a, b, 1e-30}));
        }
      }
      EXPECT_LE(least, kTie) << when << ", layer " << layer << ", head " << head << ": position "
                             << wrongly_left[i] << " left against the rule";
    }
  }

  void check(const std::string& when) {
    expect_consistent(bounded_, when);
    book_.expect_matches(bounded_.evictor(), when, /*freed_rows_are_poisoned=*/true);
  }

  KvProbe probe_;
  KvProbe apart_probe_;
  BoundOptions options_;
  Bounded bounded_;
  RowBook book_;
  ContextPtr apart_;  // plain; after its probe
  std::map<int, std::vector<HeadOracle>> oracles_;
  std::vector<BoundLayer> held_;                                         // what the guides see
  std::map<int, std::vector<std::vector<int>>> places_;                  // [layer][head][rank]
  std::map<int, std::vector<std::vector<std::vector<double>>>> scores_;  // and [guide]
  std::vector<float> logits_;  // after the last token of the text
  int evictions_ = 0;
  int near_ties_ = 0;
  double query_difference_ = 0.0;
};

struct Reading {
  std::size_t piece = 40;
  int pieces = 5;
  std::vector<std::vector<llama_token>> guides;
  int tail = 0;  // of the last piece
  int steps = 10;
};

void expect_rule(llama_model* model, const std::set<int>& layers, const BoundOptions& options,
                 std::span<const llama_token> text, const Reading& reading) {
  GuidedStream stream(model, layers, options);
  for (int i = 0; i < reading.pieces; ++i) {
    const bool by_tail = i + 1 == reading.pieces && reading.tail > 0;
    const auto piece = text.subspan(static_cast<std::size_t>(i) * reading.piece, reading.piece);
    stream.read(piece, reading.guides, by_tail ? reading.tail : 0);
    if (testing::Test::HasFailure()) return;
  }
  std::size_t heads = 0;
  for (const auto& layer : stream.bounded().evictor().snapshot()) {
    if (layers.contains(layer.index)) heads += layer.rows.heads.size();
  }
  EXPECT_EQ(stream.evictions(),
            static_cast<int>(heads) *
                (static_cast<int>(reading.piece) * reading.pieces - options.cache.budget));
  for (int i = 0; i < reading.steps && !testing::Test::HasFailure(); ++i) stream.step();
  EXPECT_LE(stream.near_ties(), stream.evictions() / 50);
  EXPECT_LT(stream.query_difference(), kQueryTolerance);
}

void expect_rule(const BoundOptions& options, const Reading& reading) {
  // A layer near the input, whose keys depend on the token alone, and two whose keys do not.
  expect_rule(test_model(), {0, 11, 29}, options, prose_tokens(400), reading);
}

void expect_rule(const TinyModel& description, const std::set<int>& layers) {
  const ModelPtr model = make_tiny_model(description);
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    SCOPED_TRACE(to_string(queries));
    expect_rule(model.get(), layers,
                {.cache = small_cache("morphkv", queries), .call_tokens = 64, .guide_tokens = 10},
                noise_tokens(400, kVocab), {.guides = {noise_tokens(10, kVocab, 7)}});
  }
}

BoundOptions guided_options(QuerySource queries = QuerySource::kAttention) {
  BoundOptions options{
      .cache = small_cache("morphkv", queries), .call_tokens = 64, .guide_tokens = 10};
  options.cache.pool = 7;
  return options;
}

Tokens guide_tokens(int n) {
  const Tokens text = prose_tokens(400);
  return {text.end() - n, text.end()};
}

TEST(EvictorGuideOracle, KeepsTheRowsThatTheGuideEvaluatedApartAttendsTo) {
  expect_rule(guided_options(), {.guides = {guide_tokens(10)}});
}

TEST(EvictorGuideOracle, WithMaximumFusionAndARecentTailFollowsTheRule) {
  BoundOptions options = guided_options();
  options.cache.fusion = Fusion::kMax;
  options.cache.recent = 20;
  options.cache.window = 3;
  options.cache.n_sink = 0;
  expect_rule(options, {.guides = {guide_tokens(10)}});
}

TEST(EvictorGuideOracle, StoredKeysAskInTheirPlaceWithTheKeysPolicy) {
  expect_rule(guided_options(QuerySource::kKeys), {.guides = {guide_tokens(10)}});
}

TEST(EvictorGuideOracle, QuantisedRowsFollowTheRule) {
  BoundOptions options = guided_options();
  options.type_k = options.type_v = GGML_TYPE_Q8_0;
  expect_rule(options, {.pieces = 3, .guides = {guide_tokens(10)}});
  options.type_k = options.type_v = GGML_TYPE_Q4_0;
  expect_rule(options, {.pieces = 3, .guides = {guide_tokens(10)}});
  options = guided_options(QuerySource::kKeys);
  options.type_k = GGML_TYPE_Q4_0;
  expect_rule(options, {.pieces = 3, .guides = {guide_tokens(10)}});
}

TEST(EvictorGuideOracle, ABudgetOfOneRowMoreThanIsProtectedFollowsTheRule) {
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    BoundOptions options = guided_options(queries);
    options.cache.budget = 13;  // 4 sinks and a window of 8
    options.cache.pool = 1;
    options.micro_batch = 32;
    expect_rule(options, {.piece = 20, .guides = {guide_tokens(10)}});
  }
}

TEST(EvictorGuideOracle, SoftCappedLogitsFollowTheRule) {
  expect_rule({.architecture = "gemma2", .n_layer = 4, .sliding_window = 32}, {1, 3});
}

TEST(EvictorGuideOracle, LayersBesideSlidingOnesFollowTheRule) { expect_rule(kSliding, {1, 3}); }

TEST(EvictorGuideOracle, OneLatentHeadFollowsTheRule) {
  expect_rule({.architecture = "deepseek2", .mla = true}, {0, 1});
}

TEST(EvictorGuideOracle, SeveralGuidesShareTheBudget) {
  BoundOptions options = guided_options();
  options.guide_tokens = 20;
  expect_rule(options, {.guides = {guide_tokens(20), prose_tokens(7), guide_tokens(1)}});
}

TEST(EvictorGuideOracle, AGuideMayBeLongerThanAPiece) {
  BoundOptions options = guided_options();
  options.guide_tokens = 60;
  options.call_tokens = 80;
  expect_rule(options, {.piece = 20, .pieces = 8, .guides = {guide_tokens(60)}});
}

TEST(EvictorGuideOracle, AnEndTokenInAGuideIsATokenLikeOthers) {
  Tokens guide = guide_tokens(10);
  guide[4] = llama_vocab_eos(llama_model_get_vocab(test_model()));
  ASSERT_GE(guide[4], 0);
  guide.back() = guide[4];
  expect_rule(guided_options(), {.pieces = 3, .guides = {guide}});
}

TEST(EvictorGuideOracle, ThePromptsOwnTailAsksAtItsEndAndStays) {
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    BoundOptions options = guided_options(queries);
    options.guide_tokens = 24;
    expect_rule(options, {.pieces = 3, .guides = {guide_tokens(10)}, .tail = 24});
  }
}

}  // namespace
}  // namespace morphkv::test

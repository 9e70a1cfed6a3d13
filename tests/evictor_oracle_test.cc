// The evictor gives up the positions that the rule, written plainly in double
// precision (oracle.h), gives up, from the queries and key rows that the engine itself computed: on
// the trained model, and on tiny ones for what that model does not have.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <vector>

#include "kv_probe.h"
#include "model_support.h"
#include "oracle.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using Positions = std::vector<Position>;

// The key of a row in the book, K before V.
std::vector<float> key_of(const std::string& row, ggml_type type, int dim) {
  std::vector<float> key(static_cast<std::size_t>(dim));
  ggml_get_type_traits(type)->to_float(row.data(), key.data(), dim);
  return key;
}

Positions difference(const Positions& a, const Positions& b) {
  Positions out;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(out));
  return out;
}

class OracleStream {
 public:
  OracleStream(llama_model* model, const std::set<int>& layers, const BoundOptions& options)
      : cache_(options.cache), stream_(model, options, layers) {
    for (const int layer : layers) {
      const ProbedLayer& probed = stream_.probe().layer(layer);
      for (int h = 0; h < probed.n_heads; ++h) {
        oracles_[layer].emplace_back(options.cache, probed.scale, probed.softcap);
      }
    }
  }

  void feed(std::span<const llama_token> tokens) {
    const Position first = stream_.evictor().offset();
    ASSERT_EQ(stream_.feed_unevicted(tokens), 0);
    for (auto& [layer, oracles] : oracles_) queries_[layer] = stream_.probe().queries(layer);
    stream_.evict();
    for (const auto& layer : stream_.evictor().snapshot()) {
      if (!oracles_.contains(layer.index)) continue;
      for (int h = 0; h < static_cast<int>(layer.rows.heads.size()); ++h) {
        SCOPED_TRACE("layer " + std::to_string(layer.index) + ", head " + std::to_string(h) +
                     ", call at token " + std::to_string(first));
        const Positions& held = layer.rows.heads[static_cast<std::size_t>(h)].positions;
        if (cache_.queries == QuerySource::kAttention) {
          expect_evicts_at_the_end(layer.index, h, first, tokens.size(), held);
        } else {
          expect_evicts_per_token(layer.index, h, first, tokens.size(), held);
        }
      }
    }
  }
  void move(int call_tokens) { stream_.move(call_tokens); }
  int heads() const {
    int n = 0;
    for (const auto& [layer, oracles] : oracles_) n += static_cast<int>(oracles.size());
    return n;
  }
  int evictions() const { return evictions_; }
  int near_ties() const { return near_ties_; }

 private:
  void append(HeadOracle& oracle, int layer, int head, Position position) {
    const ProbedLayer& probed = stream_.probe().layer(layer);
    oracle.append(key_of(stream_.book().row(layer, head, position), probed.k->type, probed.dim_k));
  }

  void ask(HeadOracle& oracle, int layer, int head, std::size_t token) {
    const auto& query = queries_[layer].at(token);
    const auto group = query.size() / oracles_[layer].size();
    const auto first = query.begin() + static_cast<std::ptrdiff_t>(group) * head;
    oracle.ask({first, first + static_cast<std::ptrdiff_t>(group)});
  }

  // All of a call leave together, scored by the model's queries.
  void expect_evicts_at_the_end(int layer, int head, Position first, std::size_t tokens,
                                const Positions& held) {
    HeadOracle& oracle = oracles_[layer][static_cast<std::size_t>(head)];
    for (std::size_t t = 0; t < tokens; ++t) {
      append(oracle, layer, head, first + static_cast<Position>(t));
      ask(oracle, layer, head, t);
    }
    const Positions left = difference(oracle.positions(), held);
    if (left != oracle.victims()) {
      ++near_ties_;
      EXPECT_TRUE(oracle.is_near_tie_with(left)) << "other positions left than the rule says";
    }
    evictions_ += static_cast<int>(left.size());
    oracle.evict(left);
    EXPECT_EQ(oracle.positions(), held);
  }

  // One leaves after each token over the budget, scored by the stored keys.
  void expect_evicts_per_token(int layer, int head, Position first, std::size_t tokens,
                               const Positions& held) {
    HeadOracle& oracle = oracles_[layer][static_cast<std::size_t>(head)];
    for (std::size_t t = 0; t < tokens; ++t) {
      append(oracle, layer, head, first + static_cast<Position>(t));
      Positions victim = oracle.victims();
      if (victim.empty()) continue;
      if (std::binary_search(held.begin(), held.end(), victim.front())) {
        // The rule's victim is still there: only another one with practically the same score may
        // have gone in its place.
        ++near_ties_;
        const Positions gone = difference(oracle.positions(), held);
        const auto at = std::find_if(gone.begin(), gone.end(), [&](Position position) {
          return oracle.is_near_tie_with({position});
        });
        ASSERT_NE(at, gone.end()) << "position " << victim.front() << " should have left";
        victim = {*at};
      }
      ++evictions_;
      oracle.evict(victim);
    }
    EXPECT_EQ(oracle.positions(), held);
  }

  CacheConfig cache_;
  WatchedStream stream_;
  std::map<int, std::vector<KvProbe::Query>> queries_;  // of the last call
  std::map<int, std::vector<HeadOracle>> oracles_;
  int evictions_ = 0;
  int near_ties_ = 0;
};

// `text` in these pieces; 0 stands for a move to another context, one larger and one smaller.
void expect_rule(OracleStream& stream, const CacheConfig& cache,
                 const std::vector<llama_token>& text, const std::vector<int>& pieces) {
  std::size_t fed = 0;
  int call_tokens = 0;
  for (const int piece : pieces) {
    if (piece == 0) stream.move(call_tokens = 300 - call_tokens);
    if (piece > 0) stream.feed(std::span(text).subspan(fed, static_cast<std::size_t>(piece)));
    if (testing::Test::HasFailure()) return;
    fed += static_cast<std::size_t>(piece);
  }
  EXPECT_EQ(stream.evictions(), stream.heads() * (static_cast<int>(fed) - cache.budget));
  // Rounding may decide now and then, not often: else this test shows little.
  EXPECT_LE(stream.near_ties(), stream.evictions() / 50);
}

void expect_rule(const BoundOptions& options, const std::vector<int>& pieces) {
  // A layer near the input, whose keys depend on the token alone, and two whose keys do not.
  OracleStream stream(test_model(), {0, 11, 29}, options);
  expect_rule(stream, options.cache, prose_tokens(400), pieces);
}

void expect_rule(const TinyModel& description, const std::set<int>& layers) {
  const llama_cpp::ModelPtr model = make_tiny_model(description);
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    SCOPED_TRACE(to_string(queries));
    const CacheConfig cache = small_cache("morphkv", queries);
    OracleStream stream(model.get(), layers, {.cache = cache});
    expect_rule(stream, cache, noise_tokens(400, description.n_vocab),
                {50, 14, 1, 1, 1, 64, 1, 1, 30, 0, 1, 1, 5, 0, 1, 20});
  }
}

TEST(EvictorOracle, AttentionPolicyEvictsWhatTheRuleSaysFromTheModelsQueries) {
  CacheConfig cache = small_cache();
  cache.pool = 7;
  expect_rule({.cache = cache}, {50, 33, 1, 1, 1, 5, 64, 1, 1, 1, 7, 8, 9, 1, 1});
}

TEST(EvictorOracle, AttentionPolicyWithMaximumFusionAndARecentTailFollowsTheRule) {
  CacheConfig cache = small_cache();
  cache.fusion = Fusion::kMax;
  cache.recent = 20;
  cache.window = 3;
  cache.n_sink = 0;
  expect_rule({.cache = cache}, {64, 1, 1, 1, 1, 1, 20, 2, 1, 1});
}

TEST(EvictorOracle, KeysPolicyEvictsWhatTheRuleSaysFromTheStoredKeys) {
  expect_rule({.cache = small_cache("morphkv", QuerySource::kKeys)},
              {50, 33, 1, 1, 1, 5, 64, 1, 1, 1, 7});
}

TEST(EvictorOracle, QuantisedKeysAreScoredAsTheNumbersTheyStandFor) {
  expect_rule({.cache = small_cache(), .type_k = GGML_TYPE_Q8_0, .type_v = GGML_TYPE_Q8_0},
              {64, 20, 1, 1, 1, 9, 1});
  expect_rule({.cache = small_cache("morphkv", QuerySource::kKeys), .type_k = GGML_TYPE_Q4_0},
              {64, 20, 1, 1, 1, 9, 1});
}

TEST(EvictorOracle, TheRuleGoesOnAsBeforeInANewContext) {
  expect_rule({.cache = small_cache()}, {64, 40, 1, 0, 1, 1, 1, 5, 0, 1, 1, 20});
  expect_rule({.cache = small_cache("morphkv", QuerySource::kKeys)},
              {64, 40, 1, 0, 1, 1, 1, 5, 0, 1, 1, 20});
}

TEST(EvictorOracle, SoftCappedLogitsFollowTheRule) {
  expect_rule({.architecture = "gemma2", .n_layer = 4, .sliding_window = 32}, {1, 3});
}

TEST(EvictorOracle, OneLatentHeadFollowsTheRule) {
  expect_rule({.architecture = "deepseek2", .mla = true}, {0, 1});
}

TEST(EvictorOracle, HeadsWithoutAGroupFollowTheRule) {
  expect_rule({.n_head = 3, .n_head_kv = 3, .head_dim = 40}, {0, 1});
}

}  // namespace
}  // namespace morphkv::test

#include "morphkv/policy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <numeric>

#include "dot_slots.h"
#include "h2o.h"
#include "kernels/kernels.h"
#include "morphkv/scores.h"
#include "morphkv/window_logits.h"

namespace morphkv {
namespace {

// What the two query sources share: a ring of window weights, fused into scores.
class WindowHead : public HeadPolicy {
 public:
  WindowHead(const CacheConfig& config, QuerySource source, int max_slots)
      : source_(source), fusion_(config.fusion), window_(source, config.window, max_slots) {}

  void score(const KeepSet& keep, std::span<float> scores, Workspace& ws) override {
    fuse_window(window_, fusion_, keep, ws.slot_scores, scores);
  }
  // Each token of the guide asks as a token of the window would, with its query or its stored key.
  // A row counts as much as the token and query head that looks at it most: a question has words
  // that look nowhere in particular, and a mean over them would drown those that do
  // (docs/guided.md).
  void score_by_guide(const KeepSet& keep, const NewRows& guide, std::span<float> scores,
                      Workspace& ws) override {
    ws.seen = keep.held();
    for (const int slot : guide.slots) ws.seen.add(slot);
    std::fill_n(ws.slot_scores.begin(), ws.seen.limit(), 0.0f);
    AttentionPass pass(asked_by(source_, guide, guide.slots, ws.seen, Fusion::kMax), ws);
    while (pass.next()) pass.add_to(ws.slot_scores.data());
    for (int rank = 0; rank < keep.size(); ++rank) {
      scores[rank] = ws.slot_scores[keep.slots()[rank]];
    }
  }
  void prefetch(int slot_limit) const override { window_.prefetch(slot_limit); }
  void erase(int slot) override { window_.erase(slot); }
  void move(int from, int to) override { window_.move(from, to); }
  void shift(int first, int last, int by) override { window_.shift(first, last, by); }
  void clear() override { window_.clear(); }
  void resize(int max_slots) override { window_.resize(max_slots); }
  void save(const KeepSet& keep, std::vector<float>& out) const override {
    window_.save(keep.slots(), out);
  }
  bool load(const KeepSet& keep, std::span<const float> saved) override {
    return window_.load(keep.slots(), saved);
  }

 protected:
  QuerySource source_;
  Fusion fusion_;
  WindowLogits window_;
};

// The rule of the reference page: stored keys ask, every row answers, one eviction per token.
class KeysHead final : public WindowHead {
 public:
  KeysHead(const CacheConfig& config, int max_slots)
      : WindowHead(config, QuerySource::kKeys, max_slots) {}

  void append(const KeepSet& keep, const NewRows& rows, int first, int /*count*/,
              Workspace& ws) override {
    const int in_block = first % Workspace::kBlock;
    if (in_block == 0) multiply_block(keep, rows, first, ws);
    window_.push_key(keep.slots().back(), keep.held(), ws.logits.data() + block_offset(in_block));
  }

  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<KeysHead>(*this); }

 private:
  std::size_t block_offset(int token) const {
    return static_cast<std::size_t>(token) * static_cast<std::size_t>(window_.max_slots());
  }

  // Logits of the next tokens of the call with the rows held and with one another: one blocked
  // product.
  void multiply_block(const KeepSet& keep, const NewRows& rows, int first, Workspace& ws) {
    const auto tokens = rows.slots.subspan(
        static_cast<std::size_t>(first),
        std::min<std::size_t>(Workspace::kBlock,
                              rows.slots.size() - static_cast<std::size_t>(first)));
    const int dim = rows.keys.dim;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      kernels::to_float(rows.keys.row(tokens[t]), rows.keys.dtype, dim,
                        ws.queries.data() + t * static_cast<std::size_t>(dim));
    }
    // The first token of the block is already held; the others follow.
    ws.seen = keep.held();
    for (const int slot : tokens) ws.seen.add(slot);
    dot_slots({.queries = ws.queries.data(),
               .query_stride = dim,
               .n_queries = static_cast<int>(tokens.size()),
               .rows = rows.keys,
               .first_slot = 0,
               .last_slot = 0,
               .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
               .out = ws.logits.data(),
               .out_stride = window_.max_slots()},
              ws.seen);
  }
};

// The rule of the paper: the model's own queries ask, causally; all of a call leave at its end.
class AttentionHead final : public WindowHead {
 public:
  AttentionHead(const CacheConfig& config, int max_slots)
      : WindowHead(config, QuerySource::kAttention, max_slots) {}

  void append(const KeepSet& keep, const NewRows& rows, int /*first*/, int count,
              Workspace& ws) override {
    // Only the last `window` tokens still ask when the call is over.
    const auto asking = static_cast<std::size_t>(std::min(count, window_.window()));
    AttentionPass pass(asked_by(source_, rows, rows.slots.last(asking), keep.held(), fusion_), ws);
    while (pass.next()) pass.add_to(window_.push_query());
  }

  std::unique_ptr<HeadPolicy> clone() const override {
    return std::make_unique<AttentionHead>(*this);
  }
};

class StreamingHead final : public HeadPolicy {
 public:
  void append(const KeepSet&, const NewRows&, int, int, Workspace&) override {}
  void score(const KeepSet&, std::span<float> scores, Workspace&) override {
    std::iota(scores.begin(), scores.end(), 0.0f);  // the oldest leaves
  }
  std::unique_ptr<HeadPolicy> clone() const override {
    return std::make_unique<StreamingHead>(*this);
  }
};

class RandomHead final : public HeadPolicy {
 public:
  RandomHead(std::uint64_t seed, HeadId id)
      : stream_(mix(seed + mix((static_cast<std::uint64_t>(id.layer) << 32) +
                               static_cast<std::uint64_t>(id.head)))) {}

  void append(const KeepSet&, const NewRows&, int, int, Workspace&) override {}
  void score(const KeepSet& keep, std::span<float> scores, Workspace&) override {
    for (std::size_t rank = 0; rank < scores.size(); ++rank) {
      const auto bits = mix(stream_ ^ static_cast<std::uint64_t>(keep.positions()[rank]));
      scores[rank] = static_cast<float>(bits >> 40) * 0x1p-24f;  // uniform in [0, 1)
    }
  }
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<RandomHead>(*this); }

 private:
  // SplitMix64 finaliser (Steele et al., OOPSLA 2014): a hash, so that a row's priority never
  // changes.
  static constexpr std::uint64_t mix(std::uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

  std::uint64_t stream_;
};

// A policy that is no more than a name, its traits and a way to make heads.
class NamedPolicy final : public Policy {
 public:
  using MakeHead = std::unique_ptr<HeadPolicy> (*)(const CacheConfig&, HeadId, int max_slots);

  NamedPolicy(CacheConfig config, PolicyTraits traits, MakeHead make)
      : config_(std::move(config)), traits_(traits), make_(make) {}

  std::string_view name() const override { return config_.policy; }
  PolicyTraits traits() const override { return traits_; }
  std::unique_ptr<HeadPolicy> make_head(HeadId id, int max_slots) const override {
    return make_(config_, id, max_slots);
  }

 private:
  CacheConfig config_;
  PolicyTraits traits_;
  MakeHead make_;
};

std::unique_ptr<Policy> make_morphkv(const CacheConfig& config) {
  if (config.queries == QuerySource::kKeys) {
    return std::make_unique<NamedPolicy>(
        config,
        PolicyTraits{.needs_keys = true, .evicts_per_token = true, .pools = true, .guided = true},
        [](const CacheConfig& c, HeadId, int max_slots) -> std::unique_ptr<HeadPolicy> {
          return std::make_unique<KeysHead>(c, max_slots);
        });
  }
  return std::make_unique<NamedPolicy>(
      config,
      PolicyTraits{.needs_keys = true, .needs_queries = true, .pools = true, .guided = true},
      [](const CacheConfig& c, HeadId, int max_slots) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<AttentionHead>(c, max_slots);
      });
}

std::unique_ptr<Policy> make_h2o(const CacheConfig& config) {
  return std::make_unique<NamedPolicy>(
      config, h2o_traits(config),
      [](const CacheConfig& c, HeadId, int max_slots) { return make_h2o_head(c, max_slots); });
}

std::unique_ptr<Policy> make_streaming(const CacheConfig& config) {
  return std::make_unique<NamedPolicy>(
      config, PolicyTraits{}, [](const CacheConfig&, HeadId, int) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<StreamingHead>();
      });
}

std::unique_ptr<Policy> make_random(const CacheConfig& config) {
  return std::make_unique<NamedPolicy>(
      config, PolicyTraits{},
      [](const CacheConfig& c, HeadId id, int) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<RandomHead>(c.seed, id);
      });
}

std::unique_ptr<Policy> make_full(const CacheConfig& config) {
  return std::make_unique<NamedPolicy>(
      config, PolicyTraits{.evicts = false},
      [](const CacheConfig&, HeadId, int) -> std::unique_ptr<HeadPolicy> {
        return std::make_unique<StreamingHead>();
      });
}

struct Entry {
  std::string_view name;
  std::unique_ptr<Policy> (*make)(const CacheConfig&);
};

constexpr std::array kPolicies = {
    Entry{"morphkv", make_morphkv}, Entry{"h2o", make_h2o},   Entry{"streaming", make_streaming},
    Entry{"random", make_random},   Entry{"full", make_full},
};

const Entry* find_policy(std::string_view name) {
  const auto* const entry = std::find_if(kPolicies.begin(), kPolicies.end(),
                                         [&](const Entry& e) { return e.name == name; });
  return entry == kPolicies.end() ? nullptr : entry;
}

}  // namespace

Workspace::Workspace(int max_slots, int max_group, int max_dim)
    : logits(static_cast<std::size_t>(std::max(kBlock, max_group)) * max_slots),
      queries(static_cast<std::size_t>(std::max(kBlock, max_group)) * max_dim),
      factors(std::max(kBlock, max_group)),
      slot_scores(max_slots),
      scores(max_slots),
      pooled(3 * static_cast<std::size_t>(max_slots)),
      ranks(2 * static_cast<std::size_t>(max_slots)),
      seen(max_slots) {}

std::unique_ptr<Policy> make_policy(const CacheConfig& config) {
  validate(config);
  return find_policy(config.policy)->make(config);
}

bool is_policy_name(std::string_view name) { return find_policy(name) != nullptr; }

std::vector<std::string_view> policy_names() {
  std::vector<std::string_view> names;
  for (const Entry& entry : kPolicies) names.push_back(entry.name);
  return names;
}

std::string policy_names_text() {
  std::string text;
  for (const std::string_view name : policy_names()) {
    if (!text.empty()) text += ", ";
    text += name;
  }
  return text;
}

}  // namespace morphkv

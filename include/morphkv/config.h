// The numbers that govern retention, and their limits. Every constructor, flag and JSON field that
// carries one of them goes through validate().
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace morphkv {

// What stands in for the queries of the window (ARCHITECTURE.md, "query source").
enum class QuerySource : std::uint8_t {
  kKeys,       // the stored keys of the window: the rule of the reference page
  kAttention,  // the model's own queries: the rule of the paper (arXiv 2503.00979)
};

// How the window's weights of a row become one score.
enum class Fusion : std::uint8_t { kMean, kMax };

inline constexpr int kMaxBudget = 1 << 24;

struct CacheConfig {
  int budget = 512;  // most rows of a KV head between calls
  int n_sink = 4;    // first positions, never evicted
  int window = 8;    // last tokens whose queries score the others; protected
  int recent = 0;    // rows of the protected tail, at least `window`; 0 = `window`
  int pool = 1;      // odd width of the neighbour maximum over scores; 1 = off
  Fusion fusion = Fusion::kMean;
  QuerySource queries = QuerySource::kKeys;
  std::string policy = "morphkv";  // a name that policy.h knows
  std::uint64_t seed = 0;          // of the policy `random`

  // Rows at the end of the keep set that are never evicted.
  int protected_tail() const { return recent > window ? recent : window; }

  bool operator==(const CacheConfig&) const = default;
};

// Throws std::invalid_argument that names the field, its value, the limit and the fix:
// budget in [1, kMaxBudget], window in [1, budget], n_sink >= 0, n_sink < budget, recent 0 or >=
// window, n_sink + protected_tail() < budget, pool odd and >= 1, policy known.
void validate(const CacheConfig& config);

// The fields that differ, in words: "budget 16 (here 32), window 4 (here 8)"; "" when none do.
std::string differences(const CacheConfig& other, const CacheConfig& here);

std::string_view to_string(QuerySource source);
std::string_view to_string(Fusion fusion);

}  // namespace morphkv

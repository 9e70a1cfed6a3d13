// The numbers that govern retention, and their limits. Every constructor, flag and JSON field that
// carries one of them goes through validate().
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

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

// A field of CacheConfig as the world outside knows it. Whatever reads, prints, compares or saves
// settings goes through the table kCacheFields, so each of these facts is said once.
template <typename T>
struct CacheField {
  std::string_view name;  // of JSON fields, keyword arguments and messages
  std::string_view flag;  // of command lines and arms of `morphkv eval`; "" = none
  T CacheConfig::*member;
  int least = 0;  // of a number; what fields demand of one another is validate()'s matter
  int most = 0;
  std::string_view help;
};

// In the order of saved files.
inline constexpr std::tuple kCacheFields{
    CacheField<int>{"budget", "budget", &CacheConfig::budget, 1, kMaxBudget,
                    "rows per KV head and layer"},
    CacheField<int>{"n_sink", "sinks", &CacheConfig::n_sink, 0, kMaxBudget,
                    "first positions that are never evicted"},
    CacheField<int>{"window", "window", &CacheConfig::window, 1, kMaxBudget,
                    "last tokens whose queries score the others; protected"},
    CacheField<int>{"recent", "recent", &CacheConfig::recent, 0, kMaxBudget,
                    "protected tail, at least the window; 0 = the window"},
    CacheField<int>{"pool", "pool", &CacheConfig::pool, 1, kMaxBudget,
                    "odd width of the neighbour maximum over scores; 1 = off"},
    CacheField<Fusion>{"fusion", "fuse", &CacheConfig::fusion, 0, 0,
                       "how the window's weights become one score"},
    CacheField<QuerySource>{"queries", "queries", &CacheConfig::queries, 0, 0,
                            "what asks: the model's queries, or the stored keys in their place"},
    CacheField<std::string>{"policy", "policy", &CacheConfig::policy, 0, 0, "which rows to keep"},
    CacheField<std::uint64_t>{"seed", "", &CacheConfig::seed, 0, 0, "of policy random"},
};

inline constexpr const auto& kBudgetField = std::get<0>(kCacheFields);
inline constexpr const auto& kSinkField = std::get<1>(kCacheFields);
inline constexpr const auto& kPolicyField = std::get<7>(kCacheFields);
inline constexpr const auto& kSeedField = std::get<8>(kCacheFields);

// Calls visit(field) for each of them, in order.
template <typename Visit>
constexpr void for_each_cache_field(Visit&& visit) {
  std::apply([&](const auto&... field) { (visit(field), ...); }, kCacheFields);
}

// Throws std::invalid_argument that names the field, its value, the limit and the fix:
// budget in [1, kMaxBudget], window in [1, budget], n_sink >= 0, n_sink < budget, recent 0 or >=
// window, n_sink + protected_tail() < budget, pool odd and >= 1, policy known.
void validate(const CacheConfig& config);

// The fields that differ, in words: "budget 16 (here 32), window 4 (here 8)"; "" when none do.
std::string differences(const CacheConfig& other, const CacheConfig& here);

std::string_view to_string(QuerySource source);
std::string_view to_string(Fusion fusion);

// The values of a choice, in the order of help texts and messages.
template <typename T>
inline constexpr std::array<T, 0> kChoices{};
template <>
inline constexpr std::array kChoices<QuerySource>{QuerySource::kAttention, QuerySource::kKeys};
template <>
inline constexpr std::array kChoices<Fusion>{Fusion::kMean, Fusion::kMax};

// The choice of that name. Throws std::invalid_argument that names `field`, the word and the
// choices.
template <typename Choice>
Choice choice_of(std::string_view field, std::string_view word) {
  std::string words;
  for (const Choice choice : kChoices<Choice>) {
    if (to_string(choice) == word) return choice;
    words += (words.empty() ? "" : ", ") + std::string(to_string(choice));
  }
  throw std::invalid_argument(std::string(field) + " '" + std::string(word) +
                              "' is not known: use one of " + words);
}

// A field's value as text: a number, a word.
template <typename T>
std::string value_text(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::string(to_string(value));
  } else if constexpr (std::is_same_v<T, std::string>) {
    return value;
  } else {
    return std::to_string(value);
  }
}

}  // namespace morphkv

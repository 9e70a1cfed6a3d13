#include "morphkv/config.h"

#include <stdexcept>

#include "morphkv/policy.h"

namespace morphkv {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

std::string number(const char* name, int value) {
  return std::string(name) + " " + std::to_string(value);
}

}  // namespace

void validate(const CacheConfig& c) {
  const std::string budget = number("budget", c.budget);
  require(c.budget >= 1, budget + " is below 1: give at least 1 row per KV head");
  require(c.budget <= kMaxBudget, budget + " is above the limit of " + std::to_string(kMaxBudget) +
                                      " rows: lower the budget, or use policy full");
  require(c.window >= 1, number("window", c.window) + " is below 1: the window must be >= 1 token");
  require(c.n_sink >= 0, number("n_sink", c.n_sink) + " is negative: use 0 for no sinks");
  require(c.n_sink < c.budget, number("n_sink", c.n_sink) + " is not below " + budget +
                                   ": lower n_sink or raise the budget");
  require(c.window <= c.budget, number("window", c.window) + " is above " + budget +
                                    ": lower the window or raise the budget");
  require(c.recent >= 0,
          number("recent", c.recent) + " is negative: use 0 for the window's own length");
  require(c.recent == 0 || c.recent >= c.window,
          number("recent", c.recent) + " is below " + number("window", c.window) +
              ": the protected tail holds at least the window; raise recent or use 0");
  const bool tail_is_window = c.protected_tail() == c.window;
  // 64-bit: both may be large.
  require(std::int64_t{c.n_sink} + c.protected_tail() < c.budget,
          number("n_sink", c.n_sink) + " + " +
              (tail_is_window ? number("window", c.window) : number("recent", c.recent)) +
              " is not below " + budget +
              ": no evictable positions would remain; raise the budget to at least " +
              std::to_string(std::int64_t{c.n_sink} + c.protected_tail() + 1));
  require(
      c.pool >= 1 && c.pool % 2 == 1,
      number("pool", c.pool) + " is not an odd number of at least 1: use 1 (off), 3, 5, 7, ...");
  require(is_policy_name(c.policy),
          "policy '" + c.policy + "' is not known: use one of " + policy_names_text());
}

std::string differences(const CacheConfig& other, const CacheConfig& here) {
  std::string text;
  for_each_cache_field([&](const auto& field) {
    const auto& a = other.*field.member;
    const auto& b = here.*field.member;
    if (a == b) return;
    text += (text.empty() ? "" : ", ") + std::string(field.name) + " " + value_text(a) + " (here " +
            value_text(b) + ")";
  });
  return text;
}

std::string_view to_string(QuerySource source) {
  return source == QuerySource::kKeys ? "keys" : "attention";
}

std::string_view to_string(Fusion fusion) { return fusion == Fusion::kMean ? "mean" : "max"; }

}  // namespace morphkv

// What a cache holds between calls, out and in again. A state from outside is checked as a whole
// before any of it is used.
#include <algorithm>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "morphkv/cache.h"
#include "row_convert.h"

namespace morphkv {
namespace {

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

std::string shape_text(std::int64_t batch, std::int64_t heads, std::int64_t dim, DType dtype) {
  return "B " + std::to_string(batch) + ", H " + std::to_string(heads) + ", D " +
         std::to_string(dim) + ", " + (dtype == DType::kF16 ? "fp16" : "bf16");
}

// Shape, type and the lengths of the arrays. The products cannot overflow: each factor is checked
// first.
void check_shape(const CacheState& s) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  const auto within = [](std::int64_t size) { return size >= 1 && size <= kMost; };
  require(within(s.batch) && within(s.heads) && within(s.dim) &&
              (s.dtype == DType::kF16 || s.dtype == DType::kBF16),
          "the state has an impossible shape or type");
  const auto n = static_cast<std::uint64_t>(s.batch * s.heads);
  const auto dim = static_cast<std::uint64_t>(s.dim);
  require(!s.positions.empty() && s.positions.size() % n == 0 && s.keys.size() % dim == 0 &&
              s.keys.size() / dim == s.positions.size() && s.values.size() == s.keys.size() &&
              s.memory.size() == n,
          "the state's arrays do not fit its shape");
  require(s.offset >= 1 && s.offset <= std::int64_t{1} << 48 && s.saturated >= 0,
          "the state's offset " + std::to_string(s.offset) + " or count of saturated values " +
              std::to_string(s.saturated) + " is impossible");
}

// One head's positions: ascending, and the sinks and the recent tail among them.
void check_positions(std::span<const Position> held, Position offset, const CacheConfig& config,
                     std::size_t head) {
  const std::string whose = "the state's positions of head " + std::to_string(head);
  const bool ascending =
      std::adjacent_find(held.begin(), held.end(), std::greater_equal<>()) == held.end();
  require(ascending && held.front() >= 0 && held.back() < offset,
          whose + " do not ascend within [0, offset)");
  const auto rows = static_cast<Position>(held.size());
  const auto sinks = std::min<Position>(config.n_sink, rows);
  const auto tail = std::min<Position>(config.protected_tail(), rows);
  require((sinks == 0 || held[static_cast<std::size_t>(sinks - 1)] == sinks - 1) &&
              held[static_cast<std::size_t>(rows - tail)] == offset - tail,
          whose + " lack a sink or a row of the recent tail");
}

}  // namespace

CacheState MorphKVCache::state() const {
  require(!policy_->traits().evicts || kept() <= config_.budget,
          std::to_string(kept()) + " rows per head are held, the budget is " +
              std::to_string(config_.budget) + ": evict() before you take the state");
  // Empty, though a guide may have fixed the shape.
  if (offset_ == 0) return {config_, 0, 0, 0, DType::kF16, 0, 0, {}, {}, {}, {}};
  MorphKVCache settled = copy();
  CacheState s{config_, batch_, heads_, dim_, dtype_, offset_, saturated_, positions(), {}, {}, {}};
  const Rows keys = settled.keys();
  s.keys.resize(static_cast<std::size_t>(batch_ * heads_ * keys.rows * dim_));
  keys.copy_to(s.keys.data());
  s.values.resize(s.keys.size());
  settled.values().copy_to(s.values.data());
  for (const Head& head : settled.state_heads_) {
    s.memory.emplace_back();
    head.retention.save(s.memory.back());
  }
  return s;
}

void MorphKVCache::set_state(const CacheState& s) {
  require(s.config == config_,
          "the state is of another configuration: " + differences(s.config, config_));
  MorphKVCache restored(config_, policy_, layer_);
  if (s.batch == 0 && s.heads == 0) {
    require(s.offset == 0 && s.saturated == 0 && s.positions.empty() && s.keys.empty() &&
                s.values.empty() && s.memory.empty(),
            "the state has no heads, yet it is not empty");
    *this = std::move(restored);
    return;
  }
  check_shape(s);
  const bool same = state_heads_.empty() ||
                    (s.batch == batch_ && s.heads == heads_ && s.dim == dim_ && s.dtype == dtype_);
  require(same, "the state has " + shape_text(s.batch, s.heads, s.dim, s.dtype) +
                    "; this cache holds " + shape_text(batch_, heads_, dim_, dtype_) +
                    ": reset() it first, or use a new one");
  const bool evicts = policy_->traits().evicts;
  const auto due = evicts ? std::min<Position>(config_.budget, s.offset) : s.offset;
  require(s.rows() == due, "the state holds " + std::to_string(s.rows()) + " rows per head, " +
                               std::to_string(due) + " are due");
  require(all_finite(s.keys, s.dtype) && all_finite(s.values, s.dtype),
          "the state's keys or values contain NaN or infinity");
  const auto n = static_cast<std::size_t>(s.batch * s.heads);
  const auto rows = static_cast<std::size_t>(s.rows());
  for (std::size_t h = 0; h < n; ++h) {
    check_positions(std::span(s.positions).subspan(h * rows, rows), s.offset, config_, h);
  }

  restored.set_shape(s.batch, s.heads, s.dim, s.dtype);
  restored.make_room(s.rows());
  restored.offset_ = s.offset;
  restored.saturated_ = s.saturated;
  const auto elements = rows * static_cast<std::size_t>(s.dim);
  for (std::size_t h = 0; h < n; ++h) {
    const auto positions = std::span(s.positions).subspan(h * rows, rows);
    require(restored.state_heads_[h].retention.load(positions, s.memory[h]),
            "the state's policy memory of head " + std::to_string(h) + " does not fit");
    std::copy_n(s.keys.data() + h * elements, elements,
                restored.row(restored.key_store_, h, restored.state_heads_[h].start));
    std::copy_n(s.values.data() + h * elements, elements,
                restored.row(restored.value_store_, h, restored.state_heads_[h].start));
  }
  *this = std::move(restored);
}

}  // namespace morphkv

#include "morphkv/cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "row_convert.h"

namespace morphkv {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::string shape_text(const ArrayView& array) {
  std::string text = "[";
  for (const auto size : array.shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// Free slots beside the budget, so that rows seldom have to move to make room for the next one.
int slack(int budget) { return std::max(32, budget / 8); }

}  // namespace

void Rows::copy_to(void* out) const {
  auto* to = static_cast<std::uint16_t*>(out);
  const auto values = static_cast<std::size_t>(rows * dim);
  for (const std::uint16_t* block : blocks) {
    if (values > 0) std::memcpy(to, block, values * sizeof(std::uint16_t));
    to += values;
  }
}

MorphKVCache::MorphKVCache(CacheConfig config, int layer)
    : config_(std::move(config)), layer_(layer) {
  policy_ = make_policy(config_);
}

MorphKVCache::MorphKVCache(CacheConfig config, std::shared_ptr<const Policy> policy, int layer)
    : config_(std::move(config)), policy_(std::move(policy)), layer_(layer) {
  validate(config_);
  if (policy_ == nullptr) refuse("the policy is null");
}

MorphKVCache::MorphKVCache(const MorphKVCache& other)
    : config_(other.config_),
      policy_(other.policy_),
      layer_(other.layer_),
      batch_(other.batch_),
      heads_(other.heads_),
      dim_(other.dim_),
      dtype_(other.dtype_),
      group_(other.group_),
      offset_(other.offset_),
      saturated_(other.saturated_),
      capacity_(other.capacity_),
      key_store_(other.key_store_),
      value_store_(other.value_store_),
      workspace_(other.workspace_) {
  state_heads_.reserve(other.state_heads_.size());
  for (const Head& head : other.state_heads_)
    state_heads_.push_back({head.retention.copy(), head.start});
}

KeysAndValues MorphKVCache::update_and_fetch(const ArrayView& keys, const ArrayView& values) {
  return update(keys, values, nullptr, Call::kUpdate);
}

KeysAndValues MorphKVCache::update_and_fetch(const ArrayView& keys, const ArrayView& values,
                                             const ArrayView& queries) {
  return update(keys, values, &queries, Call::kUpdate);
}

KeysAndValues MorphKVCache::extend_and_fetch(const ArrayView& keys, const ArrayView& values) {
  return update(keys, values, nullptr, Call::kExtend);
}

KeysAndValues MorphKVCache::extend_and_fetch(const ArrayView& keys, const ArrayView& values,
                                             const ArrayView& queries) {
  return update(keys, values, &queries, Call::kExtend);
}

KeysAndValues MorphKVCache::guide_and_fetch(const ArrayView& keys, const ArrayView& values) {
  return update(keys, values, nullptr, Call::kGuide);
}

KeysAndValues MorphKVCache::guide_and_fetch(const ArrayView& keys, const ArrayView& values,
                                            const ArrayView& queries) {
  return update(keys, values, &queries, Call::kGuide);
}

void MorphKVCache::evict() {
  settle();
  for (Head& head : state_heads_) head.retention.evict(*workspace_);
  settle();
}

// One call: complete the last eviction, take the new rows in, let every head choose its victims.
KeysAndValues MorphKVCache::update(const ArrayView& keys, const ArrayView& values,
                                   const ArrayView* queries, Call call) {
  if (call == Call::kGuide && !policy_->traits().guided) {
    refuse("policy '" + std::string(policy_->name()) + "' takes no guide: use policy " +
           policy_names_text(&PolicyTraits::guided));
  }
  check(keys, values, queries);
  const bool first_call = state_heads_.empty();
  if (first_call) {
    const bool bf16 = keys.dtype == DType::kBF16 && values.dtype == DType::kBF16;
    set_shape(keys.shape[0], keys.shape[1], keys.shape[3], bf16 ? DType::kBF16 : DType::kF16);
  }
  if (queries != nullptr) group_ = static_cast<int>(queries->shape[1] / heads_);
  settle();
  const int tokens = static_cast<int>(keys.shape[2]);
  const bool in_blocks = call == Call::kUpdate && policy_->traits().evicts_per_token &&
                         kept() <= config_.budget && kept() + tokens > usual_capacity();
  const std::int64_t saturated = saturated_;
  const std::string problem =
      in_blocks ? read_in_blocks(keys, values) : read_at_once(keys, values, queries, call);
  if (!problem.empty() || call == Call::kGuide) saturated_ = saturated;
  if (problem.empty()) return {view(false), view(true)};
  if (first_call) reset();
  throw std::invalid_argument(problem + "; the cache is unchanged");
}

// The new rows go behind those held. The victims stay where they are until the next call, so that
// this one can attend to them.
std::string MorphKVCache::read_at_once(const ArrayView& keys, const ArrayView& values,
                                       const ArrayView* queries, Call call) {
  const int tokens = static_cast<int>(keys.shape[2]);
  make_room(tokens);
  for (std::size_t h = 0; h < state_heads_.size(); ++h) {
    const int slot = state_heads_[h].start + kept();
    std::string problem =
        write_new_rows(keys, values, h, row(key_store_, h, slot), row(value_store_, h, slot));
    if (!problem.empty()) return problem;
  }
  if (!read_queries(queries, call)) return "the queries contain NaN";
  visible_rows_ = kept() + tokens;
  for (std::size_t h = 0; h < state_heads_.size(); ++h) step(h, tokens, call);
  if (call != Call::kGuide) offset_ += tokens;
  return "";
}

// A call too long for the store: a buffer of its own holds what is returned, and each head takes
// the new rows from it a few at a time, into whatever slots are free. The rule evicts per token, so
// the result is the same.
std::string MorphKVCache::read_in_blocks(const ArrayView& keys, const ArrayView& values) {
  const int prior = kept();
  const int tokens = static_cast<int>(keys.shape[2]);
  const auto block = static_cast<std::size_t>((prior + tokens) * dim_);
  std::vector<std::uint16_t> call_keys(state_heads_.size() * block);
  std::vector<std::uint16_t> call_values(call_keys.size());
  const auto held = static_cast<std::size_t>(prior * dim_);
  for (std::size_t h = 0; h < state_heads_.size(); ++h) {
    std::uint16_t* k = call_keys.data() + h * block;
    std::uint16_t* v = call_values.data() + h * block;
    std::copy_n(row(key_store_, h, state_heads_[h].start), held, k);
    std::copy_n(row(value_store_, h, state_heads_[h].start), held, v);
    std::string problem = write_new_rows(keys, values, h, k + held, v + held);
    if (!problem.empty()) return problem;
  }
  query_tokens_ = 0;
  std::vector<int> free;  // slots
  for (std::size_t h = 0; h < state_heads_.size(); ++h) {
    HeadRetention& head = state_heads_[h].retention;
    free.clear();
    for (int slot = 0; slot < config_.budget + Workspace::kBlock; ++slot) {
      if (!head.keep().held().contains(slot)) free.push_back(slot);
    }
    for (int done = 0; done < tokens;) {
      const int n = std::min(tokens - done, static_cast<int>(free.size()));
      new_slots_.assign(free.begin(), free.begin() + n);
      free.erase(free.begin(), free.begin() + n);
      const std::uint16_t* k = call_keys.data() + h * block + (prior + done) * dim_;
      const std::uint16_t* v = call_values.data() + h * block + (prior + done) * dim_;
      for (const int slot : new_slots_) {
        std::copy_n(k, dim_, row(key_store_, h, slot));
        std::copy_n(v, dim_, row(value_store_, h, slot));
        k += dim_;
        v += dim_;
      }
      head.append(new_rows(h), offset_ + done, *workspace_);
      free.insert(free.end(), head.victims().begin(), head.victims().end());
      std::sort(free.begin(), free.end());
      head.forget_victims();
      done += n;
    }
    put_in_order(h);
  }
  offset_ += tokens;
  call_keys_ = std::move(call_keys);
  call_values_ = std::move(call_values);
  visible_rows_ = prior + tokens;
  return "";
}

// Builds its messages only when one is due: this runs in every decode step.
void MorphKVCache::check(const ArrayView& keys, const ArrayView& values,
                         const ArrayView* queries) const {
  for (const auto size : keys.shape) {
    if (size < 1)
      refuse("keys " + shape_text(keys) + ": every one of [B, H, S, D] must be at least 1");
  }
  if (keys.shape != values.shape)
    refuse("values " + shape_text(values) + " must have the shape of keys " + shape_text(keys));
  const bool same = state_heads_.empty() ||
                    (keys.shape[0] == batch_ && keys.shape[1] == heads_ && keys.shape[3] == dim_);
  if (!same) {
    refuse("keys " + shape_text(keys) + ": this cache holds B " + std::to_string(batch_) + ", H " +
           std::to_string(heads_) + ", D " + std::to_string(dim_) +
           " since its first call; use a new cache, or reset() this one");
  }
  constexpr std::int64_t kMaxValues = std::numeric_limits<int>::max() / 2;
  if (keys.shape[2] > kMaxValues - config_.budget || keys.shape[3] > kMaxValues)
    refuse("keys " + shape_text(keys) + ": too long for one call; split it");
  if (policy_->traits().needs_queries && queries == nullptr) {
    refuse(
        "query source attention needs the queries [B, Hq, S, D] of the new tokens: pass them as "
        "the third argument, or use query source keys");
  }
  if (queries == nullptr) return;
  const bool fits = queries->shape[0] == keys.shape[0] && queries->shape[2] == keys.shape[2] &&
                    queries->shape[3] == keys.shape[3] && queries->shape[1] >= 1 &&
                    queries->shape[1] % keys.shape[1] == 0;
  if (!fits) {
    refuse("queries " + shape_text(*queries) + " do not fit keys " + shape_text(keys) +
           ": B, S and D must agree, and the query heads be a multiple of the KV heads");
  }
}

void MorphKVCache::set_shape(std::int64_t batch, std::int64_t heads, std::int64_t dim,
                             DType dtype) {
  batch_ = batch;
  heads_ = heads;
  dim_ = dim;
  dtype_ = dtype;
  const auto n = static_cast<std::size_t>(batch * heads);
  capacity_ = policy_->traits().evicts ? usual_capacity() : slack(0);
  key_store_.resize(n * static_cast<std::size_t>(capacity_ * dim_));
  value_store_.resize(key_store_.size());
  for (std::size_t h = 0; h < n; ++h) {
    const HeadId id{layer_, static_cast<int>(h)};
    state_heads_.push_back({HeadRetention(config_, *policy_, id, capacity_), 0});
  }
  workspace_.emplace(capacity_, group_, static_cast<int>(dim_));
}

// Sees to it that `tokens` more rows fit behind those held in every block.
void MorphKVCache::make_room(std::int64_t tokens) {
  const auto needed = static_cast<int>(kept() + tokens);
  const bool wide_group =
      static_cast<int>(workspace_->logits.size() / static_cast<std::size_t>(capacity_)) < group_;
  if (needed > capacity_) {
    reallocate(policy_->traits().evicts ? needed : std::max(needed, 2 * capacity_));
  } else if (wide_group) {
    reallocate(capacity_);
  }
  for (std::size_t h = 0; h < state_heads_.size(); ++h) {
    Head& head = state_heads_[h];
    if (head.start + needed > capacity_)
      move_rows(head, h, head.start, head.start + kept(), -head.start);
  }
}

void MorphKVCache::reallocate(int capacity) {
  const auto block = static_cast<std::size_t>(capacity * dim_);
  std::vector<std::uint16_t> keys(state_heads_.size() * block);
  std::vector<std::uint16_t> values(keys.size());
  for (std::size_t h = 0; h < state_heads_.size(); ++h) {
    Head& head = state_heads_[h];
    const auto held = static_cast<std::size_t>(kept() * dim_);
    std::copy_n(row(key_store_, h, head.start), held,
                keys.begin() + static_cast<std::ptrdiff_t>(h * block));
    std::copy_n(row(value_store_, h, head.start), held,
                values.begin() + static_cast<std::ptrdiff_t>(h * block));
    if (head.start > 0) head.retention.shift(head.start, head.start + kept(), -head.start);
    head.start = 0;
    head.retention.transfer({}, capacity);
  }
  key_store_ = std::move(keys);
  value_store_ = std::move(values);
  capacity_ = capacity;
  workspace_.emplace(capacity_, group_, static_cast<int>(dim_));
}

// Converts the new rows of one head; "" or what is wrong with them.
std::string MorphKVCache::write_new_rows(const ArrayView& keys, const ArrayView& values,
                                         std::size_t head, std::uint16_t* key_rows,
                                         std::uint16_t* value_rows) {
  const std::int64_t b = static_cast<std::int64_t>(head) / heads_;
  const std::int64_t h = static_cast<std::int64_t>(head) % heads_;
  const RowReport k = write_rows(keys, b, h, dtype_, key_rows);
  const RowReport v = write_rows(values, b, h, dtype_, value_rows);
  if (k.has_nan || v.has_nan) {
    return std::string(k.has_nan ? "keys" : "values") + " of batch " + std::to_string(b) +
           ", head " + std::to_string(h) + " contain NaN";
  }
  saturated_ += k.saturated + v.saturated;
  return "";
}

// The queries that count, as floats: of the last tokens of the call, or all of a guide; false on
// NaN.
bool MorphKVCache::read_queries(const ArrayView* queries, Call call) {
  query_tokens_ = 0;
  if (queries == nullptr || !policy_->traits().needs_queries) return true;
  const std::int64_t tokens = queries->shape[2];
  const bool all_ask = policy_->traits().every_query || call == Call::kGuide;
  const std::int64_t asking = all_ask ? tokens : config_.window;
  query_tokens_ = static_cast<int>(std::min(tokens, asking));
  queries_.resize(static_cast<std::size_t>(batch_ * heads_ * query_tokens_ * group_ * dim_));
  float* out = queries_.data();
  bool good = true;
  for (std::int64_t h = 0; h < batch_ * heads_; ++h) {
    for (std::int64_t t = tokens - query_tokens_; t < tokens; ++t) {
      for (int g = 0; g < group_; ++g, out += dim_) {
        good = read_floats(*queries, h / heads_, (h % heads_) * group_ + g, t, out) && good;
      }
    }
  }
  return good;
}

// What the tokens in new_slots_ bring to one head.
NewRows MorphKVCache::new_rows(std::size_t h) {
  const std::int64_t row_bytes = dim_ * static_cast<std::int64_t>(sizeof(std::uint16_t));
  const auto head_queries = static_cast<std::size_t>(query_tokens_ * group_ * dim_);
  return {.slots = new_slots_,
          .keys = {reinterpret_cast<const std::byte*>(row(key_store_, h, 0)), dtype_, row_bytes,
                   static_cast<int>(dim_)},
          .queries = {queries_.data() + h * head_queries, group_ * dim_, dim_, query_tokens_,
                      group_, static_cast<int>(dim_)},
          .scale = 1.0f / std::sqrt(static_cast<float>(dim_))};
}

// Rows that lie anywhere lie in token order again, from slot 0 on.
void MorphKVCache::put_in_order(std::size_t h) {
  HeadRetention& head = state_heads_[h].retention;
  for (auto* store : {&key_store_, &value_store_}) {
    std::vector<std::uint16_t> ordered;
    ordered.reserve(static_cast<std::size_t>(head.keep().size() * dim_));
    for (const int slot : head.keep().slots()) {
      const std::uint16_t* from = row(*store, h, slot);
      ordered.insert(ordered.end(), from, from + dim_);
    }
    std::copy(ordered.begin(), ordered.end(), row(*store, h, 0));
  }
  head.put_in_order();
  state_heads_[h].start = 0;
}

void MorphKVCache::step(std::size_t h, int tokens, Call call) {
  Head& head = state_heads_[h];
  new_slots_.resize(static_cast<std::size_t>(tokens));
  std::iota(new_slots_.begin(), new_slots_.end(), head.start + head.retention.keep().size());
  const NewRows rows = new_rows(h);
  switch (call) {
    case Call::kUpdate:
      return head.retention.append(rows, offset_, *workspace_);
    case Call::kExtend:
      return head.retention.extend(rows, offset_, *workspace_);
    case Call::kGuide:
      return head.retention.guide(rows, *workspace_);
  }
}

// Carries out the evictions of the last call.
void MorphKVCache::settle() {
  for (std::size_t h = 0; h < state_heads_.size(); ++h) settle_head(state_heads_[h], h);
  const bool grown = policy_->traits().evicts && capacity_ > usual_capacity();
  if (grown && kept() <= config_.budget) reallocate(usual_capacity());
  call_keys_ = {};
  call_values_ = {};
  visible_rows_ = kept();
}

int MorphKVCache::usual_capacity() const { return config_.budget + slack(config_.budget); }

void MorphKVCache::settle_head(Head& head, std::size_t index) {
  const auto victims = head.retention.victims();
  if (victims.empty()) return;
  const int kept_rows = head.retention.keep().size();
  const int end = head.start + kept_rows + static_cast<int>(victims.size());
  if (victims.size() == 1) {
    // One row leaves: the shorter side closes the gap.
    const int victim = victims[0];
    if (victim - head.start < end - 1 - victim) {
      move_rows(head, index, head.start, victim, 1);
      ++head.start;
    } else {
      move_rows(head, index, victim + 1, end, -1);
    }
  } else {
    // Runs of survivors move down, in order, behind the first gap.
    const std::vector<int> gaps(victims.begin(), victims.end());
    for (std::size_t i = 0; i < gaps.size(); ++i) {
      const int last = i + 1 < gaps.size() ? gaps[i + 1] : end;
      if (gaps[i] + 1 < last) move_rows(head, index, gaps[i] + 1, last, -static_cast<int>(i + 1));
    }
  }
  head.retention.forget_victims();
}

// Rows [first, last) of one block move by `by` slots, with all that is known of them.
void MorphKVCache::move_rows(Head& head, std::size_t index, int first, int last, int by) {
  if (first == last || by == 0) return;
  const auto bytes = static_cast<std::size_t>((last - first) * dim_) * sizeof(std::uint16_t);
  std::memmove(row(key_store_, index, first + by), row(key_store_, index, first), bytes);
  std::memmove(row(value_store_, index, first + by), row(value_store_, index, first), bytes);
  head.retention.shift(first, last, by);
  if (first == head.start && by < 0) head.start += by;
}

// What the last call may see: in a buffer of its own, or in the store.
Rows MorphKVCache::view(bool of_values) {
  auto& blocks = of_values ? value_blocks_ : key_blocks_;
  auto& store = of_values ? value_store_ : key_store_;
  const auto& call = of_values ? call_values_ : call_keys_;
  blocks.clear();
  for (std::size_t h = 0; h < state_heads_.size(); ++h) {
    blocks.push_back(call.empty()
                         ? row(store, h, state_heads_[h].start)
                         : call.data() + h * static_cast<std::size_t>(visible_rows_ * dim_));
  }
  return {batch_, heads_, visible_rows_, dim_, dtype_, blocks};
}

std::uint16_t* MorphKVCache::row(std::vector<std::uint16_t>& store, std::size_t head,
                                 int slot) const {
  const auto index = static_cast<std::int64_t>(head) * capacity_ + slot;
  return store.data() + index * dim_;
}

Rows MorphKVCache::keys() {
  settle();
  return view(false);
}

Rows MorphKVCache::values() {
  settle();
  return view(true);
}

std::vector<Position> MorphKVCache::positions() const {
  std::vector<Position> out;
  for (const Head& head : state_heads_) {
    const auto positions = head.retention.keep().positions();
    out.insert(out.end(), positions.begin(), positions.end());
  }
  return out;
}

std::optional<AttentionMask> MorphKVCache::make_mask(
    std::int64_t n, std::optional<std::int64_t> window_size) const {
  if (n < 1) refuse("a mask for " + std::to_string(n) + " tokens: give at least 1");
  if (window_size && *window_size < 1) {
    refuse("window_size " + std::to_string(*window_size) + " is below 1: leave it out for none");
  }
  if (n == 1 && !window_size) return std::nullopt;
  AttentionMask mask;
  mask.heads = window_size && !state_heads_.empty() ? batch_ * heads_ : 1;
  mask.queries = n;
  mask.rows = kept() + n;
  mask.allowed.reserve(static_cast<std::size_t>(mask.heads * mask.queries * mask.rows));
  const Position oldest_seen = window_size ? -*window_size : std::numeric_limits<Position>::min();
  for (std::int64_t h = 0; h < mask.heads; ++h) {
    for (Position query = offset_; query < offset_ + n; ++query) {
      const auto sees = [&](Position row) {
        return row <= query && (!window_size || row > query + oldest_seen);
      };
      if (!state_heads_.empty()) {
        for (const Position p :
             state_heads_[static_cast<std::size_t>(h)].retention.keep().positions()) {
          mask.allowed.push_back(sees(p));
        }
      }
      for (Position p = offset_; p < offset_ + n; ++p) mask.allowed.push_back(sees(p));
    }
  }
  const bool all =
      std::all_of(mask.allowed.begin(), mask.allowed.end(), [](std::uint8_t a) { return a != 0; });
  if (all) return std::nullopt;
  return mask;
}

std::size_t MorphKVCache::kept_bytes() const {
  return static_cast<std::size_t>(batch_ * heads_ * kept() * dim_) * 2 * sizeof(std::uint16_t);
}

std::size_t MorphKVCache::allocated_bytes() const {
  return (key_store_.size() + value_store_.size() + call_keys_.size() + call_values_.size()) *
         sizeof(std::uint16_t);
}

std::size_t MorphKVCache::full_seq_bytes() const {
  return static_cast<std::size_t>(batch_ * heads_ * offset_ * dim_) * 2 * sizeof(std::uint16_t);
}

std::int64_t MorphKVCache::tokens_kept() const { return kept(); }

void MorphKVCache::reset() { *this = MorphKVCache(config_, policy_, layer_); }

std::unique_ptr<KVCache> MorphKVCache::clone() const {
  return std::unique_ptr<KVCache>(new MorphKVCache(*this));
}

}  // namespace morphkv

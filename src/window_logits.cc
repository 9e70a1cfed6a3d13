#include "morphkv/window_logits.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "kernels/kernels.h"

namespace morphkv {
namespace {

constexpr float kNotHeld = -std::numeric_limits<float>::infinity();
// A reference may lag behind the true maximum as long as exp() keeps full precision and cannot
// overflow.
constexpr float kMaxAboveReference = 16.0f;
constexpr double kMinNormaliser = 1e-4;

// Whole cache lines, an odd number of them: at a power of two all queries' weights on a slot would
// want the same place in the cache.
std::int64_t stride_of(int max_slots) {
  constexpr std::int64_t kLine = 16;
  return ((max_slots + kLine - 1) / kLine | 1) * kLine;
}

}  // namespace

WindowLogits::WindowLogits(QuerySource source, int window, int max_slots)
    : source_(source), window_(window), max_slots_(max_slots), stride_(stride_of(max_slots)) {
  weights_.assign(offset(window), 0.0f);
  factors_.assign(static_cast<std::size_t>(window), 1.0f);
  if (source_ == QuerySource::kKeys) {
    logits_.assign(offset(window), kNotHeld);
    reference_.assign(static_cast<std::size_t>(window), 0.0f);
    sums_.assign(static_cast<std::size_t>(window), 0.0);
    query_slot_.assign(static_cast<std::size_t>(window), -1);
    column_.assign(static_cast<std::size_t>(window), 0.0f);
  }
}

void WindowLogits::push_key(int newcomer, const SlotSet& held, const float* logits) {
  const int limit = held.limit();
  // The newcomer's column in the rows of the older queries, with the same exp as refresh() uses, so
  // that equal logits keep giving equal weights.
  for (int i = 0; i < filled_; ++i) {
    column_[i] = logits_[offset(i) + newcomer] = logits[query_slot_[i]];
  }
  kernels::exp_shifted(column_.data(), filled_, reference_.data(), column_.data());
  for (int i = 0; i < filled_; ++i) {
    weights_[offset(i) + newcomer] = column_[i];
    sums_[i] += column_[i];
  }

  const int ring_row = next_;
  next_ = (next_ + 1) % window_;
  filled_ = std::min(filled_ + 1, window_);
  float* row = logits_.data() + offset(ring_row);
  std::copy_n(logits, limit, row);
  int done = 0;
  held.for_each_run([&](int first, int last) {
    std::fill(row + done, row + first, kNotHeld);
    done = last;
  });
  std::fill(row + done, row + max_slots_, kNotHeld);
  query_slot_[ring_row] = newcomer;
  refresh(ring_row, limit);
  for (int i = 0; i < filled_; ++i) {
    if (logits_[offset(i) + newcomer] - reference_[i] > kMaxAboveReference) refresh(i, limit);
  }
}

float* WindowLogits::push_query() {
  float* row = weights_.data() + offset(next_);
  std::fill_n(row, max_slots_, 0.0f);
  next_ = (next_ + 1) % window_;
  filled_ = std::min(filled_ + 1, window_);
  return row;
}

float WindowLogits::normaliser(int i, int slot_limit) {
  if (source_ == QuerySource::kAttention) return 1.0f;
  if (!(sums_[i] >= kMinNormaliser)) refresh(i, slot_limit);
  return static_cast<float>(sums_[i]);
}

std::span<const float> WindowLogits::factors(int slot_limit, float share) {
  for (int i = 0; i < filled_; ++i) factors_[i] = share / normaliser(i, slot_limit);
  return std::span(factors_).first(static_cast<std::size_t>(filled_));
}

void WindowLogits::refresh(int i, int slot_limit) {
  const float* row = logits_.data() + offset(i);
  float* weights = weights_.data() + offset(i);
  reference_[i] = kernels::max_of(row, slot_limit);
  sums_[i] = kernels::exp_shifted(row, slot_limit, reference_[i], weights);
  std::fill(weights + slot_limit, weights + max_slots_, 0.0f);
}

void WindowLogits::prefetch(int slot_limit) const {
  const auto columns = static_cast<std::size_t>(slot_limit);
  for (int i = 0; i < filled_; ++i)
    kernels::prefetch(std::as_bytes(std::span(weights(i), columns)));
}

void WindowLogits::erase(int slot) {
  for (int i = 0; i < filled_; ++i) {
    if (!logits_.empty()) sums_[i] -= weights_[offset(i) + slot];
  }
  empty(slot);
}

void WindowLogits::empty(int slot) {
  for (int i = 0; i < filled_; ++i) {
    weights_[offset(i) + slot] = 0.0f;
    if (!logits_.empty()) logits_[offset(i) + slot] = kNotHeld;
  }
}

void WindowLogits::move(int from, int to) {
  for (int i = 0; i < filled_; ++i) {
    weights_[offset(i) + to] = weights_[offset(i) + from];
    if (!logits_.empty()) {
      logits_[offset(i) + to] = logits_[offset(i) + from];
      if (query_slot_[i] == from) query_slot_[i] = to;
    }
  }
  empty(from);
}

void WindowLogits::shift(int first, int last, int by) {
  const auto shift_row = [&](float* row, float not_held) {
    std::memmove(row + first + by, row + first,
                 static_cast<std::size_t>(last - first) * sizeof(float));
    const int left = by > 0 ? first : last + by;
    std::fill_n(row + left, std::abs(by), not_held);
  };
  for (int i = 0; i < filled_; ++i) {
    shift_row(weights_.data() + offset(i), 0.0f);
    if (logits_.empty()) continue;
    shift_row(logits_.data() + offset(i), kNotHeld);
    if (query_slot_[i] >= first && query_slot_[i] < last) query_slot_[i] += by;
  }
}

void WindowLogits::clear() {
  filled_ = 0;
  next_ = 0;
}

void WindowLogits::save(std::span<const int> keep_slots, std::vector<float>& out) const {
  out.push_back(static_cast<float>(filled_));
  out.push_back(static_cast<float>(next_));
  for (int i = 0; i < filled_; ++i) {
    for (const int slot : keep_slots) out.push_back(weights_[offset(i) + slot]);
    if (logits_.empty()) continue;
    const auto query = std::find(keep_slots.begin(), keep_slots.end(), query_slot_[i]);
    out.push_back(reference_[i]);
    out.push_back(static_cast<float>(query - keep_slots.begin()));
    for (const int slot : keep_slots) out.push_back(logits_[offset(i) + slot]);
  }
}

bool WindowLogits::load(std::span<const int> keep_slots, std::span<const float> saved) {
  const std::size_t rows = keep_slots.size();
  if (saved.size() < 2) return false;
  const auto is_index = [](float value, std::size_t end) {
    return value >= 0.0f && value < static_cast<float>(end) && value == std::floor(value);
  };
  const auto queries = static_cast<std::size_t>(window_);
  if (!is_index(saved[0], queries + 1) || !is_index(saved[1], queries)) return false;
  const auto filled = static_cast<std::size_t>(saved[0]);
  const std::size_t per_query = logits_.empty() ? rows : 2 * rows + 2;
  if (saved.size() != 2 + filled * per_query) return false;
  for (std::size_t i = 0; i < filled && !logits_.empty(); ++i) {
    if (!is_index(saved[2 + i * per_query + rows + 1], rows)) return false;
  }
  std::fill(weights_.begin(), weights_.end(), 0.0f);
  std::fill(logits_.begin(), logits_.end(), kNotHeld);
  filled_ = static_cast<int>(filled);
  next_ = static_cast<int>(saved[1]);
  const float* in = saved.data() + 2;
  for (int i = 0; i < filled_; ++i) {
    double sum = 0.0;
    for (const int slot : keep_slots) sum += weights_[offset(i) + slot] = *in++;
    if (logits_.empty()) continue;
    sums_[i] = sum;
    reference_[i] = *in++;
    query_slot_[i] = keep_slots[static_cast<std::size_t>(*in++)];
    for (const int slot : keep_slots) logits_[offset(i) + slot] = *in++;
  }
  return true;
}

void WindowLogits::resize(int max_slots) {
  WindowLogits resized(source_, window_, max_slots);
  const int columns = std::min(max_slots_, max_slots);
  for (int i = 0; i < filled_; ++i) {
    std::copy_n(weights(i), columns, resized.weights_.data() + resized.offset(i));
    if (!logits_.empty()) {
      std::copy_n(logits_.data() + offset(i), columns, resized.logits_.data() + resized.offset(i));
    }
  }
  resized.filled_ = filled_;
  resized.next_ = next_;
  resized.reference_ = reference_;
  resized.sums_ = sums_;
  resized.query_slot_ = query_slot_;
  *this = std::move(resized);
}

}  // namespace morphkv

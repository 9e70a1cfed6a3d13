#include "morphkv/window_logits.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/kernels.h"

namespace morphkv {
namespace {

constexpr float kNotHeld = -std::numeric_limits<float>::infinity();
// A reference may lag behind the true maximum as long as exp() keeps full precision and cannot
// overflow.
constexpr float kMaxAboveReference = 16.0f;
constexpr double kMinNormaliser = 1e-4;

}  // namespace

WindowLogits::WindowLogits(QuerySource source, int window)
    : source_(source), window_(window), weights_(columns_.add(window, 0.0f)) {
  const auto n = static_cast<std::size_t>(window);
  factors_.assign(n, 1.0f);
  if (!keys()) return;
  logits_ = columns_.add(window, kNotHeld);
  reference_.assign(n, 0.0f);
  sums_.assign(n, 0.0);
  column_.assign(n, 0.0f);
}

int WindowLogits::advance() {
  const int ring_row = next_;
  next_ = (next_ + 1) % window_;
  filled_ = std::min(filled_ + 1, window_);
  return ring_row;
}

void WindowLogits::push_key(const KeepSet& keep, const float* logits) {
  const int newcomer = keep.slots().back();
  const int limit = keep.held().limit();
  // The newcomer's column in the rows of the older queries, with the same exp as refresh() uses, so
  // that equal logits keep giving equal weights.
  const int* const latest = &keep.slots().back();
  for (int i = 0; i < filled_; ++i) {
    column_[i] = columns_[logits_ + i][newcomer] = logits[latest[-1 - age(i, next_)]];
  }
  kernels::exp_shifted(column_.data(), filled_, reference_.data(), column_.data());
  for (int i = 0; i < filled_; ++i) {
    columns_[weights_ + i][newcomer] = column_[i];
    sums_[i] += column_[i];
  }

  const int ring_row = advance();
  float* row = columns_[logits_ + ring_row];
  std::copy_n(logits, limit, row);
  int done = 0;
  keep.held().for_each_run([&](int first, int last) {
    std::fill(row + done, row + first, kNotHeld);
    done = last;
  });
  std::fill(row + done, row + columns_.max_slots(), kNotHeld);
  refresh(ring_row, limit);
  for (int i = 0; i < filled_; ++i) {
    if (columns_[logits_ + i][newcomer] - reference_[i] > kMaxAboveReference) {
      refresh(i, limit);
    }
  }
}

float* WindowLogits::push_query() {
  float* row = columns_[weights_ + advance()];
  std::fill_n(row, columns_.max_slots(), 0.0f);
  return row;
}

float WindowLogits::normaliser(int i, int slot_limit) {
  if (!keys()) return 1.0f;
  if (!(sums_[i] >= kMinNormaliser)) refresh(i, slot_limit);
  return static_cast<float>(sums_[i]);
}

void WindowLogits::fuse(Fusion fusion, int slot_limit, std::span<float> scores) {
  std::fill_n(scores.data(), slot_limit, 0.0f);
  const bool mean = fusion == Fusion::kMean;
  const float share = mean ? 1.0f / static_cast<float>(std::max(1, filled_)) : 1.0f;
  for (int i = 0; i < filled_; ++i) factors_[i] = share / normaliser(i, slot_limit);
  const kernels::ScaledRows rows{
      .x = weights(0), .stride = columns_.stride(), .factors = factors_.data(), .rows = filled_};
  (mean ? kernels::add_scaled : kernels::max_scaled)(rows, slot_limit, scores.data());
}

void WindowLogits::refresh(int i, int slot_limit) {
  const float* row = columns_[logits_ + i];
  float* weights = columns_[weights_ + i];
  reference_[i] = kernels::max_of(row, slot_limit);
  sums_[i] = kernels::exp_shifted(row, slot_limit, reference_[i], weights);
  std::fill(weights + slot_limit, weights + columns_.max_slots(), 0.0f);
}

void WindowLogits::prefetch(int slot_limit) const {
  const auto slots = static_cast<std::size_t>(slot_limit);
  for (int i = 0; i < filled_; ++i) {
    kernels::prefetch(std::as_bytes(std::span(weights(i), slots)));
  }
}

void WindowLogits::erased(int slot, const RowsView* /*keys*/, Workspace& /*ws*/) {
  if (!keys()) return;
  for (int i = 0; i < filled_; ++i) sums_[i] -= weights(i)[slot];
}

void WindowLogits::save(const KeepSet& keep, std::vector<float>& out) const {
  out.push_back(static_cast<float>(filled_));
  out.push_back(static_cast<float>(next_));
  for (int i = 0; i < filled_; ++i) {
    for (const int slot : keep.slots()) out.push_back(weights(i)[slot]);
    if (!keys()) continue;
    out.push_back(reference_[i]);
    out.push_back(static_cast<float>(keep.size() - 1 - age(i, next_)));
    for (const int slot : keep.slots()) out.push_back(columns_[logits_ + i][slot]);
  }
}

bool WindowLogits::load(const KeepSet& keep, std::span<const float> saved) {
  constexpr float kEmpty[] = {0.0f, 0.0f};
  if (keep.size() == 0 && saved.empty()) saved = kEmpty;
  if (saved.size() < 2) return false;
  const auto is_index = [](float value, int end) {
    return value >= 0.0f && value < static_cast<float>(end) && value == std::floor(value);
  };
  if (!is_index(saved[0], window_ + 1) || !is_index(saved[1], window_)) return false;
  const int filled = static_cast<int>(saved[0]);
  const int next = static_cast<int>(saved[1]);
  const auto rows = static_cast<std::size_t>(keep.size());
  const std::size_t per_query = keys() ? 2 * rows + 2 : rows;
  if (saved.size() != 2 + static_cast<std::size_t>(filled) * per_query) return false;
  const float* in = saved.data() + 2;
  for (int i = 0; keys() && i < filled; ++i) {
    const int rank = keep.size() - 1 - age(i, next);
    const float saved_rank = in[static_cast<std::size_t>(i) * per_query + rows + 1];
    if (rank < 0 || saved_rank != static_cast<float>(rank)) return false;
  }
  columns_.clear();
  filled_ = filled;
  next_ = next;
  for (int i = 0; i < filled; ++i) {
    double sum = 0.0;
    for (const int slot : keep.slots()) sum += columns_[weights_ + i][slot] = *in++;
    if (!keys()) continue;
    sums_[i] = sum;
    reference_[i] = *in;
    in += 2;  // its rank follows
    for (const int slot : keep.slots()) columns_[logits_ + i][slot] = *in++;
  }
  return true;
}

}  // namespace morphkv

#include "morphkv/scores.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "dot_slots.h"
#include "kernels/kernels.h"

namespace morphkv {

void by_rank(const KeepSet& keep, const float* of_slot, std::span<float> scores) {
  const int* slots = keep.slots().data();
  for (int rank = 0; rank < keep.size(); ++rank) scores[rank] = of_slot[slots[rank]];
}

AttentionArgs asked_by(QuerySource source, const NewRows& rows, std::span<const int> slots,
                       const SlotSet& seen, Fusion fusion) {
  if (source == QuerySource::kKeys) {
    return {.queries = {},
            .slots = slots,
            .keys = rows.keys,
            .rows = seen,
            .scale = 1.0f / std::sqrt(static_cast<float>(rows.keys.dim)),
            .softcap = 0.0f,
            .fusion = fusion};
  }
  const auto shown = static_cast<std::size_t>(rows.queries.tokens);
  return {.queries = rows.queries,
          .slots = slots.last(std::min(slots.size(), shown)),
          .keys = rows.keys,
          .rows = seen,
          .scale = rows.scale,
          .softcap = rows.softcap,
          .fusion = fusion};
}

AttentionPass::AttentionPass(const AttentionArgs& args, Workspace& workspace)
    : args_(args),
      ws_(workspace),
      group_(args.queries.data == nullptr ? 1 : args.queries.group),
      limit_(args.rows.limit()),
      block_(std::max(1, Workspace::kBlock / group_)) {}

bool AttentionPass::next() {
  if (++token_ >= static_cast<int>(args_.slots.size())) return false;
  if (token_ % block_ == 0) multiply();
  return true;
}

// Logits [token, group, slot] of the next tokens with all rows; what lies between the rows becomes
// -infinity.
void AttentionPass::multiply() {
  const int tokens = std::min(block_, static_cast<int>(args_.slots.size()) - token_);
  gather_queries(tokens);
  const int n_queries = tokens * group_;
  const auto row = [&](int q) { return ws_.logits.data() + static_cast<std::size_t>(q) * limit_; };
  dot_slots({.queries = ws_.queries.data(),
             .query_stride = args_.keys.dim,
             .n_queries = n_queries,
             .rows = args_.keys,
             .first_slot = 0,
             .last_slot = 0,
             .scale = args_.scale,
             .out = ws_.logits.data(),
             .out_stride = limit_},
            args_.rows);
  int done = 0;
  args_.rows.for_each_run([&](int first, int last) {
    for (int q = 0; q < n_queries; ++q) {
      std::fill(row(q) + done, row(q) + first, -std::numeric_limits<float>::infinity());
      if (args_.softcap <= 0.0f) continue;
      for (int slot = first; slot < last; ++slot)
        row(q)[slot] = args_.softcap * std::tanh(row(q)[slot] / args_.softcap);
    }
    done = last;
  });
}

void AttentionPass::gather_queries(int tokens) {
  const int dim = args_.keys.dim;
  const int skipped = args_.queries.tokens - static_cast<int>(args_.slots.size());
  float* query = ws_.queries.data();
  for (int t = token_; t < token_ + tokens; ++t) {
    for (int g = 0; g < group_; ++g, query += dim) {
      if (args_.queries.data == nullptr) {
        const int slot = args_.slots[static_cast<std::size_t>(t)];
        kernels::to_float(args_.keys.row(slot), args_.keys.dtype, dim, query);
      } else {
        std::copy_n(args_.queries.query(skipped + t, g), dim, query);
      }
    }
  }
}

void AttentionPass::add_to(float* weights) {
  const bool mean = args_.fusion == Fusion::kMean;
  const float share = mean ? 1.0f / static_cast<float>(group_) : 1.0f;
  float* logits = ws_.logits.data() + static_cast<std::size_t>(token_ % block_ * group_) * limit_;
  for (int g = 0; g < group_; ++g) {
    float* row = logits + static_cast<std::size_t>(g) * limit_;
    for (const int later : args_.slots.subspan(static_cast<std::size_t>(token_) + 1))
      row[later] = -std::numeric_limits<float>::infinity();
    const double sum = kernels::exp_shifted(row, limit_, kernels::max_of(row, limit_), row);
    ws_.factors[static_cast<std::size_t>(g)] = share / static_cast<float>(sum);
  }
  const kernels::ScaledRows rows{
      .x = logits, .stride = limit_, .factors = ws_.factors.data(), .rows = group_};
  (mean ? kernels::add_scaled : kernels::max_scaled)(rows, limit_, weights);
}

void pool_scores(int pool, std::span<float> scores, std::span<float> scratch) {
  if (pool <= 1 || scores.empty()) return;
  const int n = static_cast<int>(scores.size());
  kernels::max_of_neighbours(scores.data(), n, std::min(pool / 2, n), scratch.data(),
                             scores.data());
}

}  // namespace morphkv

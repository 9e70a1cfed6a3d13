// The ring of one head: for each of the last `window` queries, its weights on the stored rows.
// Logits between two stored vectors never change, so a new token costs one pass over the keys and
// nothing is recomputed (ARCHITECTURE.md, "what a step costs"). Two ways to fill it, one per query
// source.
#pragma once

#include <span>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"
#include "morphkv/policy.h"

namespace morphkv {

// The part of a head that remembers: weights and logits are columns, one for each query.
class WindowLogits : public HeadPolicy {
 public:
  WindowLogits(QuerySource source, int window);

  // kKeys. The last row of `keep` enters the window as a query; the queries before it are the rows
  // before it, for the window is never evicted. `logits` [slot] are its scaled products with the
  // rows held (itself included); other entries are ignored. The products are symmetric, so they
  // also become the newcomer's column in the rows of the older queries.
  void push_key(const KeepSet& keep, const float* logits);

  // kAttention. Opens the next row of the ring, all zero, for the caller to add weights [slot] to.
  // They are probabilities over the rows that the query could see when it was asked, and stay as
  // they are.
  float* push_query();

  QuerySource source() const { return source_; }
  int window() const { return window_; }
  int queries() const { return filled_; }

  // Weights of query i (in [0, queries()), no particular order) on each slot; 0 for a slot not
  // held.
  const float* weights(int i) const { return columns_[weights_ + i]; }
  // Sum of weights(i), which makes them probabilities for kKeys; 1 for kAttention. Mutates: a row
  // whose reference has gone stale is taken anew from its logits. All rows lie below `slot_limit`.
  float normaliser(int i, int slot_limit);
  // scores[slot] = mean or maximum over the queries of their probability for the row in that slot.
  void fuse(Fusion fusion, int slot_limit, std::span<float> scores);

  void erased(int slot, const RowsView* keys, Workspace& workspace) override;
  void prefetch(int slot_limit) const override;
  // The ring in terms of ranks: header, then each query's weights, reference, rank and logits.
  void save(const KeepSet& keep, std::vector<float>& out) const override;
  bool load(const KeepSet& keep, std::span<const float> saved) override;

 private:
  bool keys() const { return source_ == QuerySource::kKeys; }
  // How many queries came after query i if ring row `next` is the next one to be taken.
  int age(int i, int next) const { return next - 1 - i + (i < next ? 0 : window_); }
  int advance();
  void refresh(int i, int slot_limit);

  QuerySource source_;
  int window_;
  int weights_;      // first column [query] of exp(logit - reference), or probabilities
  int logits_ = -1;  // first column [query], kKeys only; -infinity for a slot not held
  int filled_ = 0;
  int next_ = 0;                  // ring row that the next query takes
  std::vector<float> reference_;  // [query] subtracted from the logits
  std::vector<double> sums_;      // [query] of the weights, kept up as rows come and go; kKeys only
  std::vector<float> factors_;  // [query] what makes its weights probabilities, or shares of a mean
  std::vector<float> column_;   // [query] a newcomer's logits, then its weights
};

}  // namespace morphkv

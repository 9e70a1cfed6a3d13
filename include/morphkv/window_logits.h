// The ring of one head: for each of the last `window` queries, its weights on the stored rows.
// Logits between two stored vectors never change, so a new token costs one pass over the keys and
// nothing is recomputed (ARCHITECTURE.md, "what a step costs"). Two ways to fill it, one per query
// source.
#pragma once

#include <span>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"
#include "morphkv/tensor_view.h"

namespace morphkv {

class WindowLogits {
 public:
  // Holds [query, slot] floats, allocated here once: one array for kAttention, two for kKeys.
  WindowLogits(QuerySource source, int window, int max_slots);

  // kKeys. The row in slot `newcomer` enters the window as a query. `logits` [slot] are its scaled
  // products with the rows held (itself included); other entries are ignored. The products are
  // symmetric, so they also become the newcomer's column in the rows of the older queries.
  void push_key(int newcomer, const SlotSet& held, const float* logits);

  // kAttention. Opens the next row of the ring, all zero, for the caller to add weights [slot] to.
  // They are probabilities over the rows that the query could see when it was asked, and stay as
  // they are.
  float* push_query();

  int window() const { return window_; }
  int queries() const { return filled_; }
  int max_slots() const { return max_slots_; }
  std::int64_t stride() const { return stride_; }  // floats from one query's weights to the next's

  // Weights of query i (in [0, queries()), no particular order) on each slot; 0 for a slot not
  // held.
  const float* weights(int i) const { return weights_.data() + offset(i); }
  // Sum of weights(i), which makes them probabilities for kKeys; 1 for kAttention. Mutates: a row
  // whose reference has gone stale is taken anew from its logits. All rows lie below `slot_limit`.
  float normaliser(int i, int slot_limit);
  // share / normaliser(i, slot_limit) of every query.
  std::span<const float> factors(int slot_limit, float share);

  // Brings into the cache the weights of the slots below slot_limit.
  void prefetch(int slot_limit) const;
  void erase(int slot);
  void move(int from, int to);
  // The columns [first, last) move by `by`; what they leave is not held.
  void shift(int first, int last, int by);
  void clear();
  // The ring in terms of ranks: header, then each query's reference, rank, weights and logits.
  // load() returns false, having changed nothing, if `saved` is not the ring of so many rows.
  void save(std::span<const int> keep_slots, std::vector<float>& out) const;
  bool load(std::span<const int> keep_slots, std::span<const float> saved);
  // Keeps the columns below `max_slots`. Allocates.
  void resize(int max_slots);

 private:
  std::size_t offset(int i) const {
    return static_cast<std::size_t>(i) * static_cast<std::size_t>(stride_);
  }
  void refresh(int i, int slot_limit);
  void empty(int slot);

  QuerySource source_;
  int window_;
  int max_slots_;
  std::int64_t stride_;
  int filled_ = 0;
  int next_ = 0;                  // ring row that the next query takes
  std::vector<float> weights_;    // [query, slot] exp(logit - reference), or probabilities
  std::vector<float> logits_;     // [query, slot] kKeys only; -infinity for a slot not held
  std::vector<float> reference_;  // [query] subtracted from the logits
  std::vector<double> sums_;      // [query] of the weights, kept up as rows come and go; kKeys only
  std::vector<int> query_slot_;   // [query] slot of the key that asks; kKeys only
  std::vector<float> factors_;    // [query] what factors() gives
  std::vector<float> column_;     // [query] a newcomer's logits, then its weights
};

}  // namespace morphkv

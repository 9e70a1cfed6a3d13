// What queries pay to the rows of a head, and what rows lend to their neighbours. All functions
// write into memory of the caller and allocate nothing.
#pragma once

#include <span>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"
#include "morphkv/tensor_view.h"
#include "morphkv/workspace.h"

namespace morphkv {

// scores[rank] = of_slot[the slot of that rank]. `scores` has keep.size() entries.
void by_rank(const KeepSet& keep, const float* of_slot, std::span<float> scores);

// What the tokens at the end of a call pay to the rows held, theirs included: softmax of
// scale * q . k (soft-capped to softcap * tanh(x / softcap) when softcap > 0), fused over the G
// queries of the group by mean or maximum.
struct AttentionArgs {
  QueriesView queries;         // [token, group, dim]; the last slots.size() tokens of it ask. {}:
                               // the stored keys do, as groups of one
  std::span<const int> slots;  // [token] where the rows of those that ask lie
  RowsView keys;               // [slot, dim]
  const SlotSet& rows;         // what the last token sees; each of the others sees less by the
                               // tokens after it
  float scale = 1.0f;
  float softcap = 0.0f;
  Fusion fusion = Fusion::kMean;
};

// The tokens of `rows` that lie in `slots` (its last ones) ask what lies in `seen`: with their
// stored keys, or with their queries as far as these are shown.
AttentionArgs asked_by(QuerySource source, const NewRows& rows, std::span<const int> slots,
                       const SlotSet& seen, Fusion fusion);

// Goes through those tokens, oldest first: while (pass.next()) pass.add_to(weights). The products
// of many tokens are one pass over the keys.
class AttentionPass {
 public:
  AttentionPass(const AttentionArgs& args, Workspace& workspace);
  bool next();
  // Adds the token's probabilities to weights [slot], or takes the larger of the two (fusion max).
  void add_to(float* weights);

 private:
  void multiply();
  void gather_queries(int tokens);

  AttentionArgs args_;
  Workspace& ws_;
  int group_;
  int limit_;       // of the rows
  int block_;       // tokens whose products are made together
  int token_ = -1;  // of those that ask
};

// scores[rank] becomes the maximum over the `pool` nearest ranks (pool / 2 on each side). `scratch`
// is three times as long.
void pool_scores(int pool, std::span<float> scores, std::span<float> scratch);

}  // namespace morphkv

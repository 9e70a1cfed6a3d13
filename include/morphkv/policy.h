// The family of scoring rules. A policy scores the rows of one head; who is protected, who leaves
// and where rows go is not its business (victim.h, row_moves.h). To add one: implement HeadPolicy
// and Policy in src/policies, and name it in policies.cc, or hand your own to LayerRetention.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"
#include "morphkv/slot_columns.h"
#include "morphkv/tensor_view.h"
#include "morphkv/workspace.h"

namespace morphkv {

// What a policy must be shown, and how often it evicts.
struct PolicyTraits {
  bool evicts = true;          // false: the cache grows without limit (policy full)
  bool needs_keys = false;     // NewRows::keys is valid
  bool needs_queries = false;  // NewRows::queries is valid
  bool every_query = false;    // all queries of a call count, not only those of the last window;
                               // a host that cannot show them all shows the last ones
  bool evicts_per_token =
      false;            // true: one eviction per token; false: all of a call leave at its end
  bool pools = false;   // scores mean importance, so neighbours lend theirs (config.pool) whenever
                        // they are asked for; a policy may also pool on its own
  bool guided = false;  // rows can be scored by a guide (HeadPolicy::score_by_guide)
  bool beside_guides = false;  // its own score counts as one guide more when guides have asked
  bool by_slot = false;  // score() writes scores[slot]: one victim is then found without the order
                         // of the ranks
};

// The rule for one head and what it remembers. What it remembers of each row stands in columns,
// which HeadRetention keeps in step with the rows: they need nothing but append(), which fills
// them. Called once or a few times per call; erased() alone once per row.
class HeadPolicy {
 public:
  virtual ~HeadPolicy() = default;

  // The tokens [first, first + count) of the call were just appended to `keep` as its last ranks.
  // With evicts_per_token, count is 1.
  virtual void append(const KeepSet& keep, const NewRows& rows, int first, int count,
                      Workspace& workspace) = 0;
  // scores[rank] for every row held; the least one leaves. Higher = keep longer. With
  // PolicyTraits::by_slot, scores[slot]; slots that are not held may get anything.
  virtual void score(const KeepSet& keep, std::span<float> scores, Workspace& workspace) = 0;
  // With PolicyTraits::guided. scores[rank]: the most attention that a token of a guide pays to
  // each row held. guide.slots [token] are the last slots of `keep`, or slots that are not held and
  // will not be; each token also sees the guide's tokens up to itself. Changes nothing that is
  // remembered.
  virtual void score_by_guide(const KeepSet& /*keep*/, const NewRows& /*guide*/,
                              std::span<float> /*scores*/, Workspace& /*workspace*/) {}
  // The row in `slot` leaves; its numbers are still in the columns. `keys` are those of the call if
  // it also brings rows, so that whoever remembers something of a key can take it back; else null.
  virtual void erased(int /*slot*/, const RowsView* /*keys*/, Workspace& /*workspace*/) {}
  // Brings into the cache what append() and score() will read of the slots below slot_limit.
  virtual void prefetch(int /*slot_limit*/) const {}
  virtual std::unique_ptr<HeadPolicy> clone() const = 0;
  // What is remembered, in terms of ranks: the columns, unless a policy has something else to say.
  // load() replaces it; it returns false, having changed nothing, if `saved` does not fit the rows.
  // No numbers for no rows make it as new; a head that is cleared is loaded so.
  virtual void save(const KeepSet& keep, std::vector<float>& out) const {
    columns_.save(keep.slots(), out);
  }
  virtual bool load(const KeepSet& keep, std::span<const float> saved) {
    return columns_.load(keep.slots(), saved);
  }

  SlotColumns& columns() { return columns_; }

 protected:
  SlotColumns columns_;  // added to by the constructor
};

// Where a head stands, for policies that tell heads apart.
struct HeadId {
  int layer = 0;
  int head = 0;
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  virtual PolicyTraits traits() const = 0;
  virtual std::unique_ptr<HeadPolicy> make_head(HeadId id) const = 0;
};

// The policy that config.policy names. Throws std::invalid_argument like validate().
//   morphkv    attention or key similarity of the last `window` tokens (Ghadia et al., ICML 2025,
//              arXiv 2503.00979)
//   h2o        all the attention that a row has had (Zhang et al., NeurIPS 2023, arXiv 2306.14048)
//   snapkv     attention of the last `window` tokens of a prompt, asked once (Li et al., NeurIPS
//              2024, arXiv 2404.14469)
//   tova       attention of the last token (Oren et al., EMNLP 2024, arXiv 2401.06104)
//   keydiff    keys unlike the others (Park et al., 2025, arXiv 2504.15364)
//   rkv        attention as morphkv, less likeness to the other keys (Cai et al., 2025, arXiv
//              2505.24133)
//   streaming  sinks and the most recent rows (Xiao et al., ICLR 2024, arXiv 2309.17453)
//   random     a uniform sample of the unprotected rows seen: each row draws one priority, from
//              config.seed
//   full       evicts nothing
// Where a policy differs from its paper, its file in src/policies says. config.fusion is of morphkv
// and h2o, config.pool of these, snapkv and rkv; sinks and the protected tail are everyone's.
std::unique_ptr<Policy> make_policy(const CacheConfig& config);

// In the order above.
std::vector<std::string_view> policy_names();
bool is_policy_name(std::string_view name);
// "morphkv, h2o, snapkv, tova, keydiff, rkv, streaming, random, full"
std::string policy_names_text();
// Those with this trait: of PolicyTraits::guided "morphkv or rkv".
std::string policy_names_text(bool PolicyTraits::*trait);

}  // namespace morphkv

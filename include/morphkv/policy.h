// The family of scoring rules. A policy scores the rows of one head; who is protected, who leaves
// and where rows go is not its business (victim.h, row_moves.h). To add one: implement HeadPolicy
// and Policy in src/policies, and name it in policy.cc, or hand your own to LayerRetention.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"
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

// The state that one head keeps for its policy. Called once or a few times per call, never per row.
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
  virtual void score_by_guide(const KeepSet& keep, const NewRows& guide, std::span<float> scores,
                              Workspace& workspace) {
    static_cast<void>(keep);
    static_cast<void>(guide);
    static_cast<void>(scores);
    static_cast<void>(workspace);
  }
  // Brings into the cache what append() and score() will read of the slots below slot_limit.
  virtual void prefetch(int slot_limit) const { static_cast<void>(slot_limit); }
  // The row in `slot` has left; the row in `from` now lies in `to`.
  virtual void erase(int slot) { static_cast<void>(slot); }
  // erase() of a row whose key can still be read, which is so when a call both brings and evicts
  // rows: `keys` are those of the call. Whoever remembers something of a key can take it back here.
  virtual void erase_shown(int slot, const RowsView& keys, Workspace& workspace) {
    static_cast<void>(keys);
    static_cast<void>(workspace);
    erase(slot);
  }
  virtual void move(int from, int to) {
    static_cast<void>(from);
    static_cast<void>(to);
  }
  // The rows in slots [first, last) now lie `by` slots further on, over a slot that is not held.
  virtual void shift(int first, int last, int by) {
    if (by < 0) {
      for (int slot = first; slot < last; ++slot) move(slot, slot + by);
    } else {
      for (int slot = last; slot-- > first;) move(slot, slot + by);
    }
  }
  virtual void clear() {}
  virtual std::unique_ptr<HeadPolicy> clone() const = 0;
  // What the policy remembers beyond the rows, as floats in terms of ranks; a policy that remembers
  // nothing keeps these. load() returns false, having changed nothing, if the floats are not such a
  // state.
  virtual void save(const KeepSet& keep, std::vector<float>& out) const {
    static_cast<void>(keep);
    static_cast<void>(out);
  }
  virtual bool load(const KeepSet& keep, std::span<const float> saved) {
    static_cast<void>(keep);
    return saved.empty();
  }
  // From now on slots are 0 .. max_slots - 1; no row lies beyond. Allocates.
  virtual void resize(int max_slots) { static_cast<void>(max_slots); }
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
  // Allocates all that the head will ever need, for slots 0 .. max_slots - 1.
  virtual std::unique_ptr<HeadPolicy> make_head(HeadId id, int max_slots) const = 0;
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

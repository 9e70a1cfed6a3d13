// A KV cache of constant size for one attention layer: what the reference page documents,
// engine-free. Source of the contract: the MorphKV page of the VeloxQuant-MLX API; of the method:
// Ghadia et al., arXiv 2503.00979.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/keep_set.h"
#include "morphkv/policy.h"
#include "morphkv/retention.h"
#include "morphkv/tensor_view.h"

namespace morphkv {

// Stored rows of all heads, [batch, head, row, dim] in token order. Each head is one block without
// gaps, at an address of its own. Valid until the next call of a method of the cache that is not
// const.
struct Rows {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  DType dtype = DType::kF16;
  std::span<const std::uint16_t* const> blocks;  // [batch * heads], each [row, dim]

  RowsView head(std::int64_t b, std::int64_t h) const {
    return {reinterpret_cast<const std::byte*>(blocks[static_cast<std::size_t>(b * heads + h)]),
            dtype, 2 * dim, static_cast<int>(dim)};
  }
  // Writes one array [batch, head, row, dim] without gaps.
  void copy_to(void* out) const;
};

struct KeysAndValues {
  Rows keys;
  Rows values;
};

// Which of the columns [row] each of n queries may see; 1 = may. `heads` is 1 when all heads share
// it, else batch * heads.
struct AttentionMask {
  std::int64_t heads = 1;
  std::int64_t queries = 0;
  std::int64_t rows = 0;
  std::vector<std::uint8_t> allowed;  // [head, query, row]
};

// Everything that a cache holds between calls.
struct CacheState {
  CacheConfig config;
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  DType dtype = DType::kF16;
  Position offset = 0;
  std::int64_t saturated = 0;
  std::vector<Position> positions;    // [batch, head, row]
  std::vector<std::uint16_t> keys;    // [batch, head, row, dim]
  std::vector<std::uint16_t> values;  // [batch, head, row, dim]
  std::vector<std::vector<float>>
      memory;  // [batch * head] what the policy remembers (HeadPolicy::save)

  std::int64_t rows() const {
    return batch * heads == 0 ? 0 : static_cast<std::int64_t>(positions.size()) / (batch * heads);
  }
};

// What hosts rely on. No method merges caches: an object that offers one is swapped for an
// unbounded cache by servers that batch.
class KVCache {
 public:
  virtual ~KVCache() = default;

  // Stores keys and values [B, H, S, D] of any float type and strides, and returns the rows held
  // before the call plus all new ones, [B, H, rows + S, D]: eviction changes only what is kept for
  // the next call. The first call fixes B, H, D and the stored type: bf16 if both inputs are, else
  // fp16 (values beyond 65504 are stored as 65504 and counted). Throws std::invalid_argument for
  // shapes that do not fit and for NaN; the cache is then as it was.
  virtual KeysAndValues update_and_fetch(const ArrayView& keys, const ArrayView& values) = 0;

  // The rows held now. Completes the eviction of the last call, so its result is no longer valid.
  virtual Rows keys() = 0;
  virtual Rows values() = 0;
  // [batch, head, row] token position of each row, ascending in each head.
  virtual std::vector<Position> positions() const = 0;
  // Tokens seen so far = position of the next one; never the number of rows.
  virtual Position offset() const = 0;

  // Mask for the next call of n tokens, over the rows that it will return, from token positions. A
  // query at position p may see the positions (p - window_size, p]. Nothing when every query may
  // see every row.
  virtual std::optional<AttentionMask> make_mask(std::int64_t n,
                                                 std::optional<std::int64_t> window_size) const = 0;

  // An evicted row does not come back: false, and trim() removes nothing and returns 0.
  bool is_trimmable() const { return false; }
  std::int64_t trim(std::int64_t n) {
    static_cast<void>(n);
    return 0;
  }

  virtual std::size_t kept_bytes() const = 0;       // K and V of the rows held
  virtual std::size_t allocated_bytes() const = 0;  // K and V memory of this object
  virtual std::size_t full_seq_bytes() const = 0;   // K and V if every token were held
  virtual std::int64_t tokens_seen() const = 0;     // B * H * S summed over calls
  virtual std::int64_t tokens_kept() const = 0;     // rows of batch 0, head 0
  double compression_ratio() const {                // full_seq_bytes / kept_bytes; 1 while empty
    return kept_bytes() == 0
               ? 1.0
               : static_cast<double>(full_seq_bytes()) / static_cast<double>(kept_bytes());
  }

  // As newly made.
  virtual void reset() = 0;
  virtual std::unique_ptr<KVCache> clone() const = 0;

  // Throws std::invalid_argument while rows beyond the budget wait for evict().
  virtual CacheState state() const = 0;
  // Throws std::invalid_argument when the state does not fit this cache or itself; the cache is
  // then as it was.
  virtual void set_state(const CacheState& state) = 0;

  // One file: versioned, sized, checksummed; written beside `path` and renamed. Throws
  // std::runtime_error when it cannot be written or read, std::invalid_argument when the file is
  // damaged or belongs to another cache; a cache whose load was refused is as it was.
  void save(const std::string& path) const;
  void load(const std::string& path);
};

class MorphKVCache final : public KVCache {
 public:
  // Throws std::invalid_argument (validate()). `layer` tells the layers of a model apart for policy
  // random.
  explicit MorphKVCache(CacheConfig config, int layer = 0);
  // With a policy of one's own; it is shared with copies.
  MorphKVCache(CacheConfig config, std::shared_ptr<const Policy> policy, int layer = 0);
  MorphKVCache(MorphKVCache&&) noexcept = default;
  MorphKVCache& operator=(MorphKVCache&&) noexcept = default;
  MorphKVCache copy() const { return MorphKVCache(*this); }

  KeysAndValues update_and_fetch(const ArrayView& keys, const ArrayView& values) override;
  // Query source kAttention: the queries [B, Hq, S, D] (after RoPE) that belong to the tokens, Hq a
  // multiple of H.
  KeysAndValues update_and_fetch(const ArrayView& keys, const ArrayView& values,
                                 const ArrayView& queries);

  // update_and_fetch() in parts, to read a long prompt with a question in mind: for each piece
  // extend_and_fetch() it, run the question through the model with guide_and_fetch() in its place,
  // and evict(). (ARCHITECTURE.md, "guided prefill"; several questions may follow one another.)
  //
  // As update_and_fetch(), but nothing is evicted: the rows stay until evict() or
  // update_and_fetch().
  KeysAndValues extend_and_fetch(const ArrayView& keys, const ArrayView& values);
  KeysAndValues extend_and_fetch(const ArrayView& keys, const ArrayView& values,
                                 const ArrayView& queries);
  // Returns the rows held and the guide's, [B, H, rows + S, D], and lets the guide say which rows
  // evict() is to keep: by its queries, or its keys with query source kKeys. The guide's own rows,
  // rotated from offset() on, are gone with the next call; offset() and all else are as before.
  // Throws std::invalid_argument where the policy takes no guide (PolicyTraits::guided).
  KeysAndValues guide_and_fetch(const ArrayView& keys, const ArrayView& values);
  KeysAndValues guide_and_fetch(const ArrayView& keys, const ArrayView& values,
                                const ArrayView& queries);
  // Lets the rows beyond the budget leave: those that the guides since the last extend_and_fetch()
  // need least, or that the window does when there was none.
  void evict();

  Rows keys() override;
  Rows values() override;
  std::vector<Position> positions() const override;
  Position offset() const override { return offset_; }
  std::optional<AttentionMask> make_mask(std::int64_t n,
                                         std::optional<std::int64_t> window_size) const override;
  std::size_t kept_bytes() const override;
  std::size_t allocated_bytes() const override;
  std::size_t full_seq_bytes() const override;
  std::int64_t tokens_seen() const override { return batch_ * heads_ * offset_; }
  std::int64_t tokens_kept() const override;
  void reset() override;
  std::unique_ptr<KVCache> clone() const override;
  CacheState state() const override;
  void set_state(const CacheState& state) override;

  const CacheConfig& config() const { return config_; }
  // Values that were too large for the stored type and became its largest (65504 in fp16).
  std::int64_t saturated() const { return saturated_; }

 private:
  // K and V rows of one (batch, head), in token order, lie in the slots [start, start + rows) of
  // its block.
  struct Head {
    HeadRetention retention;
    int start = 0;
  };
  MorphKVCache(const MorphKVCache& other);

  // What becomes of the rows of a call.
  enum class Call : std::uint8_t { kUpdate, kExtend, kGuide };
  KeysAndValues update(const ArrayView& keys, const ArrayView& values, const ArrayView* queries,
                       Call call);
  void check(const ArrayView& keys, const ArrayView& values, const ArrayView* queries) const;
  void set_shape(std::int64_t batch, std::int64_t heads, std::int64_t dim, DType dtype);
  std::string read_at_once(const ArrayView& keys, const ArrayView& values, const ArrayView* queries,
                           Call call);
  std::string read_in_blocks(const ArrayView& keys, const ArrayView& values);
  std::string write_new_rows(const ArrayView& keys, const ArrayView& values, std::size_t head,
                             std::uint16_t* key_rows, std::uint16_t* value_rows);
  bool read_queries(const ArrayView* queries, Call call);
  NewRows new_rows(std::size_t head);
  void put_in_order(std::size_t head);
  void step(std::size_t head, int tokens, Call call);
  void make_room(std::int64_t tokens);
  void reallocate(int capacity);
  void settle();
  void settle_head(Head& head, std::size_t index);
  void move_rows(Head& head, std::size_t index, int first, int last, int by);
  Rows view(bool of_values);
  int usual_capacity() const;
  int kept() const {
    return state_heads_.empty() ? 0 : state_heads_.front().retention.keep().size();
  }
  std::uint16_t* row(std::vector<std::uint16_t>& store, std::size_t head, int slot) const;

  CacheConfig config_;
  std::shared_ptr<const Policy> policy_;
  int layer_;

  std::int64_t batch_ = 0;
  std::int64_t heads_ = 0;
  std::int64_t dim_ = 0;
  DType dtype_ = DType::kF16;
  int group_ = 1;  // query heads per KV head
  Position offset_ = 0;
  std::int64_t saturated_ = 0;

  int capacity_ = 0;                        // slots of each block
  std::vector<std::uint16_t> key_store_;    // [batch * head, slot, dim]
  std::vector<std::uint16_t> value_store_;  // [batch * head, slot, dim]
  std::vector<Head> state_heads_;           // [batch * head]
  std::vector<std::uint16_t>
      call_keys_;  // [batch * head, visible_rows_, dim] of a long call, else empty
  std::vector<std::uint16_t> call_values_;
  int visible_rows_ = 0;  // rows that the last call returned

  std::optional<Workspace> workspace_;
  std::vector<int> new_slots_;
  std::vector<float> queries_;  // [batch * head, token, group, dim] of the last tokens of the call
  int query_tokens_ = 0;
  std::vector<const std::uint16_t*> key_blocks_;
  std::vector<const std::uint16_t*> value_blocks_;
};

}  // namespace morphkv

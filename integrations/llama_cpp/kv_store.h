// The rows of one sequence inside the engine's K and V tensors of one layer: read keys, copy rows,
// poison freed rows. In host memory directly, elsewhere through the backend's own calls; quantised
// keys are dequantised to float.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <span>
#include <vector>

#include "morphkv/row_moves.h"
#include "morphkv/tensor_view.h"
#include "tensor_tap.h"

namespace morphkv::llama_cpp {

// Memory that the layers share while they are worked on, grown at construction time of the evictor
// only.
struct KvScratch {
  std::vector<std::byte> bytes;  // rows on their way from or to a device
  std::vector<float> keys;       // [head, cell, dim] dequantised keys
  std::vector<RowsView> views;   // [head]
};

class KvStore {
 public:
  KvStore(const TappedLayer& layer, int sequence);

  // Why rows of single heads cannot be handled, or "": a head's slice of a row must be whole
  // blocks.
  static std::string unsupported(const TappedLayer& layer);

  // Keys of each head, for the cells in `cells` (others may hold anything). Valid until the scratch
  // is used again.
  std::span<const RowsView> keys(std::span<const int> cells, KvScratch& scratch) const;
  // Copies K and V of one head from cell to cell.
  void apply(int head, std::span<const RowMove> moves, KvScratch& scratch) const;
  // Overwrites K and V of all heads with `value`, which the type must be able to hold.
  void poison(std::span<const int> cells, float value, KvScratch& scratch) const;

  // Bytes of K and V that one head keeps for one token; K and V of all heads,
  // cells and sequences as allocated.
  std::size_t row_bytes() const;
  std::size_t allocated_bytes() const;
  bool in_host_memory() const { return host_; }

 private:
  // One head's slice of one row in K or V.
  struct Slice {
    ggml_tensor* tensor = nullptr;
    std::size_t head_bytes = 0;
    std::size_t begin = 0;  // of the sequence, in bytes
    std::size_t offset(int head, int cell) const {
      return begin + static_cast<std::size_t>(cell) * tensor->nb[1] +
             static_cast<std::size_t>(head) * head_bytes;
    }
  };
  void read(const Slice& slice, std::size_t offset, std::size_t bytes, std::byte* out) const;
  void write(const Slice& slice, std::size_t offset, std::size_t bytes, const std::byte* in) const;

  Slice k_;
  Slice v_;
  bool host_;
  int n_head_kv_;
  int dim_k_;
};

}  // namespace morphkv::llama_cpp

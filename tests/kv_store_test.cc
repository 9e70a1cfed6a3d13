#include "kv_store.h"

#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace morphkv::llama_cpp {
namespace {

constexpr int kHeads = 3;
constexpr int kDimK = 64;
constexpr int kDimV = 32;
constexpr int kCells = 7;

// A layer's K and V as the engine allocates them, each row filled with numbers of its own.
class Tensors {
 public:
  Tensors(ggml_type type_k, ggml_type type_v, bool with_v = true)
      : context_(ggml_init(
            {.mem_size = 4 * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true})),
        backend_(ggml_backend_cpu_init()) {
    layer.n_head_kv = kHeads;
    layer.dim_k = kDimK;
    layer.dim_v = kDimV;
    layer.k = ggml_new_tensor_3d(context_.get(), type_k, kHeads * kDimK, kCells, 1);
    if (with_v) layer.v = ggml_new_tensor_3d(context_.get(), type_v, kHeads * kDimV, kCells, 1);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), backend_.get()));
    fill(layer.k, 1.0f);
    if (with_v) fill(layer.v, -1.0f);
  }

  static std::string bytes(const ggml_tensor* tensor) {
    std::string out(ggml_nbytes(tensor), '\0');
    ggml_backend_tensor_get(tensor, out.data(), 0, out.size());
    return out;
  }
  // One head's slice of one cell.
  static std::string slice(const ggml_tensor* tensor, int head, int cell) {
    const std::size_t size = ggml_row_size(tensor->type, tensor->ne[0] / kHeads);
    return bytes(tensor).substr(
        static_cast<std::size_t>(cell) * tensor->nb[1] + static_cast<std::size_t>(head) * size,
        size);
  }
  static float value(int cell, int i) { return std::sin(static_cast<float>(cell * 1000 + i)); }

  TappedLayer layer;

 private:
  static void fill(ggml_tensor* tensor, float sign) {
    std::vector<float> row(static_cast<std::size_t>(tensor->ne[0]));
    std::vector<char> encoded(tensor->nb[1]);
    for (int cell = 0; cell < kCells; ++cell) {
      for (std::size_t i = 0; i < row.size(); ++i) row[i] = sign * value(cell, static_cast<int>(i));
      if (tensor->type == GGML_TYPE_F32) {
        std::memcpy(encoded.data(), row.data(), encoded.size());
      } else {
        ggml_get_type_traits(tensor->type)
            ->from_float_ref(row.data(), encoded.data(), tensor->ne[0]);
      }
      ggml_backend_tensor_set(tensor, encoded.data(),
                              static_cast<std::size_t>(cell) * tensor->nb[1], encoded.size());
    }
  }

  struct Free {
    void operator()(ggml_context* context) const { ggml_free(context); }
    void operator()(ggml_backend* backend) const { ggml_backend_free(backend); }
    void operator()(ggml_backend_buffer* buffer) const { ggml_backend_buffer_free(buffer); }
  };
  std::unique_ptr<ggml_context, Free> context_;
  std::unique_ptr<ggml_backend, Free> backend_;
  std::unique_ptr<ggml_backend_buffer, Free> buffer_;
};

const std::vector<ggml_type> kTypes = {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32, GGML_TYPE_Q8_0,
                                       GGML_TYPE_Q4_0};

// How far a number of size 1 may be from what the type keeps of it.
float precision(ggml_type type) {
  return type == GGML_TYPE_F32 ? 0.0f : type == GGML_TYPE_Q4_0 ? 0.15f : 0.01f;
}

float element(const RowsView& view, int cell, int i) {
  const std::byte* at = view.row(cell) + static_cast<std::size_t>(i) * size_of(view.dtype);
  if (view.dtype == DType::kF32) return *reinterpret_cast<const float*>(at);
  if (view.dtype == DType::kF16) {
    return ggml_fp16_to_fp32(*reinterpret_cast<const ggml_fp16_t*>(at));
  }
  return ggml_bf16_to_fp32(*reinterpret_cast<const ggml_bf16_t*>(at));
}

TEST(KvStore, KeysOfEachHeadCanBeReadForTheCellsAskedFor) {
  for (const ggml_type type : kTypes) {
    SCOPED_TRACE(ggml_type_name(type));
    Tensors tensors(type, GGML_TYPE_F16);
    const KvStore store(tensors.layer, 0);
    KvScratch scratch;
    const auto views = store.keys(std::vector{6, 1, 3}, scratch);
    ASSERT_EQ(views.size(), static_cast<std::size_t>(kHeads));
    for (int h = 0; h < kHeads; ++h) {
      EXPECT_EQ(views[static_cast<std::size_t>(h)].dim, kDimK);
      for (const int cell : {6, 1, 3}) {
        for (int i = 0; i < kDimK; ++i) {
          EXPECT_NEAR(element(views[static_cast<std::size_t>(h)], cell, i),
                      Tensors::value(cell, h * kDimK + i), precision(type))
              << "head " << h << ", cell " << cell;
        }
      }
    }
  }
}

TEST(KvStore, AMoveCopiesKAndVOfOneHeadByteForByteAndNothingElse) {
  for (const ggml_type type_k : kTypes) {
    for (const ggml_type type_v : kTypes) {
      Tensors tensors(type_k, type_v);
      const Tensors before(type_k, type_v);
      KvScratch scratch;
      KvStore(tensors.layer, 0).apply(1, std::vector<RowMove>{{5, 0}, {2, 3}}, scratch);
      for (int h = 0; h < kHeads; ++h) {
        for (int cell = 0; cell < kCells; ++cell) {
          const int from = h != 1 ? cell : cell == 0 ? 5 : cell == 3 ? 2 : cell;
          EXPECT_EQ(Tensors::slice(tensors.layer.k, h, cell),
                    Tensors::slice(before.layer.k, h, from));
          EXPECT_EQ(Tensors::slice(tensors.layer.v, h, cell),
                    Tensors::slice(before.layer.v, h, from));
        }
      }
    }
  }
}

TEST(KvStore, WithoutValuesOnlyKeysMove) {
  Tensors tensors(GGML_TYPE_F16, GGML_TYPE_F16, /*with_v=*/false);
  const std::string expected = Tensors::slice(tensors.layer.k, 0, 4);
  KvScratch scratch;
  const KvStore store(tensors.layer, 0);
  store.apply(0, std::vector<RowMove>{{4, 1}}, scratch);
  store.poison(std::vector{4}, 3e4f, scratch);
  EXPECT_EQ(Tensors::slice(tensors.layer.k, 0, 1), expected);
  EXPECT_EQ(store.row_bytes(), kDimK * 2u);
  EXPECT_EQ(store.allocated_bytes(), kCells * kHeads * kDimK * 2u);
}

TEST(KvStore, PoisonFillsAllHeadsOfTheCellsAndLeavesTheOthers) {
  for (const ggml_type type : kTypes) {
    SCOPED_TRACE(ggml_type_name(type));
    Tensors tensors(type, type);
    const Tensors before(type, type);
    const KvStore store(tensors.layer, 0);
    KvScratch scratch;
    store.poison(std::vector{0, 4}, 3e4f, scratch);
    std::vector<int> all(kCells);
    std::iota(all.begin(), all.end(), 0);
    const auto views = store.keys(all, scratch);
    for (int h = 0; h < kHeads; ++h) {
      for (const int cell : {0, 4}) {
        EXPECT_NEAR(element(views[static_cast<std::size_t>(h)], cell, 11), 3e4f, 100.0f);
      }
      for (const int cell : {1, 2, 3, 5, 6}) {
        EXPECT_EQ(Tensors::slice(tensors.layer.k, h, cell),
                  Tensors::slice(before.layer.k, h, cell));
        EXPECT_EQ(Tensors::slice(tensors.layer.v, h, cell),
                  Tensors::slice(before.layer.v, h, cell));
      }
    }
    EXPECT_NE(Tensors::slice(tensors.layer.v, 2, 4), Tensors::slice(before.layer.v, 2, 4));
  }
}

TEST(KvStore, BytesAreThoseOfKAndVInTheirTypes) {
  const Tensors tensors(GGML_TYPE_Q8_0, GGML_TYPE_Q4_0);
  const KvStore store(tensors.layer, 0);
  EXPECT_EQ(store.row_bytes(), 68u + 18u);
  EXPECT_EQ(store.allocated_bytes(), kCells * kHeads * (68u + 18u));
}

TEST(KvStore, AHeadThatIsNoWholeBlocksOrNoPartOfTheRowIsRefused) {
  Tensors tensors(GGML_TYPE_Q8_0, GGML_TYPE_F16);
  EXPECT_EQ(KvStore::unsupported(tensors.layer), "");
  tensors.layer.n_head_kv = 12;  // 12 heads of 16: the row fits, a block of 32 does not
  tensors.layer.dim_k = 16;
  EXPECT_NE(KvStore::unsupported(tensors.layer).find("head dimension 16"), std::string::npos);
  tensors.layer.n_head_kv = kHeads;
  tensors.layer.dim_k = 32;
  EXPECT_NE(KvStore::unsupported(tensors.layer).find("192 values per cell"), std::string::npos);
  tensors.layer.dim_k = kDimK;
  tensors.layer.dim_v = 64;
  EXPECT_NE(KvStore::unsupported(tensors.layer).find("V of layer 0"), std::string::npos);
}

}  // namespace
}  // namespace morphkv::llama_cpp

// The shape of a model from its file: the real model's, and files made here that must be refused.
#include "morphkv/llama_cpp/model_spec.h"

#include <gguf.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "gguf_file.h"
#include "morphkv/llama_cpp/model_file.h"

namespace morphkv::llama_cpp {
namespace {

class ModelSpecFile : public testing::Test {
 protected:
  ModelSpecFile()
      : path_(
            (std::filesystem::temp_directory_path() /
             ("morphkv-model-spec-" +
              std::string(testing::UnitTest::GetInstance()->current_test_info()->name()) + ".gguf"))
                .string()) {}
  ~ModelSpecFile() override { std::filesystem::remove(path_); }

  // A file with metadata and no tensors.
  const std::string& with(const std::function<void(gguf_context*)>& fill) {
    const GgufPtr gguf(gguf_init_empty());
    gguf_set_val_str(gguf.get(), "general.architecture", "llama");
    gguf_set_val_u32(gguf.get(), "llama.block_count", 5);
    gguf_set_val_u32(gguf.get(), "llama.embedding_length", 96);
    gguf_set_val_u32(gguf.get(), "llama.attention.head_count", 6);
    fill(gguf.get());
    EXPECT_TRUE(gguf_write_to_file(gguf.get(), path_.c_str(), true));
    return path_;
  }
  void expect_refused(const std::function<void(gguf_context*)>& fill, const std::string& word) {
    expect_refusal(with(fill), word);
  }
  static void expect_refusal(const std::string& path, const std::string& word) {
    try {
      read_model_spec(path);
      FAIL() << "read, though " << word;
    } catch (const BadModelFile& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(word), std::string::npos) << text;
      EXPECT_NE(text.find(path), std::string::npos) << text;
    }
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST_F(ModelSpecFile, OfTheRealModelSaysThirtyLayersThreeHeadsAndD64) {
  const char* model = std::getenv("MORPHKV_TEST_MODEL");
  ASSERT_NE(model, nullptr);
  const ModelSpec spec = read_model_spec(model);
  EXPECT_EQ(spec.n_layers, 30);
  EXPECT_EQ(spec.n_heads_kv, 3);
  EXPECT_EQ(spec.head_dim, 64);
  EXPECT_EQ(CacheBuilder::for_model(spec, {}).size(), 30u);
}

TEST_F(ModelSpecFile, WithoutKVHeadsHasAsManyAsQueryHeads) {
  const ModelSpec spec = read_model_spec(with([](gguf_context*) {}));
  EXPECT_EQ(spec.n_layers, 5);
  EXPECT_EQ(spec.n_heads_kv, 6);
  EXPECT_EQ(spec.head_dim, 16);
}

TEST_F(ModelSpecFile, MaySayTheLengthOfItsKeysAndItsKVHeadsLayerByLayer) {
  const ModelSpec spec = read_model_spec(with([](gguf_context* gguf) {
    gguf_set_val_u32(gguf, "llama.attention.key_length", 128);
    const std::vector<std::int32_t> heads(5, 2);
    gguf_set_arr_data(gguf, "llama.attention.head_count_kv", GGUF_TYPE_INT32, heads.data(), 5);
  }));
  EXPECT_EQ(spec.n_heads_kv, 2);
  EXPECT_EQ(spec.head_dim, 128);
}

TEST_F(ModelSpecFile, IsRefusedWhenItDoesNotSayOrSaysNonsense) {
  expect_refused([](gguf_context* g) { gguf_remove_key(g, "general.architecture"); },
                 "general.architecture");
  expect_refused([](gguf_context* g) { gguf_remove_key(g, "llama.block_count"); },
                 "llama.block_count");
  expect_refused([](gguf_context* g) { gguf_remove_key(g, "llama.attention.head_count"); },
                 "llama.attention.head_count");
  expect_refused([](gguf_context* g) { gguf_set_val_u32(g, "llama.block_count", 0); }, "is 0");
  expect_refused([](gguf_context* g) { gguf_set_val_i32(g, "llama.block_count", -1); }, "is -1");
  expect_refused([](gguf_context* g) { gguf_set_val_str(g, "llama.block_count", "5"); },
                 "no whole number");
  expect_refused(
      [](gguf_context* g) {
        const std::uint32_t heads[] = {2, 2, 1};
        gguf_set_arr_data(g, "llama.attention.head_count_kv", GGUF_TYPE_UINT32, heads, 3);
      },
      "differs between layers");
}

TEST_F(ModelSpecFile, IsRefusedWhenItIsNoModelFile) {
  expect_refusal(path(), "no such file");
  expect_refusal(std::filesystem::temp_directory_path().string(), "directory");
  std::ofstream(path()) << "GG";
  expect_refusal(path(), "2 bytes");
  std::ofstream(path()) << "A text that is no model.";
  expect_refusal(path(), "GGUF");
  std::ofstream(path()) << "GGUF and then nothing that fits";
  expect_refusal(path(), "damaged");
}

}  // namespace
}  // namespace morphkv::llama_cpp

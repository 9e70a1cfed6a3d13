// Saved caches: going on as if nothing had happened, and files and states that must be refused.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache_harness.h"
#include "morphkv/cache.h"

namespace morphkv {
namespace {

namespace fs = std::filesystem;
using test::CacheHarness;
using test::HostArray;
using test::Random;
using test::refusal;
using test::Tensor;

// A folder of its own for each test, gone afterwards.
class CacheFile : public testing::Test {
 protected:
  CacheFile()
      : folder_(fs::temp_directory_path() /
                ("morphkv-cache-file-" + std::to_string(getpid()) + "-" +
                 testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::create_directories(folder_);
  }
  ~CacheFile() override { fs::remove_all(folder_); }

  std::string path(const std::string& name = "cache") const { return (folder_ / name).string(); }

  static std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void write(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
  }

 private:
  fs::path folder_;
};

CacheConfig config_of(const char* policy, QuerySource queries = QuerySource::kKeys) {
  return {.budget = 16, .n_sink = 2, .window = 4, .queries = queries, .policy = policy};
}

std::vector<CacheConfig> every_policy() {
  return {config_of("morphkv"),
          config_of("morphkv", QuerySource::kAttention),
          config_of("h2o"),
          config_of("h2o", QuerySource::kAttention),
          config_of("snapkv"),
          config_of("snapkv", QuerySource::kAttention),
          config_of("tova"),
          config_of("tova", QuerySource::kAttention),
          config_of("keydiff"),
          config_of("rkv"),
          config_of("rkv", QuerySource::kAttention),
          config_of("streaming"),
          config_of("random"),
          config_of("full")};
}

CacheHarness fed(const CacheConfig& config, std::int64_t tokens, DType in = DType::kF32) {
  Random random(71);
  const std::array<std::int64_t, 4> shape = {2, 2, 200, 6};
  CacheHarness harness(MorphKVCache(config), test::random_tensor(shape, random),
                       test::random_tensor(shape, random), in);
  if (config.queries == QuerySource::kAttention) {
    harness.set_queries(test::random_tensor({2, 4, 200, 6}, random));
  }
  while (harness.offset() < tokens) {
    harness.feed(std::min<std::int64_t>(5, tokens - harness.offset()));
  }
  return harness;
}

// A cache whose file is small: one head, few rows, two numbers each.
MorphKVCache tiny(double shift = 0.0) {
  MorphKVCache cache({.budget = 4, .n_sink = 1, .window = 2});
  Random random(72);
  Tensor tensor = test::random_tensor({1, 1, 7, 2}, random);
  tensor.numbers[0] += shift;
  const HostArray rows(tensor, DType::kF16);
  cache.update_and_fetch(rows.view(), rows.view());
  return cache;
}

void expect_mentions(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) EXPECT_NE(text.find(word), std::string::npos) << text;
}

// ---------------------------------------------------------------- going on

TEST_F(CacheFile, LetsAnotherObjectGoOnAsTheUninterruptedOneToTheBit) {
  for (const CacheConfig& config : every_policy()) {
    for (const std::int64_t saved_at : {0, 1, 3, 16, 17, 90}) {
      for (const DType in : {DType::kF32, DType::kBF16}) {
        CacheHarness original = fed(config, saved_at, in);
        original.cache().save(path());
        CacheHarness resumed = fed(config, saved_at, in);
        MorphKVCache loaded(config);
        loaded.load(path());
        test::expect_same_state(loaded.state(), original.cache().state());
        resumed.set_cache(std::move(loaded));
        EXPECT_EQ(resumed.cache().offset(), saved_at);
        while (original.left() > 0) {
          const std::int64_t tokens = std::min<std::int64_t>(3, original.left());
          original.feed(tokens);
          resumed.feed(tokens);
        }
        resumed.expect_rows_live();
        test::expect_same_state(resumed.cache().state(), original.cache().state());
        ASSERT_FALSE(HasFailure()) << config.policy << ", saved at " << saved_at;
      }
    }
  }
}

TEST_F(CacheFile, LetsAFreshProcessGoOn) {
  const CacheConfig config = config_of("morphkv");
  CacheHarness original = fed(config, 90);
  original.cache().save(path());
  const pid_t child = fork();
  if (child == 0) {
    CacheHarness resumed = fed(config, 90);
    MorphKVCache loaded(config);
    loaded.load(path());
    resumed.set_cache(std::move(loaded));
    while (resumed.left() > 0) resumed.feed(std::min<std::int64_t>(3, resumed.left()));
    resumed.cache().save(path());
    _exit(HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  ASSERT_EQ(WEXITSTATUS(status), 0);
  while (original.left() > 0) original.feed(std::min<std::int64_t>(3, original.left()));
  MorphKVCache resumed(config);
  resumed.load(path());
  test::expect_same_state(resumed.state(), original.cache().state());
}

TEST_F(CacheFile, ReplacesWhatALiveCacheOfTheSameShapeHeld) {
  CacheHarness early = fed(config_of("morphkv"), 40);
  early.cache().save(path());
  CacheHarness late = fed(config_of("morphkv"), 120);
  late.cache().load(path());
  test::expect_same_state(late.cache().state(), early.cache().state());
  MorphKVCache(config_of("morphkv")).save(path());
  late.cache().load(path());
  EXPECT_EQ(late.cache().offset(), 0);
  test::expect_same_state(late.cache().state(), MorphKVCache(config_of("morphkv")).state());
}

TEST_F(CacheFile, CarriesTheCountOfSaturatedValues) {
  const HostArray rows(Tensor{{1, 1, 1, 2}, {1e5, 1}}, DType::kF32);
  MorphKVCache cache(config_of("morphkv"));
  cache.update_and_fetch(rows.view(), rows.view());
  cache.save(path());
  MorphKVCache loaded(config_of("morphkv"));
  loaded.load(path());
  EXPECT_EQ(loaded.saturated(), 2);
}

// ---------------------------------------------------------------- damage

TEST_F(CacheFile, IsRefusedWhereverItIsCutShort) {
  tiny().save(path());
  const std::string whole = read(path());
  MorphKVCache live = tiny(0.5);
  const CacheState before = live.state();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    write(path("cut"), whole.substr(0, length));
    ASSERT_THROW(live.load(path("cut")), std::invalid_argument) << length;
  }
  write(path("long"), whole + '\0');
  EXPECT_THROW(live.load(path("long")), std::invalid_argument);
  test::expect_same_state(live.state(), before);
  live.load(path());
  test::expect_same_state(live.state(), tiny().state());
}

TEST_F(CacheFile, IsRefusedWithAnyBitOfItFlipped) {
  tiny().save(path());
  const std::string whole = read(path());
  MorphKVCache live = tiny(0.5);
  const CacheState before = live.state();
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const int bits : {1 << (at % 8), 0xFF}) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ bits);
      write(path("damaged"), damaged);
      const std::string text = refusal([&] { live.load(path("damaged")); });
      ASSERT_NE(text.find(path("damaged")), std::string::npos)
          << "byte " << at << ", bits " << bits << ": " << text;
    }
  }
  test::expect_same_state(live.state(), before);
}

// FNV-1a as the file format names it, so that a forged file passes for whole.
std::string with_right_checksum(std::string file) {
  std::uint64_t hash = 0xCBF29CE484222325ull;
  for (std::size_t i = 28; i < file.size(); ++i) {
    hash = (hash ^ static_cast<unsigned char>(file[i])) * 0x100000001B3ull;
  }
  std::memcpy(file.data() + 20, &hash, sizeof hash);
  return file;
}

TEST_F(CacheFile, WithForgedLengthsIsRefusedWithoutAllocatingThem) {
  tiny().save(path());
  const std::string whole = read(path());
  ASSERT_EQ(with_right_checksum(whole), whole);
  const CacheConfig config = tiny().config();
  rusage usage_before{};
  getrusage(RUSAGE_SELF, &usage_before);
  // Every eight bytes that could be a length, a size or a count become huge.
  for (std::size_t at = 28; at + 8 <= whole.size(); ++at) {
    for (const std::uint64_t huge : {0x7FFFFFFFFFFFFFFFull, 0x1000000000000001ull, 0x40000000ull}) {
      std::string forged = whole;
      std::memcpy(forged.data() + at, &huge, sizeof huge);
      write(path("forged"), with_right_checksum(forged));
      try {
        MorphKVCache fresh(config);
        fresh.load(path("forged"));
      } catch (const std::invalid_argument&) {
        // Refused; what it must not be is an allocation failure or a crash.
      }
    }
  }
  rusage usage_after{};
  getrusage(RUSAGE_SELF, &usage_after);
  EXPECT_LT(usage_after.ru_maxrss - usage_before.ru_maxrss, 64 * 1024) << "KiB";
}

// ---------------------------------------------------------------- other caches

TEST_F(CacheFile, OfAnotherConfigurationIsRefusedWithBothInTheMessage) {
  const CacheConfig here = config_of("morphkv");
  CacheHarness live = fed(here, 60);
  const CacheState before = live.cache().state();
  struct Other {
    const char* field;
    const char* theirs;
    const char* ours;
    CacheConfig config;
  };
  std::vector<Other> others = {{"budget", "17", "16", here},
                               {"n_sink", "3", "2", here},
                               {"window", "5", "4", here},
                               {"recent", "6", "0", here},
                               {"pool", "7", "1", here},
                               {"fusion", "max", "mean", here},
                               {"policy", "random", "morphkv", here},
                               {"seed", "9", "0", here},
                               {"queries", "attention", "keys", here}};
  others[0].config.budget = 17;
  others[1].config.n_sink = 3;
  others[2].config.window = 5;
  others[3].config.recent = 6;
  others[4].config.pool = 7;
  others[5].config.fusion = Fusion::kMax;
  others[6].config.policy = "random";
  others[7].config.seed = 9;
  others[8].config.queries = QuerySource::kAttention;
  for (const Other& other : others) {
    fed(other.config, 60).cache().save(path());
    expect_mentions(
        refusal([&] { live.cache().load(path()); }),
        {std::string(other.field) + " " + other.theirs + " (here " + other.ours + ")", path()});
  }
  test::expect_same_state(live.cache().state(), before);
}

TEST_F(CacheFile, OfAnotherShapeOrTypeIsRefusedByALiveCacheAndTakenByANewOne) {
  const CacheConfig config = config_of("morphkv");
  CacheHarness live = fed(config, 60);
  const CacheState before = live.cache().state();
  Random random(73);
  for (const std::array<std::int64_t, 4>& shape :
       {std::array<std::int64_t, 4>{1, 2, 20, 6}, {2, 1, 20, 6}, {2, 2, 20, 7}}) {
    const HostArray rows(test::random_tensor(shape, random), DType::kF32);
    MorphKVCache other(config);
    other.update_and_fetch(rows.view(), rows.view());
    other.save(path());
    expect_mentions(refusal([&] { live.cache().load(path()); }),
                    {"B " + std::to_string(shape[0]) + ", H " + std::to_string(shape[1]) + ", D " +
                         std::to_string(shape[3]) + ", fp16",
                     "B 2, H 2, D 6, fp16", "reset()"});
    MorphKVCache fresh(config);
    fresh.load(path());
    test::expect_same_state(fresh.state(), other.state());
  }
  fed(config, 60, DType::kBF16).cache().save(path());
  expect_mentions(refusal([&] { live.cache().load(path()); }), {"D 6, bf16", "D 6, fp16"});
  test::expect_same_state(live.cache().state(), before);
}

// ---------------------------------------------------------------- forged states

struct Forgery {
  const char* what;
  std::function<void(CacheState&)> forge;
};

const Forgery kForgeries[] = {
    {"positions that do not ascend",
     [](CacheState& s) { std::swap(s.positions[5], s.positions[6]); }},
    {"a position twice", [](CacheState& s) { s.positions[6] = s.positions[5]; }},
    {"a position not yet seen", [](CacheState& s) { s.positions.back() = s.offset; }},
    {"a negative position", [](CacheState& s) { s.positions[0] = -1; }},
    {"no sink", [](CacheState& s) { s.positions[1] = 2, s.positions[2] = 3; }},
    {"a gap in the tail", [](CacheState& s) { s.positions[12] -= 1; }},
    {"an offset beyond the tail", [](CacheState& s) { ++s.offset; }},
    {"an offset of 0", [](CacheState& s) { s.offset = 0; }},
    {"a negative offset", [](CacheState& s) { s.offset = -90; }},
    {"an endless offset", [](CacheState& s) { s.offset = std::numeric_limits<Position>::max(); }},
    {"a negative count of saturated values", [](CacheState& s) { s.saturated = -1; }},
    {"no rows", [](CacheState& s) { s.positions.clear(), s.keys.clear(), s.values.clear(); }},
    {"one position more", [](CacheState& s) { s.positions.push_back(s.offset - 1); }},
    {"one key less", [](CacheState& s) { s.keys.pop_back(); }},
    {"one value more", [](CacheState& s) { s.values.push_back(0); }},
    {"no heads but rows", [](CacheState& s) { s.batch = 0, s.heads = 0; }},
    {"no batch", [](CacheState& s) { s.batch = 0; }},
    {"negative heads", [](CacheState& s) { s.batch = -2, s.heads = -2; }},
    {"more heads than memory", [](CacheState& s) { s.heads = 4, s.batch = 2; }},
    {"a product of heads that overflows",
     [](CacheState& s) {
       s.batch = 7 * 4;
       s.heads = 0x6DB6DB6DB6DB6DB7;
     }},
    {"a dimension whose product overflows", [](CacheState& s) { s.dim += std::int64_t{1} << 60; }},
    {"another dimension", [](CacheState& s) { s.dim = 3; }},
    {"a type that no cache stores", [](CacheState& s) { s.dtype = DType::kF32; }},
    {"a type that does not exist", [](CacheState& s) { s.dtype = static_cast<DType>(99); }},
    {"NaN in a key", [](CacheState& s) { s.keys[7] = 0x7E00; }},
    {"NaN in a value", [](CacheState& s) { s.values.back() = 0xFFFF; }},
    {"infinity in a key", [](CacheState& s) { s.keys[7] = 0x7C00; }},
    {"no memory of the policy", [](CacheState& s) { s.memory[1].clear(); }},
    {"memory of one head less", [](CacheState& s) { s.memory.pop_back(); }},
    {"too many queries in the ring", [](CacheState& s) { s.memory[0][0] = 5; }},
    {"a place in the ring beyond it", [](CacheState& s) { s.memory[0][1] = 4; }},
    {"half a query", [](CacheState& s) { s.memory[0][0] = 3.5f; }},
    {"NaN queries", [](CacheState& s) { s.memory[0][0] = std::nanf(""); }},
    {"a query that is no row", [](CacheState& s) { s.memory[0][2 + 16 + 1] = 16; }},
    {"a query of a negative row", [](CacheState& s) { s.memory[0][2 + 16 + 1] = -1; }},
};

TEST(CacheState, ThatWasForgedIsRefusedAndLeavesALiveCacheAsItWas) {
  const CacheConfig config = config_of("morphkv");
  CacheHarness live = fed(config, 60);
  const CacheState before = live.cache().state();
  const CacheState good = fed(config, 90).cache().state();
  for (const Forgery& forgery : kForgeries) {
    CacheState forged = good;
    forgery.forge(forged);
    EXPECT_THROW(live.cache().set_state(forged), std::invalid_argument) << forgery.what;
    EXPECT_THROW(MorphKVCache(config).set_state(forged), std::invalid_argument) << forgery.what;
  }
  test::expect_same_state(live.cache().state(), before);
  live.cache().set_state(good);
  test::expect_same_state(live.cache().state(), good);
}

// ---------------------------------------------------------------- writing

TEST_F(CacheFile, IsNotThereOrNotReadable) {
  MorphKVCache cache = tiny();
  EXPECT_THROW(cache.load(path("none")), std::runtime_error);
  fs::create_directory(path("folder"));
  EXPECT_THROW(cache.load(path("folder")), std::runtime_error);
  EXPECT_THROW(cache.save(path("none/cache")), std::runtime_error);
  EXPECT_THROW(cache.save(path("folder")), std::runtime_error);
  test::expect_same_state(cache.state(), tiny().state());
}

TEST_F(CacheFile, StaysAsItWasWhenANewOneCannotBeWritten) {
  tiny().save(path());
  const std::string old = read(path());
  // The disk is full after 100 bytes.
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit little{100, limit.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &little);
  std::string text;
  try {
    tiny(0.5).save(path());
  } catch (const std::runtime_error& error) {
    text = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  expect_mentions(text, {path(), "cannot be written"});
  EXPECT_EQ(read(path()), old);
  EXPECT_EQ(std::distance(fs::directory_iterator(fs::path(path()).parent_path()), {}), 1);
}

TEST_F(CacheFile, ReplacesTheOldOneAndLeavesNothingElse) {
  tiny().save(path());
  tiny(0.5).save(path());
  MorphKVCache cache({.budget = 4, .n_sink = 1, .window = 2});
  cache.load(path());
  test::expect_same_state(cache.state(), tiny(0.5).state());
  EXPECT_EQ(std::distance(fs::directory_iterator(fs::path(path()).parent_path()), {}), 1);
}

}  // namespace
}  // namespace morphkv

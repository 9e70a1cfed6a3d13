// What a cache promises beside the rule: counters, refusals that change nothing, values beyond the
// range, copies, reset, policies, memory, and how long results stay valid.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cache_harness.h"
#include "morphkv/cache.h"

namespace morphkv {
namespace {

using test::CacheHarness;
using test::HostArray;
using test::Positions;
using test::Random;
using test::refusal;
using test::Tensor;

constexpr CacheConfig small() { return {.budget = 16, .n_sink = 2, .window = 4}; }

CacheConfig small(std::string policy, QuerySource queries = QuerySource::kKeys) {
  CacheConfig config = small();
  config.policy = std::move(policy);
  config.queries = queries;
  return config;
}

Tensor random_tokens(std::int64_t tokens, std::uint64_t seed, std::int64_t heads = 2) {
  Random random(seed);
  return test::random_tensor({1, heads, tokens, 8}, random);
}

CacheHarness fed(const CacheConfig& config, std::int64_t tokens, std::int64_t of = 300) {
  CacheHarness harness(MorphKVCache(config), random_tokens(of, 1), random_tokens(of, 2));
  if (config.queries == QuerySource::kAttention) harness.set_queries(random_tokens(of, 3, 4));
  while (harness.offset() < tokens) {
    harness.feed(std::min<std::int64_t>(7, tokens - harness.offset()));
  }
  return harness;
}

void expect_mentions(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << text;
}

// ---------------------------------------------------------------- counters

TEST(CacheCounters, AreThoseOfAnEmptyCacheBeforeTheFirstCall) {
  MorphKVCache cache(small());
  EXPECT_EQ(cache.offset(), 0);
  EXPECT_EQ(cache.tokens_seen(), 0);
  EXPECT_EQ(cache.tokens_kept(), 0);
  EXPECT_EQ(cache.kept_bytes(), 0u);
  EXPECT_EQ(cache.full_seq_bytes(), 0u);
  EXPECT_EQ(cache.allocated_bytes(), 0u);
  EXPECT_EQ(cache.compression_ratio(), 1.0);
  EXPECT_TRUE(cache.positions().empty());
  EXPECT_EQ(cache.keys().rows, 0);
  EXPECT_EQ(cache.values().rows, 0);
  EXPECT_TRUE(cache.state().keys.empty());
}

TEST(CacheCounters, CountRowsOfKVHeadsOnly) {
  const std::int64_t tokens = 8192;
  const std::vector<std::uint16_t> zeros(static_cast<std::size_t>(3 * tokens * 64), 0);
  const auto view = ArrayView::contiguous(zeros.data(), DType::kF16, {1, 3, tokens, 64});
  MorphKVCache cache({.policy = "streaming"});
  cache.update_and_fetch(view, view);
  // Field case 8: thirty such layers hold 11,796,480 bytes of 188,743,680 + 0.
  EXPECT_EQ(30 * cache.kept_bytes(), 11'796'480u);
  EXPECT_EQ(30 * cache.full_seq_bytes(), 188'743'680u);
  EXPECT_EQ(cache.compression_ratio(), 16.0);
  EXPECT_EQ(cache.tokens_seen(), 3 * tokens);
  EXPECT_EQ(cache.tokens_kept(), 512);
}

TEST(CacheBudget, EvictsNothingUpToTheBudgetAndExactlyOneRowBeyondIt) {
  for (const auto& config :
       {small("morphkv"), small("morphkv", QuerySource::kAttention), small("streaming"),
        small("random"), small("h2o"), small("h2o", QuerySource::kAttention), small("snapkv"),
        small("snapkv", QuerySource::kAttention), small("tova"),
        small("tova", QuerySource::kAttention), small("keydiff"), small("rkv"),
        small("rkv", QuerySource::kAttention)}) {
    for (const std::int64_t first : {1, 16}) {
      CacheHarness harness = fed(config, 0);
      while (harness.offset() < 16) harness.feed(first);
      EXPECT_EQ(harness.cache().compression_ratio(), 1.0);
      Positions all(16);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<Position>(i);
      EXPECT_EQ(harness.held()[0], all);
      harness.feed(1);
      EXPECT_EQ(harness.cache().tokens_kept(), 16) << config.policy;
      EXPECT_EQ(harness.held()[1].back(), 16);
      EXPECT_EQ(harness.cache().compression_ratio(), 17.0 / 16.0);
    }
  }
}

TEST(CacheTrim, ReturnsZeroAndChangesNothing) {
  CacheHarness harness = fed(small(), 40);
  KVCache& cache = harness.cache();
  const CacheState before = cache.state();
  EXPECT_FALSE(cache.is_trimmable());
  for (const std::int64_t n : {0, 3, 1'000'000, -1}) EXPECT_EQ(cache.trim(n), 0);
  test::expect_same_state(cache.state(), before);
}

// ---------------------------------------------------------------- refusals

TEST(CacheRefusals, OfShapesThatDoNotFitLeaveTheCacheAsItWas) {
  CacheHarness harness = fed(small(), 40);
  MorphKVCache& cache = harness.cache();
  const CacheState before = cache.state();
  const std::vector<float> memory(4096, 0.5f);
  const auto array = [&](std::array<std::int64_t, 4> shape) {
    return ArrayView::contiguous(memory.data(), DType::kF32, shape);
  };
  const ArrayView good = array({1, 2, 3, 8});
  for (const auto& shape : std::vector<std::array<std::int64_t, 4>>{
           {2, 2, 3, 8}, {1, 3, 3, 8}, {1, 2, 3, 9}, {1, 2, 0, 8}, {0, 2, 3, 8}, {1, 2, -1, 8}}) {
    EXPECT_THROW(cache.update_and_fetch(array(shape), array(shape)), std::invalid_argument);
    EXPECT_THROW(cache.update_and_fetch(good, array(shape)), std::invalid_argument);
    EXPECT_THROW(cache.update_and_fetch(array(shape), good), std::invalid_argument);
  }
  EXPECT_THROW(cache.update_and_fetch(good, array({1, 2, 2, 8})), std::invalid_argument);
  expect_mentions(refusal([&] {
                    cache.update_and_fetch(array({1, 3, 3, 8}), array({1, 3, 3, 8}));
                  }),
                  {"[1, 3, 3, 8]", "H 2", "D 8", "reset()"});
  test::expect_same_state(cache.state(), before);
}

TEST(CacheRefusals, OfQueriesThatAreMissingOrDoNotFitLeaveTheCacheAsItWas) {
  CacheHarness harness = fed(small("morphkv", QuerySource::kAttention), 40);
  MorphKVCache& cache = harness.cache();
  const CacheState before = cache.state();
  const std::vector<float> memory(4096, 0.5f);
  const auto array = [&](std::array<std::int64_t, 4> shape) {
    return ArrayView::contiguous(memory.data(), DType::kF32, shape);
  };
  const ArrayView good = array({1, 2, 3, 8});
  expect_mentions(refusal([&] { cache.update_and_fetch(good, good); }), {"queries", "third"});
  for (const auto& shape : std::vector<std::array<std::int64_t, 4>>{
           {2, 4, 3, 8}, {1, 3, 3, 8}, {1, 4, 2, 8}, {1, 4, 3, 7}, {1, 0, 3, 8}}) {
    EXPECT_THROW(cache.update_and_fetch(good, good, array(shape)), std::invalid_argument);
  }
  test::expect_same_state(cache.state(), before);
}

TEST(CacheRefusals, OfNaNLeaveTheCacheAsItWasWhateverTheLengthOfTheCall) {
  for (const DType in : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const std::int64_t tokens : {1, 5, 200}) {
      for (const bool in_values : {false, true}) {
        CacheHarness harness = fed(small(), 40);
        CacheHarness untouched = fed(small(), 40);
        MorphKVCache& cache = harness.cache();
        Tensor good = random_tokens(tokens, 7);
        good.at(0, 0, 0, 0) = 1e30;  // saturates, which must not be counted either
        const HostArray a(good, in);
        const HostArray b(good, in);
        // All bits set are NaN in every type; HostArray's conversions are not made for it.
        const ArrayView& view = b.view();
        auto* at = const_cast<std::byte*>(view.data) + view.strides[1] +
                   (tokens - 1) * view.strides[2] + 7 * view.strides[3];
        std::fill_n(at, size_of(in), std::byte{0xFF});
        const std::string text = refusal([&] {
          in_values ? cache.update_and_fetch(a.view(), view)
                    : cache.update_and_fetch(view, a.view());
        });
        expect_mentions(text, {in_values ? "values" : "keys", "head 1", "NaN", "unchanged"});
        test::expect_same_state(cache.state(), untouched.cache().state());
        harness.feed(20);
        untouched.feed(20);
        test::expect_same_state(cache.state(), untouched.cache().state());
      }
    }
  }
}

TEST(CacheRefusals, OfNaNInTheQueriesLeaveTheCacheAsItWas) {
  CacheHarness harness = fed(small("morphkv", QuerySource::kAttention), 40);
  MorphKVCache& cache = harness.cache();
  const CacheState before = cache.state();
  const HostArray rows(random_tokens(3, 7), DType::kF32);
  Tensor queries = random_tokens(3, 8, 4);
  queries.at(0, 3, 2, 7) = std::numeric_limits<double>::quiet_NaN();
  const HostArray bad(queries, DType::kF32);
  expect_mentions(refusal([&] { cache.update_and_fetch(rows.view(), rows.view(), bad.view()); }),
                  {"queries", "NaN", "unchanged"});
  test::expect_same_state(cache.state(), before);
}

TEST(CacheRefusals, OfTheFirstCallLeaveTheCacheWithoutAShape) {
  MorphKVCache cache(small());
  Tensor bad = random_tokens(3, 1);
  bad.at(0, 1, 2, 7) = std::numeric_limits<double>::quiet_NaN();
  const HostArray nan(bad, DType::kF32);
  EXPECT_THROW(cache.update_and_fetch(nan.view(), nan.view()), std::invalid_argument);
  test::expect_same_state(cache.state(), MorphKVCache(small()).state());
  EXPECT_EQ(cache.allocated_bytes(), 0u);
  Random random(1);
  const HostArray other(test::random_tensor({2, 1, 4, 5}, random), DType::kF32);
  EXPECT_EQ(cache.update_and_fetch(other.view(), other.view()).keys.rows, 4);
}

TEST(CacheRefusals, OfIllegalNumbersAndOfNoPolicyComeFromTheConstructor) {
  EXPECT_THROW(MorphKVCache({.budget = 12}), std::invalid_argument);
  EXPECT_THROW(MorphKVCache({.policy = "lru"}), std::invalid_argument);
  EXPECT_THROW(MorphKVCache(small(), std::shared_ptr<const Policy>()), std::invalid_argument);
}

// ---------------------------------------------------------------- values beyond the range

TEST(CacheSaturation, StoresWhatIsTooLargeAsTheLargestNumberAndCountsIt) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Tensor keys{{1, 1, 1, 6}, {1e5, -1e5, 65504, 65519, 65520, 1}};
  const Tensor values{{1, 1, 1, 6}, {kInfinity, -kInfinity, 1e300, 0, -65504, 7}};
  for (const DType in : {DType::kF32, DType::kF64}) {
    MorphKVCache cache(small());
    const HostArray k(keys, in);
    const HostArray v(values, in);
    const auto fetched = cache.update_and_fetch(k.view(), v.view());
    const auto* key = reinterpret_cast<const std::uint16_t*>(fetched.keys.head(0, 0).row(0));
    const auto* value = reinterpret_cast<const std::uint16_t*>(fetched.values.head(0, 0).row(0));
    const std::vector<float> stored_keys = {65504, -65504, 65504, 65504, 65504, 1};
    const std::vector<float> stored_values = {65504, -65504, 65504, 0, -65504, 7};
    for (std::size_t d = 0; d < 6; ++d) {
      EXPECT_EQ(test::from_f16(key[d]), stored_keys[d]) << d;
      EXPECT_EQ(test::from_f16(value[d]), stored_values[d]) << d;
    }
    EXPECT_EQ(cache.saturated(), 6);
    EXPECT_EQ(cache.state().saturated, 6);
    EXPECT_EQ(cache.copy().saturated(), 6);
    cache.reset();
    EXPECT_EQ(cache.saturated(), 0);
  }
}

TEST(CacheSaturation, KeepsInfinityOutOfBf16AsWell) {
  const std::uint16_t row[] = {0x7F80, 0xFF80, 0x3F80, 0x7F7F};
  const auto view = ArrayView::contiguous(row, DType::kBF16, {1, 1, 1, 4});
  MorphKVCache cache(small());
  const auto fetched = cache.update_and_fetch(view, view);
  const auto* key = reinterpret_cast<const std::uint16_t*>(fetched.keys.head(0, 0).row(0));
  EXPECT_EQ(std::vector<std::uint16_t>(key, key + 4),
            (std::vector<std::uint16_t>{0x7F7F, 0xFF7F, 0x3F80, 0x7F7F}));
  EXPECT_EQ(cache.saturated(), 4);
}

TEST(CacheSaturation, StaysWithinTheBudgetWhenProductsOfBf16KeysOverflow) {
  Random random(5);
  const Tensor keys = test::random_tensor({1, 1, 100, 8}, random, 1e30);
  CacheHarness harness(MorphKVCache(small()), keys, keys, DType::kBF16);
  while (harness.left() > 0) harness.feed(5);
  const Positions held = harness.held()[0];
  ASSERT_EQ(held.size(), 16u);
  EXPECT_EQ(held[1], 1);
  EXPECT_EQ(held[12], 96);
}

// ---------------------------------------------------------------- copies and reset

TEST(CacheCopy, GoesOnIdenticallyAndIndependently) {
  for (const auto& config :
       {small(), small("morphkv", QuerySource::kAttention), small("random"), small("full"),
        small("h2o"), small("h2o", QuerySource::kAttention), small("snapkv"),
        small("snapkv", QuerySource::kAttention), small("tova"),
        small("tova", QuerySource::kAttention), small("keydiff"), small("rkv"),
        small("rkv", QuerySource::kAttention)}) {
    CacheHarness original = fed(config, 53);
    CacheHarness twin = original.cache().offset() == 53 ? fed(config, 53) : fed(config, 0);
    twin.set_cache(original.cache().copy());
    const CacheState before = original.cache().state();
    while (twin.offset() < 120) twin.feed(3);
    test::expect_same_state(original.cache().state(), before);
    while (original.offset() < 120) original.feed(3);
    test::expect_same_state(original.cache().state(), twin.cache().state());
    // Through the interface, and in the middle of a deferred eviction.
    const std::unique_ptr<KVCache> clone = original.cache().clone();
    test::expect_same_state(clone->state(), original.cache().state());
    EXPECT_EQ(clone->keys().rows, original.cache().tokens_kept());
  }
}

TEST(CacheCopy, OfALongCallHoldsTheRowsThatAreKept) {
  CacheHarness harness = fed(small(), 0);
  harness.feed(250);
  CacheHarness twin = fed(small(), 0);
  twin.feed(250);
  twin.set_cache(harness.cache().copy());
  twin.expect_rows_live();
  twin.feed(1);
}

TEST(CacheMove, CarriesEverything) {
  CacheHarness harness = fed(small(), 53);
  CacheHarness reference = fed(small(), 53);
  MorphKVCache moved = std::move(harness.cache());
  harness.set_cache(std::move(moved));
  harness.feed(30);
  reference.feed(30);
  test::expect_same_state(harness.cache().state(), reference.cache().state());
}

TEST(CacheReset, MakesItAsNew) {
  CacheHarness harness = fed(small(), 60);
  MorphKVCache& cache = harness.cache();
  cache.reset();
  test::expect_same_state(cache.state(), MorphKVCache(small()).state());
  EXPECT_EQ(cache.allocated_bytes(), 0u);
  EXPECT_EQ(cache.compression_ratio(), 1.0);
  CacheHarness again = fed(small(), 0);
  again.set_cache(std::move(cache));
  while (again.offset() < 60) again.feed(6);
  test::expect_same_state(again.cache().state(), fed(small(), 60).cache().state());
}

// ---------------------------------------------------------------- policies

TEST(CachePolicy, StreamingKeepsSinksAndTheMostRecentAndFullKeepsAll) {
  CacheHarness streaming = fed(small("streaming"), 100);
  Positions expected = {0, 1};
  for (Position p = 86; p < 100; ++p) expected.push_back(p);
  EXPECT_EQ(streaming.held()[0], expected);
  CacheHarness full = fed(small("full"), 300);
  EXPECT_EQ(full.cache().tokens_kept(), 300);
  EXPECT_EQ(full.cache().compression_ratio(), 1.0);
  full.expect_rows_live();
}

TEST(CachePolicy, RandomTellsLayersApart) {
  const auto held = [](int layer) {
    CacheHarness harness = fed(small("random"), 0);
    harness.set_cache(MorphKVCache(small("random"), layer));
    harness.feed(200);
    return harness.held();
  };
  EXPECT_EQ(held(0), held(0));
  EXPECT_NE(held(0), held(1));
}

// Keeps the rows whose first number is largest; asks for keys, all of a call leave at its end.
class LargestFirst final : public Policy {
 public:
  class Head final : public HeadPolicy {
   public:
    Head() : first_(columns_.add(1, -65504.0f)) {}
    void append(const KeepSet&, const NewRows& rows, int first, int count, Workspace&) override {
      for (int t = first; t < first + count; ++t) {
        const int slot = rows.slots[static_cast<std::size_t>(t)];
        std::uint16_t bits = 0;
        std::memcpy(&bits, rows.keys.row(slot), sizeof bits);
        columns_[first_][slot] = test::from_f16(bits);
      }
    }
    void score(const KeepSet& keep, std::span<float> scores, Workspace&) override {
      for (std::size_t i = 0; i < scores.size(); ++i) {
        scores[i] = columns_[first_][keep.slots()[i]];
      }
    }
    std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<Head>(*this); }

   private:
    int first_;  // column
  };

  std::string_view name() const override { return "largest-first"; }
  PolicyTraits traits() const override { return {.needs_keys = true}; }
  std::unique_ptr<HeadPolicy> make_head(HeadId) const override { return std::make_unique<Head>(); }
};

TEST(CachePolicy, OfTheCallersOwnFollowsItsRowsThroughCallsOfAnyLength) {
  const Tensor keys = random_tokens(300, 1);
  for (const int longest : {1, 10, 200}) {
    CacheHarness harness(MorphKVCache(small(), std::make_shared<LargestFirst>()), keys, keys);
    Random random(9);
    while (harness.left() > 0) {
      harness.feed(std::min<std::int64_t>(random.between(1, longest), harness.left()));
      if (random.coin()) harness.set_cache(harness.cache().copy());
    }
    // Each row leaves as the least of those over budget, so the largest of all remain.
    for (std::int64_t h = 0; h < 2; ++h) {
      std::vector<std::pair<double, Position>> order;
      for (Position p = 2; p < 296; ++p) order.emplace_back(-harness.stored_key(h, p)[0], p);
      std::sort(order.begin(), order.end());
      Positions expected = {0, 1, 296, 297, 298, 299};
      for (std::size_t i = 0; i < 10; ++i) expected.push_back(order[i].second);
      std::sort(expected.begin(), expected.end());
      EXPECT_EQ(harness.held()[static_cast<std::size_t>(h)], expected);
    }
  }
}

// ---------------------------------------------------------------- memory and lifetime

TEST(CacheMemory, IsBackAtTheUsualAfterALongCall) {
  for (const auto source : {QuerySource::kKeys, QuerySource::kAttention}) {
    CacheHarness harness = fed(small("morphkv", source), 20);
    const std::size_t usual = harness.cache().allocated_bytes();
    EXPECT_EQ(usual, std::size_t{2} * 2 * (16 + 32) * 8 * 2);
    harness.feed(250);
    EXPECT_GE(harness.cache().allocated_bytes(), std::size_t{2} * 2 * 266 * 8 * 2);
    harness.cache().keys();
    EXPECT_EQ(harness.cache().allocated_bytes(), usual);
    harness.feed(1);
    EXPECT_EQ(harness.cache().allocated_bytes(), usual);
  }
}

TEST(CacheResult, StaysValidUntilTheNextCallThatIsNotConst) {
  for (const std::int64_t tokens : {1, 200}) {
    CacheHarness harness = fed(small(), 40);
    MorphKVCache& cache = harness.cache();
    const HostArray k(random_tokens(tokens, 5), DType::kF32);
    const auto fetched = cache.update_and_fetch(k.view(), k.view());
    const auto bytes = static_cast<std::size_t>(2 * fetched.keys.rows * 8);
    std::vector<std::uint16_t> before(bytes);
    std::vector<std::uint16_t> after(bytes);
    fetched.keys.copy_to(before.data());
    const MorphKVCache& fixed = cache;
    static_cast<void>(fixed.state());
    static_cast<void>(fixed.copy().keys());
    static_cast<void>(fixed.positions());
    static_cast<void>(fixed.make_mask(5, 3));
    static_cast<void>(fixed.clone()->values());
    static_cast<void>(cache.trim(4));
    fetched.keys.copy_to(after.data());
    EXPECT_TRUE(before == after);
    // The result of keys() likewise.
    const Rows kept = cache.keys();
    EXPECT_EQ(kept.rows, 16);
    kept.copy_to(before.data());
    static_cast<void>(fixed.state());
    kept.copy_to(after.data());
    EXPECT_TRUE(before == after);
  }
}

}  // namespace
}  // namespace morphkv

// Masks come from token positions, head by head, and fit the rows that the next call returns.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache_harness.h"
#include "morphkv/cache.h"

namespace morphkv {
namespace {

using test::CacheHarness;
using test::Positions;
using test::Random;

using WindowSize = std::optional<std::int64_t>;

CacheHarness fed(std::int64_t tokens) {
  Random random(81);
  const std::array<std::int64_t, 4> shape = {2, 2, 400, 6};
  CacheHarness harness(MorphKVCache({.budget = 16, .n_sink = 2, .window = 4}),
                       test::random_tensor(shape, random), test::random_tensor(shape, random));
  while (harness.offset() < tokens) {
    harness.feed(std::min<std::int64_t>(5, tokens - harness.offset()));
  }
  return harness;
}

// [head][query][column] by the words of the contract.
using Plain = std::vector<std::vector<std::vector<bool>>>;
Plain plain_mask(const std::vector<Positions>& held, Position offset, std::int64_t n,
                 WindowSize window) {
  Plain mask;
  for (const Positions& head : held) {
    auto& of_head = mask.emplace_back();
    for (Position query = offset; query < offset + n; ++query) {
      auto& of_query = of_head.emplace_back();
      Positions columns = head;
      for (Position p = offset; p < offset + n; ++p) columns.push_back(p);
      for (const Position p : columns) {
        of_query.push_back(p <= query && (!window || query - p < *window));
      }
    }
  }
  return mask;
}

bool allows_all(const Plain& mask) {
  for (const auto& head : mask) {
    for (const auto& query : head) {
      for (const bool allowed : query) {
        if (!allowed) return false;
      }
    }
  }
  return true;
}

void expect_plain(const CacheHarness& harness, const MorphKVCache& cache, std::int64_t n,
                  WindowSize window) {
  SCOPED_TRACE("offset " + std::to_string(cache.offset()) + ", " + std::to_string(n) +
               " tokens, window " + (window ? std::to_string(*window) : "none"));
  const Plain plain = plain_mask(harness.held(), cache.offset(), n, window);
  const auto mask = cache.make_mask(n, window);
  ASSERT_EQ(mask.has_value(), !allows_all(plain));
  if (!mask) return;
  ASSERT_TRUE(mask->heads == 1 || mask->heads == harness.n_heads());
  ASSERT_EQ(mask->queries, n);
  ASSERT_EQ(mask->rows, cache.tokens_kept() + n);
  ASSERT_EQ(mask->allowed.size(), static_cast<std::size_t>(mask->heads * n * mask->rows));
  for (std::size_t h = 0; h < plain.size(); ++h) {
    for (std::size_t q = 0; q < plain[h].size(); ++q) {
      for (std::size_t row = 0; row < plain[h][q].size(); ++row) {
        const auto of = mask->heads == 1 ? 0 : h;
        const auto at =
            (of * static_cast<std::size_t>(n) + q) * static_cast<std::size_t>(mask->rows) + row;
        ASSERT_EQ(mask->allowed[at] != 0, plain[h][q][row])
            << "head " << h << ", query " << q << ", row " << row;
      }
    }
  }
}

TEST(CacheMask, IsWhatPositionsAllowForEveryHeadQueryAndRow) {
  for (const std::int64_t tokens : {0, 1, 5, 16, 17, 40, 200}) {
    CacheHarness harness = fed(tokens);
    for (const std::int64_t n : {1, 2, 7, 60}) {
      for (const WindowSize window : {WindowSize(), WindowSize(1), WindowSize(3), WindowSize(16),
                                      WindowSize(17), WindowSize(50), WindowSize(1000),
                                      WindowSize(std::numeric_limits<std::int64_t>::max())}) {
        expect_plain(harness, harness.cache(), n, window);
      }
    }
  }
}

TEST(CacheMask, IsNoneForASingleTokenThatMaySeeEverything) {
  EXPECT_FALSE(MorphKVCache({}).make_mask(1, std::nullopt));
  EXPECT_FALSE(MorphKVCache({}).make_mask(1, 1));
  CacheHarness harness = fed(100);
  EXPECT_FALSE(harness.cache().make_mask(1, std::nullopt));
  EXPECT_FALSE(harness.cache().make_mask(1, 101));  // position 0 is a sink: 101 are in reach
  EXPECT_TRUE(harness.cache().make_mask(1, 100));
  EXPECT_TRUE(harness.cache().make_mask(2, std::nullopt));
}

TEST(CacheMask, IsOneForAllHeadsOnlyWithoutAWindow) {
  CacheHarness harness = fed(100);
  EXPECT_EQ(harness.cache().make_mask(4, std::nullopt)->heads, 1);
  const auto mask = harness.cache().make_mask(4, 30);
  ASSERT_EQ(mask->heads, 4);
  const auto of = [&](std::int64_t head) {
    const auto size = mask->queries * mask->rows;
    const auto begin = mask->allowed.begin() + head * size;
    return std::vector<std::uint8_t>(begin, begin + size);
  };
  EXPECT_NE(of(0), of(1));  // heads keep other rows
}

TEST(CacheMask, HasTheColumnsThatTheNextCallReturns) {
  for (const std::int64_t n : {1, 9, 150}) {
    CacheHarness harness = fed(60);
    const auto mask = harness.cache().make_mask(n, 5);
    Random random(82);
    const test::HostArray rows(test::random_tensor({2, 2, n, 6}, random), DType::kF32);
    EXPECT_EQ(harness.cache().update_and_fetch(rows.view(), rows.view()).keys.rows, mask->rows);
  }
}

TEST(CacheMask, ForNoTokensOrAWindowOfNoneIsRefused) {
  const MorphKVCache cache({});
  for (const std::int64_t n : {0, -1}) {
    EXPECT_THROW(static_cast<void>(cache.make_mask(n, std::nullopt)), std::invalid_argument);
    EXPECT_THROW(static_cast<void>(cache.make_mask(3, n)), std::invalid_argument);
  }
}

}  // namespace
}  // namespace morphkv

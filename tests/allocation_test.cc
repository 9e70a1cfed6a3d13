// Nothing is allocated per token.
#include <gtest/gtest.h>

#include <new>
#include <numeric>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "count_allocations.h"
#include "generators.h"
#include "morphkv/cache.h"
#include "morphkv/policy.h"
#include "morphkv/retention.h"

namespace morphkv {
namespace {

TEST(AllocationCounter, SeesWhatIsAllocated) {
  const long before = g_allocations;
  ::operator delete(::operator new(8));  // calls, which may not be optimised away
  ::operator delete[](::operator new[](8, std::nothrow));
  EXPECT_EQ(g_allocations - before, 2);
}

struct Case {
  const char* policy;
  QuerySource queries;
  int group;
  int tokens_per_call;
};

// NOLINTNEXTLINE(readability-identifier-naming): GoogleTest looks for this name
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.policy << ", " << to_string(c.queries) << ", calls of " << c.tokens_per_call;
}

class Allocations : public ::testing::TestWithParam<Case> {};

// The host's part is done beforehand, so that what is counted is the core alone.
TEST_P(Allocations, AreNoneAfterConstruction) {
  const Case& c = GetParam();
  constexpr int kHeads = 2;
  constexpr int kDim = 17;
  constexpr int kBudget = 40;
  constexpr int kCalls = 30;
  const bool grows = std::string_view(c.policy) == "full";
  const int max_slots = grows ? kCalls * c.tokens_per_call : kBudget + c.tokens_per_call;

  const CacheConfig config{.budget = kBudget,
                           .n_sink = 2,
                           .window = 6,
                           .recent = 9,
                           .pool = 5,
                           .queries = c.queries,
                           .policy = c.policy};
  const auto policy = make_policy(config);
  LayerRetention layer(config, *policy, 0, kHeads, max_slots);
  Workspace workspace(max_slots, c.group, kDim);

  test::Random random(1);
  std::vector<test::StoredRows> stores(kHeads, test::StoredRows({}, max_slots, kDim));
  std::vector<RowsView> keys;
  for (const auto& store : stores) keys.push_back(store.view());
  std::vector<float> query_values;
  for (int i = 0; i < c.tokens_per_call * c.group * kDim; ++i) {
    query_values.push_back(static_cast<float>(random.normal()));
  }
  const std::vector<QueriesView> queries(kHeads, {.data = query_values.data(),
                                                  .token_stride = std::int64_t{c.group} * kDim,
                                                  .group_stride = kDim,
                                                  .tokens = c.tokens_per_call,
                                                  .group = c.group,
                                                  .dim = kDim});
  std::vector<int> slots;
  for (int t = 0; t < c.tokens_per_call; ++t) slots.push_back(t);
  std::vector<int> freed;
  std::vector<RowMove> moves(static_cast<std::size_t>(max_slots));
  std::vector<float> row(kDim);

  Position offset = 0;
  long allocations = 0;
  for (int call = 0; call < kCalls; ++call) {
    for (auto& store : stores) {
      for (const int slot : slots) {
        for (float& value : row) value = static_cast<float>(random.normal());
        store.set(slot, row);
      }
    }
    const LayerCall layer_call{.slots = slots,
                               .first_position = offset,
                               .keys = keys,
                               .queries = queries,
                               .scale = 0.25f,
                               .softcap = 30.0f};
    const long before_append = g_allocations;
    layer.append(layer_call, workspace);
    allocations += g_allocations - before_append;
    offset += c.tokens_per_call;

    // The call that comes next takes the slots that head 1 gave up; at first there are others.
    const auto victims = layer.victims(1);
    freed.assign(victims.begin(), victims.end());
    for (int h = 0; h < kHeads; ++h) {
      const long before_moves = g_allocations;
      const int n = layer.plan_moves(h, freed, moves);
      layer.apply_moves(h, std::span(moves).first(static_cast<std::size_t>(n)));
      allocations += g_allocations - before_moves;
      for (int i = 0; i < n; ++i) {
        const auto [from, to] = moves[static_cast<std::size_t>(i)];
        stores[static_cast<std::size_t>(h)].copy(from, to);
      }
    }
    slots.clear();
    std::vector<bool> used(static_cast<std::size_t>(max_slots), false);
    for (const int slot : layer.keep(0).slots()) used[static_cast<std::size_t>(slot)] = true;
    for (int slot = 0; static_cast<int>(slots.size()) < c.tokens_per_call && slot < max_slots;
         ++slot) {
      if (!used[static_cast<std::size_t>(slot)]) slots.push_back(slot);
    }
  }
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(layer.keep(0).size(),
            grows ? kCalls * c.tokens_per_call : std::min<int>(offset, kBudget));

  const long before_clear = g_allocations;
  layer.clear();
  EXPECT_EQ(g_allocations - before_clear, 0);
}

// Guided prefill, in a store that holds the budget, a piece and a guide.
TEST_P(Allocations, AreNoneInAGuidedPrefill) {
  const Case& c = GetParam();
  if (std::string_view(c.policy) != "morphkv") return;
  constexpr int kHeads = 2;
  constexpr int kDim = 17;
  constexpr int kBudget = 40;
  const int n = c.tokens_per_call;
  const int max_slots = kBudget + 2 * n;
  const CacheConfig config{
      .budget = kBudget, .n_sink = 2, .window = 6, .pool = 5, .queries = c.queries};
  LayerRetention layer(config, *make_policy(config), 0, kHeads, max_slots);
  Workspace workspace(max_slots, c.group, kDim);

  test::Random random(3);
  test::StoredRows store({}, max_slots, kDim);
  std::vector<float> numbers(static_cast<std::size_t>(n * c.group * kDim));
  for (float& number : numbers) number = static_cast<float>(random.normal());
  for (int slot = 0; slot < max_slots; ++slot) {
    std::vector<float> row(kDim);
    for (float& value : row) value = static_cast<float>(random.normal());
    store.set(slot, row);
  }
  const std::vector<RowsView> keys(kHeads, store.view());
  const std::vector<QueriesView> queries(
      kHeads, {numbers.data(), std::int64_t{c.group} * kDim, kDim, n, c.group, kDim});
  std::vector<RowMove> moves(static_cast<std::size_t>(max_slots));
  std::vector<int> slots(static_cast<std::size_t>(n));
  std::vector<int> guide_slots(slots.size());
  std::vector<int> freed(slots.size());
  std::iota(guide_slots.begin(), guide_slots.end(), kBudget + n);

  long allocations = 0;
  for (int call = 0; call < 12 + kBudget / n; ++call) {
    const int held = layer.keep(0).size();
    std::iota(slots.begin(), slots.end(), held);
    LayerCall piece{.slots = slots, .first_position = call * n, .keys = keys, .queries = queries};
    LayerCall guide = piece;
    guide.slots = guide_slots;
    const long before = g_allocations;
    layer.extend(piece, workspace);
    layer.guide(guide, workspace);
    layer.guide(piece, workspace);  // the rows held last
    layer.evict(workspace);
    const auto victims = static_cast<int>(layer.victims(0).size());
    std::iota(freed.begin(), freed.end(), kBudget);
    for (int h = 0; h < kHeads; ++h) {
      const int m = layer.plan_moves(h, std::span(freed).first(victims), moves);
      layer.apply_moves(h, std::span(moves).first(static_cast<std::size_t>(m)));
    }
    allocations += g_allocations - before;
  }
  EXPECT_EQ(layer.keep(0).size(), kBudget);
  EXPECT_EQ(allocations, 0);
}

constexpr Case kCases[] = {
    {"morphkv", QuerySource::kKeys, 1, 1},       {"morphkv", QuerySource::kKeys, 1, 5},
    {"morphkv", QuerySource::kKeys, 1, 70},      {"morphkv", QuerySource::kAttention, 1, 1},
    {"morphkv", QuerySource::kAttention, 40, 5}, {"morphkv", QuerySource::kAttention, 3, 70},
    {"h2o", QuerySource::kKeys, 1, 1},           {"h2o", QuerySource::kKeys, 1, 70},
    {"h2o", QuerySource::kAttention, 3, 1},      {"h2o", QuerySource::kAttention, 3, 70},
    {"snapkv", QuerySource::kKeys, 1, 1},        {"snapkv", QuerySource::kKeys, 1, 70},
    {"snapkv", QuerySource::kAttention, 3, 1},   {"snapkv", QuerySource::kAttention, 3, 70},
    {"tova", QuerySource::kKeys, 1, 1},          {"tova", QuerySource::kKeys, 1, 70},
    {"tova", QuerySource::kAttention, 3, 1},     {"tova", QuerySource::kAttention, 3, 70},
    {"keydiff", QuerySource::kKeys, 1, 1},       {"keydiff", QuerySource::kKeys, 1, 70},
    {"rkv", QuerySource::kKeys, 1, 1},           {"rkv", QuerySource::kKeys, 1, 70},
    {"rkv", QuerySource::kAttention, 3, 1},      {"rkv", QuerySource::kAttention, 3, 70},
    {"streaming", QuerySource::kKeys, 1, 1},     {"streaming", QuerySource::kKeys, 1, 70},
    {"random", QuerySource::kKeys, 1, 1},        {"random", QuerySource::kKeys, 1, 70},
    {"full", QuerySource::kKeys, 1, 1},          {"full", QuerySource::kKeys, 1, 70},
};

INSTANTIATE_TEST_SUITE_P(OfEveryPolicy, Allocations, ::testing::ValuesIn(kCases),
                         [](const ::testing::TestParamInfo<Case>& test) {
                           return std::string(test.param.policy) + "_" +
                                  std::string(to_string(test.param.queries)) + "_calls_of_" +
                                  std::to_string(test.param.tokens_per_call);
                         });

// A decode step of the cache class, once the budget is full and the first calls have sized all.
TEST_P(Allocations, AreNoneInADecodeStepOfACache) {
  const Case& c = GetParam();
  if (std::string_view(c.policy) == "full" || c.tokens_per_call != 1) return;
  constexpr std::int64_t kHeads = 3;
  constexpr std::int64_t kDim = 17;
  MorphKVCache cache({.budget = 40,
                      .n_sink = 2,
                      .window = 6,
                      .recent = 9,
                      .pool = 5,
                      .queries = c.queries,
                      .policy = c.policy});
  test::Random random(2);
  std::vector<float> numbers(static_cast<std::size_t>(kHeads * c.group * kDim));
  long allocations = 0;
  for (int step = 0; step < 300; ++step) {
    for (float& number : numbers) number = static_cast<float>(random.normal());
    const auto view = [&](std::int64_t heads) {
      return ArrayView::contiguous(numbers.data(), DType::kF32, {1, heads, 1, kDim});
    };
    const long before = g_allocations;
    const auto rows =
        c.queries == QuerySource::kKeys
            ? cache.update_and_fetch(view(kHeads), view(kHeads))
            : cache.update_and_fetch(view(kHeads), view(kHeads), view(kHeads * c.group));
    if (step > 60) allocations += g_allocations - before;
    EXPECT_EQ(rows.keys.rows, std::min(step, 40) + 1);
  }
  EXPECT_EQ(allocations, 0);
}

}  // namespace
}  // namespace morphkv

// The ring against a recomputation from all logits in double, above all where its references go
// stale.
#include "morphkv/window_logits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "generators.h"

namespace morphkv {
namespace {

using test::Random;

KeepSet keep_set(std::initializer_list<int> slots) {
  KeepSet keep(std::max(slots) + 1);
  for (const int slot : slots) keep.append(slot, keep.size());
  return keep;
}

// A head that is no more than a ring.
class Ring final : public WindowLogits {
 public:
  Ring(QuerySource source, int window, int max_slots) : WindowLogits(source, window) {
    columns_.resize(max_slots);
  }

  void append(const KeepSet&, const NewRows&, int, int, Workspace&) override {}
  void score(const KeepSet&, std::span<float>, Workspace&) override {}
  std::unique_ptr<HeadPolicy> clone() const override { return std::make_unique<Ring>(*this); }

  void erase(int slot) {
    Workspace none(1, 1, 1);
    erased(slot, nullptr, none);
    columns_.erase(slot);
  }
};

// A head of the keys source that remembers all logits: token i asks or answers, logit(i, j) =
// logit(j, i).
class KeysModel {
 public:
  using Logit = std::function<float(int, int)>;

  KeysModel(int window, int max_slots, Logit logit)
      : window_(window),
        ring_(QuerySource::kKeys, window, max_slots),
        logit_(std::move(logit)),
        token_in_(static_cast<std::size_t>(max_slots), -1) {}

  Ring& ring() { return ring_; }
  int rows() const { return static_cast<int>(held_.size()); }
  int token(int rank) const { return held_[static_cast<std::size_t>(rank)].token; }

  void push(int slot) {
    const int token = next_++;
    held_.push_back({token, slot});
    token_in_[static_cast<std::size_t>(slot)] = token;
    // Entries of slots not held are to be ignored.
    std::vector<float> logits(token_in_.size(), std::numeric_limits<float>::quiet_NaN());
    for (const Row& row : held_) {
      logits[static_cast<std::size_t>(row.slot)] = logit_(token, row.token);
    }
    ring_.push_key(keep(), logits.data());
    askers_.push_back(token);
    if (static_cast<int>(askers_.size()) > window_) askers_.pop_front();
  }
  void push_anywhere(Random& random) { push(free_slot(random)); }

  void erase_rank(int rank) {
    const int slot = held_[static_cast<std::size_t>(rank)].slot;
    ring_.erase(slot);
    token_in_[static_cast<std::size_t>(slot)] = -1;
    held_.erase(held_.begin() + rank);
  }

  void move_rank(int rank, int to) {
    Row& row = held_[static_cast<std::size_t>(rank)];
    ring_.columns().move(row.slot, to);
    std::swap(token_in_[static_cast<std::size_t>(row.slot)],
              token_in_[static_cast<std::size_t>(to)]);
    row.slot = to;
  }

  // The rows in slots [first, last) go `by` slots further on.
  void shift(int first, int last, int by) {
    ring_.columns().shift(first, last, by);
    const std::vector<int> before = token_in_;
    const auto at = [](int slot) { return static_cast<std::size_t>(slot); };
    for (int slot = first; slot < last; ++slot) token_in_[at(slot)] = -1;
    for (int slot = first; slot < last; ++slot) token_in_[at(slot + by)] = before[at(slot)];
    for (Row& row : held_) row.slot += row.slot >= first && row.slot < last ? by : 0;
  }

  KeepSet keep() const {
    KeepSet keep(static_cast<int>(token_in_.size()));
    for (const Row& row : held_) keep.append(row.slot, row.token);
    return keep;
  }

  // The same rows in slots 0, 1, ... of a ring that was loaded from this one's state.
  void save_and_load() {
    std::vector<float> saved;
    ring_.save(keep(), saved);
    ring_ = Ring(QuerySource::kKeys, window_, ring_.columns().max_slots());
    std::fill(token_in_.begin(), token_in_.end(), -1);
    for (std::size_t rank = 0; rank < held_.size(); ++rank) {
      held_[rank].slot = static_cast<int>(rank);
      token_in_[rank] = held_[rank].token;
    }
    ASSERT_TRUE(ring_.load(keep(), saved));
    std::vector<float> again;
    ring_.save(keep(), again);
    ASSERT_EQ(again, saved);
  }

  void resize(int max_slots) {
    ring_.columns().resize(max_slots);
    token_in_.resize(static_cast<std::size_t>(max_slots), -1);
  }

  int free_slot(Random& random) const {
    std::vector<int> free;
    for (std::size_t slot = 0; slot < token_in_.size(); ++slot) {
      if (token_in_[slot] < 0) free.push_back(static_cast<int>(slot));
    }
    return free[static_cast<std::size_t>(random.between(0, static_cast<int>(free.size()) - 1))];
  }

  // Mean and maximum over the window of each slot's probability, as the ring has them and as they
  // are.
  void expect_recomputation() {
    const std::size_t n_slots = token_in_.size();
    std::vector<double> mean(n_slots, 0.0);
    std::vector<double> largest(n_slots, 0.0);
    for (const int asker : askers_) {
      double top = -std::numeric_limits<double>::infinity();
      for (const Row& row : held_) top = std::max<double>(top, logit_(asker, row.token));
      double sum = 0.0;
      for (const Row& row : held_) sum += std::exp(logit_(asker, row.token) - top);
      for (const Row& row : held_) {
        const auto slot = static_cast<std::size_t>(row.slot);
        const double p = std::exp(logit_(asker, row.token) - top) / sum;
        mean[slot] += p / static_cast<double>(askers_.size());
        largest[slot] = std::max(largest[slot], p);
      }
    }
    ASSERT_EQ(ring_.queries(), static_cast<int>(askers_.size()));
    std::vector<double> ring_mean(n_slots, 0.0);
    std::vector<double> ring_largest(n_slots, 0.0);
    for (int i = 0; i < ring_.queries(); ++i) {
      const double sum = ring_.normaliser(i, static_cast<int>(n_slots));
      for (std::size_t slot = 0; slot < n_slots; ++slot) {
        const float weight = ring_.weights(i)[slot];
        if (token_in_[slot] < 0) {
          ASSERT_EQ(weight, 0.0f) << "slot " << slot << " is not held";
        }
        ring_mean[slot] += weight / sum / ring_.queries();
        ring_largest[slot] = std::max(ring_largest[slot], weight / sum);
      }
    }
    for (std::size_t slot = 0; slot < n_slots; ++slot) {
      // The absolute part: weights that float cannot hold.
      ASSERT_NEAR(ring_mean[slot], mean[slot], 1e-5 * mean[slot] + 1e-30) << "slot " << slot;
      ASSERT_NEAR(ring_largest[slot], largest[slot], 1e-5 * largest[slot] + 1e-30);
    }
  }

 private:
  struct Row {
    int token;
    int slot;
  };
  int window_;
  Ring ring_;
  Logit logit_;
  std::vector<int> token_in_;  // [slot] -1 = free
  std::vector<Row> held_;      // [rank]
  std::deque<int> askers_;     // the window, oldest first
  int next_ = 0;
};

// logit(i, j) = a normal number that depends on the pair only, and what each of the two adds to all
// of its logits.
KeysModel::Logit noisy_logits(std::function<float(int)> boost) {
  return [boost = std::move(boost)](int i, int j) {
    const auto [low, high] = std::minmax({i, j});  // the same rounding for (i, j) and (j, i)
    Random random(static_cast<std::uint64_t>(low) * 100003 + static_cast<std::uint64_t>(high));
    return static_cast<float>(2.0 * random.normal()) + boost(low) + boost(high);
  };
}
float no_boost(int) { return 0.0f; }

TEST(WindowLogits, StartsWithoutQueries) {
  Ring ring(QuerySource::kKeys, 3, 8);
  EXPECT_EQ(ring.window(), 3);
  EXPECT_EQ(ring.queries(), 0);
  EXPECT_EQ(ring.columns().max_slots(), 8);
}

TEST(WindowLogits, HoldsTheLastWindowQueriesAndNoMore) {
  KeysModel model(3, 8, noisy_logits(no_boost));
  Random random(1);
  for (int token = 0; token < 7; ++token) {
    model.push_anywhere(random);
    EXPECT_EQ(model.ring().queries(), std::min(token + 1, 3));
    model.expect_recomputation();
  }
}

TEST(WindowLogits, GivesTheNewcomerAColumnInTheRowsOfOlderQueries) {
  Ring ring(QuerySource::kKeys, 2, 4);
  const float first[] = {0.0f, 0.0f, 0.5f, 0.0f};
  ring.push_key(keep_set({2}), first);
  const float second[] = {1.5f, 0.0f, 0.25f, 0.0f};
  ring.push_key(keep_set({2, 0}), second);
  // Query in slot 2: logits 0.5 (itself) and 0.25 (newcomer); query in slot 0: 0.25 and 1.5.
  EXPECT_FLOAT_EQ(ring.weights(0)[0] / ring.weights(0)[2], std::exp(0.25f - 0.5f));
  EXPECT_FLOAT_EQ(ring.weights(1)[0] / ring.weights(1)[2], std::exp(1.5f - 0.25f));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(ring.weights(i)[1], 0.0f);
    EXPECT_EQ(ring.weights(i)[3], 0.0f);
    EXPECT_FLOAT_EQ(ring.normaliser(i, 3), ring.weights(i)[0] + ring.weights(i)[2]);
  }
}

TEST(WindowLogits, GivesEqualWeightsForEqualLogitsEvenWhenTheyCameAtDifferentTimes) {
  Random random(2);
  // Odd and even tokens are two keys; the reference of older queries moves when token 5 comes.
  const auto logit = [](int i, int j) {
    return (i == 5 || j == 5) ? 9.3f : (i % 2 == j % 2 ? 1.7f : 0.3f);
  };
  KeysModel model(4, 16, logit);
  for (int token = 0; token < 12; ++token) model.push(15 - token);
  for (int i = 0; i < 4; ++i) {
    const float* weights = model.ring().weights(i);
    for (const int token : {2, 4, 6, 8, 10}) EXPECT_EQ(weights[15 - token], weights[15]) << token;
    for (const int token : {3, 7, 9, 11}) EXPECT_EQ(weights[15 - token], weights[14]) << token;
  }
}

TEST(WindowLogits, ForgetsARowThatLeaves) {
  Random random(3);
  KeysModel model(4, 12, noisy_logits(no_boost));
  for (int token = 0; token < 10; ++token) model.push_anywhere(random);
  for (const int rank : {3, 0, 2}) {
    model.erase_rank(rank);
    model.expect_recomputation();
  }
}

TEST(WindowLogits, FollowsARowThatMovesAlsoWhenItAsks) {
  Random random(4);
  KeysModel model(4, 12, noisy_logits(no_boost));
  for (int token = 0; token < 8; ++token) model.push_anywhere(random);
  for (int rank = 0; rank < 8; ++rank) {
    model.move_rank(rank, model.free_slot(random));
    model.expect_recomputation();
  }
  // The moved askers answer for the newcomers that follow.
  for (int token = 0; token < 4; ++token) {
    model.push_anywhere(random);
    model.expect_recomputation();
  }
}

TEST(WindowLogits, FollowsARunOfRowsThatShiftsAlsoWhenItAsks) {
  Random random(14);
  for (const auto& [first, last, by] :
       {std::array{4, 9, 1}, {4, 9, -1}, {4, 9, 3}, {4, 9, -4}, {8, 9, 3}, {4, 5, -3}}) {
    KeysModel model(4, 16, noisy_logits(no_boost));
    for (int slot = 4; slot < 9; ++slot) model.push(slot);
    model.shift(first, last, by);
    model.expect_recomputation();
    // The shifted askers answer for the newcomers that follow.
    for (int token = 0; token < 4; ++token) {
      model.push_anywhere(random);
      model.expect_recomputation();
    }
  }
}

TEST(WindowLogits, ClosesTheGapOfARowThatLeft) {
  Random random(15);
  KeysModel model(3, 12, noisy_logits(no_boost));
  for (int slot = 0; slot < 8; ++slot) model.push(slot);
  model.erase_rank(2);
  model.shift(0, 2, 1);
  model.expect_recomputation();
  model.erase_rank(3);
  model.shift(5, 8, -1);
  model.expect_recomputation();
  model.push_anywhere(random);
  model.expect_recomputation();
}

TEST(WindowLogits, GoesOnFromASavedState) {
  Random random(16);
  for (const int tokens : {1, 3, 4, 9}) {
    KeysModel model(4, 20, noisy_logits(no_boost));
    for (int token = 0; token < tokens; ++token) model.push_anywhere(random);
    if (tokens > 5) model.erase_rank(2);
    model.save_and_load();
    model.expect_recomputation();
    for (int token = 0; token < 6; ++token) {
      model.push_anywhere(random);
      model.expect_recomputation();
    }
  }
}

TEST(WindowLogits, RefusesAStateThatIsNoneAndStaysAsItWas) {
  Ring ring(QuerySource::kKeys, 2, 4);
  const float logits[] = {1.0f, 2.0f, 3.0f, 4.0f};
  const KeepSet keep = keep_set({3, 1});
  ring.push_key(keep_set({3}), logits);
  ring.push_key(keep_set({3, 1}), logits);
  std::vector<float> good;
  ring.save(keep, good);
  ASSERT_EQ(good.size(), 2u + 2 * (2 + 1 + 1 + 2));
  const auto refuses = [&](std::size_t at, float value) {
    std::vector<float> bad = good;
    bad[at] = value;
    EXPECT_FALSE(ring.load(keep, bad)) << at << ": " << value;
  };
  for (const float value : {-1.0f, 3.0f, 0.5f, std::nanf("")}) refuses(0, value);
  for (const float value : {-1.0f, 2.0f, 0.5f, std::nanf("")}) refuses(1, value);
  for (const float value : {-1.0f, 2.0f, 0.5f, std::nanf("")}) refuses(2 + 2 + 1, value);
  EXPECT_FALSE(ring.load(keep, {}));
  EXPECT_FALSE(ring.load(keep, std::span(good).first(good.size() - 1)));
  EXPECT_FALSE(ring.load(keep_set({3, 1, 0}), good));
  std::vector<float> after;
  ring.save(keep, after);
  EXPECT_EQ(after, good);

  Ring attention(QuerySource::kAttention, 2, 4);
  EXPECT_FALSE(attention.load(keep, good));
  attention.push_query()[3] = 0.5f;
  std::vector<float> saved;
  attention.save(keep, saved);
  EXPECT_EQ(saved, (std::vector<float>{1, 1, 0.5f, 0}));
  Ring other(QuerySource::kAttention, 2, 9);
  ASSERT_TRUE(other.load(keep_set({0, 1}), saved));
  EXPECT_EQ(other.weights(0)[0], 0.5f);
  EXPECT_EQ(other.queries(), 1);
}

TEST(WindowLogits, StaysExactWhenLogitsJumpUpBy200) {
  Random random(5);
  for (const int when : {1, 6, 11}) {
    for (const int check_every : {1, 8}) {  // checking mends what is stale
      KeysModel model(4, 32, noisy_logits([when](int i) { return i >= when ? 200.0f : 0.0f; }));
      for (int token = 1; token <= 24; ++token) {
        model.push_anywhere(random);
        if (token % check_every == 0) model.expect_recomputation();
      }
    }
  }
}

TEST(WindowLogits, StaysExactWhenLogitsRiseOrFallWithEachToken) {
  Random random(6);
  for (const float slope : {-20.0f, -3.0f, 0.4f, 3.0f, 7.9f, 20.0f}) {
    for (const int check_every : {1, 15}) {
      KeysModel model(6, 64,
                      noisy_logits([slope](int i) { return slope * static_cast<float>(i); }));
      for (int token = 1; token <= 60; ++token) {
        model.push_anywhere(random);
        if (token % check_every == 0) model.expect_recomputation();
      }
    }
  }
}

TEST(WindowLogits, StaysExactWhenTheLargestRowLeaves) {
  Random random(7);
  for (const float lead : {2.0f, 8.0f, 9.5f, 15.0f, 30.0f, 60.0f, 80.0f, 90.0f, 200.0f}) {
    KeysModel model(4, 32, noisy_logits([lead](int i) { return i == 2 || i == 9 ? lead : 0.0f; }));
    for (int token = 0; token < 20; ++token) model.push_anywhere(random);
    model.erase_rank(9);
    model.expect_recomputation();
    model.erase_rank(2);
    model.expect_recomputation();
    for (int token = 0; token < 3; ++token) model.push_anywhere(random);
    model.expect_recomputation();
  }
}

// What is left is far above the others and yet far below the reference.
TEST(WindowLogits, StaysExactWhenTheLargerOfTwoLargeRowsLeaves) {
  Random random(10);
  KeysModel model(4, 32, noisy_logits([](int i) {
                    return i == 9 ? 145.0f : i == 2 ? 60.0f : 0.0f;
                  }));
  for (int token = 0; token < 20; ++token) model.push_anywhere(random);
  model.erase_rank(9);
  model.expect_recomputation();
}

TEST(WindowLogits, DoesNotDriftIn5000Steps) {
  constexpr int kRows = 40;
  constexpr int kWindow = 8;
  Random random(8);
  const auto boost = [](int i) {  // now and then a row far above or below the others
    if (i % 97 == 13) return 60.0f;
    if (i % 31 == 7) return 14.0f;
    return i % 17 == 3 ? -25.0f : 0.0f;
  };
  KeysModel model(kWindow, kRows + 8, noisy_logits(boost));
  for (int step = 0; step < 5000; ++step) {
    model.push_anywhere(random);
    if (model.rows() > kRows) model.erase_rank(random.between(0, model.rows() - kWindow - 1));
    if (random.between(0, 2) == 0) {
      model.move_rank(random.between(0, model.rows() - 1), model.free_slot(random));
    }
    // Not at every step: asking for the normaliser mends a stale row.
    if (step % 3 == 0 || step > 4900) model.expect_recomputation();
    if (HasFatalFailure()) FAIL() << "step " << step;
  }
}

TEST(WindowLogits, KeepsAllWhenTheNumberOfSlotsChanges) {
  Random random(9);
  KeysModel model(4, 12, noisy_logits(no_boost));
  for (int token = 0; token < 10; ++token) model.push(token);
  model.resize(40);
  model.expect_recomputation();
  model.push(39);
  model.expect_recomputation();
  for (int i = 0; i < 4; ++i) model.erase_rank(1);
  model.move_rank(6, 1);  // the row in slot 39
  model.resize(10);       // below the slots in use nothing is lost
  EXPECT_EQ(model.ring().columns().max_slots(), 10);
  model.expect_recomputation();
  model.push(3);
  model.expect_recomputation();
}

TEST(WindowLogits, StaysExactWhenTheLargestRowLeavesAfterAResize) {
  for (const int max_slots : {10, 40}) {
    KeysModel model(4, 12, noisy_logits([](int i) { return i == 2 ? 60.0f : 0.0f; }));
    for (int token = 0; token < 10; ++token) model.push(token);
    model.resize(max_slots);
    model.erase_rank(2);
    model.expect_recomputation();
  }
}

TEST(WindowLogits, IsAsNewAfterClear) {
  Ring used(QuerySource::kKeys, 2, 4);
  const float before[] = {1.0f, 2.0f, 3.0f, 4.0f};
  used.push_key(keep_set({3}), before);
  used.push_key(keep_set({3, 1}), before);
  used.push_key(keep_set({3, 1, 0}), before);
  ASSERT_TRUE(used.load(KeepSet(4), {}));
  EXPECT_EQ(used.queries(), 0);

  Ring fresh(QuerySource::kKeys, 2, 4);
  for (Ring* ring : {&used, &fresh}) {
    const float after[] = {0.5f, -1.0f, 0.25f, 9.0f};
    ring->push_key(keep_set({2}), after);
    ring->push_key(keep_set({2, 0}), after);
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(used.normaliser(i, 4), fresh.normaliser(i, 4));
    for (int slot = 0; slot < 4; ++slot) {
      EXPECT_EQ(used.weights(i)[slot], fresh.weights(i)[slot]);
    }
  }
}

TEST(WindowLogits, OfAttentionOpensZeroRowsAndKeepsProbabilitiesAsTheyWere) {
  Ring ring(QuerySource::kAttention, 2, 3);
  for (const float p : {0.1f, 0.2f, 0.3f}) {
    float* row = ring.push_query();
    for (int slot = 0; slot < 3; ++slot) EXPECT_EQ(row[slot], 0.0f);
    row[0] = p;
    row[2] = 1.0f - p;
  }
  EXPECT_EQ(ring.queries(), 2);
  std::vector<float> first = {ring.weights(0)[0], ring.weights(1)[0]};
  std::sort(first.begin(), first.end());
  EXPECT_EQ(first, (std::vector<float>{0.2f, 0.3f}));  // the oldest of three has gone
  EXPECT_EQ(ring.normaliser(0, 3), 1.0f);

  ring.erase(2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(ring.weights(i)[2], 0.0f);
    EXPECT_EQ(ring.normaliser(i, 3), 1.0f);  // nobody inherits what has left
  }
  ring.columns().move(0, 2);
  ring.columns().resize(5);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(ring.weights(i)[0], 0.0f);
    EXPECT_GT(ring.weights(i)[2], 0.1f);
    EXPECT_EQ(ring.weights(i)[4], 0.0f);
  }
  ASSERT_TRUE(ring.load(KeepSet(4), {}));
  EXPECT_EQ(ring.queries(), 0);
}

}  // namespace
}  // namespace morphkv

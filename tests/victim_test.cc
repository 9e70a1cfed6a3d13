// Who leaves: protection, the least scores, ties and scores that are no numbers.
#include "morphkv/victim.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "generators.h"

namespace morphkv {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<int> victims_of(const std::vector<float>& scores, EvictableRanks evictable, int n) {
  std::vector<int> scratch(scores.size());
  std::vector<int> out(static_cast<std::size_t>(n));
  choose_victims(scores, evictable, scratch, out);
  return out;
}

using Ranks = std::vector<int>;

Ranks places_of(const std::vector<float>& scores, Ranks places) {
  std::vector<int> scratch(scores.size());
  improve_places(scores, scratch, places);
  return places;
}

TEST(EvictableRanks, LieBetweenTheSinksAndTheTail) {
  static_assert(evictable_ranks(10, 2, 3).first == 2);
  static_assert(evictable_ranks(10, 2, 3).last == 7);
  EXPECT_EQ(evictable_ranks(6, 2, 3).last, 3);
}

TEST(EvictableRanks, AreNoneWhenSinksAndTailMeetOrOverlap) {
  for (const int rows : {0, 1, 4, 5}) {
    const EvictableRanks none = evictable_ranks(rows, 2, 3);
    EXPECT_EQ(none.first, none.last) << rows;
  }
}

TEST(Victim, IsTheRowWithTheLeastScore) {
  EXPECT_EQ(victims_of({5, 4, 1, 3, 2}, {0, 5}, 1), Ranks{2});
  EXPECT_EQ(victims_of({5, 4, 1, 3, 2}, {0, 5}, 2), (Ranks{2, 4}));
  EXPECT_EQ(victims_of({1, 4, 5, 3, 2}, {0, 5}, 4), (Ranks{0, 1, 3, 4}));
}

TEST(Victim, IsNeverProtected) {
  EXPECT_EQ(victims_of({0, 0, 7, 8, 9, 0}, {2, 5}, 1), Ranks{2});
  EXPECT_EQ(victims_of({0, 0, 7, 8, 6, 0}, {2, 5}, 1), Ranks{4});
  EXPECT_EQ(victims_of({0, 0, 7, 8, 6, 0}, {2, 5}, 2), (Ranks{2, 4}));
  EXPECT_EQ(victims_of({0, 0, 7, 8, 6, 0}, {2, 5}, 3), (Ranks{2, 3, 4}));
}

TEST(Victim, OfEqualScoresIsTheLowestPosition) {
  EXPECT_EQ(victims_of({1, 1, 1, 1}, {0, 4}, 1), Ranks{0});
  EXPECT_EQ(victims_of({2, 1, 2, 1, 1}, {0, 5}, 1), Ranks{1});
  EXPECT_EQ(victims_of({2, 1, 2, 1, 1}, {0, 5}, 2), (Ranks{1, 3}));
  EXPECT_EQ(victims_of({2, 1, 2, 1, 1}, {0, 5}, 4), (Ranks{0, 1, 3, 4}));
  EXPECT_EQ(victims_of({3, 0.0f, -0.0f, 3}, {0, 4}, 1), Ranks{1});
}

TEST(Victim, IsARowWhoseScoreIsNoNumberBeforeAnyOther) {
  EXPECT_EQ(victims_of({0, 1, kNaN, -5}, {0, 4}, 1), Ranks{2});
  EXPECT_EQ(victims_of({kNaN, 1, kNaN, -5}, {1, 4}, 2), (Ranks{2, 3}));
  EXPECT_EQ(victims_of({kNaN, kNaN, 1}, {0, 3}, 1), Ranks{0});
  EXPECT_EQ(victims_of({kNaN, 2, kNaN, kNaN}, {0, 4}, 2), (Ranks{0, 2}));
  EXPECT_EQ(victims_of({kInfinity, 3, kInfinity}, {0, 3}, 2), (Ranks{0, 1}));
}

TEST(Victim, IsNobodyWhenNoneIsAskedFor) {
  EXPECT_TRUE(victims_of({1, 2, 3}, {1, 1}, 0).empty());
  EXPECT_TRUE(victims_of({}, {0, 0}, 0).empty());
}

TEST(Victim, AgreesWithAStableSortOnRandomScores) {
  test::Random random(3);
  for (int run = 0; run < 3000; ++run) {
    const int rows = random.between(1, 60);
    std::vector<float> scores;
    const int distinct = random.between(1, 40);  // few: many ties
    for (int i = 0; i < rows; ++i) scores.push_back(0.125f * random.between(0, distinct));
    const int first = random.between(0, rows - 1);
    const EvictableRanks evictable{first, random.between(first, rows)};
    const int n = random.between(0, evictable.last - evictable.first);

    Ranks expected(static_cast<std::size_t>(evictable.last - evictable.first));
    std::iota(expected.begin(), expected.end(), first);
    std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) {
      return scores[static_cast<std::size_t>(a)] < scores[static_cast<std::size_t>(b)];
    });
    expected.resize(static_cast<std::size_t>(n));
    std::sort(expected.begin(), expected.end());
    ASSERT_EQ(victims_of(scores, evictable, n), expected) << "run " << run;
  }
}

TEST(Places, AreTheOrderOfTheScoresTheBestFirst) {
  EXPECT_EQ(places_of({5, 1, 3, 4}, {4, 4, 4, 4}), (Ranks{0, 3, 2, 1}));
  EXPECT_EQ(places_of({-2}, {1}), Ranks{0});
  EXPECT_TRUE(places_of({}, {}).empty());
}

TEST(Places, OfEqualScoresAreBetterForTheHigherRank) {
  EXPECT_EQ(places_of({1, 1, 1}, {3, 3, 3}), (Ranks{2, 1, 0}));
  EXPECT_EQ(places_of({2, 1, 2, 1}, {4, 4, 4, 4}), (Ranks{1, 3, 0, 2}));
}

TEST(Places, AreWorstForScoresThatAreNoNumbers) {
  EXPECT_EQ(places_of({kNaN, -1, kNaN, 0}, {4, 4, 4, 4}), (Ranks{3, 1, 2, 0}));
  EXPECT_EQ(places_of({kInfinity, kNaN, -5}, {3, 3, 3}), (Ranks{0, 2, 1}));
}

TEST(Places, OfSeveralRankingsAreTheBestOfEach) {
  const Ranks first = places_of({9, 8, 7, 6}, {4, 4, 4, 4});
  EXPECT_EQ(places_of({6, 1, 7, 9}, first), (Ranks{0, 1, 1, 0}));
  EXPECT_EQ(places_of({9, 8, 7, 6}, {0, 0, 0, 0}), (Ranks{0, 0, 0, 0}));
}

TEST(Places, AreTheOrderInWhichVictimsAreSpared) {
  test::Random random(4);
  for (int run = 0; run < 500; ++run) {
    const int rows = random.between(1, 40);
    std::vector<float> scores;
    for (int i = 0; i < rows; ++i) {
      scores.push_back(random.between(0, 9) == 0 ? kNaN : 0.5f * random.between(0, 12));
    }
    const Ranks places = places_of(scores, Ranks(scores.size(), rows));
    const int n = random.between(0, rows);
    Ranks last;
    for (int rank = 0; rank < rows; ++rank) {
      if (places[static_cast<std::size_t>(rank)] >= rows - n) last.push_back(rank);
    }
    ASSERT_EQ(victims_of(scores, {0, rows}, n), last) << "run " << run;
  }
}

// The same scores by slot: few are distinct, some are no numbers, some slots are not held.
TEST(Victim, FoundBySlotIsTheOneFoundByRank) {
  test::Random random(5);
  for (int run = 0; run < 3000; ++run) {
    const int rows = random.between(1, 80);
    const int max_slots = rows + random.between(0, 9);
    Ranks slots(static_cast<std::size_t>(max_slots));
    std::iota(slots.begin(), slots.end(), 0);
    random.shuffle(slots);
    KeepSet keep(max_slots);
    std::vector<float> slot_scores(slots.size(), -1.0f);
    std::vector<float> scores;
    const int distinct = random.between(1, 200);
    for (int rank = 0; rank < rows; ++rank) {
      const int slot = slots[static_cast<std::size_t>(rank)];
      keep.append(slot, 3 * rank);
      const int draw = random.between(0, distinct);
      scores.push_back(draw == 7 ? kNaN : draw == 8 ? kInfinity : 0.125f * draw);
      slot_scores[static_cast<std::size_t>(slot)] = scores.back();
    }
    const int first = random.between(0, rows - 1);
    const EvictableRanks evictable{first, random.between(first + 1, rows)};
    const Ranks expected = victims_of(scores, evictable, 1);
    ASSERT_EQ(choose_victim(keep, evictable, slot_scores), expected[0]) << "run " << run;
  }
}

}  // namespace
}  // namespace morphkv

// The experiment of `morphkv bench topic-shift`: the same text twice gives the same figures, and
// the figures say what the rules make one expect.
#include "../apps/cli/topic_shift.h"

#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace morphkv::cli {
namespace {

TopicShiftGeometry quick() {
  TopicShiftGeometry g;
  g.seeds = 10;
  return g;
}

TEST(TopicShift, HasH2oKeepTheOldTopicAndWiderWindowsTheNewOne) {
  const auto arms = measure_topic_shift(quick());
  std::vector<std::string> names;
  std::vector<double> means;
  for (const auto& arm : arms) {
    ASSERT_EQ(arm.shift.size(), 10u);
    names.push_back(arm.name);
    means.push_back(mean_of(arm.shift));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"h2o", "morphkv, window 1", "morphkv, window 8",
                                             "morphkv, window 32", "streaming"}));
  EXPECT_LT(means[0], 0.05);
  EXPECT_GT(means[1], means[0] + 0.05);
  EXPECT_GT(means[2], means[1] + 0.1);
  EXPECT_GT(means[3], means[1] + 0.1);
  EXPECT_EQ(means[4], 0.0);
}

TEST(TopicShift, ControlHoldsTheTopicInEveryArm) {
  for (const auto& arm : measure_topic_shift(quick())) {
    for (const double share : arm.control) EXPECT_EQ(share, 1.0) << arm.name;
  }
}

TEST(TopicShift, RepeatsItselfSeedBySeed) {
  const auto some = measure_topic_shift(quick());
  TopicShiftGeometry more = quick();
  more.seeds = 12;
  const auto again = measure_topic_shift(more);
  for (std::size_t arm = 0; arm < some.size(); ++arm) {
    for (std::size_t seed = 0; seed < 10; ++seed) {
      EXPECT_EQ(some[arm].shift[seed], again[arm].shift[seed]);
    }
  }
}

TEST(TopicShift, RefusesNumbersThatAllowNoExperiment) {
  const auto refuses = [](auto change) {
    TopicShiftGeometry g = quick();
    change(g);
    EXPECT_THROW(measure_topic_shift(g), std::invalid_argument);
  };
  refuses([](auto& g) { g.dim = 1; });
  refuses([](auto& g) { g.first_tokens = 63; });
  refuses([](auto& g) { g.asking_tokens = 63; });
  refuses([](auto& g) { g.recent = 31; });
  refuses([](auto& g) { g.needed_tokens = 0; });
  refuses([](auto& g) { g.needed_tokens = 32; });
  refuses([](auto& g) { g.seeds = 0; });
}

TEST(TopicShift, SummarisesSeedsByMeanAndSampleDeviation) {
  EXPECT_EQ(mean_of({1, 2, 6}), 3.0);
  EXPECT_DOUBLE_EQ(deviation_of({1, 2, 6}), std::sqrt(7.0));
  EXPECT_EQ(deviation_of({5}), 0.0);
}

}  // namespace
}  // namespace morphkv::cli

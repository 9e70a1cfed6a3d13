#include <gtest/gtest.h>

#include <vector>

#include "measure.h"

namespace morphkv {
namespace {

TEST(Measure, AMedianIsInTheMiddleWhateverTheOrder) {
  EXPECT_EQ(median({}), 0.0);
  EXPECT_EQ(median({7.0}), 7.0);
  EXPECT_EQ(median({9.0, 1.0, 2.0}), 2.0);
  EXPECT_EQ(median({4.0, 1.0, 9.0, 2.0}), 3.0);
}

TEST(Measure, AQuantileLiesBetweenTwoValuesInProportion) {
  const std::vector<double> values = {50.0, 10.0, 40.0, 20.0, 30.0};
  EXPECT_EQ(quantile(values, 0.0), 10.0);
  EXPECT_EQ(quantile(values, 1.0), 50.0);
  EXPECT_DOUBLE_EQ(quantile(values, 0.1), 14.0);
}

TEST(Measure, AStopwatchNeverGoesBack) {
  const Stopwatch watch;
  const double once = watch.ms();
  EXPECT_GE(once, 0.0);
  EXPECT_GE(watch.ms(), once);
}

}  // namespace
}  // namespace morphkv

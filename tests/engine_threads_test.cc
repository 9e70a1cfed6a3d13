// Work on the engine's own threads: every piece once, on the workers it may use, errors handed on.
#include "engine_threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <thread>
#include <vector>

namespace morphkv::llama_cpp {
namespace {

TEST(EngineThreads, DoEachPieceOnceAndNameWorkersBelowTheNumberAskedFor) {
  EngineThreads threads(3);
  EXPECT_EQ(threads.threads(), 3);
  for (const int asked : {1, 2, 3, 7}) {
    for (const int n : {0, 1, 2, 50}) {
      std::vector<std::atomic<int>> done(static_cast<std::size_t>(n));
      std::atomic<int> highest = -1;
      threads.for_each(n, asked, [&](int i, int worker) {
        ++done[static_cast<std::size_t>(i)];
        int seen = highest;
        while (seen < worker && !highest.compare_exchange_weak(seen, worker)) {
        }
      });
      for (const auto& times : done) EXPECT_EQ(times, 1);
      EXPECT_LT(highest, std::min(asked, 3));
    }
  }
}

// Two pieces that wait for one another end only if two threads have them.
TEST(EngineThreads, AreSeveralAtOnce) {
  EngineThreads threads(2);
  std::atomic<int> begun = 0;
  threads.for_each(2, 2, [&](int, int) {
    ++begun;
    begun.notify_all();
    for (int seen = begun; seen < 2; seen = begun) begun.wait(seen);
  });
  EXPECT_EQ(begun, 2);
}

TEST(EngineThreads, HandOnTheFirstErrorAndWorkAgainAfterwards) {
  for (const int count : {1, 2}) {
    EngineThreads threads(count);
    std::atomic<int> done = 0;
    const auto fail_at_ten = [&](int i, int) {
      if (i == 10) throw std::runtime_error("ten");
      // The other thread must not be through with all before the error has been caught.
      if (i > 10) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ++done;
    };
    EXPECT_THROW(threads.for_each(10'000, count, fail_at_ten), std::runtime_error);
    EXPECT_LT(done, 10'000 - 1) << "what had not begun is left out";
    done = 0;
    threads.for_each(10, count, fail_at_ten);
    EXPECT_EQ(done, 10);
  }
}

}  // namespace
}  // namespace morphkv::llama_cpp

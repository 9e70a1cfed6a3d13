// A prompt in pieces: which tokens come next, when guides ask, and that a reading that stops leaves
// the engine and the rule in step.
#include "prompt_reader.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::llama_cpp {
namespace {

using Tokens = std::vector<llama_token>;

// --- Sizes
// ----------------------------------------------------------------------------------------

TEST(GuidePlan, AUsualGuideTakesAnEighthOfACallAndThePieceTheRest) {
  const Tokens prompt = test::noise_tokens(1000, 96);
  for (const auto& [most, tail] : {std::pair{512, 24}, {192, 24}, {64, 8}, {32, 4}, {4, 1}}) {
    const GuidePlan plan = plan_guides({.tokens = prompt}, 0, most, most);
    EXPECT_EQ(plan.tail, tail) << most;
    EXPECT_EQ(plan.guide, tail) << most;
    EXPECT_EQ(plan.piece, most - tail) << most;
  }
}

TEST(GuidePlan, TheTailIsBoundedByTheQuestionTheCallAndTheRoomForGuides) {
  const Tokens prompt = test::noise_tokens(1000, 96);
  EXPECT_EQ(plan_guides({.tokens = prompt, .question = 990}, 0, 512, 512).tail, 10);
  EXPECT_EQ(plan_guides({.tokens = prompt}, 600, 512, 512).tail, 512);
  EXPECT_EQ(plan_guides({.tokens = prompt}, 600, 512, 64).tail, 64);
  EXPECT_EQ(plan_guides({.tokens = prompt}, 40, 512, 64).tail, 40);
}

TEST(GuidePlan, APieceIsAtLeastHalfOfACallAndWithTextsAtLeastTheTail) {
  const Tokens prompt = test::noise_tokens(1000, 96);
  const std::vector<Tokens> texts = {test::noise_tokens(5, 96), test::noise_tokens(50, 96)};
  const GuidePlan plan = plan_guides({.tokens = prompt, .guides = texts}, 60, 64, 64);
  EXPECT_EQ(plan.guide, 50);
  EXPECT_EQ(plan.tail, 60);
  EXPECT_EQ(plan.piece, 60);
  EXPECT_EQ(plan_guides({.tokens = prompt, .guides = texts}, 0, 64, 64).piece, 32);
  EXPECT_EQ(
      plan_guides({.tokens = prompt, .guides = texts, .end_guides_too = true}, 60, 64, 64).guide,
      60);
}

// --- Reading
// --------------------------------------------------------------------------------------

class Reading : public testing::Test {
 protected:
  Reading() : model_(test::make_tiny_model({})), prompt_(test::noise_tokens(150, 96)) {}

  // "64 64+ ..." : sizes of what came next, "?" for a guide, "!" where the prompt ends with it.
  // Each is evaluated in parts of at most `most` tokens.
  std::string course(PromptReader& reader, test::Bounded& bounded, std::size_t most = 1000) {
    std::string out;
    while (!reader.next().empty()) {
      const Tokens next(reader.next().begin(), reader.next().end());
      out += (out.empty() ? "" : " ") + std::to_string(next.size()) +
             (reader.asking() ? "?"
              : reader.last() ? "!"
                              : "");
      for (std::size_t done = 0; done < next.size(); done += most) {
        const std::size_t n = std::min(most, next.size() - done);
        EXPECT_EQ(test::decode(bounded.context(), std::span(next).subspan(done, n)), 0);
        reader.evaluated(static_cast<int>(n));
      }
    }
    EXPECT_EQ(reader.done(), 150);
    EXPECT_EQ(bounded.evictor().offset(), 150);
    EXPECT_EQ(bounded.evictor().stats().rows_kept, 64);
    test::expect_consistent(bounded, "after reading");
    return out;
  }

  ModelPtr model_;
  Tokens prompt_;
};

TEST_F(Reading, WithoutGuidesIsInPieces) {
  test::Bounded bounded(model_.get(), {});
  PromptReader reader(bounded.evictor(), 0, prompt_, 64);
  EXPECT_EQ(course(reader, bounded), "64 64 22!");
}

TEST_F(Reading, AsksAfterEachPieceThatMakesRowsLeaveAndAtTheEndWithTheTailItself) {
  test::Bounded bounded(model_.get(), {.call_tokens = 128, .guide_tokens = 64});
  const Prompt prompt{.tokens = prompt_};
  PromptReader reader(bounded.evictor(), 0, prompt, plan_guides(prompt, 0, 64, 64));
  EXPECT_EQ(course(reader, bounded), "56 56 8? 38!");
}

TEST_F(Reading, TextsAskAfterEveryPieceAndTheTailOnlyAtTheEnd) {
  test::Bounded bounded(model_.get(), {.call_tokens = 128, .guide_tokens = 64});
  const Prompt prompt{.tokens = prompt_,
                      .guides = {test::noise_tokens(5, 96, 2), test::noise_tokens(9, 96, 3)}};
  PromptReader reader(bounded.evictor(), 0, prompt, plan_guides(prompt, 0, 64, 64));
  EXPECT_EQ(course(reader, bounded), "55 55 5? 9? 40! 5? 9?");
}

TEST_F(Reading, InManyBatchesKeepsTheSameRowsAsInOne) {
  const Prompt prompt{.tokens = prompt_};
  std::vector<std::vector<Position>> kept[2];
  for (const std::size_t most : {std::size_t{1000}, std::size_t{7}}) {
    test::Bounded bounded(model_.get(), {.call_tokens = 128, .guide_tokens = 64});
    PromptReader reader(bounded.evictor(), 0, prompt, plan_guides(prompt, 0, 64, 64));
    course(reader, bounded, most);
    for (const BoundLayer& layer : bounded.evictor().snapshot()) {
      for (const HeadSnapshot& head : layer.rows.heads) {
        kept[most == 7].push_back(head.positions);
      }
    }
  }
  EXPECT_EQ(kept[0], kept[1]);
}

TEST_F(Reading, ThatStopsAnywhereIsDecidedAbout) {
  const Prompt prompt{.tokens = prompt_};
  for (int stop = 0; stop < 150; stop += 13) {
    test::Bounded bounded(model_.get(), {.call_tokens = 128, .guide_tokens = 64});
    PromptReader reader(bounded.evictor(), 0, prompt, plan_guides(prompt, 0, 64, 64));
    for (int done = 0; done < stop && !reader.next().empty(); ++done) {
      const llama_token token = reader.next().front();
      ASSERT_EQ(test::decode(bounded.context(), {&token, 1}), 0);
      reader.evaluated(1);
    }
    const int read = reader.done();
    reader.stop();
    EXPECT_EQ(bounded.evictor().offset(), read) << stop;
    EXPECT_LE(bounded.evictor().stats().rows_kept, 64);
    test::expect_consistent(bounded, "stopped after " + std::to_string(stop));
  }
}

}  // namespace
}  // namespace morphkv::llama_cpp

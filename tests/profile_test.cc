#include "morphkv/profile.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <string>

#include "morphkv/policy.h"

namespace morphkv {
namespace {

TEST(Profile, EveryOneIsValidHasItsOwnNameAndSaysWhatItIsFor) {
  std::set<std::string_view> names;
  for (const Profile& profile : profiles()) {
    EXPECT_NO_THROW(validate(profile.cache)) << profile.name;
    EXPECT_TRUE(names.insert(profile.name).second) << profile.name;
    EXPECT_FALSE(profile.why.empty()) << profile.name;
    EXPECT_EQ(profile.why.find('\n'), std::string_view::npos) << profile.name;
    EXPECT_EQ(&find_profile(profile.name), &profile);
    // A guide's text is for a policy that takes one, and a reading that asks it.
    if (!profile.guide_text.empty()) {
      EXPECT_TRUE(make_policy(profile.cache)->traits().guided) << profile.name;
      EXPECT_EQ(profile.prefill, Prefill::kGuided) << profile.name;
    }
  }
  EXPECT_EQ(names, (std::set<std::string_view>{"document", "chat", "reference", "paper"}));
  EXPECT_EQ(default_profile().name, "document");
}

TEST(Profile, TheReferenceIsTheSeedsDefaultsAndThePaperAsksWithThirtyTwoQueries) {
  EXPECT_EQ(find_profile("reference").cache, CacheConfig{});
  EXPECT_EQ(find_profile("reference").prefill, Prefill::kStream);
  const CacheConfig paper = find_profile("paper").cache;
  EXPECT_EQ(paper, (CacheConfig{.window = 32, .queries = QuerySource::kAttention}));
  EXPECT_EQ(find_profile("paper").prefill, Prefill::kWhole);
}

TEST(Profile, TheTailIsAShareOfTheBudgetThatLeavesRoomToChoose) {
  const Profile& document = find_profile("document");
  EXPECT_EQ(document.with_budget(512).recent, 128);
  EXPECT_EQ(document.with_budget(512).budget, 512);
  EXPECT_EQ(document.with_budget(128).recent, 32);
  EXPECT_EQ(document.with_budget(20).recent, 8);  // the window
  EXPECT_EQ(find_profile("paper").with_budget(256).recent, 0);
  CacheConfig pinned{.budget = 512, .n_sink = 412};
  EXPECT_EQ(recent_rows(25, pinned), 75);  // three quarters of the 100 that are left
  pinned.n_sink = 505;
  EXPECT_EQ(recent_rows(25, pinned), 8);  // and validate() says that it does not fit
  EXPECT_EQ(recent_rows(0, pinned), 0);
  for (const Profile& profile : profiles()) {
    for (const int budget : {64, 128, 256, 512, 1024, 4096}) {
      EXPECT_NO_THROW(validate(profile.with_budget(budget))) << profile.name << ' ' << budget;
    }
  }
}

TEST(Profile, AnUnknownNameIsRefusedWithThoseThereAre) {
  try {
    find_profile("fast");
    FAIL() << "no error";
  } catch (const std::invalid_argument& error) {
    EXPECT_EQ(std::string(error.what()),
              "profile 'fast' is not one of document, chat, reference, paper");
  }
}

TEST(Prefill, HasTheNamesOfTheFlags) {
  EXPECT_EQ(to_string(Prefill::kGuided), "guided");
  EXPECT_EQ(to_string(Prefill::kStream), "stream");
  EXPECT_EQ(to_string(Prefill::kWhole), "whole");
}

}  // namespace
}  // namespace morphkv

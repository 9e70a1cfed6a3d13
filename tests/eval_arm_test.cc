#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <string>

#include "arm.h"
#include "morphkv/policy.h"

namespace morphkv::eval {
namespace {

std::string refusal(const std::string& specification, int budget = 512) {
  try {
    with_budget(parse_arm(specification), budget);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(Arm, IsAPolicyWithSettings) {
  const Arm arm =
      parse_arm("morphkv queries=keys window=32 pool=7 fuse=max sinks=2 recent=40 guide=general");
  EXPECT_EQ(arm.name,
            "morphkv queries=keys window=32 pool=7 fuse=max sinks=2 recent=40 guide=general");
  const CacheConfig cache = with_budget(arm, 128);
  EXPECT_EQ(cache, (CacheConfig{.budget = 128,
                                .n_sink = 2,
                                .window = 32,
                                .recent = 40,
                                .pool = 7,
                                .fusion = Fusion::kMax,
                                .queries = QuerySource::kKeys}));
  EXPECT_TRUE(arm.general_guide);
  EXPECT_FALSE(parse_arm("morphkv").general_guide);
}

TEST(Arm, ATailMayBeAShareOfTheBudgetButNotBelowTheWindow) {
  EXPECT_EQ(with_budget(parse_arm("morphkv recent=25%"), 512).recent, 128);
  EXPECT_EQ(with_budget(parse_arm("morphkv recent=25%"), 128).recent, 32);
  EXPECT_EQ(with_budget(parse_arm("morphkv window=48 recent=25%"), 128).recent, 48);
  EXPECT_EQ(with_budget(parse_arm("h2o"), 512).recent, 256);
  EXPECT_EQ(with_budget(parse_arm("h2o recent=8"), 512).recent, 8);
}

TEST(Arm, EveryDefaultArmIsOneAndEveryPolicyIsAmongThem) {
  std::set<std::string> policies;
  for (const std::string& name : default_arms()) {
    for (const int budget : {128, 256, 512, 1024}) {
      policies.insert(with_budget(parse_arm(name), budget).policy);
    }
  }
  for (const std::string_view policy : policy_names()) {
    EXPECT_TRUE(policies.contains(std::string(policy))) << policy;
  }
}

TEST(Arm, OfAProfileHasItsRule) {
  for (const Profile& profile : profiles()) {
    const std::string arm = "morphkv profile=" + std::string(profile.name);
    for (const int budget : {128, 512}) {
      EXPECT_EQ(with_budget(parse_arm(arm), budget), profile.with_budget(budget)) << arm;
    }
  }
  EXPECT_EQ(with_budget(parse_arm("h2o profile=paper"), 512).policy, "h2o");
}

TEST(Arm, WhatIsWrongIsNamed) {
  EXPECT_NE(refusal("morphcv").find("'morphcv' is not one of morphkv, h2o"), std::string::npos);
  EXPECT_NE(refusal("").find("is not one of"), std::string::npos);
  EXPECT_NE(refusal("morphkv windows=3").find("'windows' is not one of sinks, window"),
            std::string::npos);
  EXPECT_NE(refusal("morphkv window=x").find("window 'x' is no whole number"), std::string::npos);
  EXPECT_NE(refusal("morphkv window=3.5").find("window '3.5'"), std::string::npos);
  EXPECT_NE(refusal("morphkv window").find("'window' is no key=value"), std::string::npos);
  EXPECT_NE(refusal("morphkv fuse=sum").find("fuse 'sum' is not known: use one of mean, max"),
            std::string::npos);
  EXPECT_NE(refusal("morphkv queries=values").find("queries 'values'"), std::string::npos);
  EXPECT_NE(refusal("morphkv guide=some").find("guide 'some'"), std::string::npos);
  EXPECT_NE(refusal("morphkv recent=100%").find("recent 100 %"), std::string::npos);
  EXPECT_NE(refusal("morphkv window=600").find("600"), std::string::npos);
  EXPECT_NE(refusal("morphkv pool=4").find("pool"), std::string::npos);
}

}  // namespace
}  // namespace morphkv::eval

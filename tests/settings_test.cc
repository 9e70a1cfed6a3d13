// Settings: what a profile and single values together mean, and what cannot be.
#include "morphkv/settings.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "morphkv/archive.h"
#include "morphkv/policy.h"

namespace morphkv {
namespace {

constexpr const auto& kWindowField = std::get<2>(kCacheFields);
constexpr const auto& kRecentField = std::get<3>(kCacheFields);

std::string refusal_of(const Settings& settings) {
  try {
    static_cast<void>(settings.resolve());
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(Settings, WithoutAnythingSetAreTheProfile) {
  for (const Profile& profile : profiles()) {
    const ResolvedSettings resolved = Settings(profile).resolve();
    EXPECT_EQ(resolved.cache, profile.with_budget(512)) << profile.name;
    EXPECT_EQ(resolved.prefill, profile.prefill) << profile.name;
    EXPECT_EQ(resolved.guide_text, profile.guide_text) << profile.name;
    EXPECT_EQ(resolved.profile, profile.name);
  }
}

TEST(Settings, WhatIsSetStandsWhateverProfileIsTakenAfterwards) {
  Settings settings;
  settings.set(kWindowField, 5);
  settings.set_prefill(Prefill::kStream);
  settings.use(find_profile("paper"));
  const ResolvedSettings resolved = settings.resolve();
  EXPECT_EQ(resolved.cache.window, 5);
  EXPECT_EQ(resolved.cache.pool, 1);
  EXPECT_EQ(resolved.prefill, Prefill::kStream);
  EXPECT_EQ(resolved.profile, "paper");
}

TEST(Settings, ATailOfAShareFollowsTheBudgetAndTheSinksUnlessItsRowsAreSet) {
  Settings settings;
  settings.set(kBudgetField, 128);
  EXPECT_EQ(settings.resolve().cache.recent, 32);
  settings.pin(100);
  EXPECT_EQ(settings.resolve().cache.recent, 21);  // three quarters of what the sinks leave
  settings.pin(10);
  EXPECT_EQ(settings.resolve().cache.n_sink, 100);
  settings.set(kRecentField, 9);
  EXPECT_EQ(settings.resolve().cache.recent, 9);
}

TEST(Settings, AGeneralGuideAsksOnlyWhereAPromptIsReadGuided) {
  Settings settings(find_profile("chat"));
  EXPECT_FALSE(settings.resolve().guide_text.empty());
  settings.set_prefill(Prefill::kWhole);
  EXPECT_TRUE(settings.resolve().guide_text.empty());
}

TEST(Settings, APolicyWithoutGuidesStreamsUnlessGuidesAreAskedFor) {
  Settings settings;
  settings.set(kPolicyField, std::string("streaming"));
  EXPECT_EQ(settings.resolve().prefill, Prefill::kStream);
  settings.set_prefill(Prefill::kWhole);
  EXPECT_EQ(settings.resolve().prefill, Prefill::kWhole);
  settings.set_prefill(Prefill::kGuided);
  EXPECT_NE(refusal_of(settings).find("policy 'streaming' takes no guide"), std::string::npos);
}

TEST(Settings, ThatExcludeOneAnotherAreRefusedWhenResolved) {
  Settings settings;
  settings.set(kBudgetField, 12);
  EXPECT_NE(refusal_of(settings).find("budget 12"), std::string::npos);
  settings.set(kPolicyField, std::string("best"));
  settings.set(kBudgetField, 512);
  EXPECT_NE(refusal_of(settings).find("policy 'best'"), std::string::npos);
}

TEST(Settings, AreToldInWords) {
  EXPECT_EQ(to_text(Settings(find_profile("paper")).resolve()),
            "profile paper, budget 512, n_sink 4, window 32, recent 0, pool 1, fusion mean, "
            "queries attention, policy morphkv, seed 0, prefill whole");
}

// The table against the struct: a field that is missing in it would be lost in files and messages.
TEST(CacheFields, AreAllFieldsOfTheConfigUnderNamesOfTheirOwn) {
  std::set<std::string_view> names;
  std::set<std::string_view> flags;
  for_each_cache_field([&](const auto& field) {
    EXPECT_TRUE(names.insert(field.name).second) << field.name;
    EXPECT_FALSE(field.help.empty()) << field.name;
    EXPECT_TRUE(field.flag.empty() || flags.insert(field.flag).second) << field.flag;
    CacheConfig changed;
    auto& value = changed.*field.member;
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, std::string>) {
      value = "h2o";
    } else if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(value)>>) {
      value = static_cast<std::remove_cvref_t<decltype(value)>>(1);
    } else {
      value = 7;
    }
    EXPECT_NE(differences(changed, CacheConfig{}).find(field.name), std::string::npos);
  });
  // Each byte of the struct belongs to a field of the table, a string, or padding.
  const auto& [budget, n_sink, window, recent, pool, fusion, queries, policy, seed] = CacheConfig{};
  static_cast<void>(std::tie(budget, n_sink, window, recent, pool, fusion, queries, policy, seed));
  EXPECT_EQ(names.size(), 9u);
}

TEST(CacheFields, AreWrittenAndReadInOneOrder) {
  const CacheConfig config{.budget = 77,
                           .n_sink = 3,
                           .window = 5,
                           .recent = 9,
                           .pool = 7,
                           .fusion = Fusion::kMax,
                           .queries = QuerySource::kAttention,
                           .policy = "rkv",
                           .seed = 123456789012345};
  Writer out;
  config_fields(out, config);
  EXPECT_EQ(out.bytes().size(), 5 * 4 + 2 + 8 + 3 + 8u);
  Reader in(out.bytes());
  CacheConfig read;
  config_fields(in, read);
  EXPECT_EQ(read, config);
  EXPECT_TRUE(in.at_end());
}

TEST(Choices, HaveTheirNamesAndRefuseOthersWithThem) {
  EXPECT_EQ(choice_of<Fusion>("fusion", "max"), Fusion::kMax);
  try {
    choice_of<Prefill>("prefill", "fast");
    FAIL() << "no error";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "prefill 'fast' is not known: use one of guided, stream, whole");
  }
}

}  // namespace
}  // namespace morphkv

// Means and intervals by hand: what is weighted, what is resampled together, and what is compared.
// The record of the cells is tested here, too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap.h"
#include "eval_samples.h"
#include "record.h"
#include "summary.h"

namespace morphkv::eval {
namespace {

constexpr std::uint64_t kSeed = 7;

double width_of(const Estimate& e) { return e.high - e.low; }

// `documents` documents of `questions` questions; the score depends on the document alone.
std::vector<Trial> alternating(int documents, int questions) {
  std::vector<Trial> trials;
  for (int d = 0; d < documents; ++d) {
    for (int q = 0; q < questions; ++q) {
      trials.push_back(sample_trial("morphkv", 256, d, q, d % 2));
    }
  }
  return trials;
}

Cell only_cell(const std::vector<Trial>& trials) {
  const std::vector<Cell> cells = summarise(trials, kSeed);
  EXPECT_EQ(cells.size(), 1u);
  return cells.at(0);
}

Cell cell_of(const std::vector<Trial>& trials, const std::string& arm, const std::string& mode) {
  for (const Cell& cell : summarise(trials, kSeed)) {
    if (cell.arm == arm && cell.mode == mode) return cell;
  }
  ADD_FAILURE() << "no cell of " << arm << ", " << mode;
  return {};
}

// --- Intervals -----------------------------------------------------------------------------------

TEST(EvalInterval, OfEqualScoresHasNoWidth) {
  std::vector<Trial> trials;
  for (int d = 0; d < 7; ++d) trials.push_back(sample_trial("morphkv", 256, d, 0, 0.7));
  const Estimate score = only_cell(trials).score;
  EXPECT_DOUBLE_EQ(score.mean, 0.7);
  EXPECT_EQ(score.low, score.mean);
  EXPECT_EQ(score.high, score.mean);
}

TEST(EvalInterval, OfTwoDocumentsRunsFromOneToTheOther) {
  const Estimate score = only_cell(alternating(2, 1)).score;
  EXPECT_DOUBLE_EQ(score.mean, 0.5);
  EXPECT_EQ(score.low, 0.0) << "a quarter of the samples is the first document twice";
  EXPECT_EQ(score.high, 1.0);
}

TEST(EvalInterval, OfManyDocumentsIsThatOfTheNormalDistribution) {
  const Estimate score = only_cell(alternating(400, 1)).score;
  const double expected = 1.96 * std::sqrt(0.25 / 400);
  EXPECT_NEAR(score.mean - score.low, expected, 0.15 * expected);
  EXPECT_NEAR(score.high - score.mean, expected, 0.15 * expected);
}

TEST(EvalInterval, HoldsTheMean) {
  for (int documents = 1; documents < 20; ++documents) {
    std::vector<Trial> trials;
    for (int d = 0; d < documents; ++d) {
      trials.push_back(sample_trial("morphkv", 256, d, 0, d == 0 ? 1.0 : 0.01 * d));
    }
    const Estimate score = only_cell(trials).score;
    EXPECT_LE(score.low, score.mean);
    EXPECT_GE(score.high, score.mean);
  }
}

TEST(EvalInterval, NarrowsWithMoreDocuments) {
  EXPECT_LT(width_of(only_cell(alternating(160, 1)).score),
            0.6 * width_of(only_cell(alternating(40, 1)).score));
}

TEST(EvalInterval, DoesNotNarrowWithMoreQuestionsOfTheSameDocuments) {
  const Estimate one = only_cell(alternating(20, 1)).score;
  const Estimate many = only_cell(alternating(20, 16)).score;
  EXPECT_DOUBLE_EQ(many.low, one.low);
  EXPECT_DOUBLE_EQ(many.high, one.high);
}

TEST(EvalInterval, IsTheSameInAnyOrderOfTheTrials) {
  std::vector<Trial> trials;
  for (int d = 0; d < 9; ++d) {
    trials.push_back(sample_trial("morphkv", 256, d, 0, 0.1 * d));
    trials.push_back(sample_trial("morphkv", 256, d, 1, 1.0 / (1 + d)));
  }
  const Cell there = only_cell(trials);
  std::reverse(trials.begin(), trials.end());
  const Cell back = only_cell(trials);
  EXPECT_EQ(there.score.mean, back.score.mean);
  EXPECT_EQ(there.score.low, back.score.low);
  EXPECT_EQ(there.score.high, back.score.high);
}

TEST(EvalInterval, IsTheSameOnEveryMachine) {
  Statistic statistic;
  for (int i = 0; i < 10; ++i) statistic.clusters.push_back({.value = 1.0 * i * i, .weight = 1.0});
  const Estimate estimate = bootstrap({statistic}, kSeed).at(0);
  EXPECT_DOUBLE_EQ(estimate.mean, 28.5);
  EXPECT_DOUBLE_EQ(estimate.low, 13.4) << "as a program in another language finds it";
  EXPECT_DOUBLE_EQ(estimate.high, 46.1);
  EXPECT_NE(bootstrap({statistic}, kSeed + 1).at(0).low, estimate.low);
}

TEST(EvalInterval, DoesNotDependOnOtherCells) {
  std::vector<Trial> trials = alternating(11, 2);
  const Cell alone = only_cell(trials);
  for (int d = 0; d < 5; ++d) trials.push_back(sample_trial("another", 128, d, 0, 0.1 * d));
  const Cell beside = cell_of(trials, "morphkv", "whole");
  EXPECT_EQ(beside.score.low, alone.score.low);
  EXPECT_EQ(beside.score.high, alone.score.high);
}

// --- Means and counts ----------------------------------------------------------------------------

TEST(EvalSummary, CountsEveryQuestionAlike) {
  const Cell cell =
      only_cell({sample_trial("morphkv", 256, 0, 0, 1.0), sample_trial("morphkv", 256, 0, 1, 1.0),
                 sample_trial("morphkv", 256, 0, 2, 1.0), sample_trial("morphkv", 256, 1, 0, 0.0)});
  EXPECT_DOUBLE_EQ(cell.score.mean, 0.75);
  EXPECT_EQ(cell.trials, 4);
  EXPECT_EQ(cell.documents, 2);
}

TEST(EvalSummary, TakesTheMeanOfAMeasureOverTheTrialsThatHaveIt) {
  std::vector<Trial> trials = {sample_trial("morphkv", 256, 0, 0, 1.0),
                               sample_trial("morphkv", 256, 1, 0, 1.0),
                               sample_trial("morphkv", 256, 2, 0, 1.0)};
  trials[0].measures["nll"] = 1.0;
  trials[2].measures["nll"] = 4.0;
  EXPECT_DOUBLE_EQ(only_cell(trials).measures.at("nll").mean, 2.5);
}

TEST(EvalSummary, TakesMediansOfWhatWasMeasuredTheMostOfSizesAndAllTokens) {
  std::vector<Trial> trials;
  for (int d = 0; d < 4; ++d) {
    Trial trial = sample_trial("morphkv", 256, d, 0, 1.0);
    trial.rows_kept = 250 + d;
    trial.kv_bytes_kept = 1000 * d;
    trial.kv_bytes_allocated = 2000 * d;
    trial.tokens_judged = 4 + d;
    if (d > 0) trial.step_ms = std::vector{0.0, 1.0, 9.0, 3.0}[d];
    if (d == 1) trial.evict_ms = 0.5;
    if (d < 2) trial.read_ms = 10.0 + 10.0 * d;
    trials.push_back(trial);
  }
  const Cell cell = only_cell(trials);
  EXPECT_EQ(cell.rows_kept, 253);
  EXPECT_EQ(cell.kv_bytes_kept, 3000);
  EXPECT_EQ(cell.kv_bytes_allocated, 6000);
  EXPECT_EQ(cell.tokens_judged, 22) << "all of them together";
  EXPECT_DOUBLE_EQ(cell.step_ms, 3.0);
  EXPECT_DOUBLE_EQ(cell.evict_ms, 0.0) << "a step without eviction counts";
  EXPECT_DOUBLE_EQ(cell.read_ms, 15.0);
}

TEST(EvalSummary, OrdersCellsByFirstAppearanceAndBudget) {
  std::vector<Trial> trials;
  const auto add = [&](const char* task, const char* arm, int budget) {
    trials.push_back(sample_trial(arm, budget, 0, 0, 1.0));
    trials.back().key.task = task;
  };
  add("zebra", "tova", 512);
  add("apple", "morphkv", 256);
  add("zebra", "morphkv", 256);
  add("zebra", "tova", 128);
  std::string order;
  for (const Cell& cell : summarise(trials, kSeed)) {
    order += cell.task + " " + cell.arm + " " + std::to_string(cell.budget) + "; ";
  }
  EXPECT_EQ(order, "zebra tova 128; zebra tova 512; zebra morphkv 256; apple morphkv 256; ");
}

TEST(EvalSummary, OfNoTrialsIsEmpty) { EXPECT_TRUE(summarise({}, kSeed).empty()); }

// --- Against the full cache ----------------------------------------------------------------------

TEST(EvalOfFull, ComparesOnTheSameQuestionsOnly) {
  const std::vector<Trial> trials = {
      sample_trial("full", 0, 0, 0, 1.0), sample_trial("full", 0, 1, 0, 0.5),
      sample_trial("full", 0, 2, 0, 0.0),  // not asked of the arm
      sample_trial("morphkv", 256, 0, 0, 0.8), sample_trial("morphkv", 256, 1, 0, 0.4)};
  const Cell cell = cell_of(trials, "morphkv", "whole");
  ASSERT_TRUE(cell.has_full);
  EXPECT_DOUBLE_EQ(cell.of_full.mean, 0.8);
  EXPECT_NEAR(width_of(cell.of_full), 0.0, 1e-12) << "every document has the same share";
}

TEST(EvalOfFull, IsUnsetWhenTheFullCacheWasNotAskedAll) {
  std::vector<Trial> trials = {sample_trial("full", 0, 0, 0, 1.0),
                               sample_trial("morphkv", 256, 0, 0, 0.8),
                               sample_trial("morphkv", 256, 0, 1, 0.8)};
  EXPECT_FALSE(cell_of(trials, "morphkv", "whole").has_full);
  trials.push_back(sample_trial("full", 0, 0, 1, 1.0));
  EXPECT_TRUE(cell_of(trials, "morphkv", "whole").has_full);
  trials.back().key.tokens = 8192;
  EXPECT_FALSE(cell_of(trials, "morphkv", "whole").has_full) << "of another length";
  trials.back().key.tokens = 4096;
  trials.back().key.task = "another";
  EXPECT_FALSE(cell_of(trials, "morphkv", "whole").has_full) << "of another task";
}

TEST(EvalOfFull, IsUnsetWhereTheFullCacheKnowsNothing) {
  EXPECT_FALSE(
      cell_of({sample_trial("full", 0, 0, 0, 0.0), sample_trial("morphkv", 256, 0, 0, 0.5)},
              "morphkv", "whole")
          .has_full);
}

TEST(EvalOfFull, TakesTheWholeModeForAllThatAsksAboutDocuments) {
  std::vector<Trial> trials = {sample_trial("full", 0, 0, 0, 0.5)};
  for (const char* mode : {"whole", "guided", "stream", "generate"}) {
    trials.push_back(sample_trial("morphkv", 256, 0, 0, 0.25));
    trials.back().key.mode = mode;
  }
  for (const char* mode : {"whole", "guided", "stream"}) {
    const Cell cell = cell_of(trials, "morphkv", mode);
    ASSERT_TRUE(cell.has_full) << mode;
    EXPECT_DOUBLE_EQ(cell.of_full.mean, 0.5) << mode;
  }
  EXPECT_FALSE(cell_of(trials, "morphkv", "generate").has_full);
  trials.front().key.mode = "generate";
  EXPECT_TRUE(cell_of(trials, "morphkv", "generate").has_full);
  EXPECT_FALSE(cell_of(trials, "morphkv", "guided").has_full);
}

TEST(EvalOfFull, OfTheFullCacheIsOne) {
  const Cell cell = cell_of(
      {sample_trial("full", 0, 0, 0, 0.9), sample_trial("full", 0, 1, 0, 0.3)}, "full", "whole");
  ASSERT_TRUE(cell.has_full);
  EXPECT_EQ(cell.of_full.mean, 1.0);
  EXPECT_EQ(width_of(cell.of_full), 0.0);
}

// --- Texts ---------------------------------------------------------------------------------------

TEST(EvalText, WeighsStretchesByTheirTokens) {
  const Cell cell = only_cell(
      {sample_stretch("morphkv", 256, 0, 1.0, 300), sample_stretch("morphkv", 256, 1, 3.0, 100)});
  EXPECT_DOUBLE_EQ(cell.score.mean, std::exp(1.5));
  EXPECT_DOUBLE_EQ(cell.score.low, std::exp(1.0)) << "stretches are resampled, not the document";
  EXPECT_DOUBLE_EQ(cell.score.high, std::exp(3.0));
  EXPECT_EQ(cell.documents, 2);
}

TEST(EvalText, ComparesPerplexityWithThatOfTheFullCache) {
  const std::vector<Trial> trials = {
      sample_stretch("full", 0, 0, 1.0, 300), sample_stretch("full", 0, 1, 2.0, 100),
      sample_stretch("morphkv", 256, 0, 1.2, 300), sample_stretch("morphkv", 256, 1, 2.2, 100)};
  const Cell cell = cell_of(trials, "morphkv", "text");
  ASSERT_TRUE(cell.has_full);
  EXPECT_NEAR(cell.of_full.mean, std::exp(0.2), 1e-12);
  EXPECT_NEAR(width_of(cell.of_full), 0.0, 1e-12) << "0.2 nats more everywhere";
}

TEST(EvalText, HasMeasuresPerTokenAndOfTheLastQuarter) {
  std::vector<Trial> trials;
  for (int s = 0; s < 8; ++s) {
    trials.push_back(sample_stretch("morphkv", 256, s, s, s == 7 ? 300 : 100));
    trials.back().measures = {{"kl", 0.1 * s}, {"top1", s < 6 ? 1.0 : 0.5}};
  }
  const auto measures = only_cell(trials).measures;
  EXPECT_NEAR(measures.at("ppl_last_quarter").mean, std::exp((6 * 100 + 7 * 300) / 400.0), 1e-9);
  EXPECT_NEAR(measures.at("kl").mean, 0.1 * (0 + 1 + 2 + 3 + 4 + 5 + 6 + 3 * 7) / 10, 1e-12);
  EXPECT_NEAR(measures.at("kl_last_quarter").mean, 0.1 * (6 + 3 * 7) / 4, 1e-12);
  EXPECT_NEAR(measures.at("top1").mean, (6 + 4 * 0.5) / 10, 1e-12);
  EXPECT_NEAR(measures.at("top1_last_quarter").mean, 0.5, 1e-12);
  EXPECT_EQ(measures.size(), 5u);
}

TEST(EvalText, HasTheSameLastQuarterForAnArmThatIsNotYetThere) {
  std::vector<Trial> trials;
  for (int s = 0; s < 8; ++s) trials.push_back(sample_stretch("full", 0, s, s, 100));
  for (int s = 0; s < 6; ++s) trials.push_back(sample_stretch("morphkv", 256, s, s, 100));
  EXPECT_FALSE(cell_of(trials, "morphkv", "text").measures.contains("ppl_last_quarter"));
  trials.push_back(sample_stretch("morphkv", 256, 6, 6.0, 100));
  const Cell cell = cell_of(trials, "morphkv", "text");
  EXPECT_NEAR(cell.measures.at("ppl_last_quarter").mean, std::exp(6.0), 1e-9);
}

TEST(EvalText, RoundsTheLastQuarter) {
  const std::vector<std::pair<int, int>> quarters = {{2, 1}, {5, 1}, {6, 2}, {9, 2}, {12, 3}};
  for (const auto& [stretches, quarter] : quarters) {
    std::vector<Trial> trials;
    for (int s = 0; s < stretches; ++s) {
      trials.push_back(sample_stretch("morphkv", 256, s, s < stretches - quarter ? 0.0 : 1.0, 10));
      trials.back().measures["kl"] = s == stretches - quarter ? quarter : 0.0;
    }
    const auto measures = only_cell(trials).measures;
    EXPECT_DOUBLE_EQ(measures.at("ppl_last_quarter").mean, std::exp(1.0)) << stretches;
    EXPECT_DOUBLE_EQ(measures.at("kl_last_quarter").mean, 1.0) << stretches;
  }
}

TEST(EvalText, OfOneStretchIsItsOwnLastQuarter) {
  const Cell cell = only_cell({sample_stretch("morphkv", 256, 0, 2.0, 10)});
  EXPECT_DOUBLE_EQ(cell.measures.at("ppl_last_quarter").mean, std::exp(2.0));
}

// --- The record ----------------------------------------------------------------------------------

TEST(EvalRecord, HasEverythingOfACell) {
  Cell cell = sample_cell("needle", "guided", "morphkv", 256, 0.5);
  cell.measures["nll"] = {1.0, 0.5, 2.0};
  cell.read_ms = 11.0;
  const std::string text = to_json(sample_info(), {cell}, "2024-05-06");
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json.at("date"), "2024-05-06");
  EXPECT_EQ(json.at("model_fingerprint"), "abc123");
  EXPECT_EQ(json.at("seed"), 7);
  const auto& out = json.at("cells").at(0);
  EXPECT_EQ(out.at("task"), "needle");
  EXPECT_EQ(out.at("mode"), "guided");
  EXPECT_EQ(out.at("tokens"), 4096);
  EXPECT_EQ(out.at("arm"), "morphkv");
  EXPECT_EQ(out.at("budget"), 256);
  EXPECT_EQ(out.at("trials"), 60);
  EXPECT_EQ(out.at("documents"), 20);
  EXPECT_EQ(out.at("score").at("low"), cell.score.low);
  EXPECT_TRUE(out.at("of_full").is_null()) << "the full cache was not asked";
  EXPECT_EQ(out.at("measures").at("nll").at("high"), 2.0);
  EXPECT_EQ(out.at("rows_kept"), 256);
  EXPECT_EQ(out.at("tokens_judged"), cell.tokens_judged);
  EXPECT_EQ(out.at("kv_bytes_kept"), cell.kv_bytes_kept);
  EXPECT_EQ(out.at("kv_bytes_allocated"), cell.kv_bytes_allocated);
  EXPECT_EQ(out.at("read_ms"), 11.0);
  EXPECT_EQ(out.at("step_ms"), cell.step_ms);
  EXPECT_EQ(out.at("evict_ms"), cell.evict_ms);
  EXPECT_NE(text.find("\n  \"date\""), std::string::npos) << "indented by two";
}

TEST(EvalRecord, HasNullForAPerplexityBeyondAllNumbers) {
  Cell cell = sample_cell("prose", "text", "streaming", 256, 0.5);
  cell.score.high = std::numeric_limits<double>::infinity();
  const auto json = nlohmann::json::parse(to_json(sample_info(), {cell}, ""));
  EXPECT_TRUE(json.at("cells").at(0).at("score").at("high").is_null());
}

TEST(EvalRecord, OfNoCellsHasAnEmptyList) {
  EXPECT_TRUE(nlohmann::json::parse(to_json(sample_info(), {}, "")).at("cells").is_array());
}

}  // namespace
}  // namespace morphkv::eval

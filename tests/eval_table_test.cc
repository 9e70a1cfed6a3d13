// The terminal table: what stands where, what is missing, and how wide it gets.
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "blocks.h"
#include "eval_samples.h"
#include "table.h"
#include "text.h"

namespace morphkv::eval {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// The line that begins with `start`; empty, and a failure, where there is none.
std::string line_with(const std::string& table, const std::string& start) {
  for (const std::string& line : lines_of(table)) {
    if (line.starts_with(start)) return line;
  }
  ADD_FAILURE() << "no line begins with '" << start << "' in\n" << table;
  return "";
}

int widest(const std::string& table) {
  int width = 0;
  for (const std::string& line : lines_of(table)) width = std::max(width, columns(line));
  return width;
}

TEST(EvalTable, HasARowForEachArmAndAColumnForEachBudget) {
  const std::string table = to_table({sample_cell("needle", "whole", "full", 0, 0.95),
                                      sample_cell("needle", "whole", "morphkv", 256, 0.80),
                                      sample_cell("needle", "whole", "morphkv", 1024, 0.90),
                                      sample_cell("needle", "whole", "tova", 256, 0.50),
                                      sample_cell("needle", "whole", "tova", 1024, 0.60)},
                                     100);
  EXPECT_EQ(table,
            "needle, whole, 4,096 tokens:  full cache 95% [91-98] (n 60)  n 60\n"
            "budget           256        1,024\n"
            "morphkv  80% [76-83]  90% [86-93]\n"
            "tova     50% [46-53]  60% [56-63]\n");
}

TEST(EvalTable, ShowsAMissingCellAsADash) {
  const std::string table = to_table({sample_cell("needle", "whole", "morphkv", 256, 0.80),
                                      sample_cell("needle", "whole", "tova", 1024, 0.60)},
                                     100);
  EXPECT_EQ(line_with(table, "morphkv"), "morphkv  80% [76-83]            -");
  EXPECT_EQ(line_with(table, "tova"), "tova               -  60% [56-63]");
}

TEST(EvalTable, ShowsTheFullCacheOfTheWholeModeAboveOtherModes) {
  const std::string table = to_table({sample_cell("needle", "whole", "full", 0, 0.95),
                                      sample_cell("needle", "whole", "control", 0, 0.10),
                                      sample_cell("needle", "guided", "morphkv", 256, 0.80)},
                                     100);
  const std::string head = line_with(table, "needle, guided");
  EXPECT_NE(head.find("full cache 95% [91-98] (n 60)"), std::string::npos) << head;
  EXPECT_NE(head.find("control 10% [6-13] (n 60)"), std::string::npos) << head;
  EXPECT_EQ(table.find("needle, whole"), std::string::npos) << "no block of its own";
}

TEST(EvalTable, ShowsAFullCacheThatIsAlone) {
  const std::string table = to_table({sample_cell("needle", "whole", "full", 0, 0.95)}, 100);
  EXPECT_EQ(table, "needle, whole, 4,096 tokens:  full cache 95% [91-98] (n 60)\n");
}

TEST(EvalTable, ShowsHowCountsDiffer) {
  std::vector<Cell> cells = {sample_cell("needle", "whole", "morphkv", 256, 0.8),
                             sample_cell("needle", "whole", "tova", 256, 0.8)};
  cells[1].trials = 1200;
  EXPECT_NE(to_table(cells, 100).find("n 60-1,200"), std::string::npos);
}

TEST(EvalTable, BeginsAModeWithTheMeanOverItsTasks) {
  const std::string table = to_table({sample_cell("needle", "guided", "morphkv", 256, 0.80),
                                      sample_cell("recall", "guided", "morphkv", 256, 0.60)},
                                     100);
  EXPECT_TRUE(table.starts_with("mean over the tasks, guided, 4,096 tokens:  n 120\n")) << table;
  EXPECT_EQ(line_with(table, "morphkv"), "morphkv  70% [67-72]")
      << "0.04 and 0.03 of two tasks, independent: over the root of two";
  EXPECT_EQ(line_with(table, "tasks"), "tasks              2");
}

TEST(EvalTable, TakesAMeanOverTheTasksThatAllArmsHave) {
  const std::string table = to_table({sample_cell("needle", "guided", "morphkv", 256, 0.80),
                                      sample_cell("needle", "guided", "tova", 256, 0.40),
                                      sample_cell("needle", "guided", "morphkv", 512, 0.90),
                                      sample_cell("recall", "guided", "morphkv", 256, 0.10),
                                      sample_cell("recall", "guided", "morphkv", 512, 0.70)},
                                     100);
  EXPECT_EQ(line_with(table, "morphkv"), "morphkv  80% [76-83]  80% [77-82]")
      << "at 256 tova has one task, at 512 none";
  EXPECT_EQ(line_with(table, "tova"), "tova     40% [36-43]            -");
  EXPECT_EQ(line_with(table, "tasks"), "tasks              1            2");
}

TEST(EvalTable, SaysWhenNoTaskHasAllArms) {
  const std::string table = to_table({sample_cell("needle", "guided", "morphkv", 256, 0.80),
                                      sample_cell("recall", "guided", "tova", 256, 0.40)},
                                     100);
  EXPECT_EQ(line_with(table, "morphkv"), "morphkv    -");
  EXPECT_EQ(line_with(table, "tasks"), "tasks      0");
}

TEST(EvalTable, ShowsPerplexityDivergenceAndAgreementOfAText) {
  Cell cell = sample_cell("prose", "text", "morphkv", 256, 12.34);
  cell.score = {12.34, 11.9, 12.8};
  cell.measures["kl"] = {0.0123, 0.01, 0.015};
  cell.measures["top1"] = {0.96, 0.95, 0.97};
  Cell full = sample_cell("prose", "text", "full", 0, 11.0);
  full.score = {11.0, 10.5, 11.5};
  const std::string table = to_table({full, cell}, 100);
  EXPECT_NE(table.find("full cache 11.00 [10.50-11.50] (n 60)"), std::string::npos) << table;
  EXPECT_NE(table.find("12.34 [11.90-12.80]"), std::string::npos) << table;
  EXPECT_NE(table.find("0.012 [0.010-0.015]"), std::string::npos) << table;
  EXPECT_NE(table.find("96% [95-97]"), std::string::npos) << table;
}

TEST(EvalTable, TakesTheGeometricMeanOfPerplexities) {
  std::vector<Cell> cells = {sample_cell("prose", "text", "morphkv", 256, 0),
                             sample_cell("code", "text", "morphkv", 256, 0)};
  cells[0].score = {4.0, 4.0, 4.0};
  cells[1].score = {16.0, 16.0, 16.0};
  EXPECT_EQ(line_with(to_table(cells, 100), "morphkv"), "morphkv     8.000 [8.000-8.000]");
}

TEST(EvalTable, StaysWithinItsWidth) {
  std::vector<Cell> cells;
  std::string endless = "an arm whose name is longer than any terminal is wide:";
  for (int option = 0; option < 30; ++option) endless += " option=" + std::to_string(option);
  for (const std::string task : {"needle", "a task with a rather long name that goes on and on"}) {
    for (const char* arm : {"full", "control"}) {
      cells.push_back(sample_cell(task, "guided", arm, 0, 0.96));
    }
    for (const std::string& arm :
         {std::string("morphkv"), std::string("morphkv window=32 pool=7 fuse=max"), endless}) {
      for (int budget = 64; budget <= 16384; budget *= 2) {
        cells.push_back(sample_cell(task, "guided", arm, budget, 0.96));
      }
    }
  }
  for (const int width : {40, 60, 80, 100, 200}) {
    const std::string table = to_table(cells, width);
    EXPECT_LE(widest(table), width) << table;
    for (const char* part : {"16,384", " 128", "window=32", "control"}) {
      EXPECT_NE(table.find(part), std::string::npos) << width << " " << part;
    }
  }
  EXPECT_LE(widest(to_table(cells, 1)), 40) << "the least width";
}

TEST(EvalTable, UsesTheWidthThatItHas) {
  std::vector<Cell> cells;
  for (int budget = 128; budget <= 2048; budget *= 2) {
    cells.push_back(sample_cell("needle", "guided", "morphkv window=32 pool=7", budget, 0.9));
  }
  EXPECT_EQ(lines_of(to_table(cells, 100)).size(), 3u) << "five budgets beside each other";
}

TEST(EvalTable, HasNoControlCharactersOfNames) {
  const std::string table =
      to_table({sample_cell("needle", "whole", "a\x1b[31m\nb", 256, 0.8)}, 100);
  EXPECT_EQ(table.find('\x1b'), std::string::npos);
  EXPECT_NE(table.find("a?[31m?b"), std::string::npos) << table;
}

TEST(EvalTable, OfNoCellsIsEmpty) { EXPECT_EQ(to_table({}, 100), ""); }

TEST(EvalFigures, HasFourFigures) {
  EXPECT_EQ(four_figures(1.2345), "1.234");
  EXPECT_EQ(four_figures(9.9996), "10.00");
  EXPECT_EQ(four_figures(12.345), "12.35");
  EXPECT_EQ(four_figures(99.996), "100.0");
  EXPECT_EQ(four_figures(1234.5), "1234");
  EXPECT_EQ(four_figures(1e9), "1e+09");
}

TEST(EvalFigures, HasCommasBetweenThousands) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(-123456), "-123,456");
  EXPECT_EQ(with_commas(1234567), "1,234,567");
}

}  // namespace
}  // namespace morphkv::eval

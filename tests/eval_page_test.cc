// The page: well-formed, whole, by itself, and safe against what stands in names.
#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "eval_samples.h"
#include "page.h"

namespace morphkv::eval {
namespace {

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

bool is_entity(const std::string& text, std::size_t at) {
  for (const char* entity : {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"}) {
    if (text.compare(at, std::string(entity).size(), entity) == 0) return true;
  }
  return false;
}

// The attributes of a tag's inside: name="value" with single spaces. Collects ids.
std::string tag_fault(const std::string& tag, std::set<std::string>& ids) {
  for (std::size_t at = tag.find(' '); at != std::string::npos;) {
    const std::size_t equals = tag.find("=\"", at);
    const std::size_t end = equals == std::string::npos ? equals : tag.find('"', equals + 2);
    if (end == std::string::npos) return "an attribute without a value in <" + tag + ">";
    const std::string name = tag.substr(at + 1, equals - at - 1);
    for (const char c : name) {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-') {
        return "an attribute '" + name + "'";
      }
    }
    const std::string value = tag.substr(equals + 2, end - equals - 2);
    if (name == "id" && !ids.insert(value).second) return "a second id " + value;
    at = end + 1 < tag.size() ? end + 1 : std::string::npos;
    if (at != std::string::npos && tag[at] != ' ') return "no space in <" + tag + ">";
  }
  return "";
}

// What is not well-formed as XML; empty if all is.
std::string fault_of(const std::string& page) {
  const std::string doctype = "<!DOCTYPE html>";
  if (!page.starts_with(doctype)) return "no doctype";
  std::vector<std::string> open;
  std::set<std::string> ids;
  for (std::size_t at = doctype.size(); at < page.size(); ++at) {
    if (page[at] == '&' && !is_entity(page, at)) return "a bare & at " + std::to_string(at);
    if (page[at] != '<') continue;
    const std::size_t end = page.find('>', at);
    if (end == std::string::npos) return "a tag without end";
    std::string tag = page.substr(at + 1, end - at - 1);
    at = end;
    if (tag.find('<') != std::string::npos) return "a < in <" + tag + ">";
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return "<" + tag + "> closes another";
      open.pop_back();
      continue;
    }
    const bool closed = tag.back() == '/';
    if (closed) tag.pop_back();
    if (std::string fault = tag_fault(tag, ids); !fault.empty()) return fault;
    if (!closed) open.push_back(tag.substr(0, tag.find(' ')));
  }
  return open.empty() ? "" : "<" + open.back() + "> is not closed";
}

std::vector<Cell> sample_cells() {
  std::vector<Cell> cells;
  for (const char* task : {"needle", "recall"}) {
    cells.push_back(sample_cell(task, "whole", "full", 0, 0.95));
    for (const char* arm : {"morphkv window=32", "tova"}) {
      for (const int budget : {128, 256, 1024}) {
        cells.push_back(sample_cell(task, "guided", arm, budget, 0.5 + budget / 4096.0));
      }
    }
  }
  for (const char* arm : {"full", "morphkv window=32", "streaming"}) {
    Cell cell = sample_cell("prose", "text", arm, arm == std::string("full") ? 0 : 512, 0);
    cell.score = {12.0, 11.0, 13.5};
    cell.measures["kl"] = {0.02, 0.01, 0.03};
    cells.push_back(cell);
  }
  return cells;
}

std::string sample_page() { return to_page(sample_info(), sample_cells()); }

TEST(EvalPage, TheCheckOfThePageFindsFaults) {
  EXPECT_EQ(fault_of("<!DOCTYPE html>\n<a b=\"c\">d &amp; e<f g=\"h\"/></a>"), "");
  EXPECT_NE(fault_of("<!DOCTYPE html><a>"), "");
  EXPECT_NE(fault_of("<!DOCTYPE html><a></b>"), "");
  EXPECT_NE(fault_of("<!DOCTYPE html><a>&</a>"), "");
  EXPECT_NE(fault_of("<!DOCTYPE html><a b></a>"), "");
  EXPECT_NE(fault_of("<!DOCTYPE html><a b=\"1\"c=\"2\"></a>"), "");
  EXPECT_NE(fault_of("<!DOCTYPE html><a id=\"1\"/><a id=\"1\"/>"), "");
}

TEST(EvalPage, IsWellFormed) {
  EXPECT_EQ(fault_of(sample_page()), "");
  EXPECT_EQ(fault_of(to_page({}, {})), "");
}

TEST(EvalPage, NeedsNothingFromElsewhere) {
  const std::string page = sample_page();
  for (const char* part : {"http", "<script", "<link", "<img", "url(", "@import", "src="}) {
    EXPECT_EQ(count_of(page, part), 0) << part;
  }
}

TEST(EvalPage, ShowsEveryArmAndBudget) {
  const std::string page = sample_page();
  for (const char* part : {"morphkv window=32", "tova", "streaming", "full cache"}) {
    EXPECT_GT(count_of(page, "<span>" + std::string(part) + "</span>"), 0) << part;
    EXPECT_GT(count_of(page, "<th scope=\"row\">" + std::string(part) + "</th>"), 0) << part;
  }
  for (const char* part : {"128", "256", "512", "1,024"}) {
    EXPECT_GT(count_of(page, "<td>" + std::string(part) + "</td>"), 0) << part;
    EXPECT_GT(count_of(page, ">" + std::string(part) + "</text>"), 0) << part;
  }
}

TEST(EvalPage, HasATableBelowEveryPlotAndTheMeanFirst) {
  const std::string page = sample_page();
  EXPECT_EQ(count_of(page, "<div class=\"plots\">"), 4) << "mean, two tasks, a text";
  EXPECT_EQ(count_of(page, "<details>"), 4);
  EXPECT_EQ(count_of(page, "<caption>"), count_of(page, "<table>"));
  EXPECT_LT(page.find("Mean over the tasks, 4,096"), page.find("<h3>needle"));
  EXPECT_EQ(count_of(page, "<section"), 2) << "guided and text: whole has the full cache alone";
}

TEST(EvalPage, ShowsQualityAndSpeedBesideEachOther) {
  const std::string page = sample_page();
  EXPECT_EQ(count_of(page, "median ms per token</text>"), 4);
  EXPECT_EQ(count_of(page, ">score</text>"), 3);
  EXPECT_EQ(count_of(page, ">perplexity (log scale)</text>"), 1);
  EXPECT_EQ(count_of(page, ">full cache</text>"), 9) << "the dashed line of every plot";
}

TEST(EvalPage, GivesEveryPlotATitleAndItsValuesInWords) {
  const std::string page = sample_page();
  const int plots = count_of(page, "<svg class=\"plot\" role=\"img\"");
  EXPECT_EQ(plots, 9);
  EXPECT_EQ(count_of(page, "-title\">"), plots);
  EXPECT_EQ(count_of(page, "-desc\">") - count_of(page, "<svg class=\"plot\""), plots);
  EXPECT_NE(page.find("tova: 53% at 128, 56% at 256, 75% at 1,024."), std::string::npos);
}

TEST(EvalPage, TakesNoTextForMarkup) {
  const std::string evil = "<script>alert(\"1\" & '2')</script>";
  RunInfo info = sample_info();
  info.model = info.cpu = info.engine = info.version = info.model_description = evil;
  Cell cell = sample_cell(evil, evil, evil, 256, 0.5);
  cell.measures[evil] = {1.0, 1.0, 1.0};
  const std::string page = to_page(info, {cell, sample_cell("b", evil, evil, 256, 0.5)});
  EXPECT_EQ(count_of(page, "<script"), 0);
  EXPECT_GT(count_of(page, "&lt;script&gt;alert(&quot;1&quot; &amp; &#39;2&#39;)"), 10);
  EXPECT_EQ(fault_of(page), "");
}

TEST(EvalPage, ReplacesWhatNoPageMayHold) {
  const std::string page =
      to_page(sample_info(), {sample_cell("needle", "whole", "a\x1b\xFF\n", 256, 0.5)});
  EXPECT_EQ(count_of(page, "\x1b"), 0);
  EXPECT_EQ(count_of(page, "\xFF"), 0);
  EXPECT_GT(count_of(page, "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD<"), 0);
}

TEST(EvalPage, LeavesOutOfPlotsWhatWasNotMeasured) {
  Cell cell = sample_cell("needle", "whole", "morphkv", 256, 0.5);
  cell.step_ms = 0.0;
  const std::string page = to_page(sample_info(), {cell});
  EXPECT_EQ(count_of(page, "median ms per token</text>"), 0);
  EXPECT_EQ(count_of(page, ">score</text>"), 1);
}

TEST(EvalPage, HasNoNumbersThatAreNoneInItsPlots) {
  Cell cell = sample_cell("prose", "text", "streaming", 256, 0);
  const double infinity = std::numeric_limits<double>::infinity();
  cell.score = {infinity, infinity, infinity};
  Cell other = sample_cell("prose", "text", "morphkv", 512, 0);
  other.score = {12.0, 12.0, 12.0};
  cell.measures["kl"] = other.measures["kl"] = {0.0, 0.0, 0.0};
  for (const auto& cells : {std::vector{cell}, std::vector{cell, other}}) {
    const std::string page = to_page(sample_info(), cells);
    EXPECT_EQ(fault_of(page), "");
    for (const char* part : {"=\"nan", "=\"-nan", "=\"inf", "=\"-inf", " nan", ",nan"}) {
      EXPECT_EQ(count_of(page, part), 0) << part;
    }
  }
}

TEST(EvalPage, TellsManyArmsApart) {
  std::vector<Cell> cells;
  for (int arm = 0; arm < 17; ++arm) {
    cells.push_back(sample_cell("needle", "whole", "arm " + std::to_string(arm), 256, 0.5));
  }
  const std::string page = to_page(sample_info(), cells);
  std::set<std::string> keys;
  for (std::size_t at = page.find("<li><svg class=\"key\""); at != std::string::npos;
       at = page.find("<li><svg class=\"key\"", at + 1)) {
    keys.insert(page.substr(at, page.find("</svg>", at) - at));
  }
  EXPECT_EQ(keys.size(), 17u) << "line and marker differ, in every two";
  EXPECT_EQ(fault_of(page), "");
}

}  // namespace
}  // namespace morphkv::eval

// Long output by rules (the kind of LongGenBench, Wu et al. 2024, arXiv 2409.02076, made easy): a
// logbook of weeks to be gone on with. Its rules stand at the top: the one week of the fair, the
// weeks in which the bridge is closed, the lamps in every fourth week; some weeks are shown. Four
// figures, each in [0, 1], whose mean is the score:
//   completion  weeks that stand there, in order
//   single      the week of the fair mentions it, and no other does
//   range       weeks in which the bridge is rightly (not) mentioned, right in both sorts
//   periodic    likewise of the lamps
// Of the last two: the share of marked weeks that are marked, times the share of marks that are right.
#include <array>
#include <sstream>

#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "long-output";
constexpr int kShown = 8;   // weeks of the prompt
constexpr int kWeeks = 40;  // the last one asked for
constexpr int kPeriod = 4;
constexpr int kRange = 6;         // weeks
constexpr int kGenerated = 1000;  // tokens

constexpr std::array<std::string_view, 8> kNews = {
    "Rain fell on most days.",     "The boats came home early.", "The market was full of people.",
    "Fish was cheap.",             "The wind came from the west.", "The school had a concert.",
    "Two ships waited in the bay.", "The baker was ill."};
constexpr std::string_view kLamps = "The lamps were checked.";
constexpr std::string_view kBridge = "The bridge is closed.";
constexpr std::string_view kFair = "The fair is here.";

struct Plan {
  int fair = 0;
  int closed = 0;  // first week of the range
  bool is_closed(int week) const { return week >= closed && week < closed + kRange; }
  static bool has_lamps(int week) { return week % kPeriod == 0; }
};

// How well marks agree with what is due.
struct Marks {
  int due = 0;
  int given = 0;
  int right = 0;
  void add(bool is_due, bool is_given) {
    due += is_due ? 1 : 0;
    given += is_given ? 1 : 0;
    right += is_due && is_given ? 1 : 0;
  }
  double score() const {
    if (right == 0) return 0.0;
    return static_cast<double>(right) / due * right / given;
  }
};

std::map<std::string, double> judge(const Plan& plan, std::string_view generated) {
  Marks fair;
  Marks bridge;
  Marks lamps;
  int next = kShown + 1;
  std::istringstream lines{std::string(generated)};
  for (std::string line; next <= kWeeks && std::getline(lines, line);) {
    if (!line.starts_with("Week " + std::to_string(next) + ":")) continue;
    fair.add(next == plan.fair, line.find(kFair) != std::string::npos);
    bridge.add(plan.is_closed(next), line.find(kBridge) != std::string::npos);
    lamps.add(Plan::has_lamps(next), line.find(kLamps) != std::string::npos);
    ++next;
  }
  for (int week = next; week <= kWeeks; ++week) {
    fair.add(week == plan.fair, false);
    bridge.add(plan.is_closed(week), false);
    lamps.add(Plan::has_lamps(week), false);
  }
  const double completion = static_cast<double>(next - kShown - 1) / (kWeeks - kShown);
  return {{"completion", completion},
          {"single", fair.score()},
          {"range", bridge.score()},
          {"periodic", lamps.score()},
          {"score", (completion + fair.score() + bridge.score() + lamps.score()) / 4}};
}

Continuation continuation(std::uint64_t number) {
  Random random(seed_of(kName, number));
  Plan plan;
  plan.fair = 12 + static_cast<int>(random.below(8));
  plan.closed = 24 + static_cast<int>(random.below(8));
  Deck news(kNews.size());
  std::string prompt = "Logbook of the harbour, week 1 to week " + std::to_string(kWeeks) +
                       ". Every fourth week the lamps are checked. In week " +
                       std::to_string(plan.fair) + " the fair is here. From week " +
                       std::to_string(plan.closed) + " to week " +
                       std::to_string(plan.closed + kRange - 1) + " the bridge is closed.\n";
  for (int week = 1; week <= kShown; ++week) {
    prompt += "\nWeek " + std::to_string(week) + ": " + std::string(kNews[news.deal(random)]);
    if (Plan::has_lamps(week)) prompt += " " + std::string(kLamps);
  }
  return {.prompt = prompt,
          .tokens = kGenerated,
          .temperature = 0.0f,
          .judge = [plan](std::string_view generated) { return judge(plan, generated); }};
}

}  // namespace

Task long_output_task() {
  return {kName, "a logbook by rules: complete, single, range and periodic marks", "long output",
          nullptr, continuation};
}

}  // namespace morphkv::eval

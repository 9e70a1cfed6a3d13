// The tasks of `morphkv eval`: the texts say what their questions ask, and the judges count as one
// does by hand. A token is a word or the end of a line here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "morphkv/archive.h"
#include "prose.h"
#include "task.h"

namespace morphkv::eval {
namespace {

std::size_t count(std::string_view text) {
  std::size_t n = 0;
  char before = ' ';
  for (const char c : text) {
    const bool begins = c != ' ' && (before == ' ' || before == '\n');
    n += begins || c == '\n' ? 1 : 0;
    before = c;
  }
  return n;
}

std::vector<Task> document_tasks() {
  std::vector<Task> some;
  for (const Task& task : tasks()) {
    if (task.document) some.push_back(task);
  }
  return some;
}

Document document_of(std::string_view task, std::uint64_t number, int tokens = 2500) {
  return find_task(task).document(number, tokens, count);
}

std::size_t occurrences(std::string_view text, std::string_view what) {
  std::size_t n = 0;
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string_view::npos; at += what.size())
    ++n;
  return n;
}

// Where `what` begins, as a share of the text.
double depth_in(std::string_view text, std::string_view what) {
  return static_cast<double>(text.find(what)) / static_cast<double>(text.size());
}

// The end of a part of an answer: its digits (and hyphens).
std::string code_in(const std::string& part) {
  const std::size_t at = part.find_last_not_of("0123456789-");
  return at == std::string::npos ? part : part.substr(at + 1);
}

// The first number after `what`.
int number_after(const std::string& text, const std::string& what) {
  const std::size_t at = text.find(what);
  if (at == std::string::npos) throw std::runtime_error("no '" + what + "' in " + text);
  return std::stoi(text.substr(text.find_first_of("0123456789", at + what.size())));
}

double score(const Continuation& continuation, std::string_view text) {
  return continuation.judge(text).at("score");
}

TEST(EvalTasks, HaveNamesOfTheirOwnAndEitherADocumentOrAContinuation) {
  std::set<std::string_view> names;
  for (const Task& task : tasks()) {
    EXPECT_TRUE(names.insert(task.name).second) << task.name;
    EXPECT_FALSE(task.what.empty()) << task.name;
    EXPECT_NE(static_cast<bool>(task.document), static_cast<bool>(task.continuation)) << task.name;
    EXPECT_TRUE(task.group == "recall" || task.group == "in-context" || task.group == "long output")
        << task.name;
    EXPECT_EQ(&find_task(task.name), &task);
  }
}

TEST(EvalTasks, NamesTheTasksThereAreWhenThereIsNone) {
  try {
    find_task("needle");
    FAIL() << "found";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("'needle'"), std::string::npos);
    for (const Task& task : tasks())
      EXPECT_NE(std::string(error.what()).find(task.name), std::string::npos) << task.name;
  }
}

TEST(EvalTasks, RefuseDocumentsWithoutRoomForTheirFacts) {
  for (const Task& task : document_tasks()) {
    try {
      task.document(0, 50, count);
      FAIL() << task.name << " made one";
    } catch (const std::invalid_argument& error) {
      const std::string text = error.what();
      for (const std::string& part : {std::string(task.name), std::string("50 tokens"),
                                      std::string("300"), std::string("longer documents")})
        EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

TEST(EvalTasks, TextsAreThoseThatPublishedAnswersWereGivenTo) {
  std::string prose;
  for (std::uint64_t seed = 1000; seed < 1030; ++seed) {
    Prose teller(seed);
    for (int i = 0; i < 50; ++i) prose += join(teller.paragraph());
  }
  EXPECT_EQ(checksum(prose), 0x2FDF4CB6977175C0ull);
  std::string documents;
  for (const std::string_view name : {"passkey", "number-string", "multi-key", "multi-value",
                                      "few-shot", "instructions", "one-code", "eight-codes"}) {
    for (std::uint64_t number = 24; number < 36; ++number) {
      const Document document = document_of(name, number, 800);
      documents += document.text;
      for (const Question& q : document.questions) documents += q.text + q.answer[0];
    }
  }
  EXPECT_EQ(checksum(documents), 0x64116A1C6C6161F9ull);
}

TEST(EvalTasks, GiveTheSameTextForTheSameNumberAndAnotherOneForAnotherNumber) {
  for (const Task& task : document_tasks()) {
    const Document once = task.document(3, 800, count);
    const Document again = task.document(3, 800, count);
    const Document other = task.document(4, 800, count);
    EXPECT_EQ(once.text, again.text) << task.name;
    EXPECT_NE(once.text, other.text) << task.name;
    ASSERT_EQ(once.questions.size(), again.questions.size());
    for (std::size_t i = 0; i < once.questions.size(); ++i) {
      EXPECT_EQ(once.questions[i].text, again.questions[i].text) << task.name;
      EXPECT_EQ(once.questions[i].answer, again.questions[i].answer) << task.name;
    }
  }
  for (const Task& task : tasks()) {
    if (!task.continuation) continue;
    EXPECT_EQ(task.continuation(3).prompt, task.continuation(3).prompt) << task.name;
    EXPECT_NE(task.continuation(3).prompt, task.continuation(4).prompt) << task.name;
  }
}

TEST(EvalTasks, MakeDocumentsAboutAsLongAsAsked) {
  for (const Task& task : document_tasks()) {
    for (const int tokens : {600, 2500, 8000}) {
      const auto size = static_cast<double>(count(task.document(1, tokens, count).text));
      EXPECT_NEAR(size, tokens, 40 + 0.05 * tokens) << task.name;
    }
  }
}

TEST(EvalTasks, BeginAnAnswerSoThatNoTokenLiesAcrossItsBorder) {
  for (const Task& task : document_tasks()) {
    for (std::uint64_t number = 0; number < 5; ++number) {
      for (const Question& q : task.document(number, 800, count).questions) {
        ASSERT_FALSE(q.answer.empty());
        EXPECT_EQ(std::isspace(static_cast<unsigned char>(q.text.back())), 0) << q.text;
        EXPECT_TRUE(q.answer[0][0] == ' ' || q.text.back() == '"') << q.text << q.answer[0];
        EXPECT_GE(q.depth, 0.0);
        EXPECT_LE(q.depth, 1.0);
        if (q.choices.empty()) continue;
        EXPECT_EQ(std::count(q.choices.begin(), q.choices.end(), q.answer[0]), 1) << task.name;
        EXPECT_EQ(std::set<std::string>(q.choices.begin(), q.choices.end()).size(),
                  q.choices.size());
      }
    }
  }
}

TEST(EvalTasks, StateEachCodeOnceAndWhereTheQuestionSays) {
  for (const std::string_view name :
       {"passkey", "number-string", "one-code", "eight-codes", "multi-key", "multi-value"}) {
    for (std::uint64_t number = 0; number < 24; ++number) {
      const Document document = document_of(name, number);
      for (const Question& q : document.questions) {
        double depth = 0.0;
        for (const std::string& part : q.answer) {
          const std::string code = code_in(part);
          ASSERT_GE(code.size(), 4u) << name << part;
          EXPECT_EQ(occurrences(document.text, code), 1u) << name << " " << number;
          depth += depth_in(document.text, code) / static_cast<double>(q.answer.size());
        }
        EXPECT_NEAR(depth, q.depth, 0.04) << name << " " << number;
      }
    }
  }
}

TEST(EvalTasks, AskAsManyQuestionsAsTheirRulesSay) {
  const auto asked = [](std::string_view name) { return document_of(name, 1).questions.size(); };
  EXPECT_EQ(asked("passkey"), 1u);
  EXPECT_EQ(asked("number-string"), 1u);
  EXPECT_EQ(asked("one-code"), 1u);
  EXPECT_EQ(asked("eight-codes"), 1u);
  EXPECT_EQ(asked("multi-key"), 4u);
  EXPECT_EQ(asked("few-shot"), 8u);
  EXPECT_EQ(asked("instructions"), 4u);
  EXPECT_EQ(document_of("multi-value", 1).questions[0].answer.size(), 3u);
}

TEST(EvalTasks, MoveASingleFactFromTheVeryStartToTheVeryEnd) {
  for (const std::string_view name : {"passkey", "number-string"}) {
    for (std::uint64_t number = 0; number < 12; ++number) {
      EXPECT_DOUBLE_EQ(document_of(name, number + 12).questions[0].depth,
                       static_cast<double>(number) / 11.0);
    }
  }
}

TEST(EvalTasks, MoveASingleCodeThroughTwentyFourDepths) {
  for (std::uint64_t number = 0; number < 24; ++number) {
    const Document document = document_of("one-code", number + 24);
    EXPECT_DOUBLE_EQ(document.questions[0].depth, (static_cast<double>(number) + 0.5) / 24.0);
    EXPECT_EQ(occurrences(document.text, "The code of the "), 1u);
  }
}

TEST(EvalTasks, AskForAnotherOfEightCodesInEachOfEightDocuments) {
  std::set<double> depths;
  for (std::uint64_t number = 0; number < 8; ++number) {
    const Document document = document_of("eight-codes", number);
    EXPECT_EQ(occurrences(document.text, "The code of the "), 8u);
    depths.insert(document.questions[0].depth);
  }
  EXPECT_EQ(depths.size(), 8u);
}

TEST(EvalTasks, AnnounceNoCodeThatIsToBeFoundUnannounced) {
  for (const std::string_view name : {"one-code", "eight-codes"}) {
    const Document document = document_of(name, 3);
    EXPECT_EQ(occurrences(document.text, "following text"), 0u) << name;
    EXPECT_NE(document.text.front(), '\n') << name;
  }
}

TEST(EvalTasks, LeaveOneCommonWordFarAheadOfTheOtherCandidates) {
  for (std::uint64_t number = 0; number < 8; ++number) {
    const Document document = document_of("common-words", number);
    const Question& q = document.questions.at(0);
    std::istringstream words(document.text);
    std::map<std::string, int> times;
    for (std::string word; words >> word;) ++times[" " + word];
    for (const std::string& candidate : q.choices) {
      EXPECT_GT(times[candidate], 0) << candidate;
      if (candidate != q.answer[0]) {
        EXPECT_LT(5 * times[candidate], times[q.answer[0]]) << candidate;
      }
    }
  }
}

TEST(EvalTasks, ShowEveryLabelInManyRows) {
  const Document document = document_of("few-shot", 2);
  for (const std::string& label : document.questions[0].choices)
    EXPECT_GT(occurrences(document.text, ":" + label + "\n"), 20u) << label;
}

TEST(EvalTasks, GiveTheOrdersAtTheBeginningOnly) {
  const Document document = document_of("instructions", 2);
  for (const Question& q : document.questions) {
    const std::string sentence = q.text.substr(q.text.rfind("Answer: ") + 8) + q.answer[0] + "\"";
    EXPECT_EQ(occurrences(document.text, sentence), 1u) << sentence;
    EXPECT_LT(depth_in(document.text, sentence), 0.06) << sentence;
  }
}

TEST(EvalTasks, JudgeAListByItsLinesBeforeTheFirstWrongOne) {
  const Continuation list = find_task("list-continuation").continuation(5);
  const std::string last = list.prompt.substr(list.prompt.rfind('\n') + 1);
  const int shown = number_after(last, "Item ");
  const std::string box = last.substr(last.find(": ") + 2, last.rfind(' ') - last.find(": ") - 2);
  const auto text = [&](int broken) {
    std::string out;
    for (int i = 1; i <= 60; ++i) {
      const std::string n = std::to_string(shown + i);
      out += "\nItem " + n + ": " + box + " " + (i == broken ? "0" : n);
    }
    return out + "\n";
  };
  EXPECT_DOUBLE_EQ(score(list, text(0)), 1.0);
  EXPECT_DOUBLE_EQ(score(list, text(31)), 0.5);
  EXPECT_DOUBLE_EQ(score(list, text(1)), 0.0);
  EXPECT_DOUBLE_EQ(score(list, "Once upon a time\nthere was a list"), 0.0);
  EXPECT_DOUBLE_EQ(score(list, ""), 0.0);
}

TEST(EvalTasks, JudgeAStoryByItsRunsOfTenWordsThatAreNew) {
  const Continuation story = find_task("repetition").continuation(5);
  EXPECT_FLOAT_EQ(story.temperature, 0.8f);
  std::string fresh;
  for (int i = 0; i < 300; ++i) fresh += "w" + std::to_string(i) + (i % 7 == 0 ? ". " : " ");
  EXPECT_DOUBLE_EQ(score(story, fresh), 1.0);
  // 600 words have 591 runs; those of the second half are old, but for nine across the border.
  EXPECT_DOUBLE_EQ(score(story, fresh + fresh), 300.0 / 591.0);
  std::string loop;
  for (int i = 0; i < 600; ++i) loop += "again ";
  EXPECT_DOUBLE_EQ(score(story, loop), 1.0 / 591.0);
  EXPECT_DOUBLE_EQ(score(story, "too short to say"), 0.0);
}

}  // namespace
}  // namespace morphkv::eval

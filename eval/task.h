// What `morphkv eval` asks: texts with questions whose answers are known, and beginnings that a
// model is to go on with. Everything is generated from a seed; no task knows a model or a cache.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace morphkv::eval {

// Asked at the end of a document. The answer is judged token by token: a part is right when each of
// its tokens is the likeliest one, given the document, the question and the answer up to there. So
// an answer of one part is right exactly when greedy decoding gives it.
struct Question {
  std::string text;                       // follows the document; the answer begins where it ends
  std::vector<std::string> answer;        // parts, with their leading spaces; the score is the
                                          // share of parts that are right
  std::vector<std::string> choices = {};  // not empty: the score is 1 when the answer's first token
                                          // is likelier than that of every other choice, else 0
  double depth = 0.0;                     // [0, 1] where in the document the answer stands
};

// A text about which one or several questions are asked, each on its own.
struct Document {
  std::string text;
  std::vector<Question> questions;
};

// What a model is to go on with, and how well it did, by name; "score" is the one that ranks.
struct Continuation {
  std::string prompt;
  int tokens = 0;  // to generate
  float temperature = 0.0f;
  std::function<std::map<std::string, double>(std::string_view generated)> judge;
};

// How many tokens a text has.
using CountTokens = std::function<std::size_t(std::string_view)>;

struct Task {
  std::string_view name;
  std::string_view what;   // one line for the help text and the tables
  std::string_view group;  // "recall", "in-context", "long output"
  // Exactly one of the two. The same seed and number give the same text on every machine with the
  // same tokenizer. `tokens`: about how long the document is to be, a continuation's prompt has its
  // own length.
  std::function<Document(std::uint64_t number, int tokens, const CountTokens&)> document;
  std::function<Continuation(std::uint64_t number)> continuation;
};

// All of them, in the order of the tables.
const std::vector<Task>& tasks();
// Throws std::invalid_argument that names the tasks there are.
const Task& find_task(std::string_view name);

}  // namespace morphkv::eval

// What the tasks share: prose with facts at given depths, distinct codes and things that have them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "../random.h"
#include "../task.h"

namespace morphkv::eval {

// A seed for text `number` of a task, so that tasks with the same number differ: the checksum of
// the name and the number's bytes.
std::uint64_t seed_of(std::string_view name, std::uint64_t number);

// A sentence that the prose does not have, and where it is to stand.
struct Fact {
  std::string sentence;
  double depth = 0.0;  // [0, 1]: 0 begins the text, 1 ends it
};

// The middle of part `i` of `n` equal ones: depths spread evenly over a text.
constexpr double spread(std::size_t i, std::size_t n) {
  return (static_cast<double>(i) + 0.5) / static_cast<double>(n);
}

// Less than this has no room for prose between the facts of any task.
inline constexpr int kLeastTokens = 300;

// Throws std::invalid_argument that names `task`, `tokens`, the limit and what to do.
void require_tokens(std::string_view task, int tokens);

// `opening` and prose, about `tokens` tokens with the facts, whose depths ascend. A fact stands
// before the sentence up to which its share of the prose lies. The opening says, as in RULER, what
// will be asked, or is empty; without one a small model overlooks a fact that begins the text.
std::string build_text(std::uint64_t seed, int tokens, const CountTokens& count,
                       std::string_view opening, const std::vector<Fact>& facts);

// `n` different numbers of `digits` digits, none of which begins with 0.
std::vector<std::string> draw_codes(Random& random, std::size_t n, int digits);

// "blue locker" and others, in a random order.
inline constexpr std::size_t kManyThings = 8;
std::vector<std::string> draw_things(Random& random);

// How codes of several things are told and asked for. A small model mixes them up unless an example
// that stands in the opening shows how to answer.
inline constexpr std::string_view kCodesOpening =
    "Some codes are hidden in the following text. Remember them: you will be asked for them at the "
    "end. Code north tower: \"5308\".";
inline constexpr std::string_view kCodesExample =
    "\n\nQuestion: What is the code north tower?\nAnswer: Code north tower: \"5308\".";

// `Code blue locker: "`; the code and `".` follow.
std::string code_of(std::string_view thing);

// "The WHAT is NUMBER.", and the question for it.
Fact number_fact(const std::string& what, const std::string& number, double depth);
Question number_question(const std::string& what, const std::string& number, double depth);

}  // namespace morphkv::eval

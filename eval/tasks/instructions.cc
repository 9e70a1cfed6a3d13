// Instructions far back (the kind of IFEval, Zhou et al. 2023, arXiv 2311.07911, with text between
// an order and what it is about): four orders begin the document, prose follows, and each order
// is asked for.
#include <array>

#include "all.h"
#include "build_text.h"

namespace morphkv::eval {
namespace {

constexpr std::string_view kName = "instructions";
constexpr std::string_view kOpening =
    "Orders are given in the following text. Remember them: you will be asked for them at the end. "
    "The title to use is \"Report\".";
constexpr std::string_view kExample =
    "\n\nQuestion: What is the title to use?\nAnswer: The title to use is \"Report\".";

struct Order {
  std::string_view what;
  std::array<std::string_view, 6> values;
};
constexpr std::array<Order, 4> kOrders = {
    Order{"greeting", {"Ahoy", "Welcome", "Hello", "Good morning", "Greetings", "Hi there"}},
    Order{"language", {"French", "German", "Spanish", "Italian", "Dutch", "Greek"}},
    Order{"colour", {"green", "purple", "orange", "brown", "pink", "black"}},
    Order{"signature", {"Martha", "Oliver", "Sophie", "Henry", "Julia", "Daniel"}},
};

Document document(std::uint64_t number, int tokens, const CountTokens& count) {
  require_tokens(kName, tokens);
  const std::uint64_t seed = seed_of(kName, number);
  Random random(seed);
  Deck deck(kOrders.size());
  std::vector<Fact> facts;
  Document out;
  for (std::size_t i = 0; i < kOrders.size(); ++i) {
    const Order& order = kOrders[deck.deal(random)];
    const std::string value(order.values[random.below(order.values.size())]);
    const std::string sentence = "The " + std::string(order.what) + " to use is";
    facts.push_back({sentence + " \"" + value + "\".", 0.0});
    out.questions.push_back({.text = std::string(kExample) + "\n\nQuestion: What is the " +
                                     std::string(order.what) + " to use?\nAnswer: " + sentence +
                                     " \"",
                             .answer = {value},
                             .depth = 0.0});
  }
  out.text = build_text(seed, tokens, count, kOpening, facts);
  return out;
}

}  // namespace

Task instructions_task() {
  return {kName, "four orders at the beginning, each asked for at the end", "in-context", document,
          nullptr};
}

}  // namespace morphkv::eval

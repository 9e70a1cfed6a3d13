// Filler prose for long prompts: an endless chronicle of a small harbour town, made of sentence
// templates and a vocabulary that are written here (no text of others) and a seed.
//
// Rules. A paragraph tells of one person at one place, in four to seven sentences: an opening with
// the season or the hour, then what the person does, then at times a remark about the town. The
// first sentence has the name, later ones the pronoun. Templates, names and places come from
// shuffled decks that are dealt to their end before they are shuffled again, so that nothing
// repeats soon. The text has no digit and no word about codes, lockers or keys: a fact that is put
// into it is its only one of that kind. The same seed gives the same text on every machine.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "random.h"

namespace morphkv::eval {

// One line of the chronicle per element: a sentence; "" ends a paragraph.
using Sentences = std::vector<std::string>;

class Prose {
 public:
  explicit Prose(std::uint64_t seed);

  // The sentences of the next paragraph, without the "" that ends it.
  Sentences paragraph();

 private:
  std::string fill(std::string_view pattern, std::size_t person, std::size_t place);

  Random random_;
  Deck persons_, places_, openings_, deeds_, remarks_, things_, foods_, weathers_, hours_, manners_;
};

// Words separated by single spaces, paragraphs by an empty line.
std::string join(const Sentences& sentences);

}  // namespace morphkv::eval

#include "prose.h"

#include <array>
#include <string_view>

namespace morphkv::eval {
namespace {

struct Person {
  std::string_view name;
  std::string_view trade;
  bool she;
};

constexpr std::array kPersons = {
    Person{"Oda", "the sailmaker", true},           Person{"Bertil", "the ferryman", false},
    Person{"Mirelle", "the schoolteacher", true},   Person{"Tomas", "the baker", false},
    Person{"Hanne", "the lighthouse keeper", true}, Person{"Ruben", "the clockmaker", false},
    Person{"Isolde", "the apothecary", true},       Person{"Pavel", "the carpenter", false},
    Person{"Greta", "the netmender", true},         Person{"Emil", "the postman", false},
    Person{"Saskia", "the gardener", true},         Person{"Anton", "the innkeeper", false},
    Person{"Viola", "the bookbinder", true},        Person{"Kaspar", "the cooper", false},
};

constexpr std::array<std::string_view, 16> kPlaces = {
    "the old harbour",      "the market square", "the fish hall",    "the north pier",
    "the mill above town",  "the chapel garden", "the ropewalk",     "the reading room",
    "the boatyard",         "the orchard wall",  "the stone bridge", "the salt store",
    "the railway platform", "the weavers' lane", "the tea house",    "the bell tower",
};

constexpr std::array<std::string_view, 20> kThings = {
    "a coil of tarred rope", "a basket of pears",   "a cracked blue jug",   "a roll of sailcloth",
    "a brass lantern",       "a stack of almanacs", "a pair of worn boots", "a sack of barley",
    "a tin of varnish",      "an accordion",        "a wicker birdcage",    "a bundle of letters",
    "a wooden ladder",       "a jar of honey",      "a folded map",         "a grey wool blanket",
    "a bag of nails",        "a small oak barrel",  "a painted tray",       "a string of onions",
};

constexpr std::array<std::string_view, 10> kFoods = {
    "rye bread and butter", "a bowl of mussel soup", "warm plum cake",      "smoked herring",
    "cheese and apples",    "barley porridge",       "a plate of pancakes", "potatoes with dill",
    "a slice of leek pie",  "toasted oat biscuits",
};

constexpr std::array<std::string_view, 10> kWeathers = {
    "a thin rain was falling",
    "fog lay over the water",
    "the wind had turned to the west",
    "the first frost was on the roofs",
    "the sun stood low and yellow",
    "clouds were gathering behind the hills",
    "the air smelled of seaweed",
    "swallows were circling the chimneys",
    "the tide was far out",
    "a warm haze hung in the streets",
};

constexpr std::array<std::string_view, 10> kHours = {
    "early in the morning",        "shortly before noon",     "after the midday bell",
    "late in the evening",         "at first light",          "in the quiet hour after supper",
    "before the shops opened",     "when the lamps were lit", "at the turn of the tide",
    "on the last day of the week",
};

constexpr std::array<std::string_view, 10> kManners = {
    "without any hurry",        "with great care",        "humming an old tune",
    "as on every other day",    "with cold fingers",      "in the best of moods",
    "while the dog slept",      "almost without a sound", "with a patient smile",
    "for the sake of a friend",
};

// {N} name, {T} trade, {p}/{P} pronoun, {o} him or her, {s} his or her, {L} place, {t} thing,
// {f} food, {w} weather, {h} hour, {m} manner.
constexpr std::array<std::string_view, 10> kOpenings = {
    "One day in autumn, when {w}, {N} {T} came to {L} {h}.",
    "It was spring, {w}, and {N} {T} had promised to be at {L} {h}.",
    "{N} {T} liked {L} best when {w}.",
    "There had been talk at {L} for weeks, and so {N} {T} went there {h} to listen.",
    "That winter {N} {T} could be found at {L} {h}, although {w}.",
    "Nobody was surprised to see {N} {T} at {L}, for {w} and there was work to do.",
    "In the summer that followed, {N} {T} often walked to {L} {h}.",
    "While {w}, {N} {T} was already on the way to {L}.",
    "People still tell how {N} {T} stood at {L} {h} and would not leave.",
    "{N} {T} had never been fond of {L}, but {w}, and it was the only dry place.",
};

constexpr std::array<std::string_view, 36> kDeeds = {
    "{P} carried {t} under one arm and put it down {m}.",
    "Somebody had left {t} by the door, and {p} looked at it for a long time.",
    "{P} ate {f} on the steps and watched the boats come in.",
    "A child asked {o} how far it was to the islands, and {p} answered {m}.",
    "{P} had once owned {t} and was sorry to have sold it.",
    "Two neighbours were arguing about {t}, and {p} settled the matter with a joke.",
    "{P} wrote a few lines to {s} sister in the city and tore them up again.",
    "The miller's cart was late, so {p} waited and counted the gulls.",
    "{P} traded {t} for {t}, and both sides went home content.",
    "{S} grandmother had told {o} that such days bring visitors, and she was seldom wrong.",
    "{P} swept the floor {m} and opened all the windows.",
    "For lunch there was {f}, which {p} shared with a stranger.",
    "{P} could name every ship in the bay by the sound of its bell.",
    "A letter had come from abroad, but {p} kept it in {s} coat until the evening.",
    "{P} mended {t} {m} and asked for nothing in return.",
    "The captain of the mail boat waved to {o}, and {p} waved back.",
    "{P} found {t} in the grass, wiped it clean and asked around whose it was.",
    "Nobody knew why {p} laughed, but soon the whole room was laughing with {o}.",
    "{P} taught the apprentice to tie a knot that would not slip in wet weather.",
    "There was a smell of {f} in the air, and {p} remembered that {p} was hungry.",
    "{P} measured the wall twice and shook {s} head {m}.",
    "The old dog followed {o} from one end of the street to the other.",
    "{P} borrowed {t} from the parson and forgot to bring it back.",
    "When the bell rang, {p} folded {s} apron and stepped outside.",
    "{P} told the story of the great storm, and each time the waves grew higher.",
    "A traveller offered {o} {t} in exchange for a bed and {f}.",
    "{P} leaned against the railing and thought about the years at sea.",
    "The children had drawn a whale on the wall, and {p} let it stay.",
    "{P} bought {t} at the autumn fair and carried it home {m}.",
    "In {s} pocket {p} found a dry chestnut and a piece of string.",
    "{P} sat down beside the stove and listened to the rain in the gutters.",
    "Later {p} helped to unload the barge, crate by crate, {m}.",
    "{P} said little that day, but {p} noticed everything.",
    "The harbour master nodded at {o} and went on with his accounts.",
    "{P} planted a row of beans where the fence had fallen.",
    "With {t} in both hands {p} climbed the stairs {m}.",
};

constexpr std::array<std::string_view, 12> kRemarks = {
    "The town was like that: slow to change and quick to forgive.",
    "By nightfall the streets were empty and only the water could be heard.",
    "It was the kind of day that is remembered for no reason at all.",
    "The gulls knew it before anybody else did.",
    "So the week went by, and nobody complained.",
    "In the end it was the weather that decided.",
    "The older people said it had been different in their youth, but they could not say how.",
    "On the hill the mill turned and turned.",
    "Much later it was mentioned in the parish book, with a drawing in the margin.",
    "Even the mayor had to admit that it was well done.",
    "After that the talk turned to the price of fish.",
    "And the river carried all of it, as always, down to the sea.",
};

void replace_all(std::string& text, std::string_view what, std::string_view with) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += with.size()) {
    text.replace(at, what.size(), with);
  }
}

}  // namespace

Prose::Prose(std::uint64_t seed)
    : random_(seed),
      persons_(kPersons.size()),
      places_(kPlaces.size()),
      openings_(kOpenings.size()),
      deeds_(kDeeds.size()),
      remarks_(kRemarks.size()),
      things_(kThings.size()),
      foods_(kFoods.size()),
      weathers_(kWeathers.size()),
      hours_(kHours.size()),
      manners_(kManners.size()) {}

std::string Prose::fill(std::string_view pattern, std::size_t person, std::size_t place) {
  const Person& who = kPersons[person];
  std::string text(pattern);
  // Each thing of a sentence is another one.
  for (std::size_t at = 0; (at = text.find("{t}")) != std::string::npos;) {
    text.replace(at, 3, kThings[things_.deal(random_)]);
  }
  const auto put = [&](std::string_view what, const auto& words, Deck& deck) {
    if (text.find(what) != std::string::npos) replace_all(text, what, words[deck.deal(random_)]);
  };
  put("{f}", kFoods, foods_);
  put("{w}", kWeathers, weathers_);
  put("{h}", kHours, hours_);
  put("{m}", kManners, manners_);
  replace_all(text, "{N} {T}", std::string(who.name) + " " + std::string(who.trade));
  replace_all(text, "{L}", kPlaces[place]);
  replace_all(text, "{p}", who.she ? "she" : "he");
  replace_all(text, "{P}", who.she ? "She" : "He");
  replace_all(text, "{o}", who.she ? "her" : "him");
  replace_all(text, "{s}", who.she ? "her" : "his");
  replace_all(text, "{S}", who.she ? "Her" : "His");
  return text;
}

Sentences Prose::paragraph() {
  const std::size_t person = persons_.deal(random_);
  const std::size_t place = places_.deal(random_);
  Sentences out;
  out.push_back(fill(kOpenings[openings_.deal(random_)], person, place));
  const std::size_t deeds = 3 + random_.below(3);
  for (std::size_t i = 0; i < deeds; ++i) {
    out.push_back(fill(kDeeds[deeds_.deal(random_)], person, place));
  }
  if (random_.below(2) == 0) out.emplace_back(kRemarks[remarks_.deal(random_)]);
  return out;
}

std::string join(const Sentences& sentences) {
  std::string out;
  for (const std::string& sentence : sentences) {
    if (sentence.empty()) {
      out += "\n\n";
      continue;
    }
    if (!out.empty() && out.back() != '\n') out += ' ';
    out += sentence;
  }
  return out;
}

}  // namespace morphkv::eval

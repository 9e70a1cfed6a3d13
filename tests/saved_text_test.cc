// Texts that go on from bytes: in another slot, other slots and another session as where they were
// saved; and bytes that must be refused while the slot stays as it was.
#include "morphkv/llama_cpp/saved_text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "model_support.h"
#include "morphkv/archive.h"
#include "morphkv/llama_cpp/session.h"
#include "morphkv/policy.h"
#include "tiny_model.h"

namespace morphkv::llama_cpp {
namespace {

using test::notes_about;
using test::test_model;

constexpr int kBudget = 96;

CacheConfig cache_of(const std::string& policy = "morphkv") {
  CacheConfig cache = default_profile().with_budget(kBudget);
  cache.policy = policy;
  return cache;
}

Turn turn_of(std::vector<llama_token> prompt, int answer, const CacheConfig& cache = cache_of()) {
  Turn turn;
  turn.prompt = std::move(prompt);
  turn.cache = cache;
  turn.sampling.temperature = 0.0f;
  turn.max_tokens = answer;
  turn.ignore_eos = true;
  turn.top_logprobs = 0;
  return turn;
}

struct Answer {
  std::vector<llama_token> tokens;
  std::vector<float> logprobs;
};

Answer answer(Slots& slots, int slot, Turn turn) {
  Answer out;
  slots.begin(slot, std::move(turn),
              {.on_token =
                   [&](GeneratedToken t) {
                     out.tokens.push_back(t.token);
                     out.logprobs.push_back(t.chosen->logprob);
                   },
               .on_end = {},
               .on_error = [](const std::string& what) { ADD_FAILURE() << what; }});
  while (slots.step()) {
  }
  return out;
}

// The rows lie in other cells, so sums are added up in another order, V in f16: what is likely is
// still so, but of two as likely the other may be chosen, and later tokens differ then.
void expect_close(const Answer& a, const Answer& b) {
  ASSERT_FALSE(a.tokens.empty() || b.tokens.empty());
  EXPECT_NEAR(a.logprobs.front(), b.logprobs.front(), 2e-2) << test::engine();
}

void expect_same(const Answer& a, const Answer& b) {
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.logprobs, b.logprobs);
}

constexpr int kVocab = 96;

std::vector<llama_token> noise(int n, std::uint32_t seed) {
  return test::noise_tokens(n, kVocab, seed);
}

SlotsOptions options(int n, int budget = kBudget) {
  return {.slots = n, .budget = budget, .piece = 96, .batch_tokens = 64, .threads = 1};
}

std::vector<llama_token> seen(const Slots& slots, int slot) {
  const auto tokens = slots.tokens_seen(slot);
  return {tokens.begin(), tokens.end()};
}

// What the slot has seen, and a further question.
std::vector<llama_token> longer(const Slots& slots, int slot, const std::string& topic) {
  std::vector<llama_token> text = seen(slots, slot);
  const auto more = notes_about(6, topic);
  text.insert(text.end(), more.begin(), more.end());
  return text;
}

using Positions = std::vector<std::vector<std::vector<Position>>>;  // [layer][head]

Positions positions(const Slots& slots, int slot) {
  Positions out;
  for (const BoundLayer& layer : slots.snapshot(slot)) {
    auto& heads = out.emplace_back();
    for (const HeadSnapshot& head : layer.rows.heads) heads.push_back(head.positions);
  }
  return out;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

void expect_mentions(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) EXPECT_NE(text.find(word), std::string::npos) << text;
}

// ---------------------------------------------------------------- going on

class SavedTextOf : public testing::TestWithParam<const char*> {};

TEST_P(SavedTextOf, EveryPolicyGoesOnInAnotherSlotAndInOtherSlotsAsWhereItWasSaved) {
  const ModelPtr model = test::make_tiny_model({});
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    CacheConfig cache = test::small_cache(GetParam(), queries);
    if (cache.policy == "random") cache.seed = 7;
    Slots slots(model.get(), options(3));
    answer(slots, 0, turn_of(noise(200, 1), 8, cache));
    const std::string bytes = slots.save(0);
    EXPECT_TRUE(slots.save(0) == bytes) << "saving changes nothing";
    const auto before = slots.stats(0);
    const auto held = positions(slots, 0);
    auto text = seen(slots, 0);
    for (const llama_token token : noise(30, 2)) text.push_back(token);
    const Turn next = turn_of(text, 8, cache);

    answer(slots, 2, turn_of(noise(90, 3), 20, test::small_cache()));  // something else
    slots.restore(2, bytes);
    EXPECT_EQ(positions(slots, 2), held);
    EXPECT_EQ(slots.stats(2).tokens_seen, before.tokens_seen);
    EXPECT_EQ(slots.stats(2).rows_evicted, before.rows_evicted);
    EXPECT_EQ(slots.stats(2).cache, cache);
    EXPECT_EQ(slots.reusable(2, next), static_cast<int>(before.tokens_seen));

    const Answer expected = answer(slots, 0, next);
    const Answer here = answer(slots, 2, next);
    expect_close(here, expected);
    EXPECT_EQ(slots.stats(2).reused_tokens, static_cast<int>(before.tokens_seen));

    slots.restore(0, bytes);  // where it was: nothing but the cells has changed
    EXPECT_TRUE(slots.save(0) == bytes);
    Slots others(model.get(), options(1, kBudget + 300));
    others.restore(0, bytes);
    EXPECT_EQ(positions(others, 0), held);
    expect_same(answer(others, 0, next), here);
  }
}

// As bytes or not: what a checkpoint holds goes on to the bit.
TEST_P(SavedTextOf, BytesLoseNothingOfACheckpoint) {
  const ModelPtr model = test::make_tiny_model({});
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    const CacheConfig cache = test::small_cache(GetParam(), queries);
    test::Bounded first(model.get(), {.cache = cache});
    for (std::uint32_t i = 0; i < 4; ++i) first.feed(noise(50, i));
    const SavedText text{"m", noise(200, 1), first.evictor().checkpoint()};
    const SavedText back = SavedText::from_bytes(text.to_bytes());
    EXPECT_EQ(back.model, text.model);
    EXPECT_EQ(back.tokens, text.tokens);
    EXPECT_EQ(back.checkpoint.offset(), 200);
    EXPECT_EQ(back.checkpoint.rows(), cache.budget);
    EXPECT_TRUE(back.to_bytes() == text.to_bytes());

    test::Bounded copied(model.get(), {.cache = cache});
    copied.evictor().restore(text.checkpoint);
    test::Bounded loaded(model.get(), {.cache = cache});
    loaded.evictor().restore(back.checkpoint);
    for (const llama_token token : noise(40, 6)) {
      copied.feed({&token, 1});
      loaded.feed({&token, 1});
      ASSERT_EQ(loaded.logits(), copied.logits());
      test::expect_consistent(loaded, "gone on");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, SavedTextOf,
                         testing::Values("morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv",
                                         "streaming", "random"),
                         [](const auto& param) { return std::string(param.param); });

TEST(SavedText, OfModelsWithSlidingWindowsGoesOnWithAnotherNumberOfSlots) {
  const ModelPtr model = test::make_tiny_model({.architecture = "gemma3", .sliding_window = 32});
  const CacheConfig cache = test::small_cache();
  Slots slots(model.get(), options(3));
  answer(slots, 1, turn_of(noise(200, 1), 8, cache));
  const std::string bytes = slots.save(1);
  auto text = seen(slots, 1);
  for (const llama_token token : noise(30, 2)) text.push_back(token);
  const Turn next = turn_of(text, 8, cache);
  const Answer expected = answer(slots, 1, next);
  for (const int n : {1, 2, 3, 5}) {
    Slots others(model.get(), options(n));
    others.restore(n - 1, bytes);
    expect_close(answer(others, n - 1, next), expected);
  }
}

TEST(SavedText, ThatWasRestoredGoesOnToTheBitInEveryFreshProcess) {
  std::string bytes;
  std::vector<llama_token> text;
  {
    Slots slots(test_model(), options(2));
    answer(slots, 1, turn_of(notes_about(20, "lamp"), 8));
    bytes = slots.save(1);
    text = longer(slots, 1, "crane");
  }
  std::vector<Answer> answers;
  for (const int n : {1, 1, 2, 3}) {
    Slots fresh(test_model(), options(n));
    fresh.restore(n - 1, bytes);
    answers.push_back(answer(fresh, n - 1, turn_of(text, 12)));
    EXPECT_GT(fresh.stats(n - 1).reused_tokens, 200);
  }
  expect_same(answers[0], answers[1]);
  expect_same(answers[2], answers[3]);
  // A single slot reads more tokens at once than one that shares its steps, and rounds otherwise.
  EXPECT_EQ(answers[0].tokens.front(), answers[2].tokens.front());
}

TEST(SavedText, KnowsWhatItHasRead) {
  Slots slots(test_model(), options(2));
  const auto told =
      tokenize(test_model(),
               "The boat of the keeper is called Marigold. " + std::string(test::kProse), false);
  answer(slots, 0, turn_of(told, 1));
  ASSERT_GT(slots.stats(0).rows_evicted, 0);
  slots.restore(1, slots.save(0));
  auto text = seen(slots, 0);
  for (const llama_token token : tokenize(test_model(), " The boat of the keeper is called", false))
    text.push_back(token);
  const Answer expected = answer(slots, 0, turn_of(text, 3));
  EXPECT_EQ(answer(slots, 1, turn_of(text, 3)).tokens, expected.tokens);
}

TEST(SavedText, OfAnEmptySlotEmptiesASlot) {
  Slots slots(test_model(), options(2));
  const std::string bytes = slots.save(0);
  answer(slots, 1, turn_of(notes_about(20, "lamp"), 4));
  slots.restore(1, bytes);
  EXPECT_EQ(slots.stats(1).tokens_seen, 0);
  EXPECT_TRUE(slots.tokens_seen(1).empty());
  const Turn turn = turn_of(notes_about(9, "crane"), 6);
  EXPECT_EQ(answer(slots, 1, turn).tokens, answer(slots, 0, turn).tokens);
}

TEST(SavedText, BelowTheBudgetGoesOn) {
  Slots slots(test_model(), options(2));
  answer(slots, 0, turn_of(notes_about(1, "lamp"), 6));
  ASSERT_LT(slots.stats(0).rows_kept, kBudget);
  slots.restore(1, slots.save(0));
  const Turn next = turn_of(longer(slots, 0, "crane"), 8);
  const Answer expected = answer(slots, 0, next);
  expect_same(answer(slots, 1, next), expected);  // nothing has left: the cells are the same too
}

// ---------------------------------------------------------------- sessions

SessionOptions session_options(Prefill prefill = Prefill::kStream) {
  SessionOptions o;
  o.cache = cache_of();
  o.prefill = prefill;
  o.sampling.temperature = 0.0f;
  o.max_tokens = 6;
  o.ignore_eos = true;
  o.threads = 1;
  return o;
}

struct Spoken {
  SessionResult result;
  std::vector<llama_token> tokens;
};

Spoken speak(Session& session, std::span<const llama_token> prompt) {
  Spoken out;
  SessionCallbacks callbacks;
  callbacks.on_token = [&](llama_token t, std::string_view, double) { out.tokens.push_back(t); };
  out.result = session.run(prompt, callbacks);
  return out;
}

TEST(SavedText, OfASessionGoesOnWithTheTokenThatWasNotEvaluated) {
  const ModelPtr model = test::make_tiny_model({});
  const auto first = noise(200, 1);
  const auto second = noise(9, 2);
  SessionOptions o = session_options();
  o.cache = test::small_cache();
  Session session(model.get(), o);
  const Spoken spoken = speak(session, first);
  const SavedText saved = SavedText::from_bytes(session.save());
  EXPECT_EQ(saved.tokens.size(), first.size() + spoken.tokens.size());
  EXPECT_EQ(saved.checkpoint.offset(), std::ssize(saved.tokens) - 1);

  // The session that was not interrupted is fed the same by hand.
  std::vector<llama_token> fed = {spoken.tokens.back()};
  fed.insert(fed.end(), second.begin(), second.end());
  session.feed(fed);
  std::vector<llama_token> expected;
  for (int i = 0; i < 6; ++i) {
    const auto logits = session.logits();
    expected.push_back(test::likeliest({logits.begin(), logits.end()}));
    session.feed({&expected.back(), 1});
  }

  Session next(model.get(), o);
  next.resume(saved);
  const Spoken answer = speak(next, second);
  EXPECT_EQ(answer.tokens, expected);
  EXPECT_EQ(answer.result.reused_tokens, std::ssize(saved.tokens) - 1);
  EXPECT_EQ(answer.result.prompt_tokens, std::ssize(second) + 1);
  const SavedText again = SavedText::from_bytes(next.save());
  EXPECT_EQ(again.tokens.size(), saved.tokens.size() + second.size() + 6);

  Slots slots(model.get(), options(2));
  slots.restore(1, next.save());
  EXPECT_EQ(std::ssize(slots.tokens_seen(1)), again.checkpoint.offset());
  const Turn longer_turn = turn_of(again.tokens, 2, o.cache);
  EXPECT_EQ(slots.reusable(1, longer_turn), again.checkpoint.offset());
}

TEST(SavedText, GoesOnInASessionHoweverItsNextPromptIsRead) {
  Session session(test_model(), session_options());
  speak(session, notes_about(8, "lamp"));
  const std::string bytes = session.save();
  for (const Prefill prefill : {Prefill::kStream, Prefill::kGuided, Prefill::kWhole}) {
    Session next(test_model(), session_options(prefill));
    next.resume(SavedText::from_bytes(bytes));
    const Spoken spoken = speak(next, notes_about(20, "crane"));
    EXPECT_EQ(spoken.result.prefill_mode, prefill);
    EXPECT_EQ(spoken.tokens.size(), 6u);
    EXPECT_EQ(spoken.result.cache.rows_kept, kBudget);
    EXPECT_EQ(next.evictor().violations(), std::vector<std::string>{});
  }
}

TEST(SavedText, OfThePolicyThatEvictsNothingGoesOnInASessionAndInNoSlot) {
  SessionOptions full = session_options();
  full.cache.policy = "full";
  Session session(test_model(), full);
  speak(session, notes_about(12, "lamp"));
  const std::string bytes = session.save();
  Session next(test_model(), full);
  next.resume(SavedText::from_bytes(bytes));
  const Spoken spoken = speak(next, notes_about(12, "crane"));
  EXPECT_EQ(spoken.result.cache.rows_evicted, 0);
  EXPECT_EQ(spoken.result.cache.rows_kept, spoken.result.cache.tokens_seen);
  Slots slots(test_model(), options(1));
  expect_mentions(refusal([&] { slots.restore(0, bytes); }), {"'full'", "evicts nothing"});
}

TEST(SavedText, OfAnotherRuleIsRefusedByASession) {
  Session session(test_model(), session_options());
  speak(session, notes_about(8, "lamp"));
  SessionOptions other = session_options();
  other.cache.window = 9;
  Session next(test_model(), other);
  const SavedText saved = SavedText::from_bytes(session.save());
  expect_mentions(refusal([&] { next.resume(saved); }), {"window 8 (here 9)"});
}

TEST(SavedText, BeyondTheTrainedLengthIsRefused) {
  const ModelPtr model = test::make_tiny_model({.trained_length = 128});
  SessionOptions o = session_options();
  o.cache = test::small_cache();
  Session session(model.get(), o);
  speak(session, test::noise_tokens(100, 96));
  Session next(model.get(), o);
  next.resume(SavedText::from_bytes(session.save()));
  const auto more = test::noise_tokens(23, 96);
  expect_mentions(refusal([&] { speak(next, more); }),
                  {"23 tokens behind a session of 106", "trained for 128"});
}

// ---------------------------------------------------------------- refusals

// Slots with something in slot 1 that no refusal may touch.
class SavedTextRefusal : public testing::Test {
 protected:
  SavedTextRefusal() : slots_(test_model(), options(2)) {
    answer(slots_, 0, turn_of(notes_about(20, "lamp"), 4));
    bytes_ = slots_.save(0);
    answer(slots_, 1, turn_of(notes_about(11, "ferry"), 4));
    before_ = slots_.save(1);
  }
  // Tokens of the turn that its slot had not seen.
  int more(const Turn& turn) const {
    return static_cast<int>(turn.prompt.size()) -
           SavedText::from_bytes(before_).checkpoint.offset();
  }
  std::string refused(const std::string& bytes) {
    return refusal([&] { slots_.restore(1, bytes); });
  }
  void expect_untouched() {
    EXPECT_TRUE(slots_.save(1) == before_);
    const Turn next = turn_of(longer(slots_, 1, "crane"), 6);
    EXPECT_EQ(slots_.reusable(1, next), std::ssize(slots_.tokens_seen(1)));
    EXPECT_EQ(answer(slots_, 1, next).tokens.size(), 6u);
    EXPECT_EQ(slots_.stats(1).reused_tokens, slots_.stats(1).tokens_seen - 5 - more(next));
  }

  Slots slots_;
  std::string bytes_;
  std::string before_;
};

TEST_F(SavedTextRefusal, WithAByteChanged) {
  for (std::size_t i = 0; i < 160; ++i) {
    // All of the envelope and its surroundings, then all over the rest.
    const std::size_t at = i < 80 ? i : 80 + (i - 80) * (bytes_.size() - 81) / 79;
    for (const int bits : {1 << (i % 8), 0xFF}) {
      std::string damaged = bytes_;
      damaged[at] = static_cast<char>(damaged[at] ^ bits);
      ASSERT_NE(refused(damaged), "") << at;
    }
  }
  expect_untouched();
}

TEST_F(SavedTextRefusal, CutOrLonger) {
  for (std::size_t i = 0; i < 120; ++i) {
    const std::size_t length = i < 40 ? i : 40 + (i - 40) * (bytes_.size() - 41) / 79;
    ASSERT_NE(refused(bytes_.substr(0, length)), "") << length;
  }
  EXPECT_NE(refused(bytes_ + '\0'), "");
  EXPECT_NE(refused(bytes_ + bytes_), "");
  expect_untouched();
}

TEST_F(SavedTextRefusal, OfAnotherKindOrVersion) {
  expect_mentions(refused("no such thing at all, whatever it is"), {"no saved morphkv session"});
  std::string other = bytes_;
  for (const char version : {'\0', '\3'}) {
    other[8] = version;
    expect_mentions(refused(other), {"version is " + std::to_string(static_cast<int>(version)),
                                     "reads version 1 to 2"});
  }
  expect_untouched();
}

TEST_F(SavedTextRefusal, OfABudgetAboveTheOneReserved) {
  Slots large(test_model(), options(1, 200));
  Turn turn = turn_of(notes_about(20, "lamp"), 2);
  turn.cache = default_profile().with_budget(200);
  answer(large, 0, turn);
  expect_mentions(refused(large.save(0)), {"budget 200 is above 96"});
  expect_untouched();
}

TEST_F(SavedTextRefusal, OfAnotherModelOrCellType) {
  const ModelPtr tiny = test::make_tiny_model({});
  Slots others(tiny.get(), options(1));
  expect_mentions(refused(others.save(0)), {"another model", "2 layers (here 30 layers)"});
  SlotsOptions quantised = options(1);
  quantised.type_k = GGML_TYPE_Q8_0;
  Slots q8(test_model(), quantised);
  answer(q8, 0, turn_of(notes_about(20, "lamp"), 2));
  expect_mentions(refused(q8.save(0)), {"K q8_0 (here K f16)"});
  expect_untouched();
}

TEST_F(SavedTextRefusal, OfOrIntoABusySlot) {
  slots_.begin(0, turn_of(notes_about(20, "lamp"), 4), {});
  expect_mentions(refusal([&] { slots_.save(0); }), {"slot 0 is busy"});
  expect_mentions(refusal([&] { slots_.restore(0, bytes_); }), {"slot 0 is busy"});
  slots_.end(0);
  EXPECT_THROW(slots_.save(2), std::invalid_argument);
  EXPECT_THROW(slots_.restore(-1, bytes_), std::invalid_argument);
  expect_untouched();
}

TEST(SavedText, OfACallThatIsGoingOnIsRefused) {
  const ModelPtr model = test::make_tiny_model({});
  test::Bounded bounded(model.get(), {});
  ASSERT_EQ(test::decode(bounded.context(), test::noise_tokens(10, 96)), 0);
  const SavedText text{"m", test::noise_tokens(10, 96), bounded.evictor().checkpoint()};
  expect_mentions(refusal([&] { static_cast<void>(text.to_bytes()); }),
                  {"10 tokens", "after_decode()"});
}

// Where things lie in the body of bytes; each list behind its length of 8 bytes.
struct Layout {
  explicit Layout(const std::string& bytes) : body(bytes.substr(28)) {
    Reader reader(body);
    const auto here = [&] { return body.size() - reader.left(); };
    std::string model;
    std::vector<llama_token> tokens;
    reader.list(model);
    reader.list(tokens);
    messages = here();
    std::uint64_t n = 0;
    reader.value(n);
    config = here();
    CacheConfig c;
    config_fields(reader, c);
    offset = here();
    Position o = 0;
    reader.value(o);
    cells = here() + 8;
    std::vector<int> ints;
    reader.list(ints);
    rows = ints.size();
    layers = here();
    reader.value(n);
    index = here();
    int i = 0;
    reader.value(i);
    heads = here();
    reader.value(n);
    slots = here() + 8;
    reader.list(ints);
    positions = here() + 8;
    std::vector<Position> p;
    reader.list(p);
    memory = here() + 8;
  }
  template <typename T>
  void put(std::size_t at, T value) {
    std::memcpy(body.data() + at, &value, sizeof value);
  }
  template <typename T>
  T get(std::size_t at) const {
    T value;
    std::memcpy(&value, body.data() + at, sizeof value);
    return value;
  }
  std::string bytes(std::uint32_t version = 2) const {
    return seal({{'m', 'k', 'v', 't', 'e', 'x', 't', '\n'}, version, ""}, body);
  }

  std::string body;
  std::size_t messages, config, offset, cells, rows, layers, index, heads, slots, positions, memory;
};

struct Forgery {
  const char* what;
  std::function<void(Layout&)> forge;
};

const Forgery kForgeries[] = {
    {"endless messages", [](Layout& f) { f.put<std::uint64_t>(f.messages, ~0ull); }},
    {"a budget that is too large", [](Layout& f) { f.put<int>(f.config, 97); }},
    {"a budget that is less than the rows", [](Layout& f) { f.put<int>(f.config, 95); }},
    {"no budget", [](Layout& f) { f.put<int>(f.config, 0); }},
    {"a fusion that does not exist", [](Layout& f) { f.put<std::uint8_t>(f.config + 20, 7); }},
    {"a query source that does not exist",
     [](Layout& f) { f.put<std::uint8_t>(f.config + 21, 2); }},
    {"a policy that does not exist", [](Layout& f) { f.put<char>(f.config + 30, 'x'); }},
    {"an offset beyond the text", [](Layout& f) { f.put<Position>(f.offset, 100000); }},
    {"an offset before the last rows",
     [](Layout& f) { f.put<Position>(f.offset, f.get<Position>(f.offset) - 1); }},
    {"an offset of fewer rows", [](Layout& f) { f.put<Position>(f.offset, 20); }},
    {"a negative offset", [](Layout& f) { f.put<Position>(f.offset, -1); }},
    {"a cell twice", [](Layout& f) { f.put<int>(f.cells, f.get<int>(f.cells + 4)); }},
    {"a cell beyond all", [](Layout& f) { f.put<int>(f.cells, 96); }},
    {"a negative cell", [](Layout& f) { f.put<int>(f.cells, -1); }},
    {"more cells than bytes", [](Layout& f) { f.put<std::uint64_t>(f.cells - 8, 1ull << 62); }},
    {"no layers", [](Layout& f) { f.put<std::uint64_t>(f.layers, 0); }},
    {"more layers", [](Layout& f) { f.put<std::uint64_t>(f.layers, 31); }},
    {"endless layers", [](Layout& f) { f.put<std::uint64_t>(f.layers, ~0ull); }},
    {"another layer", [](Layout& f) { f.put<int>(f.index, -1); }},
    {"a layer twice", [](Layout& f) { f.put<int>(f.index, 1); }},
    {"no heads", [](Layout& f) { f.put<std::uint64_t>(f.heads, 0); }},
    {"endless heads", [](Layout& f) { f.put<std::uint64_t>(f.heads, ~0ull); }},
    {"a slot twice", [](Layout& f) { f.put<int>(f.slots, f.get<int>(f.slots + 4)); }},
    {"a slot beyond all", [](Layout& f) { f.put<int>(f.slots, 96); }},
    {"a negative slot", [](Layout& f) { f.put<int>(f.slots, -5); }},
    {"a position twice", [](Layout& f) { f.put<Position>(f.positions, 1); }},
    {"a negative position", [](Layout& f) { f.put<Position>(f.positions, -1); }},
    {"a position not yet seen",
     [](Layout& f) { f.put<Position>(f.positions + 8 * (f.rows - 1), f.get<Position>(f.offset)); }},
    {"no sink",
     [](Layout& f) { f.put<Position>(f.positions + 24, f.get<Position>(f.positions + 32) - 1); }},
    {"NaN in the memory of the policy",
     [](Layout& f) { f.put<float>(f.memory + 4 * 10, std::nanf("")); }},
    {"too many queries in the memory", [](Layout& f) { f.put<float>(f.memory, 9.0f); }},
    {"a memory longer than the bytes",
     [](Layout& f) { f.put<std::uint64_t>(f.memory - 8, 1ull << 60); }},
    {"a byte too many", [](Layout& f) { f.body += 'x'; }},
};

TEST_F(SavedTextRefusal, ThatWasForged) {
  ASSERT_TRUE(Layout(bytes_).bytes() == bytes_);
  for (const Forgery& forgery : kForgeries) {
    Layout forged(bytes_);
    forgery.forge(forged);
    EXPECT_NE(refused(forged.bytes()), "") << forgery.what;
  }
  expect_untouched();
}

TEST_F(SavedTextRefusal, NotOfTheVersionBeforeMessagesWereKept) {
  Layout old(bytes_);
  old.body.erase(old.messages, sizeof(std::uint64_t));
  slots_.restore(1, old.bytes(1));
  slots_.restore(0, bytes_);
  EXPECT_EQ(seen(slots_, 1), seen(slots_, 0));
  EXPECT_EQ(positions(slots_, 1), positions(slots_, 0));
}

TEST(SavedText, KeepsTheMessagesOfAChat) {
  const ModelPtr model = test::make_tiny_model({});
  Slots slots(model.get(), options(1));
  answer(slots, 0, turn_of(noise(30, 1), 2, test::small_cache()));
  const std::vector<ChatMessage> chat = {{"user", "Wie heißt du?"}, {"assistant", ""}};
  EXPECT_EQ(SavedText::from_bytes(slots.save(0, chat)).messages, chat);
  EXPECT_TRUE(SavedText::from_bytes(slots.save(0)).messages.empty());
}

// Rows that only the engine can refuse: by then the slot has been given up, and comes back.
TEST_F(SavedTextRefusal, WithRowsThatTheEngineRefuses) {
  const std::size_t rows = SavedText::from_bytes(bytes_).checkpoint.bytes();
  for (const std::size_t left : {std::size_t{1}, std::size_t{40}, rows / 2, rows - 1}) {
    Layout forged(bytes_);
    const std::size_t at = forged.body.size() - rows;
    ASSERT_EQ(forged.get<std::uint64_t>(at - 8), rows);
    forged.put<std::uint64_t>(at - 8, left);
    forged.body.resize(at + left);
    expect_mentions(refused(forged.bytes()), {"the engine does not take it"});
    EXPECT_TRUE(slots_.save(1) == before_) << left;
  }
  // The engine's rows of another moment.
  Layout forged(bytes_);
  const std::string other = before_.substr(before_.size() - rows);
  const std::size_t other_rows = SavedText::from_bytes(before_).checkpoint.bytes();
  if (other_rows == rows) {
    forged.body.replace(forged.body.size() - rows, rows, other);
    expect_mentions(refused(forged.bytes()), {"the engine does not take it"});
  }
  expect_untouched();
}

}  // namespace
}  // namespace morphkv::llama_cpp

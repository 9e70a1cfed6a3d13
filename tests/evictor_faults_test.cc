// What goes wrong in the engine leaves the evictor and the engine's memory in agreement: aborted
// and failed calls, a full memory, and other code that edits the memory.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "kv_probe.h"
#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::EngineError;
using llama_cpp::ModelPtr;

// --- Aborted calls
// --------------------------------------------------------------------------------

TEST(EvictorFaults, AStepAbortedAtAnyNodeLeavesNothingBehindAndCanBeRepeated) {
  const ModelPtr model = make_tiny_model({});
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    SCOPED_TRACE(to_string(queries));
    const BoundOptions options{.cache = small_cache("morphkv", queries), .poison_freed_rows = true};
    WatchedStream stream(model.get(), options);
    Bounded undisturbed(model.get(), options);
    AbortAfter abort(stream.bounded().context());
    const auto tokens = noise_tokens(1000, 96);
    stream.feed(std::span(tokens).first(64));
    undisturbed.feed(std::span(tokens).first(64));
    std::size_t fed = 64;
    int aborted = 0;
    for (int node = 1; fed < tokens.size(); ++node, ++fed) {
      const auto token = std::span(tokens).subspan(fed, 1);
      abort.arm(node);
      const int status = stream.try_feed(token);
      const bool fired = abort.fired();
      abort.disarm();
      undisturbed.feed(token);
      if (status == 2) {
        ++aborted;
        ASSERT_EQ(stream.evictor().offset(), static_cast<Position>(fed)) << "node " << node;
        stream.feed(token);
      }
      ASSERT_FALSE(HasFailure()) << "node " << node;
      ASSERT_EQ(stream.bounded().logits(), undisturbed.logits()) << "node " << node;
      if (!fired) break;  // the graph has no more nodes
    }
    EXPECT_GT(aborted, 30);
    EXPECT_LT(fed, tokens.size());
  }
}

TEST(EvictorFaults, ACallOfSeveralMicroBatchesAbortedAnywhereKeepsTheWholeOnes) {
  const ModelPtr model = make_tiny_model({});
  const BoundOptions options{
      .cache = small_cache(), .poison_freed_rows = true, .call_tokens = 192, .n_batch = 192};
  const auto tokens = noise_tokens(64 + 192 + 40, 96);
  std::set<Position> kept;
  for (int node = 1;; node += 3) {
    WatchedStream stream(model.get(), options);
    AbortAfter abort(stream.bounded().context());
    stream.feed(std::span(tokens).first(64));
    abort.arm(node);
    const int status = stream.try_feed(std::span(tokens).subspan(64, 192));
    if (!abort.fired()) break;
    abort.disarm();
    ASSERT_EQ(status, 2) << "node " << node;
    const Position offset = stream.evictor().offset();
    EXPECT_EQ(offset % 64, 0) << "node " << node;
    kept.insert(offset);
    // On with the rest of the text, in other pieces.
    for (auto fed = static_cast<std::size_t>(offset); fed < tokens.size();) {
      const std::size_t piece = std::min<std::size_t>(50, tokens.size() - fed);
      stream.feed(std::span(tokens).subspan(fed, piece));
      ASSERT_FALSE(HasFailure()) << "node " << node;
      fed += piece;
    }
  }
  EXPECT_EQ(kept, (std::set<Position>{64, 128, 192}));
}

TEST(EvictorFaults, AnAbortedPromptOfTheTrainedModelGoesOnWhereTheEngineStopped) {
  const BoundOptions options{
      .cache = small_cache(), .poison_freed_rows = true, .call_tokens = 256, .n_batch = 256};
  WatchedStream stream(test_model(), options);
  AbortAfter abort(stream.bounded().context());
  const auto text = prose_tokens(300);
  Bounded undisturbed(test_model(), options);
  AbortAfter count(undisturbed.context());
  count.arm(1 << 30);
  ASSERT_EQ(decode(undisturbed.context(), std::span(text).first(64)), 0);
  const int questions = (1 << 30) - count.left();
  ASSERT_GT(questions, 500) << "the engine asks after each node, " << engine();

  abort.arm(2 * questions + questions / 2);
  ASSERT_EQ(stream.try_feed(std::span(text).first(256)), 2);
  abort.disarm();
  const Position offset = stream.evictor().offset();
  ASSERT_EQ(offset, 128);
  ASSERT_FALSE(HasFailure());

  // The same text, never interrupted.
  ASSERT_EQ(decode(undisturbed.context(), std::span(text).subspan(64, 64)), 0);
  undisturbed.evictor().after_decode();
  stream.feed(std::span(text).subspan(128, 20));
  undisturbed.feed(std::span(text).subspan(128, 20));
  EXPECT_EQ(stream.evictor().stats().rows_evicted, undisturbed.evictor().stats().rows_evicted);

  abort.arm(questions / 2);
  ASSERT_EQ(stream.try_feed(std::span(text).subspan(148, 1)), 2);
  abort.disarm();
  EXPECT_EQ(stream.evictor().offset(), 148);
  stream.feed(std::span(text).subspan(148, 1));
}

// --- Failed calls
// ---------------------------------------------------------------------------------

TEST(EvictorFaults, AMemoryFilledByCallsWithoutEvictionGivesStatusOneAndRecovers) {
  const ModelPtr model = make_tiny_model({});
  WatchedStream stream(model.get(), {.poison_freed_rows = true});
  const auto tokens = noise_tokens(64, 96);
  int calls = 0;
  int status = 0;
  while ((status = stream.feed_unevicted(tokens)) == 0) ASSERT_LT(++calls, 10);
  EXPECT_EQ(status, 1);
  EXPECT_EQ(calls, 4);  // 256 cells
  stream.evict();
  EXPECT_EQ(stream.evictor().offset(), 256);
  EXPECT_EQ(stream.evictor().stats().rows_kept, 64);
  stream.feed(tokens);
}

TEST(EvictorFaults, ACallThatTheEngineRefusesChangesNothing) {
  const ModelPtr model = make_tiny_model({});
  WatchedStream stream(model.get(), {.poison_freed_rows = true});
  const auto tokens = noise_tokens(64, 96);
  stream.feed(tokens);
  stream.feed(tokens);
  const auto before = stream.evictor().stats();
  EXPECT_EQ(stream.try_feed(std::vector<llama_token>{1, 2, 96}), -1);  // there is no token 96
  EXPECT_EQ(stream.try_feed(std::vector<llama_token>{-5}), -1);
  EXPECT_EQ(stream.evictor().offset(), 128);
  EXPECT_EQ(stream.evictor().stats().rows_evicted, before.rows_evicted);
  stream.feed(tokens);
}

TEST(EvictorFaults, AfterDecodeWithoutADecodeChangesNothing) {
  const ModelPtr model = make_tiny_model({});
  WatchedStream stream(model.get(), {.poison_freed_rows = true});
  stream.evict();
  EXPECT_EQ(stream.evictor().offset(), 0);
  stream.feed(noise_tokens(64, 96));
  stream.feed(noise_tokens(20, 96));
  stream.evict();
  stream.evict();
  EXPECT_EQ(stream.evictor().offset(), 84);
}

// --- Other code edits the memory
// ------------------------------------------------------------------

// 100 tokens are fed and `edit` is made: after_decode() must notice. After clear() all works again.
void expect_foreign_edit_is_noticed(const std::function<void(Bounded&)>& edit) {
  const ModelPtr model = make_tiny_model({});
  Bounded bounded(model.get(), {});
  const auto tokens = noise_tokens(100, 96);
  bounded.feed(std::span(tokens).first(60));
  bounded.feed(std::span(tokens).subspan(60));
  edit(bounded);
  try {
    bounded.evictor().after_decode();
    ADD_FAILURE() << "not noticed";
  } catch (const EngineError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("no other code may edit the memory"), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
  bounded.evictor().clear();
  bounded.feed(std::span(tokens).first(60));
  bounded.feed(std::span(tokens).subspan(60));
  expect_consistent(bounded, "after clear");
}

llama_memory_t memory(Bounded& bounded) { return llama_get_memory(bounded.context()); }

TEST(EvictorForeignEdits, LabelsRemovedFromTheEndAreNoticed) {
  expect_foreign_edit_is_noticed([](Bounded& b) { llama_memory_seq_rm(memory(b), 0, 97, -1); });
}

TEST(EvictorForeignEdits, AMemoryThatWasClearedIsNoticed) {
  expect_foreign_edit_is_noticed([](Bounded& b) { llama_memory_clear(memory(b), true); });
}

TEST(EvictorForeignEdits, LabelsThatWereShiftedAreNoticed) {
  expect_foreign_edit_is_noticed([](Bounded& b) { llama_memory_seq_add(memory(b), 0, 50, -1, 7); });
  expect_foreign_edit_is_noticed(
      [](Bounded& b) { llama_memory_seq_add(memory(b), 0, 50, -1, -7); });
}

TEST(EvictorForeignEdits, ATokenTakenBackAndWrittenAnewIsNoticed) {
  expect_foreign_edit_is_noticed([](Bounded& b) {
    llama_memory_seq_rm(memory(b), 0, 99, -1);
    ASSERT_EQ(decode(b.context(), std::vector<llama_token>{5}), 0);
  });
}

TEST(EvictorForeignEdits, SeveralTokensTakenBackAndMoreWrittenAreNoticed) {
  expect_foreign_edit_is_noticed([](Bounded& b) {
    llama_memory_seq_rm(memory(b), 0, 95, -1);
    ASSERT_EQ(decode(b.context(), noise_tokens(10, 96)), 0);
  });
}

// The engine has no call that tells how many labels it holds, so a gap shows when the engine writes
// to one of its cells. The oldest cells come first: those of the sinks at once.
TEST(EvictorForeignEdits, ASinkThatWasRemovedIsNoticedAtTheNextToken) {
  expect_foreign_edit_is_noticed([](Bounded& b) {
    llama_memory_seq_rm(memory(b), 0, 1, 2);
    ASSERT_EQ(decode(b.context(), std::vector<llama_token>{5}), 0);
  });
}

TEST(EvictorForeignEdits, AFailedCallThatAfterDecodeWasNotToldOfIsNoticed) {
  expect_foreign_edit_is_noticed([](Bounded& b) {
    AbortAfter abort(b.context());
    abort.arm(40);
    ASSERT_EQ(decode(b.context(), noise_tokens(10, 96)), 2);
    llama_set_abort_callback(b.context(), nullptr, nullptr);
    ASSERT_EQ(decode(b.context(), noise_tokens(10, 96)), 0);
  });
}

}  // namespace
}  // namespace morphkv::test

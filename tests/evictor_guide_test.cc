// Guided prefill of the evictor leaves nothing behind but the choice of rows: no row, label or cell
// of a guide, no query of it in the window; not after an abort either. Which rows stay is the
// matter of evictor_guide_oracle_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "kv_probe.h"
#include "model_support.h"
#include "tiny_model.h"

namespace morphkv::test {
namespace {

using llama_cpp::EngineError;
using llama_cpp::Evictor;
using llama_cpp::ModelPtr;
using Positions = std::vector<Position>;
using Tokens = std::vector<llama_token>;

constexpr int kVocab = 96;
// Layers 0 and 2 see a window of 40 tokens, layers 1 and 3 everything.
const TinyModel kSliding{.architecture = "gemma3", .n_layer = 4, .sliding_window = 40};

Tokens guide_tokens(int n) {
  const Tokens text = prose_tokens(400);
  return {text.end() - n, text.end()};
}

// --- Nothing is left behind
// -----------------------------------------------------------------------

// `text` in pieces of 40 and the greedy answer after it, all logits in order. After each piece the
// guides are evaluated and removed, whether or not there is a row to evict.
std::vector<std::vector<float>> logits_of_run(Bounded& bounded, std::span<const llama_token> text,
                                              const std::vector<Tokens>& guides, int steps) {
  std::vector<std::vector<float>> logits;
  for (std::size_t done = 0; done < text.size(); done += 40) {
    EXPECT_EQ(decode(bounded.context(), text.subspan(done, 40)), 0);
    logits.push_back(bounded.logits());
    bounded.evictor().hold();
    for (const Tokens& guide : guides) {
      EXPECT_EQ(decode(bounded.context(), guide), 0);
      bounded.evictor().guide();
    }
    bounded.evictor().evict();
    expect_consistent(bounded, "after the piece at token " + std::to_string(done));
  }
  for (int i = 0; i < steps; ++i) {
    const llama_token token = likeliest(logits.back());
    bounded.feed({&token, 1});
    logits.push_back(bounded.logits());
  }
  return logits;
}

void expect_same_rows(const Evictor& a, const Evictor& b) {
  const auto as = a.snapshot();
  const auto bs = b.snapshot();
  ASSERT_EQ(as.size(), bs.size());
  for (std::size_t i = 0; i < as.size(); ++i) {
    for (std::size_t h = 0; h < as[i].rows.heads.size(); ++h) {
      EXPECT_EQ(as[i].rows.heads[h].positions, bs[i].rows.heads[h].positions);
      EXPECT_EQ(as[i].rows.heads[h].slots, bs[i].rows.heads[h].slots);
    }
  }
}

void expect_no_trace(llama_model* model, const CacheConfig& limits, const Tokens& text,
                     const Tokens& guide) {
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    BoundOptions options{.cache = limits, .call_tokens = 64, .guide_tokens = 24};
    options.cache.queries = queries;
    Bounded with(model, options);
    Bounded without(model, options);
    const auto logits = logits_of_run(with, text, {guide, guide}, 100);
    EXPECT_EQ(logits, logits_of_run(without, text, {}, 100)) << to_string(queries);
    expect_same_rows(with.evictor(), without.evictor());
    EXPECT_EQ(with.evictor().stats().rows_evicted, 100) << "the window must have had its say";
  }
}

TEST(EvictorGuideTrace, GuidesWithNothingToEvictChangeNoBitOfWhatFollows) {
  const ModelPtr model = make_tiny_model({});
  CacheConfig cache = small_cache();
  cache.budget = 120;
  expect_no_trace(model.get(), cache, noise_tokens(120, kVocab), noise_tokens(24, kVocab, 5));
  expect_no_trace(test_model(), cache, prose_tokens(120), guide_tokens(24));
}

TEST(EvictorGuideTrace, PoisonInTheCellsOfGuidesChangesNoLogit) {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
    std::vector<std::vector<float>> logits[2];
    for (const bool poison : {false, true}) {
      BoundOptions options = BoundOptions{.call_tokens = 64, .guide_tokens = 10};
      options.poison_freed_rows = poison;
      options.type_k = options.type_v = type;
      Bounded bounded(test_model(), options);
      logits[poison ? 1 : 0] =
          logits_of_run(bounded, prose_tokens(200), {guide_tokens(10), prose_tokens(5)}, 20);
    }
    EXPECT_EQ(logits[0], logits[1]) << ggml_type_name(type);
  }
}

TEST(EvictorGuideTrace, AGuidesCellsHoldThePoison) {
  const ModelPtr model = make_tiny_model({});
  KvProbe probe;
  BoundOptions options{.poison_freed_rows = true, .call_tokens = 64, .guide_tokens = 10};
  probe.install(options);
  Bounded bounded(model.get(), options);
  ASSERT_EQ(decode(bounded.context(), noise_tokens(40, kVocab)), 0);
  bounded.evictor().hold();
  probe.forget();
  ASSERT_EQ(decode(bounded.context(), noise_tokens(10, kVocab, 5)), 0);
  bounded.evictor().guide();
  for (const auto& [index, layer] : probe.layers()) {
    ASSERT_EQ(probe.cells(index).size(), 10u);
    for (const ggml_tensor* tensor : {layer.k, layer.v}) {
      const std::string bytes = KvProbe::whole(tensor);
      const auto* values = reinterpret_cast<const ggml_fp16_t*>(bytes.data());
      for (const std::int64_t cell : probe.cells(index)) {
        for (int i = 0; i < tensor->ne[0]; ++i) {
          ASSERT_EQ(ggml_fp16_to_fp32(values[cell * tensor->ne[0] + i]), 3e4f) << cell;
        }
      }
    }
  }
}

// As many cells as rows, piece and guide together: a cell that was lost would show as a full
// memory.
TEST(EvictorGuideTrace, ItsCellsAreFreeAgainFiftyTimesInACacheWithoutASpareCell) {
  const ModelPtr model = make_tiny_model({});
  BoundOptions options{
      .cache = small_cache(), .micro_batch = 48, .call_tokens = 72, .guide_tokens = 24};
  options.cache.budget = 184;
  Bounded bounded(model.get(), options);
  ASSERT_EQ(llama_n_ctx(bounded.context()), 256u);
  const Tokens text = noise_tokens(51 * 48, kVocab);
  const auto state_size = [&] { return llama_state_seq_get_size(bounded.context(), 0); };
  for (int i = 0; i < 51; ++i) {
    ASSERT_EQ(
        decode(bounded.context(), std::span(text).subspan(static_cast<std::size_t>(i) * 48, 48)), 0)
        << i;
    bounded.evictor().hold();
    const Position offset = bounded.evictor().offset();
    const std::size_t held = state_size();
    ASSERT_EQ(
        decode(bounded.context(), noise_tokens(24, kVocab, static_cast<std::uint32_t>(i + 2))), 0)
        << i;
    if (i == 50) {
      EXPECT_EQ(decode(bounded.context(), std::vector<llama_token>{1}), 1) << "there is room left";
    }
    EXPECT_GT(state_size(), held);
    bounded.evictor().guide();
    EXPECT_EQ(state_size(), held) << "labels or rows are left";
    EXPECT_EQ(bounded.evictor().offset(), offset);
    EXPECT_EQ(newest_label(bounded.context()), offset - 1);
    EXPECT_EQ(oldest_label(bounded.context()), 0);
    bounded.evictor().evict();
    expect_consistent(bounded, std::to_string(i));
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_EQ(bounded.evictor().stats().tokens_seen, 51 * 48);
  EXPECT_EQ(bounded.evictor().stats().rows_evicted, 51 * 48 - 184);
}

// A guide of several micro-batches, or of several calls, is one guide.
TEST(EvictorGuide, AGuideInSeveralMicroBatchesKeepsTheSameRows) {
  const ModelPtr model = make_tiny_model({});
  const Tokens text = noise_tokens(200, kVocab);
  const Tokens guide = noise_tokens(60, kVocab, 5);
  const auto positions = [&](int micro_batch, const std::vector<std::size_t>& parts) {
    Bounded bounded(
        model.get(),
        {.micro_batch = micro_batch, .call_tokens = 128, .n_batch = 64, .guide_tokens = 60});
    std::vector<Positions> out;
    for (std::size_t done = 0; done < text.size(); done += 40) {
      EXPECT_EQ(decode(bounded.context(), std::span(text).subspan(done, 40)), 0);
      bounded.evictor().hold();
      std::size_t asked = 0;
      for (const std::size_t part : parts) {
        EXPECT_EQ(decode(bounded.context(), std::span(guide).subspan(asked, part)), 0);
        asked += part;
      }
      bounded.evictor().guide();
      bounded.evictor().evict();
      expect_consistent(bounded, std::to_string(done));
    }
    for (const auto& layer : bounded.evictor().snapshot()) {
      for (const auto& head : layer.rows.heads) out.push_back(head.positions);
    }
    return out;
  };
  const auto in_one = positions(64, {60});
  EXPECT_EQ(positions(64, {20, 33, 7}), in_one);
  // Of other micro-batches other sums: nearly all. With the last one's queries alone it is not so.
  const auto same_as_in_one = [&](const std::vector<Positions>& other) {
    std::size_t same = 0;
    for (std::size_t i = 0; i < other.size(); ++i) {
      for (const Position position : other[i]) {
        same += std::binary_search(in_one[i].begin(), in_one[i].end(), position) ? 1 : 0;
      }
    }
    return static_cast<double>(same) / static_cast<double>(in_one.size() * 64);
  };
  EXPECT_GT(same_as_in_one(positions(16, {60})), 0.97);
  EXPECT_LT(same_as_in_one(positions(64, {12})), 0.97) << "no test without a difference";
}

// --- Sliding windows
// ------------------------------------------------------------------------------

// The window and a micro-batch of 64 fill the cells that a sliding layer has, 256: none to spare.
const TinyModel kTightlySliding{
    .architecture = "gemma3", .n_layer = 4, .trained_length = 8192, .sliding_window = 192};

// The rows of layer 0, which slides, that the last token of each piece and step sees. They depend
// on the token and its position alone, so they are the same bit for bit or another row stands
// there.
std::vector<std::vector<std::string>> sliding_rows(llama_model* model, const Tokens& text,
                                                   const std::vector<Tokens>& guides,
                                                   std::vector<std::vector<float>>& logits) {
  KvProbe probe;
  BoundOptions options{
      .cache = small_cache(), .micro_batch = 64, .call_tokens = 128, .guide_tokens = 64};
  options.cache.budget = 800;  // nothing is evicted
  probe.install(options);
  Bounded bounded(model, options);
  std::vector<std::vector<std::string>> seen;
  for (std::size_t done = 0; done < text.size();) {
    const std::size_t n = std::min<std::size_t>(done < 700 ? 64 : 1, text.size() - done);
    EXPECT_EQ(decode(bounded.context(), std::span(text).subspan(done, n)), 0);
    logits.push_back(bounded.logits());
    const ProbedLayer& layer = probe.layer(0);
    EXPECT_EQ(layer.k->ne[1], 256) << engine();
    const std::string bytes = KvProbe::whole(layer.k);
    auto& rows = seen.emplace_back();
    for (const int cell : probe.visible(0)) {
      rows.push_back(bytes.substr(static_cast<std::size_t>(cell) * layer.k->nb[1], layer.k->nb[1]));
    }
    std::sort(rows.begin(), rows.end());
    bounded.evictor().hold();
    for (const Tokens& guide : guides) {
      EXPECT_EQ(decode(bounded.context(), guide), 0);
      bounded.evictor().guide();
    }
    bounded.evictor().evict();
    done += n;
  }
  expect_consistent(bounded, "at the end");
  return seen;
}

double largest_difference(const std::vector<std::vector<float>>& a,
                          const std::vector<std::vector<float>>& b) {
  double most = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < a[i].size(); ++j) {
      most = std::max(most, std::fabs(static_cast<double>(a[i][j]) - b[i][j]));
    }
  }
  return most;
}

TEST(EvictorGuideSliding, AGuideOfOneMicroBatchOverwritesNoRowThatTheTextStillSees) {
  const ModelPtr model = make_tiny_model(kTightlySliding);
  const Tokens text = noise_tokens(750, kVocab);
  std::vector<std::vector<float>> plain;
  const auto without = sliding_rows(model.get(), text, {}, plain);
  EXPECT_EQ(without.back().size(), 192u);
  for (const std::vector<Tokens>& guides :
       {std::vector<Tokens>{noise_tokens(64, kVocab, 5)},
        {noise_tokens(10, kVocab, 5), noise_tokens(64, kVocab, 6), noise_tokens(1, kVocab, 7)}}) {
    std::vector<std::vector<float>> logits;
    EXPECT_EQ(sliding_rows(model.get(), text, guides, logits), without);
    // Cells in another order, so sums in another order: not bit for bit.
    EXPECT_LT(largest_difference(logits, plain), 0.05);
  }
}

TEST(EvictorGuideSliding, AGuideOfSeveralMicroBatchesIsRefusedAndClearStartsAnew) {
  const ModelPtr model = make_tiny_model(kSliding);
  for (const bool in_one_call : {true, false}) {
    Bounded bounded(model.get(),
                    {.micro_batch = 32, .call_tokens = 128, .n_batch = 64, .guide_tokens = 64});
    const Tokens text = noise_tokens(60, kVocab);
    ASSERT_EQ(decode(bounded.context(), text), 0);
    bounded.evictor().hold();
    const Tokens guide = noise_tokens(33, kVocab, 5);
    if (in_one_call) {
      ASSERT_EQ(decode(bounded.context(), guide), 0);
    } else {
      ASSERT_EQ(decode(bounded.context(), std::span(guide).first(32)), 0);
      ASSERT_EQ(decode(bounded.context(), std::span(guide).subspan(32)), 0);
    }
    try {
      bounded.evictor().guide();
      ADD_FAILURE() << "not refused";
    } catch (const EngineError& error) {
      const std::string message = error.what();
      for (const char* word : {"33 tokens", "32 tokens", "window of 40", "clear()"}) {
        EXPECT_NE(message.find(word), std::string::npos) << message;
      }
    }
    bounded.evictor().clear();
    ASSERT_EQ(decode(bounded.context(), text), 0);
    bounded.evictor().hold();
    ASSERT_EQ(decode(bounded.context(), std::span(guide).first(32)), 0);
    bounded.evictor().guide();
    bounded.evictor().evict();
    expect_consistent(bounded, "after clear");
  }
}

// --- What goes wrong
// ------------------------------------------------------------------------------

TEST(EvictorGuideFaults, CallsBeforeBindAreErrorsThatSaySo) {
  const ModelPtr model = make_tiny_model({});
  Evictor evictor(model.get(), {});
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { evictor.hold(); }, [&] { evictor.guide(); }, [&] { evictor.evict(); }}) {
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const EngineError& error) {
      EXPECT_NE(std::string(error.what()).find("before bind()"), std::string::npos) << error.what();
    }
  }
}

TEST(EvictorGuideFaults, APolicyThatScoresByNothingTakesNoGuideAndGoesOn) {
  const ModelPtr model = make_tiny_model({});
  for (const char* policy : {"h2o", "snapkv", "tova", "keydiff", "streaming", "random", "full"}) {
    Bounded bounded(model.get(), {.cache = small_cache(policy), .call_tokens = 150});
    EXPECT_FALSE(bounded.evictor().takes_guides()) << policy;
    ASSERT_EQ(decode(bounded.context(), noise_tokens(60, kVocab)), 0);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { bounded.evictor().guide(); }, [&] { bounded.evictor().hold(5); }}) {
      try {
        call();
        ADD_FAILURE() << "no error with " << policy;
      } catch (const std::invalid_argument& error) {
        const std::string message = error.what();
        EXPECT_NE(message.find("takes no guide"), std::string::npos) << message;
        EXPECT_NE(message.find(policy), std::string::npos) << message;
      }
    }
    bounded.evictor().hold();
    ASSERT_EQ(decode(bounded.context(), noise_tokens(60, kVocab)), 0);
    bounded.evictor().hold();
    bounded.evictor().evict();
    EXPECT_EQ(bounded.evictor().violations(), std::vector<std::string>{});
    EXPECT_EQ(bounded.evictor().stats().rows_kept, std::string(policy) == "full" ? 120 : 64);
  }
}

TEST(EvictorGuideFaults, AGuideWithoutTokensRanksNothing) {
  const ModelPtr model = make_tiny_model({});
  Bounded without(model.get(), {});
  Bounded with(model.get(), {});
  const Tokens text = noise_tokens(100, kVocab);
  for (std::size_t done = 0; done < text.size(); done += 50) {
    const auto piece = std::span(text).subspan(done, 50);
    without.feed(piece);
    ASSERT_EQ(decode(with.context(), piece), 0);
    with.evictor().hold();
    with.evictor().guide();
    with.evictor().evict();
    with.evictor().evict();
    EXPECT_EQ(with.logits(), without.logits());
    expect_same_rows(with.evictor(), without.evictor());
  }
  EXPECT_EQ(with.evictor().stats().rows_evicted, 36);
}

TEST(EvictorGuideFaults, PiecesHeldOneAfterTheOtherLeaveTogetherByTheLastOnesGuides) {
  const ModelPtr model = make_tiny_model({});
  const Tokens text = noise_tokens(120, kVocab);
  const Tokens guide = noise_tokens(10, kVocab, 5);
  const BoundOptions options{.call_tokens = 150, .n_batch = 150, .guide_tokens = 10};
  Bounded twice(model.get(), options);
  Bounded early(model.get(), options);
  for (Bounded* bounded : {&twice, &early}) {
    for (const std::size_t done : {0u, 60u}) {
      ASSERT_EQ(decode(bounded->context(), std::span(text).subspan(done, 60)), 0);
      bounded->evictor().hold();
      bounded->evictor().hold();  // nothing new: nothing happens
      if (done == 60 || bounded == &early) {
        ASSERT_EQ(decode(bounded->context(), guide), 0);
        bounded->evictor().guide();
        bounded->evictor().hold();
      }
    }
    EXPECT_EQ(bounded->evictor().stats().rows_kept, 120);
    bounded->evictor().evict();
    expect_consistent(*bounded, "after evict()");
  }
  expect_same_rows(twice.evictor(), early.evictor());  // an earlier guide no longer counts
}

// Reads two pieces; the guide after the second is aborted at a node, taken out, evaluated again.
// Returns whether the graph had that node.
bool expect_recovery(llama_model* model, const BoundOptions& options, std::size_t guide_size,
                     int node, const std::vector<std::vector<float>>& undisturbed) {
  Bounded bounded(model, options);
  AbortAfter abort(bounded.context());
  const Tokens text = noise_tokens(120, kVocab);
  const Tokens guide = noise_tokens(static_cast<int>(guide_size), kVocab, 5);
  for (const std::size_t done : {0u, 40u}) {
    EXPECT_EQ(decode(bounded.context(), std::span(text).subspan(done, 40)), 0);
    bounded.evictor().hold();
    if (done == 40) {
      abort.arm(node);
      const int status = decode(bounded.context(), guide);
      const bool fired = abort.fired();
      abort.disarm();
      if (!fired) return false;
      EXPECT_EQ(status, 2);
      bounded.evictor().guide();
      EXPECT_EQ(newest_label(bounded.context()), 79);
      EXPECT_EQ(bounded.evictor().offset(), 80);
      bounded.evictor().hold();  // nothing new
    }
    EXPECT_EQ(decode(bounded.context(), guide), 0);
    bounded.evictor().guide();
    bounded.evictor().evict();
    expect_consistent(bounded, "node " + std::to_string(node));
  }
  std::vector<std::vector<float>> logits;
  for (std::size_t t = 80; t < text.size(); ++t) {
    bounded.feed(std::span(text).subspan(t, 1));
    logits.push_back(bounded.logits());
  }
  expect_consistent(bounded, "at the end");
  EXPECT_TRUE(undisturbed.empty() || logits == undisturbed) << "node " << node;
  return true;
}

std::vector<std::vector<float>> undisturbed(llama_model* model, const BoundOptions& options,
                                            std::size_t guide_size) {
  Bounded bounded(model, options);
  const Tokens text = noise_tokens(120, kVocab);
  const Tokens guide = noise_tokens(static_cast<int>(guide_size), kVocab, 5);
  std::vector<std::vector<float>> logits;
  for (const std::size_t done : {0u, 40u}) {
    EXPECT_EQ(decode(bounded.context(), std::span(text).subspan(done, 40)), 0);
    bounded.evictor().hold();
    EXPECT_EQ(decode(bounded.context(), guide), 0);
    bounded.evictor().guide();
    bounded.evictor().evict();
  }
  for (std::size_t t = 80; t < text.size(); ++t) {
    bounded.feed(std::span(text).subspan(t, 1));
    logits.push_back(bounded.logits());
  }
  return logits;
}

TEST(EvictorGuideFaults, AGuideAbortedAtAnyNodeLeavesNothingBehindAndCanBeRepeated) {
  const ModelPtr model = make_tiny_model({});
  for (const QuerySource queries : {QuerySource::kAttention, QuerySource::kKeys}) {
    const BoundOptions options{.cache = small_cache("morphkv", queries),
                               .poison_freed_rows = true,
                               .call_tokens = 64,
                               .guide_tokens = 24};
    const auto expected = undisturbed(model.get(), options, 24);
    int node = 1;
    while (expect_recovery(model.get(), options, 24, node, expected)) {
      ++node;
      ASSERT_FALSE(HasFailure());
    }
    EXPECT_GT(node, 30);
  }
}

// Its first micro-batches have asked already when it is taken out, so other rows may stay.
TEST(EvictorGuideFaults, AGuideOfSeveralMicroBatchesAbortedAnywhereIsTakenOutWhole) {
  const ModelPtr model = make_tiny_model({});
  const BoundOptions options{.poison_freed_rows = true,
                             .micro_batch = 40,
                             .call_tokens = 160,
                             .n_batch = 100,
                             .guide_tokens = 100};
  int node = 1;
  while (expect_recovery(model.get(), options, 100, node, {})) {
    node += 3;
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GT(node, 90);
}

TEST(EvictorGuideFaults, AGuideForWhichThereIsNoRoomChangesNothing) {
  const ModelPtr model = make_tiny_model({});
  BoundOptions options{.micro_batch = 64};
  options.cache.budget = 192;
  Bounded bounded(model.get(), options);
  ASSERT_EQ(llama_n_ctx(bounded.context()), 256u);
  const Tokens text = noise_tokens(64, kVocab);
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(decode(bounded.context(), text), 0);
    bounded.evictor().hold();
  }
  EXPECT_EQ(decode(bounded.context(), std::span(text).first(1)), 1);
  bounded.evictor().guide();
  bounded.evictor().evict();
  expect_consistent(bounded, "after the guide");
  bounded.feed(text);
  expect_consistent(bounded, "after the next piece");
}

}  // namespace
}  // namespace morphkv::test

// Trials of documents with questions, in the three ways of reading them.
//
// whole: the document is evaluated once for all arms, then each question but its last token; at
// that moment a checkpoint, from which every arm goes on: it decides about all rows at once, takes
// the last token, and answers. So every token of the answer comes from the bounded cache. stream:
// each arm reads the document in pieces; a checkpoint, from which each question goes on. guided:
// each arm reads document and question in pieces, guided by the end of the question. A policy that
// takes no guide reads as in stream, and its trials count for both.
#include <algorithm>
#include <cstdint>

#include "harness.h"
#include "judge.h"
#include "measure.h"
#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/llama_cpp/session.h"
#include "morphkv/profile.h"

namespace morphkv::eval {
namespace {

class Questions {
 public:
  Questions(Harness& harness, const Task& task, int number)
      : harness_(harness), task_(task), number_(number), arms_(contenders(harness.plan())) {
    const llama_model* model = harness.model();
    const CountTokens count = [&](std::string_view text) {
      return llama_cpp::tokenize_continuation(model, text).size();
    };
    document_ = task.document(static_cast<std::uint64_t>(number), harness.plan().tokens, count);
    text_ = llama_cpp::tokenize(model, document_.text, false);
    general_guide_ = llama_cpp::tokenize_continuation(model, find_profile("chat").guide_text);
    for (const Question& question : document_.questions) {
      asked_.push_back(tokens_of(model, question));
      std::size_t tokens = asked_.back().question.size();
      for (const auto& part : asked_.back().parts) tokens += part.size();
      longest_ = std::max(longest_, static_cast<int>(tokens));
    }
  }

  void run() {
    if (misses_any("whole", {{std::string(kFull), {}}})) run_full();
    if (harness_.plans("whole")) run_whole();
    if (harness_.plans("stream") || harness_.plans("guided")) run_stream();
    if (harness_.plans("guided")) run_guided();
  }

 private:
  TrialKey key(std::string_view mode, const std::string& arm, int budget, std::size_t q) const {
    return {.task = std::string(task_.name),
            .mode = std::string(mode),
            .tokens = harness_.plan().tokens,
            .arm = arm,
            .budget = budget,
            .document = number_,
            .question = static_cast<int>(q)};
  }
  static int budget_of(const Contender& c) {
    return c.arm == kFull || c.arm == kControl ? 0 : c.cache.budget;
  }
  bool misses(std::string_view mode, const Contender& c, std::size_t q) const {
    return !harness_.has(key(mode, c.arm, budget_of(c), q));
  }
  bool misses_any(std::string_view mode, const std::vector<Contender>& arms) const {
    for (const Contender& arm : arms) {
      for (std::size_t q = 0; q < asked_.size(); ++q) {
        if (misses(mode, arm, q)) return true;
      }
    }
    return false;
  }

  int total_tokens() const { return static_cast<int>(text_.size()) + longest_; }
  std::string place(std::string_view mode) const {
    return std::string(task_.name) + " " + std::to_string(number_) + ", " + std::string(mode);
  }

  Trial judged(const TrialKey& k, const Judgement& judgement, const Lane& lane) const {
    Trial trial = harness_.trial_of(k, lane);
    trial.step_ms = trial.evict_ms = 0.0;  // a handful of steps, in a context of another size
    fill(trial, judgement);
    return trial;
  }
  void fill(Trial& trial, const Judgement& judgement) const {
    const auto q = static_cast<std::size_t>(trial.key.question);
    trial.score = judgement.score;
    trial.measures["nll"] = judgement.nll;
    trial.measures["tokens_right"] = judgement.tokens_right;
    trial.tokens_judged = judgement.tokens;
    trial.depth = document_.questions[q].depth;
    trial.prompt_tokens = static_cast<int>(text_.size() + asked_[q].question.size());
  }
  static Judgement judge_in(Lane& lane, const AskedTokens& asked) {
    return judge(
        asked, [&] { return lane.logits(); }, [&](llama_token t) { lane.feed(t); });
  }

  // llama.cpp as it is, nobody listening. It goes back to the same moments as run_whole does: what
  // is put back lies in other cells of a sliding window, and is summed up in another order.
  void run_full() {
    const auto kv_bytes =
        static_cast<std::int64_t>(plain_kv_bytes(harness_.model(), total_tokens()));
    Lane lane(harness_.model(), harness_.shape(total_tokens()), std::nullopt);
    const Stopwatch watch;
    lane.read(text_);
    const double read_ms = watch.ms();
    const std::vector<std::uint8_t> read = lane.state();
    harness_.did(static_cast<double>(text_.size()), place("full"));
    for (std::size_t q = 0; q < asked_.size(); ++q) {
      const auto& question = asked_[q].question;
      lane.restore(read);
      lane.read(std::span(question).first(question.size() - 1));
      lane.restore(lane.state());
      lane.read(std::span(question).last(1));
      Trial trial = judged(key("whole", std::string(kFull), 0, q), judge_in(lane, asked_[q]), lane);
      trial.read_ms = read_ms;
      trial.rows_kept = trial.prompt_tokens;
      trial.kv_bytes_kept = kv_bytes / llama_n_ctx(lane.context()) * trial.rows_kept;
      trial.kv_bytes_allocated = kv_bytes;
      if (!harness_.has(trial.key)) harness_.add(trial);
    }
  }

  // The rule that only looks on until an arm takes over. Its budget allows whole micro-batches.
  CacheConfig onlooker() const {
    int window = 64;
    for (const Contender& arm : arms_) window = std::max(window, arm.cache.window);
    CacheConfig cache = harness_.keeping(std::max(512, window + 8));
    cache.window = window;
    return cache;
  }

  void run_whole() {
    std::vector<Contender> arms = arms_;
    arms.push_back({std::string(kControl), harness_.keeping(total_tokens())});
    if (!misses_any("whole", arms)) return;
    Lane lane(harness_.model(), harness_.shape(total_tokens() + 512), onlooker());
    lane.evaluate(text_);
    const llama_cpp::Checkpoint read = lane.evictor().checkpoint();
    harness_.did(static_cast<double>(text_.size()), place("whole"));
    for (std::size_t q = 0; q < asked_.size(); ++q) {
      lane.evictor().clear(onlooker());
      lane.evictor().restore(read);
      const auto& question = asked_[q].question;
      lane.evaluate(std::span(question).first(question.size() - 1));
      const llama_cpp::Checkpoint asked = lane.evictor().checkpoint();
      for (const Contender& arm : arms) {
        if (!misses("whole", arm, q)) continue;
        lane.evictor().clear(seeded(arm.cache));
        lane.evictor().restore(asked);
        lane.decide();
        lane.read(std::span(question).last(1));
        const Judgement judgement = judge_in(lane, asked_[q]);
        Trial trial = judged(key("whole", arm.arm, budget_of(arm), q), judgement, lane);
        if (arm.arm == kControl) {
          require_equal(trial, harness_.find(key("whole", std::string(kFull), 0, q)));
        }
        harness_.add(trial);
        harness_.did(kWholeArm, place("whole"));
      }
    }
  }

  void run_stream() {
    for (const Contender& arm : arms_) {
      const bool both = harness_.plans("guided") && !arm.guided;
      const bool stream = harness_.plans("stream") && misses_any("stream", {arm});
      if (stream || (both && misses_any("guided", {arm}))) ask_streamed(arm, both);
    }
  }

  void ask_streamed(const Contender& arm, bool counts_as_guided) {
    Lane lane(harness_.model(), harness_.shape(0), seeded(arm.cache));
    const Stopwatch watch;
    lane.read(text_, arm.general_guide ? general_guide_ : std::vector<llama_token>{});
    const double read_ms = watch.ms();
    harness_.did(static_cast<double>(text_.size()), place("stream"));
    const llama_cpp::Checkpoint read = lane.evictor().checkpoint();
    for (std::size_t q = 0; q < asked_.size(); ++q) {
      if (q > 0) lane.evictor().restore(read);
      lane.read(asked_[q].question);
      const Judgement judgement = judge_in(lane, asked_[q]);
      Trial trial = judged(key("stream", arm.arm, arm.cache.budget, q), judgement, lane);
      trial.read_ms = read_ms;
      if (harness_.plans("stream") && !harness_.has(trial.key)) harness_.add(trial);
      trial.key.mode = "guided";
      if (counts_as_guided && !harness_.has(trial.key)) harness_.add(trial);
    }
  }

  void run_guided() {
    for (const Contender& arm : arms_) {
      for (std::size_t q = 0; q < asked_.size(); ++q) {
        if (arm.guided && misses("guided", arm, q)) ask_guided(arm, q);
      }
    }
  }

  void ask_guided(const Contender& arm, std::size_t q) {
    std::vector<llama_token> prompt = text_;
    prompt.insert(prompt.end(), asked_[q].question.begin(), asked_[q].question.end());
    llama_cpp::SessionOptions options;
    options.cache = seeded(arm.cache);
    options.prefill = llama_cpp::Prefill::kGuided;
    options.threads = harness_.plan().threads;
    llama_cpp::Session session(harness_.model(), options);
    llama_cpp::SessionCallbacks callbacks;
    callbacks.cancelled = harness_.shape(0).cancelled;
    const llama_cpp::SessionResult read = session.read({.tokens = prompt}, callbacks);
    harness_.did(static_cast<double>(prompt.size()), place("guided"));
    const Judgement judgement = judge(
        asked_[q], [&] { return session.logits(); },
        [&](llama_token token) {
          session.feed({&token, 1});
        });
    Trial trial;
    trial.key = key("guided", arm.arm, arm.cache.budget, q);
    trial.threads = harness_.plan().threads;
    fill(trial, judgement);
    const llama_cpp::EvictorStats stats = session.evictor().stats();
    trial.rows_kept = stats.rows_kept;
    trial.kv_bytes_kept = static_cast<std::int64_t>(stats.kv_bytes_kept);
    trial.kv_bytes_allocated = static_cast<std::int64_t>(read.kv_bytes_peak);
    trial.read_ms = read.prefill_ms;
    harness_.add(trial);
  }

  // Policy random draws anew for every document.
  CacheConfig seeded(CacheConfig cache) const {
    cache.seed = static_cast<std::uint64_t>(number_);
    return cache;
  }

 public:
  static constexpr double kWholeArm = 40.0;  // tokens that an arm costs, about

 private:
  Harness& harness_;
  const Task& task_;
  int number_;
  std::vector<Contender> arms_;
  Document document_;
  std::vector<llama_token> text_;
  std::vector<llama_token> general_guide_;
  std::vector<AskedTokens> asked_;
  int longest_ = 0;  // a question and its answer, in tokens
};

}  // namespace

// As if each document had the length asked for and four questions.
double expect_questions(const Harness& harness, const Task& task, int number) {
  constexpr int kQuestions = 4;
  const double tokens = harness.plan().tokens;
  const auto missing = [&](std::string_view mode, std::string_view arm, int budget) {
    return !harness.has({std::string(task.name), std::string(mode), harness.plan().tokens,
                         std::string(arm), budget, number, 0});
  };
  double sum = missing("whole", kFull, 0) ? tokens : 0.0;
  if (harness.plans("whole") && missing("whole", kControl, 0)) sum += tokens;
  for (const Contender& c : contenders(harness.plan())) {
    const int budget = c.cache.budget;
    if (harness.plans("whole") && missing("whole", c.arm, budget)) {
      sum += Questions::kWholeArm * kQuestions;
    }
    const bool both = harness.plans("guided") && !c.guided && missing("guided", c.arm, budget);
    if (both || (harness.plans("stream") && missing("stream", c.arm, budget))) sum += tokens;
    if (harness.plans("guided") && c.guided && missing("guided", c.arm, budget)) {
      sum += tokens * kQuestions;
    }
  }
  return sum;
}

void run_questions(Harness& harness, const Task& task, int number) {
  Questions(harness, task, number).run();
}

}  // namespace morphkv::eval

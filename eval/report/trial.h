// One answer, one continuation, or one stretch of a text, with one arm: a line of JSON.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

namespace morphkv::eval {

inline constexpr std::string_view kFull = "full";        // llama.cpp as it is
inline constexpr std::string_view kControl = "control";  // a bounded cache that is large enough

// How the document was read.
//   whole     document and question at once, compressed at the end: the question is seen
//   guided    in pieces, the question guides: seen, in constant memory
//   stream    in pieces, the question comes afterwards: not seen while rows leave
//   generate  a prompt, then what the model makes of it
//   text      a text, token by token
struct TrialKey {
  std::string task;
  std::string mode;
  int tokens = 0;   // length asked for
  std::string arm;  // "morphkv window=32 pool=7"; "full" and "control" have no budget
  int budget = 0;   // rows per KV head; 0 = all
  int document = 0;
  int question = 0;  // of a text: the stretch

  auto tie() const { return std::tie(task, mode, tokens, arm, budget, document, question); }
  bool operator<(const TrialKey& other) const { return tie() < other.tie(); }
  bool operator==(const TrialKey& other) const { return tie() == other.tie(); }
};

struct Trial {
  TrialKey key;
  double score = 0.0;  // [0, 1]; of a text: mean negative log-likelihood of a token, in nats
  // Further figures by name: "nll" of the answer's tokens and "tokens_right", how many of them are
  // the likeliest ones; "kl" and "top1" of a text; what a continuation's judge gives.
  std::map<std::string, double> measures;
  std::string text;  // what the model said, where it generated
  double depth = 0.0;
  int prompt_tokens = 0;
  int tokens_judged = 0;
  int rows_kept = 0;  // measured, of a KV head
  std::int64_t kv_bytes_kept = 0;
  std::int64_t kv_bytes_allocated = 0;
  double read_ms = 0.0;   // reading the prompt, eviction included; 0 where arms share it
  double step_ms = 0.0;   // median of the single-token steps, eviction included
  double evict_ms = 0.0;  // eviction in those steps, per step
  int threads = 0;
};

}  // namespace morphkv::eval

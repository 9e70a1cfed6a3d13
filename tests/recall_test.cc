// The recall experiment: does a bounded cache still know what the full one knows? Four documents
// of about 2,500 tokens of generated prose (prose.h), each with one 4-digit code stated once, at
// depths from 5 to 77 %, and one question at the end. Greedy, the same prompts and the same 512
// rows for every arm. The wording was chosen so that the full cache answers, and so that digits and
// question lie close together: with "The code of the blue locker is 3928." and a chat template the
// bounded cache had 7 of 8, the full one 8.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../eval/prose.h"
#include "model_support.h"
#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/llama_cpp/session.h"

namespace morphkv::test {
namespace {

using eval::Prose;
using eval::Sentences;
using llama_cpp::Prefill;
using llama_cpp::Session;
using llama_cpp::SessionOptions;

constexpr std::size_t kTextTokens = 2480;  // of prose; with statement and question ~2,540
constexpr int kAnswerTokens = 8;

struct Document {
  std::string_view code;
  double depth;  // where the code is stated, as a share of the sentences
};
constexpr std::array kDocuments = {Document{"4817", 0.05}, Document{"7351", 0.29},
                                   Document{"1583", 0.53}, Document{"3928", 0.77}};

std::vector<llama_token> prompt_of(std::size_t index) {
  const Document& document = kDocuments[index];
  Prose prose(100 + index);
  Sentences text;
  while (tokens_of(test_model(), eval::join(text)).size() < kTextTokens) {
    if (!text.empty()) text.emplace_back();
    for (std::string& sentence : prose.paragraph()) text.push_back(std::move(sentence));
  }
  const auto at = static_cast<std::ptrdiff_t>(document.depth * static_cast<double>(text.size()));
  text.insert(text.begin() + at,
              "Only the code " + std::string(document.code) + " opens the blue locker.");
  // The last `window` tokens are the start of the answer: what they look for is what they keep.
  const std::string question =
      "\n\nQuestion: Which code opens the blue locker?"
      "\nAnswer: The blue locker opens with the code";
  return llama_cpp::tokenize(test_model(), eval::join(text) + question, true);
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The answer continues with the code and nothing that would make it another number.
bool states(std::string_view answer, std::string_view code) {
  const std::size_t at = answer.find_first_not_of(" :\"");
  if (at == std::string_view::npos || answer.substr(at, code.size()) != code) return false;
  const std::size_t end = at + code.size();
  return end == answer.size() || !is_digit(answer[end]);
}

struct Arm {
  std::string_view name;
  std::string_view policy;
  Prefill prefill;
  int right = 0;
  double seconds = 0.0;
  double kept_mib = 0.0;  // K and V rows at the end
};

// Asks and counts.
void ask(Arm& arm, std::size_t index, std::span<const llama_token> prompt) {
  SessionOptions options;
  options.cache = {.budget = 512,
                   .n_sink = 4,
                   .window = 8,
                   .pool = 11,
                   .fusion = Fusion::kMean,
                   .queries = QuerySource::kAttention,
                   .policy = std::string(arm.policy),
                   .seed = index};
  options.prefill = arm.prefill;
  options.max_tokens = kAnswerTokens;
  options.sampling.temperature = 0.0f;
  std::string text;
  llama_cpp::SessionCallbacks callbacks;
  callbacks.on_token = [&](llama_token, std::string_view piece, double) { text += piece; };
  Session session(test_model(), options);
  const auto result = session.run(prompt, callbacks);
  if (arm.policy != "full") {
    EXPECT_EQ(result.cache.rows_kept, 512) << arm.name;
  }
  arm.seconds += (result.prefill_ms + result.decode_ms) / 1000.0;
  arm.kept_mib = static_cast<double>(result.cache.kv_bytes_kept) / 1048576.0;
  const bool right = states(text, kDocuments[index].code);
  std::printf("%s %-17s %3.0f %%  %s  %s\n", right ? "right" : "wrong",
              std::string(arm.name).c_str(), 100.0 * kDocuments[index].depth,
              std::string(kDocuments[index].code).c_str(), text.c_str());
  std::fflush(stdout);
  arm.right += right ? 1 : 0;
}

TEST(Recall, ABoundedCacheFindsTheCodesThatTheFullOneFindsAndTheMostRecentRowsDoNot) {
  std::array arms = {
      Arm{"full", "full", Prefill::kWhole},
      Arm{"morphkv whole", "morphkv", Prefill::kWhole},
      Arm{"morphkv guided", "morphkv", Prefill::kGuided},
      Arm{"streaming", "streaming", Prefill::kStream},
  };
  for (std::size_t i = 0; i < kDocuments.size(); ++i) {
    const std::vector<llama_token> prompt = prompt_of(i);
    EXPECT_GT(prompt.size(), kTextTokens);
    EXPECT_LT(prompt.size(), kTextTokens + 250);
    for (Arm& arm : arms) ask(arm, i, prompt);
  }

  std::printf("\n%-17s %12s %14s %12s\n", "arm", "right of 4", "rows kept MiB", "seconds");
  for (const Arm& arm : arms) {
    std::printf("%-17s %12d %14.2f %12.1f\n", std::string(arm.name).c_str(), arm.right,
                arm.kept_mib, arm.seconds);
    RecordProperty("right_" + std::string(arm.name), arm.right);
  }
  const int full = arms[0].right;
  EXPECT_EQ(full, 4) << "the experiment says nothing when the full cache fails";
  EXPECT_EQ(arms[1].right, full) << "morphkv, whole prompt then compressed";
  EXPECT_EQ(arms[2].right, full) << "morphkv, guided";
  EXPECT_LE(arms[3].right, 1) << "streaming should have lost the codes";
}

}  // namespace
}  // namespace morphkv::test

// Recall against how a long prompt is read: texts of generated prose with facts in them, a question
// at the end, the same prompts for every arm. One line of JSON per answer, appended; a run goes on
// where the last one ended. bench/recall_table.py sums them up.
//
// A text: `--tokens` of prose (eval/prose.h) with `--facts` sentences "The code of the blue locker
// is 4817." at evenly spread depths; a single one lies at another depth in each text. The question:
// "What is the code of the blue locker?", and the beginning of the answer. Greedy. The wording was
// chosen with the full cache alone: of six, the one with which it finds eight of eight in text 0.
// An answer is right when the whole code is; `tokens_right` counts its tokens (a space, four
// digits).
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../eval/prose.h"
#include "morphkv/llama_cpp/chat_template.h"
#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/llama_cpp/session.h"
#include "morphkv/policy.h"
#include "morphkv/version.h"

namespace {

using namespace morphkv;             // NOLINT
using namespace morphkv::llama_cpp;  // NOLINT
using Json = nlohmann::ordered_json;
using eval::Prose;
using eval::Sentences;

constexpr std::array kThings = {"blue locker", "garden gate", "wine cellar", "post box",
                                "boat house",  "bank safe",   "school bell", "bicycle shed"};
constexpr int kAnswerTokens = 8;

struct Task {
  int tokens = 2500;
  int facts = 1;
  int documents = 24;
  int first = 0;
  int questions = 1;  // asked of each text
  bool chat = false;
  bool operator==(const Task&) const = default;
};

struct Question {
  std::string text;  // with the prose
  std::string question;
  std::string code;
  double depth = 0;
};

std::string code_of(int document, int fact) {
  std::uint64_t x = 0x9E3779B97F4A7C15ull * static_cast<std::uint64_t>(document * 16 + fact + 1);
  x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9ull;
  return std::to_string(1000 + (x >> 33) % 9000);
}

std::size_t count_tokens(const llama_model* model, const std::string& text) {
  return tokenize(model, text, false).size();
}

// Question `q` of text `document`.
Question question_of(const llama_model* model, const Task& task, int document, int q) {
  Prose prose(1000 + static_cast<std::uint64_t>(document));
  Sentences text;
  const auto wanted = static_cast<std::size_t>(task.tokens - 40 - 15 * task.facts);
  while (count_tokens(model, eval::join(text)) < wanted) {
    if (!text.empty()) text.emplace_back();
    for (std::string& sentence : prose.paragraph()) text.push_back(std::move(sentence));
  }
  Question asked;
  const auto sentences = static_cast<double>(text.size());
  for (int f = task.facts - 1; f >= 0; --f) {
    // One fact: its depth runs through the texts. Several: they are spread over each.
    const double depth = task.facts == 1 ? (document % 24 + 0.5) / 24.0 : (f + 0.5) / task.facts;
    const std::string thing =
        kThings[static_cast<std::size_t>(task.facts == 1 ? document : f) % kThings.size()];
    const std::string code = code_of(document, f);
    text.insert(text.begin() + static_cast<std::ptrdiff_t>(depth * sentences),
                "The code of the " + thing + " is " + code + ".");
    if (f != q % task.facts) continue;
    asked.code = code;
    asked.depth = depth;
    asked.question = "Question: What is the code of the " + thing + "?\nAnswer: The code of the " +
                     thing + " is";
  }
  asked.text = eval::join(text);
  return asked;
}

std::vector<llama_token> prompt_of(const llama_model* model, const Task& task, const Question& q) {
  if (!task.chat) return tokenize(model, q.text + "\n\n" + q.question, true);
  const std::string question = q.question.substr(0, q.question.find("\nAnswer"));
  return tokenize(model, ChatTemplate(model).render({{"user", q.text + "\n\n" + question}}), true);
}

// "name key=value ...": name is a policy or a way of reading it.
struct Arm {
  std::string spec;
  SessionOptions options;
};

Arm arm_of(const std::string& spec) {
  Arm arm{spec, {}};
  SessionOptions& o = arm.options;
  o.evictor.cache.queries = QuerySource::kAttention;
  o.evictor.cache.pool = 7;
  o.max_tokens = kAnswerTokens;
  o.ignore_eos = true;
  o.sampling.temperature = 0.0f;
  std::istringstream words(spec);
  std::string word;
  words >> word;
  if (word == "guided" || word == "stream" || word == "whole") {
    o.prefill = word == "guided"   ? Prefill::kGuided
                : word == "stream" ? Prefill::kStream
                                   : Prefill::kWhole;
  } else if (is_policy_name(word)) {
    o.evictor.cache.policy = word;
  } else {
    throw std::invalid_argument("arm '" + word + "' is neither guided, stream, whole nor one of " +
                                policy_names_text());
  }
  while (words >> word) {
    const std::string key = word.substr(0, word.find('='));
    const int value = std::stoi(word.substr(word.find('=') + 1));
    const std::map<std::string, int*> numbers = {
        {"budget", &o.evictor.cache.budget},
        {"pool", &o.evictor.cache.pool},
        {"window", &o.evictor.cache.window},
        {"recent", &o.evictor.cache.recent},
        {"guide", &o.guide},
        {"ubatch", &o.micro_batch},
    };
    if (key == "max") {
      o.evictor.cache.fusion = value != 0 ? Fusion::kMax : Fusion::kMean;
    } else if (!numbers.contains(key)) {
      throw std::invalid_argument("arm '" + spec + "': unknown number '" + key + "'");
    } else {
      *numbers.at(key) = value;
    }
  }
  return arm;
}

Json ask(const llama_model* model, const Task& task, Arm arm, int document, int q, int threads) {
  const Question question = question_of(model, task, document, q);
  const auto prompt = prompt_of(model, task, question);
  arm.options.threads = threads;
  arm.options.evictor.cache.seed = static_cast<std::uint64_t>(document);
  std::string text;
  std::vector<llama_token> tokens;
  SessionCallbacks callbacks;
  callbacks.on_token = [&](llama_token token, std::string_view piece, double) {
    text += piece;
    tokens.push_back(token);
  };
  Session session(model, arm.options);
  const SessionResult result = session.run(prompt, callbacks);
  if (const auto broken = session.evictor().violations(); !broken.empty())
    throw std::runtime_error(arm.spec + ": " + broken.front());

  const auto expected = tokenize(model, " " + question.code, false);
  int tokens_right = 0;
  for (std::size_t i = 0; i < expected.size() && i < tokens.size(); ++i)
    tokens_right += tokens[i] == expected[i] ? 1 : 0;
  std::string digits;  // the first number
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && !digits.empty()) break;
    if (digit) digits += c;
  }
  return {{"arm", arm.spec},
          {"tokens", task.tokens},
          {"facts", task.facts},
          {"chat", task.chat},
          {"document", document},
          {"question", q},
          {"depth", question.depth},
          {"code", question.code},
          {"text", text},
          {"right", digits == question.code},
          {"tokens_right", tokens_right},
          {"tokens_expected", expected.size()},
          {"prompt_tokens", prompt.size()},
          {"rows_kept", result.cache.rows_kept},
          {"kv_bytes_kept", result.cache.kv_bytes_kept},
          {"kv_bytes_peak", result.kv_bytes_peak},
          {"prefill_ms", result.prefill_ms},
          {"guide_ms", result.guide_ms},
          {"guide_tokens", result.guide_tokens},
          {"evict_ms", result.evict_ms},
          {"threads", threads}};
}

std::string key_of(const Json& r) {
  return r["arm"].get<std::string>() + "|" + r["tokens"].dump() + "|" + r["facts"].dump() + "|" +
         r["chat"].dump() + "|" + r["document"].dump() + "|" + r["question"].dump();
}

}  // namespace

int main(int argc, char** argv) {
  std::string path;
  std::string out = "recall.jsonl";
  std::vector<std::string> specs;
  Task task;
  int threads = 2;
  CLI::App app("Recall of facts from long prompts, for several ways of reading them.");
  app.add_option("-m,--model", path, "GGUF model")->required();
  app.add_option("-o,--out", out, "file of JSON lines to append to")->capture_default_str();
  app.add_option("--arm", specs, "as 'guided budget=512 pool=7', several times")->required();
  app.add_option("--tokens", task.tokens, "length of a text")->capture_default_str();
  app.add_option("--facts", task.facts, "facts in a text")->capture_default_str();
  app.add_option("--documents", task.documents, "texts")->capture_default_str();
  app.add_option("--first", task.first, "number of the first text")->capture_default_str();
  app.add_option("--questions", task.questions, "questions to each text")->capture_default_str();
  app.add_flag("--chat", task.chat, "ask in the model's chat template");
  app.add_option("-t,--threads", threads, "threads")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  try {
    std::set<std::string> done;
    std::ifstream before(out);
    for (std::string line; std::getline(before, line);) done.insert(key_of(Json::parse(line)));
    const ModelPtr model = load_model(path, {});
    std::ofstream file(out, std::ios::app);
    for (const std::string& spec : specs) {
      int right = 0;
      int tokens_right = 0;
      int asked = 0;
      for (int d = task.first; d < task.first + task.documents; ++d) {
        for (int q = 0; q < task.questions; ++q) {
          const Json key = {{"arm", spec},       {"tokens", task.tokens}, {"facts", task.facts},
                            {"chat", task.chat}, {"document", d},         {"question", q}};
          if (done.contains(key_of(key))) continue;
          const Json r = ask(model.get(), task, arm_of(spec), d, q, threads);
          file << r.dump() << std::endl;
          ++asked;
          right += r["right"].get<bool>() ? 1 : 0;
          tokens_right += r["tokens_right"].get<int>();
          std::fprintf(stderr, "%-36s %3d.%d %3.0f %%  %s  %5.1f s  %-5s %s\n", spec.c_str(), d, q,
                       100 * r["depth"].get<double>(), r["code"].get<std::string>().c_str(),
                       r["prefill_ms"].get<double>() / 1000,
                       r["right"].get<bool>() ? "right" : "WRONG", r["text"].dump().c_str());
        }
      }
      std::printf("%-36s %d tokens, %d facts: %d of %d right, %d answer tokens\n", spec.c_str(),
                  task.tokens, task.facts, right, asked, tokens_right);
      std::fflush(stdout);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "recall: %s\n", error.what());
    return 1;
  }
}

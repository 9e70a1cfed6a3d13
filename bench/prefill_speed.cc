// Time and memory to read one long prompt: llama.cpp as it is, morphkv in pieces (stream) and
// guided, round by round in one run. Checked before it is timed: every arm's first token is that of
// llama.cpp when nothing needs to be evicted, and when it does, the rows held are the budget.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/llama_cpp/session.h"
#include "report.h"

namespace {

using namespace morphkv;             // NOLINT
using namespace morphkv::llama_cpp;  // NOLINT
using Json = nlohmann::ordered_json;
using Tokens = std::vector<llama_token>;

constexpr int kMicroBatch = 512;

struct Read {
  double ms = 0;
  double guide_ms = 0;
  double evict_ms = 0;
  std::size_t kv_bytes = 0;
  llama_token next = 0;
};

Read read_plain(llama_model* model, const Tokens& prompt, int threads) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(prompt.size() + 8);
  params.n_batch = params.n_ubatch = kMicroBatch;
  params.n_threads = params.n_threads_batch = threads;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.no_perf = true;
  const ContextPtr context(llama_init_from_model(model, params));
  if (!context) throw std::runtime_error("llama.cpp made no context");
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t done = 0; done < prompt.size(); done += kMicroBatch) {
    const auto n = std::min<std::size_t>(kMicroBatch, prompt.size() - done);
    auto* tokens = const_cast<llama_token*>(prompt.data() + done);
    if (llama_decode(context.get(), llama_batch_get_one(tokens, static_cast<int>(n))) != 0)
      throw std::runtime_error("llama_decode failed");
  }
  const float* logits = llama_get_logits_ith(context.get(), -1);
  Read r;
  r.ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  r.next = static_cast<llama_token>(std::max_element(logits, logits + n_vocab) - logits);
  r.kv_bytes = llama_state_seq_get_size(context.get(), 0);
  return r;
}

Read read_bounded(llama_model* model, const Tokens& prompt, int threads, Prefill prefill,
                  int budget) {
  SessionOptions o;
  o.evictor.cache = {.budget = budget, .pool = 11, .queries = QuerySource::kAttention};
  o.prefill = prefill;
  o.sampling.temperature = 0.0f;
  o.max_tokens = 1;
  o.ignore_eos = true;
  o.threads = threads;
  o.micro_batch = kMicroBatch;
  Read r;
  SessionCallbacks callbacks;
  callbacks.on_token = [&](llama_token token, std::string_view, double) { r.next = token; };
  Session session(model, o);
  const SessionResult result = session.run(prompt, callbacks);
  const int due = std::min(budget, static_cast<int>(prompt.size()));
  if (result.cache.rows_kept != due || !session.evictor().violations().empty())
    throw std::runtime_error(std::to_string(result.cache.rows_kept) + " rows kept, due " +
                             std::to_string(due));
  r.ms = result.prefill_ms;
  r.guide_ms = result.guide_ms;
  r.evict_ms = result.evict_ms;
  r.kv_bytes = result.kv_bytes_peak;
  return r;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Json arm(const std::string& name, const std::vector<Read>& rounds, double plain_ms) {
  std::vector<double> ms;
  for (const Read& r : rounds) ms.push_back(r.ms);
  const Read& last = rounds.back();
  return {{"arm", name},
          {"median_ms", median(ms)},
          {"all_ms", ms},
          {"against_llama_cpp", plain_ms / median(ms)},
          {"guide_ms", last.guide_ms},
          {"guide_share", last.guide_ms / (last.ms - last.guide_ms)},
          {"evict_share", last.evict_ms / last.ms},
          {"kv_bytes", last.kv_bytes}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Time and memory to read one long prompt.");
  std::string model_path;
  std::string text_path;
  std::string json_path;
  int tokens = 7500;
  int budget = 512;
  int rounds = 3;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  app.add_option("-m,--model", model_path, "GGUF model")->required();
  app.add_option("-f,--file", text_path, "text to read, repeated as needed")->required();
  app.add_option("--json", json_path, "write the figures to this file");
  app.add_option("--tokens", tokens, "tokens of the prompt")->capture_default_str();
  app.add_option("--budget", budget, "rows per KV head")->capture_default_str();
  app.add_option("--rounds", rounds, "how often")->capture_default_str();
  app.add_option("-t,--threads", threads, "threads")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  try {
    const ModelPtr model = load_model(model_path, {});
    std::ifstream file(text_path);
    const Tokens text =
        tokenize(model.get(), std::string(std::istreambuf_iterator<char>(file), {}), false);
    if (text.empty()) throw std::runtime_error("no text in '" + text_path + "'");
    Tokens prompt;
    for (int i = 0; i < tokens; ++i)
      prompt.push_back(text[static_cast<std::size_t>(i) % text.size()]);

    const Tokens head(prompt.begin(), prompt.begin() + std::min(tokens, 400));
    const llama_token expected = read_plain(model.get(), head, threads).next;
    for (const Prefill prefill : {Prefill::kStream, Prefill::kGuided}) {
      if (read_bounded(model.get(), head, threads, prefill, 1024).next != expected)
        throw std::runtime_error("within the budget the first token is not llama.cpp's");
    }
    std::vector<Read> plain, stream, guided;
    for (int i = 0; i < rounds; ++i) {
      std::fprintf(stderr, "round %d of %d\n", i + 1, rounds);
      plain.push_back(read_plain(model.get(), prompt, threads));
      stream.push_back(read_bounded(model.get(), prompt, threads, Prefill::kStream, budget));
      guided.push_back(read_bounded(model.get(), prompt, threads, Prefill::kGuided, budget));
    }
    Json report = bench::report_head("prefill_speed");
    report["llama_version"] = llama_version();
    report["threads"] = threads;
    report["tokens"] = tokens;
    report["budget"] = budget;
    std::vector<double> plain_ms;
    for (const Read& r : plain) plain_ms.push_back(r.ms);
    report["arms"] = {arm("llama.cpp", plain, median(plain_ms)),
                      arm("stream", stream, median(plain_ms)),
                      arm("guided", guided, median(plain_ms))};
    std::printf("| cache | %d tokens | tokens per second | vs llama.cpp | guide | KV memory |\n",
                tokens);
    std::printf("|---|---|---|---|---|---|\n");
    for (const Json& a : report["arms"]) {
      std::printf("| %s | %.1f s | %.0f | %.2fx | %.1f %% | %.1f MiB |\n",
                  a["arm"].get<std::string>().c_str(), a["median_ms"].get<double>() / 1000,
                  1000 * tokens / a["median_ms"].get<double>(),
                  a["against_llama_cpp"].get<double>(), 100 * a["guide_share"].get<double>(),
                  a["kv_bytes"].get<double>() / 1048576);
    }
    if (!json_path.empty()) std::ofstream(json_path) << report.dump(2) << "\n";
  } catch (const std::exception& error) {
    std::fprintf(stderr, "prefill_speed: error: %s\n", error.what());
    return 1;
  }
}

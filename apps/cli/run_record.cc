#include "run_record.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "morphkv/version.h"

namespace morphkv::cli {
namespace {

double ratio(double a, double b) { return b > 0 ? a / b : 0.0; }

double compression_ratio(const llama_cpp::EvictorStats& cache) {
  return cache.kv_bytes_kept == 0 ? 1.0
                                  : ratio(static_cast<double>(cache.kv_bytes_full),
                                          static_cast<double>(cache.kv_bytes_kept));
}

std::string mebibytes(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%9.2f MiB", static_cast<double>(bytes) / 1048576.0);
  return text;
}

// A device or a pipe: nothing to rename over.
bool is_special(const std::string& path) {
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status);
}

std::string temporary_name(const std::string& path) {
  return path + ".tmp" + std::to_string(getpid());
}

}  // namespace

std::int64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

std::string to_json(const RunRecord& record) {
  const auto& cache = record.result.cache;
  const CacheConfig& c = record.options.cache;
  nlohmann::ordered_json json;
  json["morphkv_version"] = kVersion;
  json["model"] = record.model;
  json["tokens_seen"] = cache.tokens_seen;
  json["reused_tokens"] = record.result.reused_tokens;
  json["prompt_tokens"] = record.result.prompt_tokens;
  json["generated_tokens"] = record.result.generated_tokens;
  json["rows_kept"] = cache.rows_kept;
  json["rows_evicted"] = cache.rows_evicted;
  json["profile"] = record.settings.profile;
  json["rule"] = to_text(record.settings);
  json["budget"] = c.budget;
  json["n_sink"] = c.n_sink;
  json["window"] = c.window;
  json["recent"] = c.protected_tail();
  json["pool"] = c.pool;
  json["fuse"] = to_string(c.fusion);
  json["policy"] = c.policy;
  json["queries"] = to_string(c.queries);
  json["prefill"] = to_string(record.options.prefill);
  json["prefill_mode"] = llama_cpp::mode_text(record.result.prefill_mode);
  json["guide_tokens"] = record.result.guide_tokens;
  json["cache_type_k"] = ggml_type_name(record.options.type_k);
  json["cache_type_v"] = ggml_type_name(record.options.type_v);
  json["kv_bytes_kept"] = cache.kv_bytes_kept;
  json["kv_bytes_allocated"] = cache.kv_bytes_allocated;
  json["kv_bytes_peak"] = record.result.kv_bytes_peak;
  json["kv_bytes_full"] = cache.kv_bytes_full;
  json["compression_ratio"] = compression_ratio(cache);
  json["prefill_ms"] = record.result.prefill_ms;
  json["guide_ms"] = record.result.guide_ms;
  json["decode_ms"] = record.result.decode_ms;
  json["evict_ms"] = record.result.evict_ms;
  json["evict_decode_ms"] = record.result.evict_decode_ms;
  json["tokens_per_second"] =
      ratio(record.result.generated_tokens, record.result.decode_ms / 1000.0);
  json["peak_rss_bytes"] = record.peak_rss_bytes;
  json["finish_reason"] = to_string(record.result.finish_reason);
  json["text"] = record.text;
  // A path need not be UTF-8, JSON must be.
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string to_table(const RunRecord& record) {
  const auto& r = record.result;
  const auto& cache = r.cache;
  char line[256];
  std::string out;
  const auto add = [&](const char* format, auto... values) {
    std::snprintf(line, sizeof line, format, values...);
    out += line;
    out += '\n';
  };
  if (r.reused_tokens > 0) add("%-10s %9d tokens  seen before", "session", r.reused_tokens);
  add("%-10s %9d tokens  %9.0f ms  %8.1f tokens/s", "prompt", r.prompt_tokens, r.prefill_ms,
      ratio(r.prompt_tokens, r.prefill_ms / 1000.0));
  add("%-10s %9d tokens  %9.0f ms  %8.1f tokens/s  (%s)", "answer", r.generated_tokens, r.decode_ms,
      ratio(r.generated_tokens, r.decode_ms / 1000.0),
      std::string(to_string(r.finish_reason)).c_str());
  add("%-10s %24.0f ms  %8.1f %% of answering", "eviction", r.evict_ms,
      100.0 * ratio(r.evict_decode_ms, r.decode_ms));
  add("%-10s %9d rows per KV head, %lld tokens seen, %lld rows evicted", "kept", cache.rows_kept,
      static_cast<long long>(cache.tokens_seen), static_cast<long long>(cache.rows_evicted));
  add("%-10s %s kept, %s allocated, %s at most", "KV cache", mebibytes(cache.kv_bytes_kept).c_str(),
      mebibytes(cache.kv_bytes_allocated).c_str(), mebibytes(r.kv_bytes_peak).c_str());
  add("%-10s %s if nothing were evicted, %.1f times what is kept", "",
      mebibytes(cache.kv_bytes_full).c_str(), compression_ratio(cache));
  add("%-10s %s most memory of the process", "",
      mebibytes(static_cast<std::size_t>(record.peak_rss_bytes)).c_str());
  return out;
}

void require_writable(const std::string& path, const std::string& option) {
  if (path.empty()) throw std::invalid_argument(option + " '' names no file");
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) {
    throw std::invalid_argument(option + " '" + path + "' is a directory; give the path of a file");
  }
  bool can = !std::filesystem::exists(status) || access(path.c_str(), W_OK) == 0;
  if (can && !is_special(path)) {
    const std::string trial = temporary_name(path);
    can = std::ofstream(trial).good();
    std::filesystem::remove(trial, ignored);
  }
  if (!can) {
    throw std::invalid_argument(option + " '" + path +
                                "' cannot be written: check that its folder exists and is yours");
  }
}

void write_file(const std::string& path, const std::string& text) {
  const std::string target = is_special(path) ? path : temporary_name(path);
  std::ofstream file(target, std::ios::binary);
  file << text;
  file.close();
  std::error_code error;
  if (file && target != path) std::filesystem::rename(target, path, error);
  if (!file || error) {
    std::error_code ignored;
    if (target != path) std::filesystem::remove(target, ignored);
    throw std::runtime_error("cannot write '" + path + "'" + (error ? ": " + error.message() : ""));
  }
}

}  // namespace morphkv::cli

#include "engine_state.h"

#include <cstring>

#include "morphkv/llama_cpp/evictor.h"

namespace morphkv::llama_cpp {
namespace {

constexpr std::size_t kHeader = 8;  // magic, sequence
constexpr std::size_t kWord = sizeof(std::uint32_t);

std::uint32_t word(std::span<const std::uint8_t> bytes, std::size_t at) {
  std::uint32_t value = 0;
  std::memcpy(&value, bytes.data() + at, kWord);
  return value;
}

void append_word(std::uint32_t value, std::vector<std::uint8_t>& out) {
  const auto at = out.size();
  out.resize(at + kWord);
  std::memcpy(out.data() + at, &value, kWord);
}

// The bytes of one cache: how many sequences there are, then for each its number of cells, which
// its cells follow. All sequences but ours have none.
bool append_cache(std::span<const std::uint8_t> cache, const EngineState& state, int sequences,
                  std::vector<std::uint8_t>& out) {
  const auto had = static_cast<std::size_t>(state.sequences);
  const auto before = static_cast<std::size_t>(state.sequence);
  if (cache.size() < kWord * (1 + had) || word(cache, 0) != had) return false;
  for (std::size_t i = 0; i < before; ++i) {
    if (word(cache, kWord * (1 + i)) != 0) return false;
  }
  const std::size_t behind = kWord * (had - 1 - before);
  for (std::size_t at = cache.size() - behind; at < cache.size(); at += kWord) {
    if (word(cache, at) != 0) return false;
  }
  append_word(static_cast<std::uint32_t>(sequences), out);
  const std::size_t begin = kWord * (1 + before);
  const auto own = cache.subspan(begin, cache.size() - behind - begin);
  out.insert(out.end(), own.begin(), own.end());
  for (int i = 1; i < sequences; ++i) append_word(0, out);
  return true;
}

}  // namespace

EngineState get_engine_state(llama_context* context, llama_seq_id sequence) {
  EngineState state;
  state.sequences = static_cast<int>(llama_n_seq_max(context));
  state.sequence = sequence;
  state.bytes.resize(llama_state_seq_get_size(context, sequence));
  state.bytes.resize(
      llama_state_seq_get_data(context, state.bytes.data(), state.bytes.size(), sequence));
  if (state.bytes.empty()) throw EngineError("llama_state_seq_get_data gave nothing");
  if (llama_model_n_swa(llama_get_model(context)) > 0) {
    const std::size_t partial =
        llama_state_seq_get_size_ext(context, sequence, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (partial < state.bytes.size()) state.swa_bytes = partial - kHeader;
  }
  return state;
}

std::vector<std::uint8_t> bytes_for(const EngineState& state, int sequences) {
  if (sequences == state.sequences) return state.bytes;
  const std::span<const std::uint8_t> bytes = state.bytes;
  if (state.sequence < 0 || state.sequence >= state.sequences || bytes.size() < kHeader ||
      state.swa_bytes > bytes.size() - kHeader) {
    return {};
  }
  const auto swa = static_cast<std::size_t>(state.swa_bytes);
  std::vector<std::uint8_t> out(bytes.begin(), bytes.begin() + kHeader);
  const auto all = bytes.subspan(kHeader, bytes.size() - kHeader - swa);
  if (!append_cache(all, state, sequences, out)) return {};
  if (swa > 0 && !append_cache(bytes.last(swa), state, sequences, out)) return {};
  return out;
}

}  // namespace morphkv::llama_cpp

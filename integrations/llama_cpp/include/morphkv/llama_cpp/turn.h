// A turn: a prompt, how it is read, and what answer is wanted. What Session, TextSession and Slots
// have in common.
#pragma once

#include <llama.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "morphkv/config.h"
#include "morphkv/llama_cpp/sampling.h"
#include "morphkv/settings.h"

namespace morphkv::llama_cpp {

using morphkv::Prefill;
using morphkv::to_string;

// Tokens at a prompt's end that are its guide, unless a turn says otherwise; fewer where that would
// cost more than an eighth of a piece.
inline constexpr int kGuideTokens = 24;
// Most tokens of a guide that slots reserve room for, unless told otherwise: their queries are
// kept, of every layer and slot.
inline constexpr int kMostGuide = 64;
// There is always an end: this many tokens when neither a limit nor the trained length gives one.
inline constexpr int kTokenCap = 32768;

// What is read before the answer.
struct Prompt {
  std::span<const llama_token> tokens;
  // Texts that guide Prefill::kGuided, each of at most as many tokens as are reserved for guides;
  // they are not part of the prompt and share the budget. Empty: the prompt's own last tokens.
  std::vector<std::vector<llama_token>> guides = {};
  bool end_guides_too = false;  // the prompt's last tokens beside those texts
  // Where the newest question begins: the prompt's own guide does not reach back beyond it.
  std::size_t question = 0;
};

// A prompt and the answer wanted for it.
struct Turn {
  std::vector<llama_token> prompt;  // the whole text so far, what has been seen included
  CacheConfig cache;
  Prefill prefill = Prefill::kGuided;
  std::vector<std::vector<llama_token>> guides = {};  // as in Prompt
  bool end_guides_too = false;
  std::size_t question = 0;  // index in `prompt`
  int guide = 0;             // tokens at the prompt's end that guide; 0 = kGuideTokens or fewer
  SamplingOptions sampling;
  int max_tokens = -1;  // negative: until the model ends, the trained length or kTokenCap
  bool ignore_eos = false;
  bool allow_past_training = false;
  bool strict = false;    // refuse rather than evict
  int top_logprobs = -1;  // likeliest tokens beside each chosen one; negative: no logprobs at all

  // The rule and the way of reading, with `texts` as guides, or the settings' own text beside the
  // prompt's end where there are none.
  void use(const ResolvedSettings& settings, const llama_model* model,
           const std::vector<std::string>& texts = {});
};

// How a prompt was read: the name of the way, or "at_once" where nothing had to be evicted.
std::string_view mode_text(const std::optional<Prefill>& mode);

enum class FinishReason : std::uint8_t { kStop, kLength, kTrainedLength, kInterrupted };
std::string_view to_string(FinishReason reason);

// The turn would need more rows than it may have, and must not evict; or more tokens than the model
// was trained for.
class TooLong : public std::invalid_argument {
 public:
  TooLong(const std::string& what, int has, int may_have)
      : std::invalid_argument(what), tokens(has), limit(may_have) {}
  int tokens;  // that the prompt has
  int limit;   // that there is room or training for
};

// What is reserved for a turn.
struct TurnLimits {
  int budget = 512;  // most rows per KV head
  int guide_tokens = kMostGuide;
  bool evicts = true;  // false: for policy full
};

// All that can be wrong with a turn. The model may be loaded vocab_only. The first `before` tokens
// of the prompt are of a text that it goes on from. Throws std::invalid_argument that names the
// value, the limit and the fix; TooLong.
void check_turn(const Turn& turn, const TurnLimits& limits, const llama_model* model,
                std::size_t before = 0);

}  // namespace morphkv::llama_cpp

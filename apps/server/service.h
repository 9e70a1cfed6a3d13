// Between HTTP and the engine: requests queue here, one thread evaluates them all, answers come
// back token by token. Interface only, so that the HTTP layer is tested without a model; the real
// one is EngineService.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "morphkv/llama_cpp/slots.h"

namespace morphkv::server {

// As many requests wait as may.
class QueueFull : public std::runtime_error {
 public:
  QueueFull(int limit, int retry_after)
      : std::runtime_error("the queue is full: " + std::to_string(limit) +
                           " requests wait already"),
        retry_after_s(retry_after) {}
  int retry_after_s;
};
// The server is stopping.
class Stopping : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
// A slot that is busy cannot be saved, restored or erased.
class SlotBusy : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Request {
  llama_cpp::Turn turn;
  std::optional<int> slot;               // this slot and no other; it waits until it is idle
  std::vector<std::string> stop;         // texts that end the answer and are not part of it
  std::chrono::milliseconds timeout{0};  // from submission to the end; 0 = none
};

enum class EndReason : std::uint8_t { kStop, kStopText, kLength, kTrainedLength, kTimeout, kError };

// A slot reads the prompt from now on.
struct Begun {
  int slot = 0;
  int reused_tokens = 0;  // of the prompt: seen already
};
struct Delta {
  std::string text;  // whole UTF-8 characters; may be empty while a stop text may be beginning
  std::vector<llama_cpp::GeneratedToken> tokens;  // whose text this is, or that wait
};
struct End {
  EndReason reason = EndReason::kStop;
  std::string error;  // with kError
  int slot = 0;
  llama_cpp::SlotStats stats;  // at the end
  double queued_ms = 0.0;
  double prompt_ms = 0.0;
  double generate_ms = 0.0;
};
using Event = std::variant<Begun, Delta, End>;

// One request on its way. Dropping it cancels the request: its slot is free within one batch.
class Answer {
 public:
  virtual ~Answer() = default;
  // The next event, or nothing when none came for so long: Begun, unless it never came to that, any
  // number of Delta, End.
  virtual std::optional<Event> next(std::chrono::milliseconds patience) = 0;
};

struct SlotInfo {
  int id = 0;
  llama_cpp::SlotStats stats;
  double tokens_per_second = 0.0;  // generated, of the turn or the last one
};

// Counters since the start.
struct Counters {
  std::int64_t requests_begun = 0;
  std::int64_t requests_finished = 0;
  std::int64_t requests_cancelled = 0;  // clients that left, time-outs
  std::int64_t requests_refused = 0;    // queue full
  std::int64_t requests_failed = 0;     // the engine failed
  std::int64_t prompt_tokens_evaluated = 0;
  std::int64_t prompt_tokens_reused = 0;
  std::int64_t tokens_generated = 0;
  std::int64_t rows_evicted = 0;
  std::int64_t steps = 0;
  double prompt_seconds = 0.0;    // of steps that read prompts
  double generate_seconds = 0.0;  // of steps that only generate
  int waiting = 0;                // now
  int busy_slots = 0;             // now
};

// What a slot remembers, for the page.
struct Picture {
  int slot = 0;
  std::int64_t tokens_seen = 0;
  std::vector<std::string> pieces;  // [token] text of the tokens from first_token on
  std::int64_t first_token = 0;
  std::vector<int> layers;                                   // numbers of the bounded layers
  int heads = 0;                                             // KV heads per layer
  std::vector<std::vector<std::vector<std::int64_t>>> held;  // [layer][head] positions, ascending
};

class Service {
 public:
  virtual ~Service() = default;
  // Queues the request. Throws std::invalid_argument and llama_cpp::TooLong (Slots::check()),
  // QueueFull, Stopping.
  virtual std::unique_ptr<Answer> submit(Request request) = 0;
  virtual std::vector<SlotInfo> slots() const = 0;
  virtual Counters counters() const = 0;
  virtual std::size_t kv_bytes_allocated() const = 0;
  // The last `most` tokens of the slot. Throws std::invalid_argument for a slot that is not there.
  virtual Picture picture(int slot, int most) const = 0;
  // Throw std::invalid_argument for a slot that is not there, or bytes that are refused (the slot
  // is as before then); SlotBusy.
  virtual std::string save(int slot) = 0;
  virtual void restore(int slot, std::string bytes) = 0;
  virtual void erase(int slot) = 0;
};

}  // namespace morphkv::server

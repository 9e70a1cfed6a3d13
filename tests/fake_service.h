// A Service without an engine: what it is asked is remembered, what it answers is scripted.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "service.h"

namespace morphkv::server {

// One answer: it begins in slot 1, then the events one after another, then nothing until it is
// dropped.
struct Script {
  std::vector<Event> events;
  std::chrono::milliseconds pause{0};  // before each event
};

// Counts the answers that were asked for and those that are gone again.
struct Tally {
  std::mutex mutex;
  std::condition_variable changed;
  int begun = 0;
  int dropped = 0;

  void count(int& counter) {
    {
      const std::lock_guard lock(mutex);
      ++counter;
    }
    changed.notify_all();
  }
  bool wait_for(const int& counter, int wanted, std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, patience, [&] { return counter >= wanted; });
  }
};

class FakeAnswer : public Answer {
 public:
  FakeAnswer(Script script, std::shared_ptr<Tally> tally)
      : script_(std::move(script)), tally_(std::move(tally)) {}
  ~FakeAnswer() override { tally_->count(tally_->dropped); }

  std::optional<Event> next(std::chrono::milliseconds patience) override {
    if (!std::exchange(begun_, true)) return Begun{1, 0};
    if (next_ == script_.events.size() || script_.pause > patience + waited_) {
      std::this_thread::sleep_for(patience);
      waited_ += patience;
      return std::nullopt;
    }
    std::this_thread::sleep_for(script_.pause - waited_);
    waited_ = {};
    return script_.events[next_++];
  }

 private:
  Script script_;
  std::shared_ptr<Tally> tally_;
  bool begun_ = false;
  std::size_t next_ = 0;
  std::chrono::milliseconds waited_{0};
};

class FakeService : public Service {
 public:
  static constexpr const char* kSaved = "bytes of a slot";
  std::shared_ptr<Tally> tally = std::make_shared<Tally>();

  // From now on submit() asks `script`, which may throw.
  void answer_with(std::function<Script(const Request&)> script) {
    const std::lock_guard lock(mutex_);
    script_ = std::move(script);
  }
  // From now on every slot is busy.
  void hold() { busy_ = true; }

  std::unique_ptr<Answer> submit(Request request) override {
    Script answer;
    {
      const std::lock_guard lock(mutex_);
      if (script_) answer = script_(request);
      requests_.push_back(std::move(request));
    }
    tally->count(tally->begun);
    return std::make_unique<FakeAnswer>(std::move(answer), tally);
  }
  std::vector<Request> requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }
  std::vector<std::string> done() const {
    const std::lock_guard lock(mutex_);
    return done_;
  }

  std::vector<SlotInfo> slots() const override {
    std::vector<SlotInfo> slots(2);
    slots[1].id = 1;
    slots[1].stats.busy = slots[1].stats.reading = true;
    slots[1].stats.tokens_seen = 300;
    slots[1].stats.rows_kept = 96;
    slots[1].stats.rows_evicted = 204;
    slots[1].tokens_per_second = 12.5;
    return slots;
  }
  Counters counters() const override { return {.requests_begun = 7, .prompt_seconds = 1.5}; }
  std::size_t kv_bytes_allocated() const override { return 4096; }
  Picture picture(int slot, int most) const override {
    require(slot);
    return {.slot = slot,
            .tokens_seen = 5,
            .pieces = std::vector<std::string>(static_cast<std::size_t>(std::min(most, 2)), "x"),
            .first_token = 3,
            .layers = {0, 2},
            .heads = 1,
            .held = {{{0, 3}}, {{3, 4}}}};
  }
  std::string save(int slot) override {
    require(slot);
    remember("save " + std::to_string(slot));
    return kSaved;
  }
  void restore(int slot, std::string bytes) override {
    require(slot);
    if (bytes != kSaved) throw std::invalid_argument("the saved slot is damaged");
    remember("restore " + std::to_string(slot));
  }
  void erase(int slot) override {
    require(slot);
    remember("erase " + std::to_string(slot));
  }

 private:
  void require(int slot) const {
    if (slot < 0 || slot > 1) {
      throw std::invalid_argument("slot " + std::to_string(slot) + " is none of 0 to 1");
    }
    if (busy_) throw SlotBusy("slot " + std::to_string(slot) + " is busy");
  }
  void remember(const std::string& what) {
    const std::lock_guard lock(mutex_);
    done_.push_back(what);
  }

  mutable std::mutex mutex_;
  std::function<Script(const Request&)> script_;
  std::atomic<bool> busy_ = false;
  std::vector<Request> requests_;
  std::vector<std::string> done_;
};

}  // namespace morphkv::server

#include "engine_service.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "morphkv/llama_cpp/model_file.h"
#include "morphkv/llama_cpp/stop_text.h"
#include "morphkv/llama_cpp/text_stream.h"

namespace morphkv::server {
namespace {

using Clock = std::chrono::steady_clock;

double ms_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

// A request and its answer, shared by the engine's thread and the one that waits for it.
struct Job {
  explicit Job(Request r) : request(std::move(r)), text(request.stop) {}

  Request request;
  const Clock::time_point submitted = Clock::now();
  std::atomic<bool> cancelled = false;  // nobody waits any more

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Event> events;

  void push(Event event) {
    {
      const std::lock_guard lock(mutex);
      events.push_back(std::move(event));
    }
    changed.notify_one();
  }

  // Of the engine's thread only:
  int slot = -1;
  llama_cpp::AnswerText text;
  std::optional<EndReason> ended;
  std::string error;
  Clock::time_point begun;
  Clock::time_point first_token;
  int generated = 0;
  std::int64_t evicted_before = 0;

  bool late(Clock::time_point now) const {
    return request.timeout.count() > 0 && now - submitted >= request.timeout;
  }
};

EndReason reason_of(llama_cpp::FinishReason reason) {
  switch (reason) {
    case llama_cpp::FinishReason::kStop:
      return EndReason::kStop;
    case llama_cpp::FinishReason::kTrainedLength:
      return EndReason::kTrainedLength;
    case llama_cpp::FinishReason::kLength:
    case llama_cpp::FinishReason::kInterrupted:
      break;
  }
  return EndReason::kLength;
}

}  // namespace

class EngineService::Impl {
 public:
  Impl(const llama_model* model, EngineServiceOptions options)
      : model_(model), options_(std::move(options)) {
    std::promise<void> ready;
    auto made = ready.get_future();
    // The slots are made by the thread that runs them: as soon as two threads of a process give
    // work to OpenMP, each with helpers of its own, these hardly wait for one another but sleep.
    thread_ = std::thread([this, ready = std::move(ready)]() mutable {
      try {
        prepare();
      } catch (...) {
        return ready.set_exception(std::current_exception());
      }
      ready.set_value();
      loop();
    });
    try {
      made.get();
    } catch (...) {
      thread_.join();
      throw;
    }
  }

  ~Impl() {
    stop_now();
    thread_.join();
  }

  std::unique_ptr<Answer> submit(Request request);
  void wake() { wake_.notify_one(); }

  std::vector<SlotInfo> slots() const {
    const std::lock_guard lock(mutex_);
    return published_;
  }
  Counters counters() const;
  std::size_t kv_bytes_allocated() const { return kv_bytes_allocated_; }

  // Runs the work on the engine's thread between two steps, and waits for it.
  template <class Work>
  auto between_steps(Work work) {
    std::packaged_task<decltype(work())()> task(std::move(work));
    auto result = task.get_future();
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) throw Stopping("the server is stopping");
      work_.push_back([&task] { task(); });
    }
    wake();
    return result.get();
  }
  Picture picture(int slot, int most) const;
  void require_idle(int slot) const {
    if (slots_->stats(slot).busy) {
      throw SlotBusy("slot " + std::to_string(slot) + " is busy: wait for its answer to end");
    }
  }
  llama_cpp::Slots& engine() { return *slots_; }
  void publish_now() {
    const std::lock_guard lock(mutex_);
    publish();
  }

  void drain() {
    const std::lock_guard lock(mutex_);
    draining_ = true;
  }
  bool idle() const {
    const std::lock_guard lock(mutex_);
    return queue_.empty() && busy_ == 0;
  }
  void stop_now() {
    {
      const std::lock_guard lock(mutex_);
      draining_ = stopped_ = true;
    }
    wake();
  }

 private:
  using JobPtr = std::shared_ptr<Job>;

  void prepare();
  void loop();
  void wait_for_work(std::unique_lock<std::mutex>& lock);
  void do_work(std::unique_lock<std::mutex>& lock);
  void drop_the_late(std::unique_lock<std::mutex>& lock);
  void assign(std::unique_lock<std::mutex>& lock);
  int slot_for(const Job& job) const;
  void begin(int slot, const JobPtr& job);
  void on_token(Job& job, llama_cpp::GeneratedToken token);
  void settle();
  void end_job(int slot);
  void publish();
  void end_waiting(const JobPtr& job, EndReason reason, const std::string& error);
  int retry_after() const;

  const llama_model* model_;
  EngineServiceOptions options_;
  std::optional<llama_cpp::Slots> slots_;  // of the engine's thread
  std::size_t kv_bytes_allocated_ = 0;
  std::vector<JobPtr> running_;               // [slot], of the engine's thread
  std::vector<Clock::time_point> last_used_;  // [slot], of the engine's thread

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::deque<JobPtr> queue_;
  std::deque<std::function<void()>> work_;
  std::vector<SlotInfo> published_;
  Counters counters_;
  double seconds_per_request_ = 5.0;  // of late
  int busy_ = 0;
  bool draining_ = false;
  bool stopped_ = false;

  std::thread thread_;
};

namespace {

class JobAnswer : public Answer {
 public:
  JobAnswer(std::shared_ptr<Job> job, std::function<void()> wake)
      : job_(std::move(job)), wake_(std::move(wake)) {}
  ~JobAnswer() override {
    job_->cancelled = true;
    wake_();
  }

  std::optional<Event> next(std::chrono::milliseconds patience) override {
    std::unique_lock lock(job_->mutex);
    job_->changed.wait_for(lock, patience, [&] { return !job_->events.empty(); });
    if (job_->events.empty()) return std::nullopt;
    Event event = std::move(job_->events.front());
    job_->events.pop_front();
    return event;
  }

 private:
  std::shared_ptr<Job> job_;
  std::function<void()> wake_;
};

}  // namespace

std::unique_ptr<Answer> EngineService::Impl::submit(Request request) {
  slots_->check(request.turn);
  if (request.slot && (*request.slot < 0 || *request.slot >= slots_->slots())) {
    throw std::invalid_argument("slot " + std::to_string(*request.slot) + " is none of 0 to " +
                                std::to_string(slots_->slots() - 1));
  }
  auto job = std::make_shared<Job>(std::move(request));
  {
    const std::lock_guard lock(mutex_);
    if (draining_) throw Stopping("the server is stopping");
    // A request that finds an idle slot does not wait.
    const int idle = slots_->slots() - busy_;
    if (static_cast<int>(queue_.size()) >= options_.max_queue + idle) {
      ++counters_.requests_refused;
      throw QueueFull(options_.max_queue, retry_after());
    }
    queue_.push_back(job);
  }
  wake();
  return std::make_unique<JobAnswer>(std::move(job), [this] { wake(); });
}

int EngineService::Impl::retry_after() const {
  const double turns = static_cast<double>(queue_.size()) / slots_->slots();
  return static_cast<int>(std::clamp(turns * seconds_per_request_, 1.0, 60.0));
}

void EngineService::Impl::prepare() {
  slots_.emplace(model_, options_.slots);
  kv_bytes_allocated_ = slots_->kv_bytes_allocated();
  running_.resize(static_cast<std::size_t>(slots_->slots()));
  last_used_.resize(running_.size());
  published_.resize(running_.size());
  for (int id = 0; id < slots_->slots(); ++id) published_[static_cast<std::size_t>(id)].id = id;
  publish();
}

void EngineService::Impl::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    wait_for_work(lock);
    do_work(lock);
    if (stopped_) break;
    drop_the_late(lock);
    assign(lock);
    if (busy_ == 0) {
      publish();  // a slot may just have become free
      continue;
    }
    lock.unlock();
    const bool reading = std::any_of(running_.begin(), running_.end(), [&](const JobPtr& job) {
      return job && slots_->stats(job->slot).reading;
    });
    const Clock::time_point start = Clock::now();
    slots_->step();
    const double seconds = ms_between(start, Clock::now()) / 1000.0;
    lock.lock();
    ++counters_.steps;
    (reading ? counters_.prompt_seconds : counters_.generate_seconds) += seconds;
    settle();
    publish();
  }
  for (const JobPtr& job : queue_) end_waiting(job, EndReason::kError, "the server is stopping");
  queue_.clear();
  for (JobPtr& job : running_) {
    if (!job) continue;
    job->ended = EndReason::kError;
    job->error = "the server is stopping";
    end_job(job->slot);
  }
}

// While a slot is busy nobody waits here: each step is followed by a look at those that are late.
void EngineService::Impl::wait_for_work(std::unique_lock<std::mutex>& lock) {
  if (busy_ > 0) return;
  const auto due = [&] { return stopped_ || !work_.empty() || !queue_.empty(); };
  wake_.wait(lock, due);
}

void EngineService::Impl::do_work(std::unique_lock<std::mutex>& lock) {
  while (!work_.empty()) {
    const std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    work();
    lock.lock();
  }
}

void EngineService::Impl::drop_the_late(std::unique_lock<std::mutex>&) {
  const Clock::time_point now = Clock::now();
  std::erase_if(queue_, [&](const JobPtr& job) {
    if (job->cancelled) {
      ++counters_.requests_cancelled;
      return true;
    }
    if (!job->late(now)) return false;
    ++counters_.requests_cancelled;
    end_waiting(job, EndReason::kTimeout, "");
    return true;
  });
  for (std::size_t id = 0; id < running_.size(); ++id) {
    const JobPtr& job = running_[id];
    if (!job || (!job->cancelled && !job->late(now))) continue;
    ++counters_.requests_cancelled;
    job->ended = EndReason::kTimeout;
    end_job(static_cast<int>(id));
  }
}

void EngineService::Impl::end_waiting(const JobPtr& job, EndReason reason,
                                      const std::string& error) {
  End end;
  end.reason = reason;
  end.error = error;
  end.slot = -1;
  end.queued_ms = ms_between(job->submitted, Clock::now());
  job->push(std::move(end));
}

// In the order of arrival; one that waits for a certain slot holds up nobody else.
void EngineService::Impl::assign(std::unique_lock<std::mutex>& lock) {
  for (auto next = queue_.begin(); next != queue_.end();) {
    const int slot = slot_for(**next);
    if (slot < 0) {
      ++next;
      continue;
    }
    const JobPtr job = *next;
    next = queue_.erase(next);
    ++busy_;
    ++counters_.requests_begun;
    begin(slot, job);
  }
  static_cast<void>(lock);
}

// The idle slot that has seen most of the prompt; else the one that nobody has needed for longest.
int EngineService::Impl::slot_for(const Job& job) const {
  int best = -1;
  int best_reused = -1;
  for (int id = 0; id < slots_->slots(); ++id) {
    const auto i = static_cast<std::size_t>(id);
    if (running_[i] || (job.request.slot && *job.request.slot != id)) continue;
    const int reused = slots_->reusable(id, job.request.turn);
    const bool older = best < 0 || last_used_[i] < last_used_[static_cast<std::size_t>(best)];
    if (reused > best_reused || (reused == best_reused && older)) {
      best = id;
      best_reused = reused;
    }
  }
  return best;
}

void EngineService::Impl::begin(int slot, const JobPtr& job) {
  job->slot = slot;
  job->begun = job->first_token = Clock::now();
  running_[static_cast<std::size_t>(slot)] = job;
  Job* raw = job.get();
  try {
    slots_->begin(slot, std::move(job->request.turn),
                  {.on_token = [this, raw](auto token) { on_token(*raw, std::move(token)); },
                   .on_end =
                       [raw](llama_cpp::FinishReason reason) {
                         if (!raw->ended) raw->ended = reason_of(reason);
                       },
                   .on_error =
                       [raw](const std::string& what) {
                         raw->ended = EndReason::kError;
                         raw->error = what;
                       }});
    const llama_cpp::SlotStats stats = slots_->stats(slot);
    job->evicted_before = stats.rows_evicted;
    counters_.prompt_tokens_reused += stats.reused_tokens;
    job->push(Begun{slot, stats.reused_tokens});
  } catch (const std::exception& error) {
    ++counters_.requests_failed;
    job->ended = EndReason::kError;
    job->error = error.what();
    end_job(slot);
  }
}

// Within a step.
void EngineService::Impl::on_token(Job& job, llama_cpp::GeneratedToken token) {
  if (job.generated++ == 0) job.first_token = Clock::now();
  if (job.ended) return;
  Delta delta;
  delta.text = job.text.push(token.text);
  delta.tokens.push_back(std::move(token));
  job.push(std::move(delta));
  if (job.text.stopped()) job.ended = EndReason::kStopText;
}

// After a step: ends what has come to its end.
void EngineService::Impl::settle() {
  for (std::size_t id = 0; id < running_.size(); ++id) {
    const JobPtr& job = running_[id];
    if (!job || !job->ended) continue;
    if (*job->ended == EndReason::kError) {
      ++counters_.requests_failed;
    } else {
      ++counters_.requests_finished;
    }
    end_job(static_cast<int>(id));
  }
}

void EngineService::Impl::end_job(int slot) {
  const auto i = static_cast<std::size_t>(slot);
  const JobPtr job = std::exchange(running_[i], nullptr);
  --busy_;
  const Clock::time_point now = Clock::now();
  last_used_[i] = now;
  End end;
  end.stats = slots_->stats(slot);
  slots_->end(slot);
  end.stats.busy = false;
  counters_.prompt_tokens_evaluated += end.stats.prompt_read - end.stats.reused_tokens;
  counters_.tokens_generated += job->generated;
  counters_.rows_evicted += end.stats.rows_evicted - job->evicted_before;
  seconds_per_request_ += 0.2 * (ms_between(job->begun, now) / 1000.0 - seconds_per_request_);
  if (std::string rest = job->text.finish(); !rest.empty()) {
    job->push(Delta{.text = std::move(rest), .tokens = {}});
  }
  end.reason = *job->ended;
  end.error = job->error;
  end.slot = slot;
  end.queued_ms = ms_between(job->submitted, job->begun);
  const Clock::time_point read = job->generated > 0 ? job->first_token : now;
  end.prompt_ms = ms_between(job->begun, read);
  end.generate_ms = ms_between(read, now);
  job->push(std::move(end));
}

// With the lock.
void EngineService::Impl::publish() {
  const Clock::time_point now = Clock::now();
  for (SlotInfo& info : published_) {
    info.stats = slots_->stats(info.id);
    const JobPtr& job = running_[static_cast<std::size_t>(info.id)];
    if (job && job->generated > 1) {
      info.tokens_per_second = (job->generated - 1) * 1000.0 / ms_between(job->first_token, now);
    }
  }
}

Counters EngineService::Impl::counters() const {
  const std::lock_guard lock(mutex_);
  Counters counters = counters_;
  counters.waiting = static_cast<int>(queue_.size());
  counters.busy_slots = busy_;
  return counters;
}

Picture EngineService::Impl::picture(int slot, int most) const {
  const std::span<const llama_token> seen = slots_->tokens_seen(slot);
  Picture picture;
  picture.slot = slot;
  picture.tokens_seen = std::ssize(seen);
  picture.first_token = std::max<std::int64_t>(0, std::ssize(seen) - most);
  llama_cpp::TextStream text;
  for (const llama_token token : seen.subspan(static_cast<std::size_t>(picture.first_token))) {
    picture.pieces.push_back(text.push(llama_cpp::token_text(model_, token, true)));
  }
  for (const llama_cpp::BoundLayer& layer : slots_->snapshot(slot)) {
    picture.layers.push_back(layer.index);
    picture.heads = static_cast<int>(layer.rows.heads.size());
    auto& heads = picture.held.emplace_back();
    for (const HeadSnapshot& head : layer.rows.heads) {
      const auto first = std::lower_bound(head.positions.begin(), head.positions.end(),
                                          Position{picture.first_token});
      heads.emplace_back(first, head.positions.end());
    }
  }
  return picture;
}

EngineService::EngineService(const llama_model* model, EngineServiceOptions options)
    : impl_(std::make_unique<Impl>(model, std::move(options))) {}
EngineService::~EngineService() = default;

std::unique_ptr<Answer> EngineService::submit(Request request) {
  return impl_->submit(std::move(request));
}
std::vector<SlotInfo> EngineService::slots() const { return impl_->slots(); }
Counters EngineService::counters() const { return impl_->counters(); }
std::size_t EngineService::kv_bytes_allocated() const { return impl_->kv_bytes_allocated(); }
Picture EngineService::picture(int slot, int most) const {
  return impl_->between_steps([&] { return impl_->picture(slot, most); });
}
std::string EngineService::save(int slot) {
  return impl_->between_steps([&] {
    impl_->require_idle(slot);
    return impl_->engine().save(slot);
  });
}
void EngineService::restore(int slot, std::string bytes) {
  impl_->between_steps([&] {
    impl_->require_idle(slot);
    impl_->engine().restore(slot, bytes);
    impl_->publish_now();
  });
}
void EngineService::erase(int slot) {
  impl_->between_steps([&] {
    impl_->require_idle(slot);
    impl_->engine().erase(slot);
    impl_->publish_now();
  });
}
const llama_cpp::Slots& EngineService::engine_slots() const { return impl_->engine(); }
void EngineService::drain() { impl_->drain(); }
bool EngineService::idle() const { return impl_->idle(); }
void EngineService::stop_now() { impl_->stop_now(); }

}  // namespace morphkv::server

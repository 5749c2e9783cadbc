#include "cpu/team.h"

#include <chrono>

namespace embert::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// For so long a thread looks for the next job before it sleeps: some 10 µs lie between two calls of a forward. A longer
// search would take the core from other processes.
constexpr auto kSearch = std::chrono::microseconds(50);
constexpr int kLooks = 32;  // between two looks at the clock

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Team& Team::shared() {
  static Team* const team = new Team;  // never destroyed: its threads may outlive static objects
  return *team;
}

void Team::run_all(int threads, int tasks, Call call, const void* context) {
  std::unique_lock<std::mutex> caller(caller_, std::defer_lock);
  if (threads < 2 || tasks < 2 || !caller.try_lock()) {
    for (int task = 0; task < tasks; ++task) call(context, task);
    return;
  }
  while (static_cast<int>(threads_.size()) < threads - 1) {
    threads_.emplace_back(&Team::work, this, static_cast<int>(threads_.size()));
    threads_.back().detach();
  }
  const std::uint32_t job = job_.load(std::memory_order_relaxed) + 1;
  // Whoever still looks at the last job's number finds no task.
  next_.store(static_cast<std::uint64_t>(job) << 32 | 0xffffffffu, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  helpers_.store(threads - 1, std::memory_order_relaxed);
  tasks_.store(tasks, std::memory_order_relaxed);
  ended_.store(0, std::memory_order_relaxed);
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  next_.store(static_cast<std::uint64_t>(job) << 32, std::memory_order_release);
  job_.store(job, std::memory_order_release);
  job_.notify_all();
  while (run_next(job)) {
  }
  while (ended_.load(std::memory_order_acquire) < tasks) pause();
}

// Runs one task of a job, unless none is left.
bool Team::run_next(std::uint32_t job) {
  std::uint64_t next = next_.load(std::memory_order_acquire);
  for (;;) {
    const int task = static_cast<int>(next & 0xffffffffu);
    if (next >> 32 != job || task < 0 || task >= tasks_.load(std::memory_order_relaxed)) return false;
    const Call call = call_.load(std::memory_order_relaxed);
    const void* const context = context_.load(std::memory_order_relaxed);
    // Where this succeeds, the job has not ended, and what was read is its own.
    if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    call(context, task);
    ended_.fetch_add(1, std::memory_order_acq_rel);
    return true;
  }
}

void Team::work(int number) {
  std::uint32_t seen = 0;
  for (;;) {
    std::uint32_t job = job_.load(std::memory_order_acquire);
    for (auto until = Clock::now() + kSearch; job == seen && Clock::now() < until;) {
      for (int look = 0; job == seen && look < kLooks; ++look) {
        pause();
        job = job_.load(std::memory_order_acquire);
      }
    }
    if (job == seen) {
      job_.wait(seen, std::memory_order_acquire);
      continue;
    }
    seen = job;
    if (number < helpers_.load(std::memory_order_relaxed)) {
      while (run_next(job)) {
      }
    }
  }
}

}  // namespace embert::cpu

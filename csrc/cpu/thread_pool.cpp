#include "cpu/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

namespace embert::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread polls for the next job before it sleeps: some 10 µs lie between two calls of a forward pass. A
// longer time would take the core from other processes.
constexpr auto kSearch = std::chrono::microseconds(50);
constexpr int kSpins = 32;                     // between two reads of the clock
constexpr std::uint64_t kNoTask = 0xffffffff;  // more than any job has

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool& ThreadPool::shared() {
  static ThreadPool* const pool = new ThreadPool;  // never destroyed: its threads may outlive static objects
  return *pool;
}

void ThreadPool::run_all(int threads, int tasks, Call call, const void* context) {
  std::unique_lock<std::mutex> caller(submit_mutex_, std::defer_lock);
  if (threads < 2 || tasks < 2 || !caller.try_lock()) {
    for (int task = 0; task < tasks; ++task) call(context, task);
    return;
  }
  const std::size_t workers = std::min(threads, tasks) - 1;
  while (workers_.size() < workers) {
    workers_.push_back(std::make_unique<Worker>());
    std::thread(&ThreadPool::work_loop, this, std::ref(*workers_.back())).detach();
  }
  if (++job_ == 0) ++job_;  // 0 is the number before the first job
  // A thread that still polls with the last job's number finds no task, and this precedes the writes below.
  next_.store(std::uint64_t{job_} << 32 | kNoTask, std::memory_order_relaxed);
  tasks_.store(tasks, std::memory_order_release);
  completed_.store(0, std::memory_order_relaxed);
  call_.store(call, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  next_.store(std::uint64_t{job_} << 32, std::memory_order_release);
  for (std::size_t i = 0; i < workers; ++i) {
    workers_[i]->job.store(job_, std::memory_order_release);
    workers_[i]->job.notify_one();
  }
  while (run_next(job_)) {
  }
  while (completed_.load(std::memory_order_acquire) < tasks) pause();
}

// Runs one task of a job, unless none is left.
bool ThreadPool::run_next(std::uint32_t job) {
  std::uint64_t next = next_.load(std::memory_order_acquire);
  for (;;) {
    const std::uint64_t task = next & kNoTask;
    if (next >> 32 != job || task >= std::uint64_t(tasks_.load(std::memory_order_acquire))) return false;
    const Call call = call_.load(std::memory_order_acquire);
    const void* const context = context_.load(std::memory_order_acquire);
    // If this succeeds, the job has not ended, and the values read belong to it.
    if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    call(context, static_cast<int>(task));
    completed_.fetch_add(1, std::memory_order_acq_rel);
    return true;
  }
}

void ThreadPool::work_loop(Worker& worker) {
  for (std::uint32_t last_job = 0;;) {
    std::uint32_t job = worker.job.load(std::memory_order_acquire);
    for (const auto until = Clock::now() + kSearch; job == last_job && Clock::now() < until;) {
      for (int spin = 0; job == last_job && spin < kSpins; ++spin) {
        pause();
        job = worker.job.load(std::memory_order_acquire);
      }
    }
    if (job == last_job) {
      worker.job.wait(last_job, std::memory_order_acquire);
      continue;
    }
    last_job = job;
    while (run_next(job)) {
    }
  }
}

}  // namespace embert::cpu

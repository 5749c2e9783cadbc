#include "cpu/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace embert::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread polls for the next job before it sleeps: some 10 µs lie between two calls of a forward pass. A
// longer time would take the core from other processes. Within a session it also waits for the last task of a job: to
// wake a thread takes 50 to 100 µs on a virtual machine.
constexpr auto kSearch = std::chrono::microseconds(50);
constexpr auto kSessionSearch = std::chrono::microseconds(100);
constexpr int kSpins = 32;                     // between two reads of the clock
constexpr std::uint64_t kNoTask = 0xffffffff;  // more than any job has

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // yield does nothing on most cores
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
  threads = std::min({threads, tasks, kMaxThreads});
  for (; started_ < threads; ++started_) std::thread(&ThreadPool::work_loop, this, started_).detach();
  if (++job_ == 0) ++job_;  // 0 is the number before the first job
  completed_.store(0, std::memory_order_relaxed);
  call_.store(call, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  threads_.store(threads, std::memory_order_release);
  const auto job = std::uint64_t{job_} << 32;
  for (int i = 0; i < threads; ++i) {
    Worker& worker = workers_[i];
    // A thread that still has the last job's number finds no task, and this precedes the write of `end`.
    worker.next.store(job | kNoTask, std::memory_order_relaxed);
    worker.end.store(std::int64_t{tasks} * (i + 1) / threads, std::memory_order_release);
    worker.next.store(job | std::uint64_t(std::int64_t{tasks} * i / threads), std::memory_order_release);
    if (i == 0) continue;
    worker.job.store(job_, std::memory_order_release);
    worker.job.notify_one();
  }
  run_job(0, job_);
  while (completed_.load(std::memory_order_acquire) < tasks) pause();
}

// Runs one task of a thread's range of a job, unless none is left.
bool ThreadPool::run_next(Worker& owner, std::uint32_t job) {
  std::uint64_t next = owner.next.load(std::memory_order_acquire);
  for (;;) {
    const std::uint64_t task = next & kNoTask;
    if (next >> 32 != job || task >= owner.end.load(std::memory_order_acquire)) return false;
    const Call call = call_.load(std::memory_order_acquire);
    const void* const context = context_.load(std::memory_order_acquire);
    // If this succeeds, the job has not ended, and the values read belong to it.
    if (!owner.next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      continue;
    }
    call(context, static_cast<int>(task));
    return true;
  }
}

// Runs a thread's own tasks of a job, then those that others have not begun.
void ThreadPool::run_job(int number, std::uint32_t job) {
  int tasks = 0;
  while (run_next(workers_[number], job)) ++tasks;
  if (tasks > 0) completed_.fetch_add(tasks, std::memory_order_acq_rel);
  const int threads = threads_.load(std::memory_order_acquire);
  for (int i = 1; i < threads; ++i) {
    Worker& owner = workers_[(number + i) % threads];
    while (run_next(owner, job)) completed_.fetch_add(1, std::memory_order_acq_rel);
  }
}

void ThreadPool::work_loop(int number) {
  Worker& worker = workers_[number];
  for (std::uint32_t last_job = 0;;) {
    std::uint32_t job = worker.job.load(std::memory_order_acquire);
    for (const auto start = Clock::now(); job == last_job;) {
      for (int spin = 0; job == last_job && spin < kSpins; ++spin) {
        pause();
        job = worker.job.load(std::memory_order_acquire);
      }
      const bool in_session = sessions_.load(std::memory_order_relaxed) > 0;
      if (Clock::now() - start > (in_session ? kSessionSearch : kSearch)) break;
    }
    if (job == last_job) {
      worker.job.wait(last_job, std::memory_order_acquire);
      continue;
    }
    last_job = job;
    run_job(number, job);
  }
}

}  // namespace embert::cpu

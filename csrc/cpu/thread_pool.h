// A thread pool that shares the tasks of one call at a time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace embert::cpu {

// Each thread has a range of adjacent tasks, and when it has none left, takes tasks of the others' ranges. So threads
// rarely write to one cache line, and a thread's tasks share what they read. The caller works too, and takes every task
// that no thread has begun: it waits only for tasks that another thread has begun, never for a thread that has not
// woken up.
class ThreadPool {
 public:
  // Threads are created when they are first needed, and end with the process.
  static ThreadPool& shared();

  // Runs function(0) … function(tasks - 1) on up to `threads` threads, including the caller. A concurrent caller runs
  // its tasks on its own thread only.
  template <typename Function>
  void run(int threads, int tasks, const Function& function) {
    // A task that throws ends the process: other threads still use the caller's objects.
    const auto call = [](const void* context, int task) noexcept { (*static_cast<const Function*>(context))(task); };
    run_all(threads, tasks, call, &function);
  }

  // While one of many threads exists, threads without work wait longer before they sleep: another call follows at once.
  // Few threads are woken soon, and next to other processes a longer wait took 4 % more CPU time.
  class Session {
   public:
    explicit Session(int threads) : counted_(threads > kFewThreads) { shared().sessions_ += counted_; }
    ~Session() { shared().sessions_ -= counted_; }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

   private:
    static constexpr int kFewThreads = 4;
    int counted_;
  };

 private:
  using Call = void (*)(const void* context, int task);

  // A thread and its tasks. It waits on its own word, so that a call wakes no more threads than it has work for.
  struct alignas(64) Worker {
    std::atomic<std::uint32_t> job{0};
    std::atomic<std::uint32_t> end{0};   // of its tasks of the job in the upper half of `next`
    std::atomic<std::uint64_t> next{0};  // the job's number, and the first task that no thread has begun
  };

  void run_all(int threads, int tasks, Call call, const void* context);
  bool run_next(Worker& owner, std::uint32_t job);
  void run_job(int number, std::uint32_t job);
  void work_loop(int number);

  static constexpr int kMaxThreads = 512;

  std::mutex submit_mutex_;
  std::array<Worker, kMaxThreads> workers_;  // the first one is the caller
  int started_ = 1;                          // threads that exist
  std::uint32_t job_ = 0;
  alignas(64) std::atomic<int> completed_{0};  // completed tasks of the job
  // What the threads read belongs to the job whose number their worker's `next` has, while it has.
  alignas(64) std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int> threads_{0};  // of the job
  std::atomic<int> sessions_{0};
};

}  // namespace embert::cpu

// A thread pool that shares the tasks of one call at a time, and its threads' scratch memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace embert::cpu {

// The caller works too, and takes every task that no thread has begun. So it waits only for tasks that another thread
// has begun, never for a thread that has not woken up.
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

 private:
  using Call = void (*)(const void* context, int task);

  // A thread besides the caller. It waits on its own word, so that a call wakes no more threads than it has work for.
  struct alignas(64) Worker {
    std::atomic<std::uint32_t> job{0};
  };

  void run_all(int threads, int tasks, Call call, const void* context);
  bool run_next(std::uint32_t job);
  void work_loop(Worker& worker);

  std::mutex submit_mutex_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::uint32_t job_ = 0;
  // What the threads read belongs to the job in the upper half of `next_`, while that half does not change.
  alignas(64) std::atomic<std::uint64_t> next_{0};  // the job's number, and its next task
  alignas(64) std::atomic<int> completed_{0};       // completed tasks of the job
  alignas(64) std::atomic<int> tasks_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
};

// Scratch memory that a thread keeps between calls of a kernel: at least `count` elements, with the contents from the
// last call of this kernel. `Kernel` is any unique type.
template <typename T, typename Kernel>
T* scratch(std::size_t count) {
  thread_local std::vector<T> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

}  // namespace embert::cpu

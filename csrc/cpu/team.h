// A team of threads that share the tasks of one call at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace embert::cpu {

// The caller works too, and takes whatever is left. So it waits only for tasks that another thread has begun, never for
// one that has not woken up.
class Team {
 public:
  // Threads are made when they are first needed, and end with the process.
  static Team& shared();

  // Runs function(0) … function(tasks - 1) on up to `threads` threads, of which the caller is one. Another caller of
  // the same time runs its tasks alone.
  template <typename Function>
  void run(int threads, int tasks, const Function& function) {
    const auto call = [](const void* context, int task) { (*static_cast<const Function*>(context))(task); };
    run_all(threads, tasks, call, &function);
  }

 private:
  using Call = void (*)(const void* context, int task);

  void run_all(int threads, int tasks, Call call, const void* context);
  bool run_next(std::uint32_t job);
  void work(int number);

  std::mutex caller_;
  std::vector<std::thread> threads_;
  // What the threads read belongs to the job in the upper half of `next_`, as long as that half stays.
  std::atomic<std::uint64_t> next_{0};  // the job's number, and its next task
  std::atomic<std::uint32_t> job_{0};   // the threads wait for its change
  std::atomic<int> helpers_{0}, tasks_{0}, ended_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
};

}  // namespace embert::cpu

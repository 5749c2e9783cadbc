// Kernels of one-dimensional blocks on the host, a warp at a time: its lanes are contexts that take turns at shuffles.
// To be included before a .cu file. Only for kernels whose warps do not wait for each other.
#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace on_host {

inline dim3 thread, block, grid;

class Warp {
 public:
  // Runs `lane` for each lane, with `thread` set.
  void run(int first_thread, const std::function<void()>& lane) {
    lane_ = lane;
    first_ = first_thread;
    for (int i = 0; i < 32; ++i) {
      getcontext(&contexts_[i]);
      stacks_[i].resize(kStack);
      contexts_[i].uc_stack.ss_sp = stacks_[i].data();
      contexts_[i].uc_stack.ss_size = kStack;
      contexts_[i].uc_link = &caller_;
      makecontext(&contexts_[i], [] { warp().lane_(); }, 0);
      began_[i] = ended_[i] = false;
    }
    current_ = 31;
    left_ = 32;
    getcontext(&caller_);  // a lane that ends comes back here
    if (left_ < 32) ended_[current_] = true;
    if (--left_ < 0) return;
    enter(next());
    go_on();
  }

  // What lane ^ step has given. All lanes meet twice: when all have given, and when all have taken.
  float exchanged(float given, int step) {
    const int mine = current_;
    given_[mine] = given;
    turn(mine);
    const float taken = given_[mine ^ step];
    turn(mine);
    return taken;
  }

  static Warp& warp() {
    static Warp one;
    return one;
  }

 private:
  static constexpr size_t kStack = 64 << 10;

  void enter(int lane) {
    current_ = lane;
    thread = dim3(first_ + lane, 0, 0);
  }
  int next() const {
    int lane = (current_ + 1) % 32;
    while (ended_[lane]) lane = (lane + 1) % 32;
    return lane;
  }
  __attribute__((noinline)) void turn(int mine) {
    enter(next());
    if (current_ != mine && __builtin_setjmp(places_[mine]) == 0) go_on();
  }
  // As the current lane. Contexts alone would do, at a system call each time.
  __attribute__((noinline, noreturn)) void go_on() {
    if (began_[current_]) __builtin_longjmp(places_[current_], 1);
    began_[current_] = true;
    setcontext(&contexts_[current_]);
    std::abort();
  }

  std::function<void()> lane_;
  ucontext_t caller_, contexts_[32];
  void* places_[32][5];
  std::vector<char> stacks_[32];
  bool began_[32] = {}, ended_[32] = {};
  float given_[32] = {};
  int current_ = 0, first_ = 0, left_ = 0;
};

template <typename... Parameters, typename... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  grid = config->gridDim;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x)
      for (unsigned first = 0; first < config->blockDim.x; first += 32) {
        block = dim3(x, y, 0);
        Warp::warp().run(int(first), [&] { kernel(arguments...); });
      }
  return cudaSuccess;
}

}  // namespace on_host

#define cudaLaunchKernelEx on_host::launch
#include "common/launch.h"  // before names that it has, too
#define __launch_bounds__(...)
#define threadIdx on_host::thread
#define blockIdx on_host::block
#define gridDim on_host::grid

using std::max;
using std::min;
inline float __shfl_xor_sync(unsigned, float value, int step) {
  return on_host::Warp::warp().exchanged(value, step);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
template <typename T>
T __ldg(const T* at) {
  return *at;
}

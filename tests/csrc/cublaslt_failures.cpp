// csrc/gemm/cublaslt.cpp before a library that fails: call 0, call 1, … until a whole product goes through. Arguments:
// the stand-in's path, and the status that a failing call returns. Prints what each failure said, and what still lives.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "gemm/gemm.h"
#include "no_device.h"
#include "ops/elementwise.h"

namespace {
int allocations = 0;
}  // namespace

extern "C" {
cudaError_t cudaMalloc(void** address, size_t bytes) {
  ++allocations;
  *address = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  if (address != nullptr) --allocations;
  std::free(address);
  return cudaSuccess;
}
}

using namespace embert;

int main(int count, char** arguments) {
  if (count < 3) return 2;
  void* const library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 3;
  int& living = *static_cast<int*>(dlsym(library, "stand_in_living"));
  int& calls_left = *static_cast<int*>(dlsym(library, "stand_in_calls_left"));
  *static_cast<int*>(dlsym(library, "stand_in_failure")) = std::atoi(arguments[2]);
  float x[64], residual[64], y[64], bias[8], weight[64] = {};
  for (int call = 0;; ++call) {
    Status status;
    {
      std::unique_ptr<GemmProvider> provider;
      std::unique_ptr<Linear> linear;
      LinearWeights weights;
      weights.weight = weight, weights.bias = bias;
      weights.n = weights.k = 8;
      int parts = 0;
      calls_left = call;
      status = make_cublaslt(DType::kFloat32, arguments[1], provider);
      if (status.ok()) status = provider->prepare(weights, {}, linear);
      if (status.ok()) status = linear->run({x}, {residual}, 5, y, nullptr, parts, {});
      const int left = calls_left;
      calls_left = -1;
      if (status.ok() && left > 0) {  // it took fewer calls than that
        std::printf("calls %d\n", call - left);
        return 0;
      }
    }
    std::printf("%d %s living=%d\n", call,
                status.ok()        ? "fine"
                : status.is_lost() ? "lost"
                                   : "refused",
                living + allocations);
  }
}

// The driver's libraries of a machine with two GPUs, for machines with none; compiled by test_gpu.py under both names,
// libcuda.so.1 and libnvidia-ml.so.1. CUDA's device 0 is NVML's second: only their PCI addresses agree.
#include <string.h>

enum { NOT_INITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

static const char* const addresses[2] = {"0000:65:00.0", "0000:17:00.0"};
static int driver_ready, nvml_ready;

int cuInit(unsigned flags) { return (int)flags | (driver_ready = 1, 0); }

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return !driver_ready ? NOT_INITIALIZED : ordinal < 2 ? 0 : NOT_FOUND;
}

int cuDeviceGetPCIBusId(char* address, int length, int device) {
  strncpy(address, addresses[device], (size_t)length);
  return 0;
}

int nvmlInit_v2(void) { return nvml_ready = 1, 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* address, const char** handle) {
  for (int i = 0; nvml_ready && i < 2; ++i)
    if (strcmp(address, *handle = addresses[i]) == 0) return 0;
  return NOT_FOUND;
}

struct memory {  // nvmlMemory_v2_t
  unsigned version;
  unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(const char* handle, struct memory* memory) {
  if (memory->version != (sizeof(struct memory) | 2 << 24)) return INVALID_ARGUMENT;
  memory->total = 80ull << 30, memory->reserved = 1ull << 30, memory->used = (handle == addresses[0] ? 21ull : 75ull) << 30;
  memory->free = memory->total - memory->reserved - memory->used;
  return 0;
}

int nvmlDeviceGetUtilizationRates(const char* handle, unsigned rates[2]) {  // per cent: kernels, memory
  rates[0] = handle == addresses[0] ? 87 : 3, rates[1] = 40;
  return 0;
}

int nvmlDeviceGetPowerUsage(const char* handle, unsigned* milliwatts) {
  *milliwatts = 412500;
  return handle == addresses[0] ? 0 : NOT_SUPPORTED;
}

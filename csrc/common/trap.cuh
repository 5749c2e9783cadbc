// The body of a kernel that needs sm_90a when it is compiled for any other architecture.
#pragma once

// A trap fails the launch, which the host sees. A body that returned would leave rows unwritten, and they would be
// pooled and normalized like valid ones. The PTX has the kernel's name.
#define EMBERT_TRAP(kernel) asm volatile("// " kernel ": not compiled for sm_90a\n\ttrap;")

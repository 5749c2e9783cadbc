// What a kernel that needs sm_90a compiles to for any other architecture.
#pragma once

// A trap fails the launch, which the host sees. A body that returned would leave rows that nobody wrote, and they pool
// and normalize like vectors. The kernel's name stands in the PTX.
#define EMBERT_TRAP(kernel) asm volatile("// " kernel ": not compiled for sm_90a\n\ttrap;")

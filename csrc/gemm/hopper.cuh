// PTX of sm_90a that the Hopper matrix product is made of: mbarriers, the tensor copy engine (TMA), wgmma.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "../kernels/cluster.cuh"
#include "../kernels/mma.cuh"

namespace embert::hopper {

// The body of a kernel that needs sm_90a, in a build for anything else: an error that the host sees, never rows that
// nobody wrote. The name stands in the PTX.
#define EMBERT_TRAP(kernel) asm volatile("// " kernel ": not compiled for sm_90a\n\ttrap;")

// --- mbarrier: counts arrivals and bytes; flips its phase when both are complete
// ----------------------------------------

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// All of the cluster's barriers are there, once those who made them have called the fence above.
__device__ __forceinline__ void wait_for_cluster_barriers() {
  cluster_arrive_relaxed();
  cluster_wait();
}
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier at the same place in another block of the cluster (or this one).
__device__ __forceinline__ void arrive_in_cluster(uint32_t barrier, uint32_t block) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
// The default scope on purpose: at cluster scope every wait and arrival would order all memory, at twice the step's
// time.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// Whether the phase is complete, without waiting for it.
__device__ __forceinline__ bool test_barrier(uint32_t barrier, uint32_t phase) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(phase)
      : "memory");
  return done != 0;
}

// --- flags in memory, between blocks of a launch
// ------------------------------------------------------------------------------------------

__device__ __forceinline__ void set_flag(int* flag) {
  asm volatile("fence.acq_rel.gpu;\nst.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ void wait_flag(const int* flag) {
  int set = 0;
  while (set == 0) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(set) : "l"(flag) : "memory");
}

// --- warps
// ---------------------------------------------------------------------------------------------------------------

// Which warp of the block this is. Read from lane 0, so that the compiler knows it to be the same in all of them: what
// is computed below a branch on it, wgmma's operands above all, then stays in uniform registers. Without, four moves
// from one kind of register to the other (R2UR) stand before every wgmma.
__device__ __forceinline__ int warp_of_block() {
  return __shfl_sync(~0u, threadIdx.x / 32, 0);
}

// The lane, as it is read here: the compiler keeps nothing that it makes of it from before.
__device__ __forceinline__ int lane_of_warp() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// True in one lane of a whole warp. The compiler then knows that one thread goes on, and spares the loop that it
// otherwise puts around every instruction that takes uniform registers.
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, chosen;\n}"
      : "=r"(elected));
  return elected != 0;
}

// --- tensor copies of a box of a 2-D matrix (column, row)
// -------------------------------------------------------------

__device__ __forceinline__ void load_box(const CUtensorMap* map, uint32_t to, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
// To the same place in every block of `mask`, completing on each one's own barrier.
__device__ __forceinline__ void load_box_for(uint16_t mask, const CUtensorMap* map, uint32_t to, uint32_t barrier,
                                             int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, "
      "%4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(mask)
      : "memory");
}
// The same of a matrix mapped in chunks of 64 columns: some neighbouring chunks' boxes, one after another.
__device__ __forceinline__ void load_boxes(const CUtensorMap* map, uint32_t to, uint32_t barrier, int chunk, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(chunk)
      : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row)
               : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most kLeft committed groups of stores still have to read shared memory.
template <int kLeft>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
// What ordinary stores put into shared memory becomes visible to the copy engine.
__device__ __forceinline__ void fence_for_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Of a kernel's parameters, first of all: a copy that finds no descriptor in the cache fetches it before anything else.
template <typename... Maps>
__device__ __forceinline__ void prefetch_maps(const Maps&... maps) {
  (..., [](const CUtensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }(maps));
}

// Rows of 128 bytes; the engine swaps 16-byte chunk c of row r to place c ^ (r mod 8), so that a column meets all
// banks.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// A read that the compiler is asked to leave where it is written: an ordinary one it puts off until its value is
// needed, which saves it registers.
__device__ __forceinline__ void load_now(uint32_t address, float2& to) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to.x), "=f"(to.y) : "r"(address));
}
__device__ __forceinline__ void load_now(uint32_t address, float4& to) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to.x), "=f"(to.y), "=f"(to.z), "=f"(to.w)
               : "r"(address));
}
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// --- wgmma
// ---------------------------------------------------------------------------------------------------------------

// A K-major operand of 64-element (128-byte) swizzled rows: 8 rows span 1 024 bytes.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 16) | ((address & 0x3FFFF) >> 4);
}
// The same of 32-element (64-byte) swizzled rows. Both serve a right operand of rows of K as well.
__device__ __forceinline__ uint64_t narrow_operand(uint32_t address) {
  return (uint64_t(2) << 62) | (uint64_t(512 >> 4) << 32) | (uint64_t(1) << 16) | ((address & 0x3FFFF) >> 4);
}
// The same operand, so many bytes on: along its swizzled rows, or whole boxes. Only the low half changes, which spares
// the products' loop an addition with carry.
__device__ __forceinline__ uint64_t further(uint64_t operand, int bytes) {
  return (operand & 0xFFFFFFFF00000000u) | (uint32_t(operand) + (bytes >> 4));
}
__device__ __forceinline__ void fence_registers() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// To the compiler these accumulators are what they are from here on: it knows nothing of products under way, and might
// else read them before a wait that does not name them.
template <int n>
__device__ __forceinline__ void are_complete(float (&accumulators)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}
template <int m, int n>
__device__ __forceinline__ void are_complete(float (&accumulators)[m][n]) {
#pragma unroll
  for (int i = 0; i < m; ++i) are_complete(accumulators[i]);
}
// Before accumulators are read: waits for all products, theirs among them.
template <typename Accumulators>
__device__ __forceinline__ void finish_products(Accumulators& accumulators) {
  wait_products<0>();
  are_complete(accumulators);
}

#define EMBERT_F8(i)                                                                                          \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
      "+f"(c[i + 7])
#define EMBERT_WGMMA_256(type)                                                                                    \
  asm volatile(                                                                                                   \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                                           \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                                \
      " "                                                                                                         \
      "{"                                                                                                         \
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                    \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                                          \
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                          \
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"                                          \
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                                          \
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"                                          \
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"                              \
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"                           \
      "}, %128, %129, add, 1, 1, 0, 0;\n}"                                                                        \
      : EMBERT_F8(0), EMBERT_F8(8), EMBERT_F8(16), EMBERT_F8(24), EMBERT_F8(32), EMBERT_F8(40), EMBERT_F8(48),    \
        EMBERT_F8(56), EMBERT_F8(64), EMBERT_F8(72), EMBERT_F8(80), EMBERT_F8(88), EMBERT_F8(96), EMBERT_F8(104), \
        EMBERT_F8(112), EMBERT_F8(120)                                                                            \
      : "l"(a), "l"(b), "r"(int(add)))
#define EMBERT_WGMMA_128(type)                                                                                        \
  asm volatile(                                                                                                       \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                                                \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                                    \
      " "                                                                                                             \
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%"  \
      "29,"                                                                                                           \
      "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%" \
      "57,"                                                                                                           \
      "%58,%59,%60,%61,%62,%63}, %64, %65, add, 1, 1, 0, 0;\n}"                                                       \
      : EMBERT_F8(0), EMBERT_F8(8), EMBERT_F8(16), EMBERT_F8(24), EMBERT_F8(32), EMBERT_F8(40), EMBERT_F8(48),        \
        EMBERT_F8(56)                                                                                                 \
      : "l"(a), "l"(b), "r"(int(add)))
#define EMBERT_WGMMA_64(type)                                                                                        \
  asm volatile(                                                                                                      \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                    \
      " "                                                                                                            \
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%" \
      "29,"                                                                                                          \
      "%30,%31}, %32, %33, add, 1, 1, 0, 0;\n}"                                                                      \
      : EMBERT_F8(0), EMBERT_F8(8), EMBERT_F8(16), EMBERT_F8(24)                                                     \
      : "l"(a), "l"(b), "r"(int(add)))
#define EMBERT_WGMMA_32(type)                                                                  \
  asm volatile(                                                                                \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"                                         \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                              \
      " "                                                                                      \
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add, 1, 1, 0, 0;\n}" \
      : EMBERT_F8(0), EMBERT_F8(8)                                                             \
      : "l"(a), "l"(b), "r"(int(add)))
// c[64 × kN] (+)= a[64 × 16] · b[kN × 16]ᵀ by the whole warpgroup. Warp w holds rows 16w …; within it, c[4j + i] is
// laid out as an m16n8 accumulator of columns 8j … 8j + 7.
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[128], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_256("f16");
  } else {
    EMBERT_WGMMA_256("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[64], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_128("f16");
  } else {
    EMBERT_WGMMA_128("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[32], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_64("f16");
  } else {
    EMBERT_WGMMA_64("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[16], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_32("f16");
  } else {
    EMBERT_WGMMA_32("bf16");
  }
}

// The same with a[64 × 16] in registers (as an m16n8k16 left operand of each warp's 16 rows) and b as rows of K:
// b[16 × 64] or [16 × 32], of swizzled rows of 128 or 64 bytes.
#define EMBERT_WGMMA_RS_64(type)                                                                                   \
  asm volatile(                                                                                                    \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                                             \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                  \
      " "                                                                                                          \
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                    \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1, 1;\n}" \
      : EMBERT_F8(0), EMBERT_F8(8), EMBERT_F8(16), EMBERT_F8(24)                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
#define EMBERT_WGMMA_RS_32(type)                                                                          \
  asm volatile(                                                                                           \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"                                                    \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                         \
      " "                                                                                                 \
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, add, 1, 1, 1;\n}" \
      : EMBERT_F8(0), EMBERT_F8(8)                                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
template <typename T>
__device__ __forceinline__ void multiply_rows(float (&c)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_RS_64("f16");
  } else {
    EMBERT_WGMMA_RS_64("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void multiply_rows(float (&c)[16], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_RS_32("f16");
  } else {
    EMBERT_WGMMA_RS_32("bf16");
  }
}

// c[64 × 192] (+)= a[64 × 16] · b[192 × 16]ᵀ, a likewise in registers, b of rows of K as for `multiply`.
#define EMBERT_WGMMA_RS_192(type)                                                                              \
  asm volatile(                                                                                                \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %101, 0;\n"                                                        \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type                                             \
      " "                                                                                                      \
      "{"                                                                                                      \
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                 \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                                       \
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                       \
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"                                       \
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                                       \
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"                                        \
      "}, {%96,%97,%98,%99}, %100, add, 1, 1, 0;\n}"                                                           \
      : EMBERT_F8(0), EMBERT_F8(8), EMBERT_F8(16), EMBERT_F8(24), EMBERT_F8(32), EMBERT_F8(40), EMBERT_F8(48), \
        EMBERT_F8(56), EMBERT_F8(64), EMBERT_F8(72), EMBERT_F8(80), EMBERT_F8(88)                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
template <typename T>
__device__ __forceinline__ void multiply_held(float (&c)[96], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_RS_192("f16");
  } else {
    EMBERT_WGMMA_RS_192("bf16");
  }
}

#undef EMBERT_F8
#undef EMBERT_WGMMA_RS_64
#undef EMBERT_WGMMA_RS_192
#undef EMBERT_WGMMA_RS_32
#undef EMBERT_WGMMA_256
#undef EMBERT_WGMMA_128
#undef EMBERT_WGMMA_64
#undef EMBERT_WGMMA_32

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Barriers among some of a block's threads; the second for those that need not wait.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace embert::hopper

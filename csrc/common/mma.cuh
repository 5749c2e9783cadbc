// Matrix instructions: mma (sm_80), and wgmma of 16-bit types and of int8 (sm_90a).
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/numeric.cuh"

namespace embert {

// The warp-level matrix instruction of sm_80 and later.

// c[16×8] += a[16×16]·b[16×8]. With g = lane / 4 and t = 2·(lane % 4), c holds (g, t), (g, t+1), (g+8, t), (g+8, t+1).
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<half_t>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<bfloat_t>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                       uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace embert

namespace embert::sm90 {

// wgmma (sm_90a): matrix products of a warpgroup, asynchronous, with operands in shared memory.

// The descriptor of a K-major operand with swizzled rows of 64 elements (128 bytes): 8 rows span 1 024 bytes.
__device__ __forceinline__ uint64_t make_descriptor(uint32_t address) {
  return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 16) | ((address & 0x3FFFF) >> 4);
}
// The descriptor with this low half.
__device__ __forceinline__ uint64_t descriptor_of(uint32_t low) {
  return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | low;
}
// The same for swizzled rows of 32 elements (64 bytes). Both also describe a right operand whose rows run along K.
__device__ __forceinline__ uint64_t make_narrow_descriptor(uint32_t address) {
  return (uint64_t(2) << 62) | (uint64_t(512 >> 4) << 32) | (uint64_t(1) << 16) | ((address & 0x3FFFF) >> 4);
}
// The descriptor of a right operand whose rows run along K, in boxes of 64 columns that lie `box_bytes` apart.
__device__ __forceinline__ uint64_t make_boxed_descriptor(uint32_t address, int box_bytes) {
  return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(box_bytes >> 4) << 16) |
         ((address & 0x3FFFF) >> 4);
}
// The operand advanced by `bytes`, along its swizzled rows or by whole boxes. Only the low half changes, which saves
// the main loop an addition with carry.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t operand, int bytes) {
  return (operand & 0xFFFFFFFF00000000u) | (uint32_t(operand) + (bytes >> 4));
}
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Orders accesses to the accumulators. The compiler does not know that products are in flight, and may otherwise read
// accumulators before a wait that does not name them.
template <int n>
__device__ __forceinline__ void fence_accumulators(float (&accumulators)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}
template <int n>
__device__ __forceinline__ void fence_accumulators(int (&accumulators)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(accumulators[i])::"memory");
}
template <typename Sum, int m, int n>
__device__ __forceinline__ void fence_accumulators(Sum (&accumulators)[m][n]) {
#pragma unroll
  for (int i = 0; i < m; ++i) fence_accumulators(accumulators[i]);
}
// Waits for all products in flight, so that the accumulators can be read.
template <typename Accumulators>
__device__ __forceinline__ void wgmma_wait_all(Accumulators& accumulators) {
  wgmma_wait<0>();
  fence_accumulators(accumulators);
}

// The registers of accumulators as PTX names them, and the same as operands of an asm statement: constraint(c[i]) and
// on.
#define EMBERT_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define EMBERT_NAMES_32 EMBERT_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define EMBERT_NAMES_48 EMBERT_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define EMBERT_NAMES_64 EMBERT_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define EMBERT_NAMES_80 EMBERT_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define EMBERT_NAMES_96 EMBERT_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define EMBERT_NAMES_112 EMBERT_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define EMBERT_NAMES_128 \
  EMBERT_NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define EMBERT_OPERANDS_4(constraint, i) \
  constraint(c[i]), constraint(c[i + 1]), constraint(c[i + 2]), constraint(c[i + 3])
#define EMBERT_OPERANDS_16(constraint, i)                                                                       \
  EMBERT_OPERANDS_4(constraint, i), EMBERT_OPERANDS_4(constraint, i + 4), EMBERT_OPERANDS_4(constraint, i + 8), \
      EMBERT_OPERANDS_4(constraint, i + 12)
#define EMBERT_OPERANDS_32(constraint, i) EMBERT_OPERANDS_16(constraint, i), EMBERT_OPERANDS_16(constraint, i + 16)
#define EMBERT_OPERANDS_64(constraint, i) EMBERT_OPERANDS_32(constraint, i), EMBERT_OPERANDS_32(constraint, i + 32)
#define EMBERT_OPERANDS_96(constraint, i) EMBERT_OPERANDS_64(constraint, i), EMBERT_OPERANDS_32(constraint, i + 64)
#define EMBERT_OPERANDS_128(constraint, i) EMBERT_OPERANDS_64(constraint, i), EMBERT_OPERANDS_64(constraint, i + 64)

// One instruction: c (+)= a · b for `count` accumulators of a thread. `shape`: its M, N, K and types; `a_b`, `adds`:
// how PTX numbers a, b and `add`, after the accumulators; `modes`: scales and layouts; then a and b as operands.
#define EMBERT_WGMMA(shape, count, constraint, a_b, adds, modes, ...)                                   \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " adds ", 0;\nwgmma.mma_async.sync.aligned." shape \
               " {" EMBERT_NAMES_##count "}, " a_b ", add" modes ";\n}"                                 \
               : EMBERT_OPERANDS_##count(constraint, 0)                                                 \
               : __VA_ARGS__, "r"(int(add)))
#define EMBERT_REGISTERS_OF_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// The same for either of the 16-bit types.
#define EMBERT_WGMMA_16_BIT(columns, count, a_b, adds, modes, ...)                                \
  if constexpr (std::is_same_v<T, half_t>) {                                                      \
    EMBERT_WGMMA("m64n" columns "k16.f32.f16.f16", count, "+f", a_b, adds, modes, __VA_ARGS__);   \
  } else {                                                                                        \
    EMBERT_WGMMA("m64n" columns "k16.f32.bf16.bf16", count, "+f", a_b, adds, modes, __VA_ARGS__); \
  }

// wgmma<T>(c, a, b, add) with both operands in shared memory, by the whole warpgroup: c[64 × N] (+)= a[64 × K] ·
// b[N × K]ᵀ. N is twice the accumulators of a thread, and K is 32 bytes: 16 elements of 16 bits, or 32 of int8, whose
// sums are exact in INT32. Warp w holds rows 16w …; within it, c[4j + i] is laid out as an m16n8 accumulator of columns
// 8j … 8j + 7.
#define EMBERT_DEFINE_WGMMA(columns, count, a_b, adds)                                         \
  template <typename T>                                                                        \
  __device__ __forceinline__ void wgmma(float (&c)[count], uint64_t a, uint64_t b, bool add) { \
    EMBERT_WGMMA_16_BIT(columns, count, a_b, adds, ", 1, 1, 0, 0", "l"(a), "l"(b));            \
  }                                                                                            \
  template <typename T>                                                                        \
  __device__ __forceinline__ void wgmma(int (&c)[count], uint64_t a, uint64_t b, bool add) {   \
    EMBERT_WGMMA("m64n" columns "k32.s32.s8.s8", count, "+r", a_b, adds, "", "l"(a), "l"(b));  \
  }
EMBERT_DEFINE_WGMMA("32", 16, "%16, %17", "%18")
EMBERT_DEFINE_WGMMA("64", 32, "%32, %33", "%34")
EMBERT_DEFINE_WGMMA("128", 64, "%64, %65", "%66")
EMBERT_DEFINE_WGMMA("256", 128, "%128, %129", "%130")

// The same with a in registers, as the left operand of mma of each warp's 16 rows: m16n8k16, of int8 m16n8k32.
template <typename T>
__device__ __forceinline__ void wgmma_rs(float (&c)[96], const uint32_t (&a)[4], uint64_t b, bool add) {
  EMBERT_WGMMA_16_BIT("192", 96, "{%96,%97,%98,%99}, %100", "%101", ", 1, 1, 0", EMBERT_REGISTERS_OF_A, "l"(b));
}
#define EMBERT_DEFINE_WGMMA_RS(columns, count, a_b, adds)                                                    \
  __device__ __forceinline__ void wgmma_rs(int (&c)[count], const uint32_t (&a)[4], uint64_t b, bool add) {  \
    EMBERT_WGMMA("m64n" columns "k32.s32.s8.s8", count, "+r", a_b, adds, "", EMBERT_REGISTERS_OF_A, "l"(b)); \
  }
EMBERT_DEFINE_WGMMA_RS("128", 64, "{%64,%65,%66,%67}, %68", "%69")
EMBERT_DEFINE_WGMMA_RS("256", 128, "{%128,%129,%130,%131}, %132", "%133")

// The same of 16 bits with rows of b that run along K, b[16 × N]: swizzled rows of 64 or 128 bytes, and from N = 128 on
// boxes of 64 columns (make_boxed_descriptor).
#define EMBERT_DEFINE_WGMMA_RS_MN_MAJOR(columns, count, a_b, adds)                                                     \
  template <typename T>                                                                                                \
  __device__ __forceinline__ void wgmma_rs_mn_major(float (&c)[count], const uint32_t (&a)[4], uint64_t b, bool add) { \
    EMBERT_WGMMA_16_BIT(columns, count, a_b, adds, ", 1, 1, 1", EMBERT_REGISTERS_OF_A, "l"(b));                        \
  }
EMBERT_DEFINE_WGMMA_RS_MN_MAJOR("32", 16, "{%16,%17,%18,%19}, %20", "%21")
EMBERT_DEFINE_WGMMA_RS_MN_MAJOR("64", 32, "{%32,%33,%34,%35}, %36", "%37")
EMBERT_DEFINE_WGMMA_RS_MN_MAJOR("128", 64, "{%64,%65,%66,%67}, %68", "%69")
EMBERT_DEFINE_WGMMA_RS_MN_MAJOR("256", 128, "{%128,%129,%130,%131}, %132", "%133")

}  // namespace embert::sm90

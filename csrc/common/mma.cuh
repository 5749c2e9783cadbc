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

#define EMBERT_FLOATS_8(i)                                                                                    \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
      "+f"(c[i + 7])
#define EMBERT_WGMMA_256(type)                                                                                     \
  asm volatile(                                                                                                    \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                                            \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                                 \
      " "                                                                                                          \
      "{"                                                                                                          \
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                     \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                                           \
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                           \
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"                                           \
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                                           \
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"                                           \
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"                               \
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"                            \
      "}, %128, %129, add, 1, 1, 0, 0;\n}"                                                                         \
      : EMBERT_FLOATS_8(0), EMBERT_FLOATS_8(8), EMBERT_FLOATS_8(16), EMBERT_FLOATS_8(24), EMBERT_FLOATS_8(32),     \
        EMBERT_FLOATS_8(40), EMBERT_FLOATS_8(48), EMBERT_FLOATS_8(56), EMBERT_FLOATS_8(64), EMBERT_FLOATS_8(72),   \
        EMBERT_FLOATS_8(80), EMBERT_FLOATS_8(88), EMBERT_FLOATS_8(96), EMBERT_FLOATS_8(104), EMBERT_FLOATS_8(112), \
        EMBERT_FLOATS_8(120)                                                                                       \
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
      : EMBERT_FLOATS_8(0), EMBERT_FLOATS_8(8), EMBERT_FLOATS_8(16), EMBERT_FLOATS_8(24), EMBERT_FLOATS_8(32),        \
        EMBERT_FLOATS_8(40), EMBERT_FLOATS_8(48), EMBERT_FLOATS_8(56)                                                 \
      : "l"(a), "l"(b), "r"(int(add)))
#define EMBERT_WGMMA_64(type)                                                                                        \
  asm volatile(                                                                                                      \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                    \
      " "                                                                                                            \
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%" \
      "29,"                                                                                                          \
      "%30,%31}, %32, %33, add, 1, 1, 0, 0;\n}"                                                                      \
      : EMBERT_FLOATS_8(0), EMBERT_FLOATS_8(8), EMBERT_FLOATS_8(16), EMBERT_FLOATS_8(24)                             \
      : "l"(a), "l"(b), "r"(int(add)))
#define EMBERT_WGMMA_32(type)                                                                  \
  asm volatile(                                                                                \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"                                         \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                              \
      " "                                                                                      \
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add, 1, 1, 0, 0;\n}" \
      : EMBERT_FLOATS_8(0), EMBERT_FLOATS_8(8)                                                 \
      : "l"(a), "l"(b), "r"(int(add)))
// c[64 × kN] (+)= a[64 × 16] · b[kN × 16]ᵀ by the whole warpgroup. Warp w holds rows 16w …; within it, c[4j + i] is
// laid out as an m16n8 accumulator of columns 8j … 8j + 7.
template <typename T>
__device__ __forceinline__ void wgmma(float (&c)[128], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_256("f16");
  } else {
    EMBERT_WGMMA_256("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void wgmma(float (&c)[64], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_128("f16");
  } else {
    EMBERT_WGMMA_128("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void wgmma(float (&c)[32], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_64("f16");
  } else {
    EMBERT_WGMMA_64("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void wgmma(float (&c)[16], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_32("f16");
  } else {
    EMBERT_WGMMA_32("bf16");
  }
}

// The same with a[64 × 16] in registers, as the m16n8k16 left operand of each warp's 16 rows. The rows of b run along
// K: b[16 × 64] or [16 × 32], with swizzled rows of 128 or 64 bytes.
#define EMBERT_WGMMA_RS_64(type)                                                                                   \
  asm volatile(                                                                                                    \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                                             \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                  \
      " "                                                                                                          \
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                    \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1, 1;\n}" \
      : EMBERT_FLOATS_8(0), EMBERT_FLOATS_8(8), EMBERT_FLOATS_8(16), EMBERT_FLOATS_8(24)                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
#define EMBERT_WGMMA_RS_32(type)                                                                          \
  asm volatile(                                                                                           \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"                                                    \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                         \
      " "                                                                                                 \
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, add, 1, 1, 1;\n}" \
      : EMBERT_FLOATS_8(0), EMBERT_FLOATS_8(8)                                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
template <typename T>
__device__ __forceinline__ void wgmma_rs_mn_major(float (&c)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_RS_64("f16");
  } else {
    EMBERT_WGMMA_RS_64("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void wgmma_rs_mn_major(float (&c)[16], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_RS_32("f16");
  } else {
    EMBERT_WGMMA_RS_32("bf16");
  }
}

// The same with b[16 × 128] or [16 × 256], in boxes of 64 columns (make_boxed_descriptor).
#define EMBERT_WGMMA_RS_128_MN(type)                                                                           \
  asm volatile(                                                                                                \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"                                                         \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                             \
      " {"                                                                                                     \
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                 \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                                       \
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                       \
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"                                        \
      "}, {%64,%65,%66,%67}, %68, add, 1, 1, 1;\n}"                                                            \
      : EMBERT_FLOATS_8(0), EMBERT_FLOATS_8(8), EMBERT_FLOATS_8(16), EMBERT_FLOATS_8(24), EMBERT_FLOATS_8(32), \
        EMBERT_FLOATS_8(40), EMBERT_FLOATS_8(48), EMBERT_FLOATS_8(56)                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
#define EMBERT_WGMMA_RS_256_MN(type)                                                                               \
  asm volatile(                                                                                                    \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %133, 0;\n"                                                            \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                                 \
      " {"                                                                                                         \
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                     \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                                           \
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                           \
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"                                           \
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                                           \
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"                                           \
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"                               \
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"                            \
      "}, {%128,%129,%130,%131}, %132, add, 1, 1, 1;\n}"                                                           \
      : EMBERT_FLOATS_8(0), EMBERT_FLOATS_8(8), EMBERT_FLOATS_8(16), EMBERT_FLOATS_8(24), EMBERT_FLOATS_8(32),     \
        EMBERT_FLOATS_8(40), EMBERT_FLOATS_8(48), EMBERT_FLOATS_8(56), EMBERT_FLOATS_8(64), EMBERT_FLOATS_8(72),   \
        EMBERT_FLOATS_8(80), EMBERT_FLOATS_8(88), EMBERT_FLOATS_8(96), EMBERT_FLOATS_8(104), EMBERT_FLOATS_8(112), \
        EMBERT_FLOATS_8(120)                                                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
template <typename T>
__device__ __forceinline__ void wgmma_rs_mn_major(float (&c)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_RS_128_MN("f16");
  } else {
    EMBERT_WGMMA_RS_128_MN("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void wgmma_rs_mn_major(float (&c)[128], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_RS_256_MN("f16");
  } else {
    EMBERT_WGMMA_RS_256_MN("bf16");
  }
}

// c[64 × 192] (+)= a[64 × 16] · b[192 × 16]ᵀ, with a in registers too, and b as for `multiply`.
#define EMBERT_WGMMA_RS_192(type)                                                                                \
  asm volatile(                                                                                                  \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %101, 0;\n"                                                          \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type                                               \
      " "                                                                                                        \
      "{"                                                                                                        \
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                   \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                                         \
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                         \
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"                                         \
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                                         \
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"                                          \
      "}, {%96,%97,%98,%99}, %100, add, 1, 1, 0;\n}"                                                             \
      : EMBERT_FLOATS_8(0), EMBERT_FLOATS_8(8), EMBERT_FLOATS_8(16), EMBERT_FLOATS_8(24), EMBERT_FLOATS_8(32),   \
        EMBERT_FLOATS_8(40), EMBERT_FLOATS_8(48), EMBERT_FLOATS_8(56), EMBERT_FLOATS_8(64), EMBERT_FLOATS_8(72), \
        EMBERT_FLOATS_8(80), EMBERT_FLOATS_8(88)                                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
template <typename T>
__device__ __forceinline__ void wgmma_rs(float (&c)[96], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, half_t>) {
    EMBERT_WGMMA_RS_192("f16");
  } else {
    EMBERT_WGMMA_RS_192("bf16");
  }
}

#undef EMBERT_FLOATS_8
#undef EMBERT_WGMMA_RS_64
#undef EMBERT_WGMMA_RS_192
#undef EMBERT_WGMMA_RS_128_MN
#undef EMBERT_WGMMA_RS_256_MN
#undef EMBERT_WGMMA_RS_32
#undef EMBERT_WGMMA_256
#undef EMBERT_WGMMA_128
#undef EMBERT_WGMMA_64
#undef EMBERT_WGMMA_32

// wgmma with int8 operands (sm_90a): exact sums in INT32. Stages, descriptors and accumulators have the layout of 16
// bits (mma.cuh), with 32 elements of K in 32 bytes where 16 bits have 16.

#define EMBERT_INTS_8(i)                                                                                      \
  "+r"(c[i]), "+r"(c[i + 1]), "+r"(c[i + 2]), "+r"(c[i + 3]), "+r"(c[i + 4]), "+r"(c[i + 5]), "+r"(c[i + 6]), \
      "+r"(c[i + 7])

// c[64 × kN] (+)= a[64 × 32] · b[kN × 32]ᵀ by the whole warpgroup.
template <typename T>
__device__ __forceinline__ void wgmma(int (&c)[128], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
      "}, %128, %129, add;\n}"
      : EMBERT_INTS_8(0), EMBERT_INTS_8(8), EMBERT_INTS_8(16), EMBERT_INTS_8(24), EMBERT_INTS_8(32), EMBERT_INTS_8(40),
        EMBERT_INTS_8(48), EMBERT_INTS_8(56), EMBERT_INTS_8(64), EMBERT_INTS_8(72), EMBERT_INTS_8(80),
        EMBERT_INTS_8(88), EMBERT_INTS_8(96), EMBERT_INTS_8(104), EMBERT_INTS_8(112), EMBERT_INTS_8(120)
      : "l"(a), "l"(b), "r"(int(add)));
}
template <typename T>
__device__ __forceinline__ void wgmma(int (&c)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, %64, %65, add;\n}"
      : EMBERT_INTS_8(0), EMBERT_INTS_8(8), EMBERT_INTS_8(16), EMBERT_INTS_8(24), EMBERT_INTS_8(32), EMBERT_INTS_8(40),
        EMBERT_INTS_8(48), EMBERT_INTS_8(56)
      : "l"(a), "l"(b), "r"(int(add)));
}
template <typename T>
__device__ __forceinline__ void wgmma(int (&c)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
      "}, %32, %33, add;\n}"
      : EMBERT_INTS_8(0), EMBERT_INTS_8(8), EMBERT_INTS_8(16), EMBERT_INTS_8(24)
      : "l"(a), "l"(b), "r"(int(add)));
}
template <typename T>
__device__ __forceinline__ void wgmma(int (&c)[16], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
      "}, %16, %17, add;\n}"
      : EMBERT_INTS_8(0), EMBERT_INTS_8(8)
      : "l"(a), "l"(b), "r"(int(add)));
}

// The same with a[64 × 32] in registers, as the m16n8k32 left operand of each warp's 16 rows.
__device__ __forceinline__ void wgmma_rs(int (&c)[128], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
      "}, {%128,%129,%130,%131}, %132, add;\n}"
      : EMBERT_INTS_8(0), EMBERT_INTS_8(8), EMBERT_INTS_8(16), EMBERT_INTS_8(24), EMBERT_INTS_8(32), EMBERT_INTS_8(40),
        EMBERT_INTS_8(48), EMBERT_INTS_8(56), EMBERT_INTS_8(64), EMBERT_INTS_8(72), EMBERT_INTS_8(80),
        EMBERT_INTS_8(88), EMBERT_INTS_8(96), EMBERT_INTS_8(104), EMBERT_INTS_8(112), EMBERT_INTS_8(120)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}
__device__ __forceinline__ void wgmma_rs(int (&c)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, {%64,%65,%66,%67}, %68, add;\n}"
      : EMBERT_INTS_8(0), EMBERT_INTS_8(8), EMBERT_INTS_8(16), EMBERT_INTS_8(24), EMBERT_INTS_8(32), EMBERT_INTS_8(40),
        EMBERT_INTS_8(48), EMBERT_INTS_8(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}

#undef EMBERT_INTS_8

}  // namespace embert::sm90

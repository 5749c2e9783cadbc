// wgmma with int8 operands (sm_90a): exact sums in INT32. Stages, descriptors and accumulators have the layout of 16
// bits (wgmma.cuh), with 32 elements of K in 32 bytes where 16 bits have 16.
#pragma once

#include <cstdint>

#include "common/wgmma.cuh"

namespace embert::sm90 {

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

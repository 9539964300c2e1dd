// NEON on 64-bit Arm. The vocabulary is explained in vec_portable.h.
#pragma once

#include <arm_neon.h>

#include "../kernels/float_environment.h"
#include "../kernels/types.h"

namespace {

constexpr const char* isa_name = "neon";

constexpr int64_t N = 4;

using F32 = float32x4_t;
using F64 = float64x2_t;
using Bits = uint32x4_t;

inline F32 set(float v) { return vdupq_n_f32(v); }
inline F32 add(F32 a, F32 b) { return vaddq_f32(a, b); }
inline F32 sub(F32 a, F32 b) { return vsubq_f32(a, b); }
inline F32 mul(F32 a, F32 b) { return vmulq_f32(a, b); }
inline F32 div(F32 a, F32 b) { return vdivq_f32(a, b); }
inline F32 fms(F32 a, F32 b, F32 c) { return vnegq_f32(vfmsq_f32(c, a, b)); }
inline F32 clamp(F32 v, float limit) { return vmaxq_f32(vminq_f32(v, set(limit)), set(-limit)); }

inline F32 widen(uint16x4_t words, bf16) { return vreinterpretq_f32_u32(vshll_n_u16(words, 16)); }
inline F32 widen(uint16x4_t words, f16) { return vcvt_f32_f16(vreinterpret_f16_u16(words)); }

// The word of a bfloat16 in the upper half of each lane.
inline uint32x4_t round_bits(F32 v) {
    uint32x4_t bits = vreinterpretq_u32_f32(v);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
}
inline uint16x4_t narrow(F32 v, bf16) { return vshrn_n_u32(round_bits(v), 16); }
inline uint16x4_t narrow(F32 v, f16) { return vreinterpret_u16_f16(vcvt_f16_f32(v)); }

inline F32 load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, F32 v) { vst1q_f32(p, v); }
template <class T>
F32 load(const T* p) {
    return widen(vld1_u16(reinterpret_cast<const uint16_t*>(p)), T{});
}
template <class T>
void store(T* p, F32 v) {
    vst1_u16(reinterpret_cast<uint16_t*>(p), narrow(v, T{}));
}
template <class T>
F32 load(const T* p, int64_t n) {
    T lanes[N] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
template <class T>
void store(T* p, F32 v, int64_t n) {
    T lanes[N];
    store(lanes, v);
    for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}
template <class T>
void store2(T* p, F32 a, F32 b) {
    store(p, a);
    store(p + N, b);
}
template <class T>
void store2_nontemporal(T* p, F32 a, F32 b) {
    store2(p, a, b);
}
inline void end_nontemporal() {}

inline F32 round_to(F32 v, float) { return v; }
inline F32 round_to(F32 v, bf16) {
    return vreinterpretq_f32_u32(vandq_u32(round_bits(v), vdupq_n_u32(0xffff0000)));
}
inline F32 round_to(F32 v, f16) { return widen(narrow(v, f16{}), f16{}); }

inline F32 nan_cleaned(F32 v) { return vbslq_f32(vceqq_f32(v, v), v, set(float_of(0x7fc00000))); }

inline Bits no_bits() { return vdupq_n_u32(0); }
inline Bits max_bits(Bits m, F32 v) { return vmaxq_u32(m, vshlq_n_u32(vreinterpretq_u32_f32(v), 1)); }
inline Bits max_bits(Bits m, const float* p) { return max_bits(m, load(p)); }
inline Bits max_bits(Bits m, const float* p, int64_t n) { return max_bits(m, load(p, n)); }
inline Bits max_bits(Bits a, Bits b, float) { return vmaxq_u32(a, b); }
template <class T>
Bits max_bits(Bits a, Bits b, T) {
    return vreinterpretq_u32_u16(vmaxq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
template <class T>
Bits max_bits(Bits m, const T* p) {
    uint16x8_t words = vshlq_n_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)), 1);
    return max_bits(m, vreinterpretq_u32_u16(words), T{});
}
template <class T>
Bits max_bits(Bits m, const T* p, int64_t n) {
    T words[2 * N] = {};
    for (int64_t i = 0; i < n; ++i) words[i] = p[i];
    return max_bits(m, words);
}
inline float largest(Bits m, float) { return float_of(vmaxvq_u32(m) >> 1); }
template <class T>
float largest(Bits m, T) {
    return widen_one(T{static_cast<uint16_t>(vmaxvq_u16(vreinterpretq_u16_u32(m)) >> 1)});
}

inline F64 set64(double v) { return vdupq_n_f64(v); }
inline F64 add(F64 a, F64 b) { return vaddq_f64(a, b); }
inline F64 sub(F64 a, F64 b) { return vsubq_f64(a, b); }
inline F64 mul(F64 a, F64 b) { return vmulq_f64(a, b); }
inline F64 div(F64 a, F64 b) { return vdivq_f64(a, b); }
inline F64 nearest(F64 v) { return vrndnq_f64(v); }
inline F64 times_two_to(F64 v, F64 n) {
    const uint64x2_t bits = vreinterpretq_u64_f64(add(n, set64(integer_magic)));
    return vreinterpretq_f64_u64(vaddq_u64(vreinterpretq_u64_f64(v), vshlq_n_u64(bits, 52)));
}
inline double total(F64 v) { return vaddvq_f64(v); }
inline F64 max(F64 a, F64 b) { return vmaxq_f64(a, b); }
inline double largest(F64 v) { return vmaxvq_f64(v); }
inline F64 fma(F64 a, F64 b, F64 sum) { return vfmaq_f64(sum, a, b); }
inline F64 fma_down(F64 a, F64 b, F64 sum) { return fma(a, b, sum); }
template <class T>
using Accumulator = F64;
inline void widen(F32 v, F64& low, F64& high) {
    low = vcvt_f64_f32(vget_low_f32(v));
    high = vcvt_high_f64_f32(v);
}
inline void widen(F32 v, F64 (&wide)[2]) { widen(v, wide[0], wide[1]); }
inline F32 narrow(F64 low, F64 high) { return vcvt_high_f32_f64(vcvt_f32_f64(low), high); }

// 2N elements as four vectors, in any order.
template <class T>
void load_widened(const T* p, F64 (&v)[4]) {
    widen(load(p), v[0], v[1]);
    widen(load(p + N), v[2], v[3]);
}

}  // namespace

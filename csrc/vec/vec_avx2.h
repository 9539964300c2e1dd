// AVX2 with FMA and F16C. The vocabulary is explained in vec_portable.h.
#pragma once

#include <immintrin.h>

#include "../kernels/float_environment.h"
#include "../kernels/types.h"

namespace {

constexpr const char* isa_name = "avx2";

constexpr int64_t N = 8;

using F32 = __m256;
using F64 = __m256d;
using Bits = __m256i;

inline F32 set(float v) { return _mm256_set1_ps(v); }
inline F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
inline F32 fms(F32 a, F32 b, F32 c) { return _mm256_fmsub_ps(a, b, c); }
// Of a NaN and a number both instructions give the second.
inline F32 clamp(F32 v, float limit) { return _mm256_max_ps(set(-limit), _mm256_min_ps(set(limit), v)); }

inline __m256i first(int64_t n) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), index);
}

inline F32 load(const float* p) { return _mm256_loadu_ps(p); }
inline F32 load(const float* p, int64_t n) { return _mm256_maskload_ps(p, first(n)); }
inline void store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
inline void store(float* p, F32 v, int64_t n) { _mm256_maskstore_ps(p, first(n), v); }
inline void store2(float* p, F32 a, F32 b) {
    store(p, a);
    store(p + N, b);
}

inline F32 widen(__m128i words, bf16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}
inline F32 widen(__m128i words, f16) { return _mm256_cvtph_ps(words); }

// The word of a bfloat16 in the upper half of each lane.
inline __m256i round_bits(F32 v) {
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}
inline __m256i narrow2(F32 a, F32 b, bf16) {
    __m256i mixed =
        _mm256_packus_epi32(_mm256_srli_epi32(round_bits(a), 16), _mm256_srli_epi32(round_bits(b), 16));
    return _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0));
}
inline __m128i narrow(F32 v, bf16) { return _mm256_castsi256_si128(narrow2(v, v, bf16{})); }
inline __m128i narrow(F32 v, f16) {
    return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline __m256i narrow2(F32 a, F32 b, f16) { return _mm256_set_m128i(narrow(b, f16{}), narrow(a, f16{})); }

template <class T>
F32 load(const T* p) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{});
}
template <class T>
F32 load(const T* p, int64_t n) {
    T words[N] = {};
    for (int64_t i = 0; i < n; ++i) words[i] = p[i];
    return load(words);
}
template <class T>
void store(T* p, F32 v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(v, T{}));
}
template <class T>
void store(T* p, F32 v, int64_t n) {
    T words[N];
    store(words, v);
    for (int64_t i = 0; i < n; ++i) p[i] = words[i];
}
template <class T>
void store2(T* p, F32 a, F32 b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow2(a, b, T{}));
}

inline void store2_nontemporal(float* p, F32 a, F32 b) {
    _mm256_stream_ps(p, a);
    _mm256_stream_ps(p + N, b);
}
template <class T>
void store2_nontemporal(T* p, F32 a, F32 b) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow2(a, b, T{}));
}
inline void end_nontemporal() { _mm_sfence(); }

inline F32 round_to(F32 v, float) { return v; }
inline F32 round_to(F32 v, bf16) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(round_bits(v), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline F32 round_to(F32 v, f16) { return widen(narrow(v, f16{}), f16{}); }

inline F32 nan_cleaned(F32 v) {
    return _mm256_blendv_ps(v, set(float_of(0x7fc00000)), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

inline Bits no_bits() { return _mm256_setzero_si256(); }
inline Bits max_bits(Bits m, F32 v) {
    __m256i bits = _mm256_castps_si256(v);
    return _mm256_max_epu32(m, _mm256_add_epi32(bits, bits));
}
inline Bits max_bits(Bits m, const float* p) { return max_bits(m, load(p)); }
inline Bits max_bits(Bits m, const float* p, int64_t n) { return max_bits(m, load(p, n)); }
template <class T>
Bits max_bits(Bits m, const T* p) {
    __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_max_epu16(m, _mm256_add_epi16(words, words));
}
template <class T>
Bits max_bits(Bits m, const T* p, int64_t n) {
    T words[2 * N] = {};
    for (int64_t i = 0; i < n; ++i) words[i] = p[i];
    return max_bits(m, words);
}
inline Bits max_bits(Bits a, Bits b, float) { return _mm256_max_epu32(a, b); }
template <class T>
Bits max_bits(Bits a, Bits b, T) {
    return _mm256_max_epu16(a, b);
}
inline uint32_t largest_lane(__m256i m) {
    __m128i r = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    r = _mm_max_epu32(r, _mm_shuffle_epi32(r, _MM_SHUFFLE(1, 0, 3, 2)));
    r = _mm_max_epu32(r, _mm_shuffle_epi32(r, _MM_SHUFFLE(2, 3, 0, 1)));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(r));
}
inline float largest(Bits m, float) { return float_of(largest_lane(m) >> 1); }
template <class T>
float largest(Bits m, T) {
    __m256i low = _mm256_and_si256(m, _mm256_set1_epi32(0xffff)), high = _mm256_srli_epi32(m, 16);
    return widen_one(T{static_cast<uint16_t>(largest_lane(_mm256_max_epu32(low, high)) >> 1)});
}

inline F64 set64(double v) { return _mm256_set1_pd(v); }
inline F64 sub(F64 a, F64 b) { return _mm256_sub_pd(a, b); }
inline F64 add(F64 a, F64 b) { return _mm256_add_pd(a, b); }
inline F64 max(F64 a, F64 b) { return _mm256_max_pd(a, b); }
inline double largest(F64 v) {
    __m128d r = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(r, _mm_unpackhi_pd(r, r)));
}
inline F64 mul(F64 a, F64 b) { return _mm256_mul_pd(a, b); }
inline F64 div(F64 a, F64 b) { return _mm256_div_pd(a, b); }
inline F64 nearest(F64 v) { return _mm256_round_pd(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F64 times_two_to(F64 v, F64 n) {
    const __m256i bits = _mm256_castpd_si256(add(n, set64(integer_magic)));
    return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(v), _mm256_slli_epi64(bits, 52)));
}
inline double total(F64 v) {
    __m128d r = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(r, _mm_unpackhi_pd(r, r)));
}
inline F64 fma(F64 a, F64 b, F64 sum) { return _mm256_fmadd_pd(a, b, sum); }
inline F64 fma_down(F64 a, F64 b, F64 sum) { return fma(a, b, sum); }
template <class T>
using Accumulator = F64;
inline void widen(F32 v, F64& low, F64& high) {
    low = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
    high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
}
inline void widen(F32 v, F64 (&wide)[2]) { widen(v, wide[0], wide[1]); }
inline F32 narrow(F64 low, F64 high) { return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low)); }
inline F64 wide4(__m128i lanes) { return _mm256_cvtps_pd(_mm_castsi128_ps(lanes)); }

// 2N elements as four vectors, in any order.
inline void load_widened(const float* p, F64 (&v)[4]) {
    for (int i = 0; i < 4; ++i) v[i] = _mm256_cvtps_pd(_mm_loadu_ps(p + 4 * i));
}
inline void load_widened(const bf16* p, F64 (&v)[4]) {
    for (int i = 0; i < 2; ++i) {
        __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + N * i));
        v[2 * i] = wide4(_mm_slli_epi32(words, 16));
        v[2 * i + 1] = wide4(_mm_and_si128(words, _mm_set1_epi32(static_cast<int>(0xffff0000))));
    }
}
inline void load_widened(const f16* p, F64 (&v)[4]) {
    for (int i = 0; i < 2; ++i) widen(load(p + N * i), v[2 * i], v[2 * i + 1]);
}

}  // namespace

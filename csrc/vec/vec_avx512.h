// AVX-512 (F, BW, VL, DQ), and its bfloat16 conversion where the compiler is told it may use it.
// The vocabulary is explained in vec_portable.h.
#pragma once

#include <immintrin.h>

#include "../kernels/types.h"

namespace {

#ifdef __AVX512BF16__
constexpr const char* isa_name = "avx512_bf16";
#else
constexpr const char* isa_name = "avx512";
#endif

constexpr int64_t N = 16;

struct TowardZero {  // every instruction that needs it says so itself
    ~TowardZero() {}
};

using F32 = __m512;
using F64 = __m512d;
using Bits = __m512i;

inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

inline F32 set(float v) { return _mm512_set1_ps(v); }
inline F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 fms(F32 a, F32 b, F32 c) { return _mm512_fmsub_ps(a, b, c); }
// Of a NaN and a number both instructions give the second.
inline F32 clamp(F32 v, float limit) { return _mm512_max_ps(set(-limit), _mm512_min_ps(set(limit), v)); }

inline F32 load(const float* p) { return _mm512_loadu_ps(p); }
inline F32 load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
inline void store(float* p, F32 v, int64_t n) { _mm512_mask_storeu_ps(p, first(n), v); }
inline void store2(float* p, F32 a, F32 b) {
    store(p, a);
    store(p + N, b);
}

inline F32 widen(__m256i words, bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}
inline F32 widen(__m256i words, f16) { return _mm512_cvtph_ps(words); }

// The word of a bfloat16 in the upper half of each lane.
inline __m512i round_bits(F32 v) {
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}
inline __m256i narrow(F32 v, bf16) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bits(v), 16)); }
inline __m256i narrow(F32 v, f16) {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline __m512i narrow2(F32 a, F32 b, f16) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(a, f16{})), narrow(b, f16{}), 1);
}
inline __m512i narrow2_in_integers(F32 a, F32 b) {
    const __m512i upper_words =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                         21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(round_bits(a), upper_words, round_bits(b));
}
inline __m512i narrow2(F32 a, F32 b, bf16) {
#ifdef __AVX512BF16__
    // VCVTNE2PS2BF16 flushes subnormals, so a vector with a zero in it is rounded again, in integers.
    __m512i words = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
    if (__builtin_expect(_mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x7fff)) == 0, 1)) return words;
#endif
    return narrow2_in_integers(a, b);
}

template <class T>
F32 load(const T* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
}
template <class T>
F32 load(const T* p, int64_t n) {
    return widen(_mm256_maskz_loadu_epi16(first(n), p), T{});
}
template <class T>
void store(T* p, F32 v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v, T{}));
}
template <class T>
void store(T* p, F32 v, int64_t n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow(v, T{}));
}
template <class T>
void store2(T* p, F32 a, F32 b) {
    _mm512_storeu_si512(p, narrow2(a, b, T{}));
}

inline void store2_nontemporal(float* p, F32 a, F32 b) {
    _mm512_stream_ps(p, a);
    _mm512_stream_ps(p + N, b);
}
template <class T>
void store2_nontemporal(T* p, F32 a, F32 b) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow2(a, b, T{}));
}
inline void end_nontemporal() { _mm_sfence(); }

inline F32 round_to(F32 v, float) { return v; }
inline F32 round_to(F32 v, bf16) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(round_bits(v), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline F32 round_to(F32 v, f16) { return widen(narrow(v, f16{}), f16{}); }

inline F32 nan_cleaned(F32 v) {
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), set(float_of(0x7fc00000)));
}

inline Bits no_bits() { return _mm512_setzero_si512(); }
inline Bits max_bits(Bits m, F32 v) {
    __m512i bits = _mm512_castps_si512(v);
    return _mm512_max_epu32(m, _mm512_add_epi32(bits, bits));
}
inline float largest(Bits m, float) { return float_of(_mm512_reduce_max_epu32(m) >> 1); }

inline Bits max_bits(Bits m, const float* p) { return max_bits(m, load(p)); }
template <class T>
Bits max_bits(Bits m, const T* p) {
    __m512i words = _mm512_loadu_si512(p);
    return _mm512_max_epu16(m, _mm512_add_epi16(words, words));
}
inline Bits max_bits(Bits m, const float* p, int64_t n) { return max_bits(m, load(p, n)); }
template <class T>
Bits max_bits(Bits m, const T* p, int64_t n) {
    __m512i words = _mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, p);
    return _mm512_max_epu16(m, _mm512_add_epi16(words, words));
}
inline Bits max_bits(Bits a, Bits b, float) { return _mm512_max_epu32(a, b); }
template <class T>
Bits max_bits(Bits a, Bits b, T) {
    return _mm512_max_epu16(a, b);
}
template <class T>
float largest(Bits m, T) {
    __m512i low = _mm512_and_si512(m, _mm512_set1_epi32(0xffff)), high = _mm512_srli_epi32(m, 16);
    return widen_one(T{static_cast<uint16_t>(_mm512_reduce_max_epu32(_mm512_max_epu32(low, high)) >> 1)});
}

inline F64 set64(double v) { return _mm512_set1_pd(v); }
inline F64 sub(F64 a, F64 b) { return _mm512_sub_pd(a, b); }
inline F64 add(F64 a, F64 b) { return _mm512_add_pd(a, b); }
inline F64 max(F64 a, F64 b) { return _mm512_max_pd(a, b); }
inline F64 mul(F64 a, F64 b) { return _mm512_mul_pd(a, b); }
inline F64 div(F64 a, F64 b) { return _mm512_div_pd(a, b); }
inline F64 nearest(F64 v) { return _mm512_roundscale_pd(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F64 times_two_to(F64 v, F64 n) { return _mm512_scalef_pd(v, n); }
inline double total(F64 v) { return _mm512_reduce_add_pd(v); }
inline double largest(F64 v) { return _mm512_reduce_max_pd(v); }
inline F64 fma(F64 a, F64 b, F64 sum) { return _mm512_fmadd_pd(a, b, sum); }
inline F64 fma_down(F64 a, F64 b, F64 sum) {
    return _mm512_fmadd_round_pd(a, b, sum, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
inline void widen(F32 v, F64& low, F64& high) {
    low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
    high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
}
inline F32 narrow(F64 low, F64 high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}
inline F64 wide8(__m256i lanes) { return _mm512_cvtps_pd(_mm256_castsi256_ps(lanes)); }

inline void widen(F32 v, F64 (&wide)[2]) { widen(v, wide[0], wide[1]); }

// Floats are widened from memory in half the time where the vector is half as long: on Zen 4, 4.8 cycles
// against 8 for the sum of 32 squares.
template <class T>
struct AccumulatorOf {
    using type = F64;
};
template <>
struct AccumulatorOf<float> {
    using type = __m256d;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

inline __m256d add(__m256d a, __m256d b) { return _mm256_add_pd(a, b); }
inline __m256d max(__m256d a, __m256d b) { return _mm256_max_pd(a, b); }
inline __m256d fma(__m256d a, __m256d b, __m256d sum) { return _mm256_fmadd_pd(a, b, sum); }
inline double total(__m256d v) {
    __m128d r = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(r, _mm_unpackhi_pd(r, r)));
}
inline double largest(__m256d v) {
    __m128d r = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(r, _mm_unpackhi_pd(r, r)));
}
inline void widen(F32 v, __m256d (&wide)[4]) {
    const __m256 half[2] = {_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)};
    for (int i = 0; i < 2; ++i) {
        wide[2 * i] = _mm256_cvtps_pd(_mm256_castps256_ps128(half[i]));
        wide[2 * i + 1] = _mm256_cvtps_pd(_mm256_extractf128_ps(half[i], 1));
    }
}

// 2N elements, in any order.
inline void load_widened(const float* p, __m256d (&v)[8]) {
    for (int i = 0; i < 8; ++i) v[i] = _mm256_cvtps_pd(_mm_loadu_ps(p + 4 * i));
}
inline void load_widened(const bf16* p, F64 (&v)[4]) {
    for (int i = 0; i < 2; ++i) {
        __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + N * i));
        v[2 * i] = wide8(_mm256_slli_epi32(words, 16));
        v[2 * i + 1] = wide8(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    }
}
inline void load_widened(const f16* p, F64 (&v)[4]) {
    for (int i = 0; i < 4; ++i)
        v[i] = _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i))));
}

}  // namespace

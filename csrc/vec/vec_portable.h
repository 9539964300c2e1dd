// The vocabulary of the kernels, in plain C++; the other vec_*.h say the same in intrinsics.
//
//   N                    floats in a vector
//   F32, F64             N floats; N/2 doubles
//   Bits                 running maximum of magnitudes, kept as integers with the sign bit shifted out: 4N
//   bytes TowardZero           while one lives, fma_down rounds toward zero, as everything else may: what
//   runs under it
//                        keeps to fma_down and exact operations, and is not inlined (fixed_sum.h)
//   load, store          N elements of float, bf16 or f16 as floats, or the first n <= N of them (the rest 0)
//   store2               2N elements
//   store2_nontemporal   2N elements to an address aligned to 64 bytes, which bypass the cache;
//   end_nontemporal
//                        orders them
//   round_to             to bf16 or f16 and back
//   nan_cleaned          NaN of any payload becomes that of set_nan
//   fms                  a * b - c, rounded once
//   fma_down             floor-and-accumulate: a * b + sum toward zero, for sums that stay positive
//   Accumulator<T>       doubles in which squares of T are summed; load_widened has 2N elements as several of
//                        them, in any order
//   clamp                to [-limit, limit]; NaN stays
//   widen, narrow        N floats as two F64 and back, to nearest
//   nearest              integer, for magnitudes below 2^51
//   times_two_to         a * 2^n for an integer n, where no exponent leaves its range
#pragma once

#include <cmath>

#include "../kernels/float_environment.h"
#include "../kernels/types.h"

namespace {

constexpr const char* isa_name = "portable";

constexpr int64_t N = 8;

struct F32 {
    float v[N];
};
struct F64 {
    double v[N / 2];
};
struct Bits {
    union {
        uint32_t lanes[N];
        uint16_t words[2 * N];
    };
};

inline F32 set(float s) {
    F32 r;
    for (auto& v : r.v) v = s;
    return r;
}
#define RMSNORM_LANEWISE(name, op)                                 \
    inline F32 name(F32 a, F32 b) {                                \
        for (int64_t i = 0; i < N; ++i) a.v[i] = a.v[i] op b.v[i]; \
        return a;                                                  \
    }
RMSNORM_LANEWISE(add, +)
RMSNORM_LANEWISE(sub, -)
RMSNORM_LANEWISE(mul, *)
RMSNORM_LANEWISE(div, /)
#undef RMSNORM_LANEWISE

inline F32 clamp(F32 a, float limit) {
    for (auto& v : a.v) v = v > limit ? limit : v < -limit ? -limit : v;
    return a;
}

template <class T>
F32 load(const T* p) {
    F32 r;
    for (int64_t i = 0; i < N; ++i) r.v[i] = widen_one(p[i]);
    return r;
}
template <class T>
F32 load(const T* p, int64_t n) {
    F32 r = set(0);
    for (int64_t i = 0; i < n; ++i) r.v[i] = widen_one(p[i]);
    return r;
}
template <class T>
void store(T* p, F32 a) {
    for (int64_t i = 0; i < N; ++i) p[i] = narrow_one(a.v[i], T{});
}
template <class T>
void store(T* p, F32 a, int64_t n) {
    for (int64_t i = 0; i < n; ++i) p[i] = narrow_one(a.v[i], T{});
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

template <class T>
F32 round_to(F32 a, T) {
    for (auto& v : a.v) v = widen_one(narrow_one(v, T{}));
    return a;
}

inline F32 nan_cleaned(F32 a) {
    for (auto& v : a.v)
        if (v != v) set_nan(v);
    return a;
}

inline Bits no_bits() { return Bits{}; }
inline Bits max_bits(Bits m, F32 a) {
    for (int64_t i = 0; i < N; ++i) {
        uint32_t bits = bits_of(a.v[i]) << 1;
        m.lanes[i] = m.lanes[i] > bits ? m.lanes[i] : bits;
    }
    return m;
}
inline Bits max_bits(Bits m, const float* p) { return max_bits(m, load(p)); }
inline Bits max_bits(Bits m, const float* p, int64_t n) { return max_bits(m, load(p, n)); }
template <class T>
Bits max_bits(Bits m, const T* p, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        uint16_t bits = uint16_t(p[i].bits << 1);
        m.words[i] = m.words[i] > bits ? m.words[i] : bits;
    }
    return m;
}
template <class T>
Bits max_bits(Bits m, const T* p) {
    return max_bits(m, p, 2 * N);
}
inline Bits max_bits(Bits a, Bits b, float) {
    for (int64_t i = 0; i < N; ++i) a.lanes[i] = a.lanes[i] > b.lanes[i] ? a.lanes[i] : b.lanes[i];
    return a;
}
template <class T>
Bits max_bits(Bits a, Bits b, T) {
    for (int64_t i = 0; i < 2 * N; ++i) a.words[i] = a.words[i] > b.words[i] ? a.words[i] : b.words[i];
    return a;
}
inline float largest(Bits m, float) {
    uint32_t r = 0;
    for (uint32_t lane : m.lanes) r = r > lane ? r : lane;
    return float_of(r >> 1);
}
template <class T>
float largest(Bits m, T) {
    uint16_t r = 0;
    for (uint16_t word : m.words) r = r > word ? r : word;
    return widen_one(T{uint16_t(r >> 1)});
}

inline F32 fms(F32 a, F32 b, F32 c) {
    // The product is exact in float64; the difference is too where c is the product rounded to float32.
    for (int64_t i = 0; i < N; ++i) a.v[i] = float(double(a.v[i]) * double(b.v[i]) - double(c.v[i]));
    return a;
}

inline F64 set64(double s) {
    F64 r;
    for (auto& v : r.v) v = s;
    return r;
}
#define RMSNORM_LANEWISE(name, op)                                     \
    inline F64 name(F64 a, F64 b) {                                    \
        for (int64_t i = 0; i < N / 2; ++i) a.v[i] = a.v[i] op b.v[i]; \
        return a;                                                      \
    }
RMSNORM_LANEWISE(add, +)
RMSNORM_LANEWISE(sub, -)
RMSNORM_LANEWISE(mul, *)
RMSNORM_LANEWISE(div, /)
#undef RMSNORM_LANEWISE
inline F64 nearest(F64 a) { return sub(add(a, set64(integer_magic)), set64(integer_magic)); }
inline F64 times_two_to(F64 a, F64 n) {
    for (int64_t i = 0; i < N / 2; ++i)
        a.v[i] = double_of(bits_of(a.v[i]) + (bits_of(n.v[i] + integer_magic) << 52));
    return a;
}
inline F64 max(F64 a, F64 b) {
    for (int64_t i = 0; i < N / 2; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline double largest(F64 a) {
    double r = a.v[0];
    for (double v : a.v) r = r > v ? r : v;
    return r;
}
inline double total(F64 a) {
    double r = 0;
    for (double v : a.v) r += v;
    return r;
}
// The product of two floats is exact in float64, so the sum alone rounds.
inline F64 fma(F64 a, F64 b, F64 sum) {
    for (int64_t i = 0; i < N / 2; ++i) sum.v[i] += a.v[i] * b.v[i];
    return sum;
}
inline F64 fma_down(F64 a, F64 b, F64 sum) { return fma(a, b, sum); }
template <class T>
using Accumulator = F64;
inline void widen(F32 a, F64& low, F64& high) {
    for (int64_t i = 0; i < N / 2; ++i) low.v[i] = a.v[i], high.v[i] = a.v[N / 2 + i];
}
inline void widen(F32 a, F64 (&wide)[2]) { widen(a, wide[0], wide[1]); }
inline F32 narrow(F64 low, F64 high) {
    F32 r;
    for (int64_t i = 0; i < N / 2; ++i) r.v[i] = float(low.v[i]), r.v[N / 2 + i] = float(high.v[i]);
    return r;
}
template <class T>
void load_widened(const T* p, F64 (&v)[4]) {
    widen(load(p), v[0], v[1]);
    widen(load(p + N), v[2], v[3]);
}

}  // namespace

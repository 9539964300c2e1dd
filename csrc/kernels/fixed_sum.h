// Sums that cannot depend on their order (docs/numerics.md, section 2), over the vocabulary of one
// instruction set.
//
// An accumulator starts at 1.5 * 2^52 quanta, so that its last bit is worth one quantum; adding toward zero
// to a positive number is then floor-and-accumulate, and every partial sum is exact.
#pragma once

#include "kernels.h"

#if defined(_MSC_VER) && !defined(__clang__)
#define RMSNORM_NOINLINE __declspec(noinline)
#define RMSNORM_INLINE __forceinline
#else
#define RMSNORM_NOINLINE __attribute__((noinline))
#define RMSNORM_INLINE __attribute__((always_inline)) inline
#endif

namespace {

using rmsnorm::Rows;
using rmsnorm::Vector;

template <class T>
T* row(Rows rows, int64_t index) {
    return static_cast<T*>(rows.data) + index * rows.stride;
}

// The rows from one on.
inline Rows from(Rows rows, int64_t row) {
    if (rows.given)
        rows.data = static_cast<char*>(rows.data) + row * rows.stride * rmsnorm::size_of(rows.dtype);
    return rows;
}

// Into the second-level cache: the first is full of the rows at work.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 2); }

inline int ceil_log2(int64_t n) {
    int log = 0;
    while ((int64_t(1) << log) < n) ++log;
    return log;
}

// 1.5 * 2^52 * q for terms below 2^exponent, q = 2^(exponent + log_cols - 51).
inline double start_value(int exponent, int log_cols) { return 1.5 * power_of_two(exponent + log_cols + 1); }

// What was added to four accumulators. Their differences from the start add exactly, in any order.
inline double drain(const F64 (&sums)[4], F64 s) {
    return total(add(add(sub(sums[0], s), sub(sums[1], s)), add(sub(sums[2], s), sub(sums[3], s))));
}

// NaN counts as larger than infinity.
template <class T>
float largest_magnitude(const T* x, int64_t cols) {
    constexpr int64_t step = 4 * N / int64_t(sizeof(T));
    Bits a = no_bits(), b = a;
    int64_t i = 0;
    for (; i + 2 * step <= cols; i += 2 * step) {
        a = max_bits(a, x + i);
        b = max_bits(b, x + i + step);
    }
    for (; i + step <= cols; i += step) a = max_bits(a, x + i);
    if (i < cols) b = max_bits(b, x + i, cols - i);
    return largest(max_bits(a, b, T{}), T{});
}

// Runs toward zero on instruction sets without a rounding mode in the instruction: nothing but exact
// operations, integers and fma_down may be done in it, and it must not be inlined where other arithmetic
// could slip in.
template <class T>
RMSNORM_NOINLINE double sum_squares_toward_zero(const T* x, int64_t cols, double start) {
    const F64 s = set64(start);
    F64 sums[4] = {s, s, s, s}, v[4];
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N) {
        widen(load(x + i), v[0], v[1]);
        widen(load(x + i + N), v[2], v[3]);
        for (int k = 0; k < 4; ++k) sums[k] = fma_down(v[k], v[k], sums[k]);
    }
    for (; i < cols; i += N) {
        widen(i + N <= cols ? load(x + i) : load(x + i, cols - i), v[0], v[1]);
        for (int k = 0; k < 2; ++k) sums[k] = fma_down(v[k], v[k], sums[k]);
    }
    return drain(sums, s);
}

template <class T>
RMSNORM_NOINLINE double fixed_sum_of_squares(const T* x, int64_t cols) {
    const float m = largest_magnitude(x, cols);
    if (!finite(m)) return double(m) * double(m);
    [[maybe_unused]] TowardZero mode;
    return sum_squares_toward_zero(x, cols, start_value(m > 0 ? 2 * exponent_of(m) : 0, ceil_log2(cols)));
}

template <class X>
RMSNORM_NOINLINE double sum_products_toward_zero(const float* u, const X* x, int64_t cols, double start) {
    const F64 s = set64(start);
    F64 sums[4] = {s, s, s, s}, a[4], b[4];
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N) {
        for (int half = 0; half < 2; ++half) {
            widen(load(u + i + half * N), a[2 * half], a[2 * half + 1]);
            widen(load(x + i + half * N), b[2 * half], b[2 * half + 1]);
        }
        for (int k = 0; k < 4; ++k) sums[k] = fma_down(a[k], b[k], sums[k]);
    }
    for (; i < cols; i += N) {
        const bool whole = i + N <= cols;
        widen(whole ? load(u + i) : load(u + i, cols - i), a[0], a[1]);
        widen(whole ? load(x + i) : load(x + i, cols - i), b[0], b[1]);
        for (int k = 0; k < 2; ++k) sums[k] = fma_down(a[k], b[k], sums[k]);
    }
    return drain(sums, s);
}

template <class X>
double fixed_sum_of_products(const float* u, const X* x, int64_t cols, float u_max, float x_max) {
    if (!finite(u_max) || !finite(x_max)) return __builtin_nan("");
    const bool zero = u_max == 0 || x_max == 0;
    [[maybe_unused]] TowardZero mode;
    return sum_products_toward_zero(
        u, x, cols, start_value(zero ? 0 : exponent_of(u_max) + exponent_of(x_max), ceil_log2(cols)));
}

}  // namespace

// Sums in ordinary arithmetic, and how far from the fixed-point sum they can be.
//
// What is wanted of a sum is one float32. Where every sum within reach of the estimate gives the same one,
// the fixed-point sum gives it too, and neither the row's largest magnitude nor a rounding mode is needed to
// know it. So the order of these sums, which differs between instruction sets, is in no result. About one
// ordinary row in a hundred has to ask fixed_sum.h. The bounds are derived in docs/numerics.md.
#pragma once

#include "fixed_sum.h"

namespace {

// Where the fixed-point sum lies.
struct Interval {
    double low, high;
};

// Whether what the two ends give is one float: zeros are told apart, and NaN is none.
inline bool settled(float low, float high) {
    return __builtin_expect(low == high && bits_of(low) == bits_of(high), 1);
}

// No square is larger than the largest of the partial sums that are kept apart: one per lane and block of
// columns.
constexpr int64_t block_cols = 4096;

// Accumulators of T that hold 2N doubles.
template <class T>
constexpr int accumulators = 2 * N * 8 / int(sizeof(Accumulator<T>));

template <class V, class Op>
V fold(const V (&v)[4], Op op) {
    return op(op(v[0], v[1]), op(v[2], v[3]));
}
template <class V, class Op>
V fold(const V (&v)[8], Op op) {
    return op(op(op(v[0], v[1]), op(v[2], v[3])), op(op(v[4], v[5]), op(v[6], v[7])));
}

// at(i, n) gives the row from i on, n elements of it ready to be read. Where the row has a NaN or an
// infinity, `low` is NaN.
template <class T, class At>
RMSNORM_INLINE Interval sum_squares(int64_t cols, int log_cols, At at) {
    constexpr int64_t step = 8 * N / int64_t(sizeof(T));  // as many bytes as 2N floats
    Accumulator<T> total{}, largest{};
    int64_t i = 0;
    do {
        const int64_t end = cols - i < block_cols ? cols : i + block_cols;
        Accumulator<T> sums[accumulators<T>] = {}, v[accumulators<T>];
        for (; i + step <= end; i += step) {
            const T* x = at(i, step);
#pragma GCC unroll 2
            for (int64_t part = 0; part < step; part += 2 * N) {
                load_widened(x + part, v);
                for (int k = 0; k < accumulators<T>; ++k) sums[k] = fma(v[k], v[k], sums[k]);
            }
        }
        for (; i < end; i += N) {
            const int64_t n = end - i < N ? end - i : N;
            const T* x = at(i, n);
            Accumulator<T> w[accumulators<T> / 2];
            widen(n == N ? load(x) : load(x, n), w);
            for (int k = 0; k < accumulators<T> / 2; ++k) sums[k] = fma(w[k], w[k], sums[k]);
        }
        total = add(total, fold(sums, [](auto a, auto b) { return add(a, b); }));
        largest = max(largest, fold(sums, [](auto a, auto b) { return max(a, b); }));
    } while (i < cols);
    const double sum = ::total(total), rounding = double(cols) * power_of_two(-52) * sum,
                 quantum = ::largest(largest) * power_of_two(log_cols - 49);
    return {sum - (double(cols) * quantum + rounding), sum + rounding};
}

struct Factors {
    F32 u, x;
};
struct ProductSum {
    Interval sum;
    float u_max, x_max;
};

// The sum of u * x, as float32 products and what their rounding left: cheaper than to widen both factors.
// at(i, n) gives n <= N of both. Both ends are NaN, which is never settled, where a factor or the sum is not
// finite: where a product leaves float32, or where so many rests of the largest products meet in one lane
// that their sum does. A rest is at most 2^103, and what two lanes join has n / N of them: that takes 2^25 N
// elements, which is 2^27 or more.
template <class At>
RMSNORM_INLINE ProductSum sum_products(int64_t cols, int log_cols, At at) {
    const double nan = __builtin_nan("");
    F64 sums[4] = {set64(0), set64(0), set64(0), set64(0)}, v[2];
    F32 rests[2] = {set(0), set(0)};
    Bits u_bits = no_bits(), x_bits = no_bits();
    auto accumulate = [&](Factors f, int k) {
        u_bits = max_bits(u_bits, f.u);
        x_bits = max_bits(x_bits, f.x);
        const F32 product = mul(f.u, f.x);
        rests[k] = add(rests[k], fms(f.u, f.x, product));
        widen(product, v);
        sums[2 * k] = add(sums[2 * k], v[0]);
        sums[2 * k + 1] = add(sums[2 * k + 1], v[1]);
    };
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N) {
        accumulate(at(i, N), 0);
        accumulate(at(i + N, N), 1);
    }
    for (; i < cols; i += N) accumulate(at(i, cols - i < N ? cols - i : N), 0);
    widen(add(rests[0], rests[1]), v);
    const double sum = total(add(fold(sums, [](F64 a, F64 b) { return add(a, b); }), add(v[0], v[1])));
    const float u_max = largest(u_bits, float{}), x_max = largest(x_bits, float{});
    // Of zeros the sum is exact.
    if (!(finite(u_max) && finite(x_max) && sum - sum == 0)) return {{nan, nan}, u_max, x_max};
    if (u_max == 0 || x_max == 0) return {{sum, sum}, u_max, x_max};
    const double n = double(cols),
                 floors = n * power_of_two(exponent_of(u_max) + exponent_of(x_max) + log_cols - 51),
                 rounding = floors * (2.5 / N + 16 / n) + n * power_of_two(-148);
    return {{sum - floors - rounding, sum + rounding}, u_max, x_max};
}

}  // namespace

// act(z) and its derivative over the vocabulary of one instruction set: the operations of docs/numerics.md.
#pragma once

#include "fixed_sum.h"

namespace {

using rmsnorm::Activation;

// The sigmoid of four vectors, step by step together: one alone waits for each of its operations.
inline void sigmoid(F64 (&z)[4]) {
    F64 n[4], f[4], square[4], p[4], q[4], e[4];
    for (int k = 0; k < 4; ++k) f[k] = mul(z[k], set64(1.4426950408889634));
    for (int k = 0; k < 4; ++k) n[k] = nearest(f[k]);
    for (int k = 0; k < 4; ++k) f[k] = sub(f[k], n[k]);
    for (int k = 0; k < 4; ++k) square[k] = mul(f[k], f[k]);
    for (int k = 0; k < 4; ++k) p[k] = add(square[k], set64(374.6464165810094));
    for (int k = 0; k < 4; ++k) q[k] = mul(square[k], set64(28.85390081777927));
    for (int k = 0; k < 4; ++k) p[k] = mul(p[k], square[k]);
    for (int k = 0; k < 4; ++k) q[k] = add(q[k], set64(2522.3357940118008));
    for (int k = 0; k < 4; ++k) p[k] = add(p[k], set64(7277.922682955102));
    for (int k = 0; k < 4; ++k) q[k] = mul(q[k], f[k]);
    for (int k = 0; k < 4; ++k) e[k] = times_two_to(add(p[k], q[k]), n[k]);
    for (int k = 0; k < 4; ++k) z[k] = div(e[k], add(sub(p[k], q[k]), e[k]));
}

// Prefetches the bytes of 2N elements from p on, where there is a p.
template <class T>
void prefetch_two(const T* p, int64_t i, void (*fetch)(const void*)) {
    for (int64_t byte = 0; p && byte < 2 * N * int64_t(sizeof(T)); byte += 64)
        fetch(reinterpret_cast<const char*>(p + i) + byte);
}

// s = sigmoid(z). Memory has nothing to do meanwhile: what is read later or written next may be prefetched.
template <class Z, class A = Z, class B = Z, class C = Z>
RMSNORM_NOINLINE void sigmoid_row(const Z* z, float* s, int64_t width, const A* read_later = nullptr,
                                  const B* also_later = nullptr, const C* write_next = nullptr) {
    for (int64_t i = 0; i < width; i += 2 * N) {
        prefetch_two(read_later, i, prefetch);
        prefetch_two(also_later, i, prefetch);
        prefetch_two(write_next, i, prefetch_to_write);
        const bool whole = i + 2 * N <= width;
        const int64_t n = width - i < N ? width - i : N,
                      rest = width - i - n;  // `rest` where it is not whole
        const F32 low = whole ? load(z + i) : load(z + i, n),
                  high = whole ? load(z + i + N) : load(z + i + n, rest);
        F64 v[4];
        widen(clamp(low, 200), v[0], v[1]);
        widen(clamp(high, 200), v[2], v[3]);
        sigmoid(v);
        if (whole) {
            store2(s + i, narrow(v[0], v[1]), narrow(v[2], v[3]));
        } else {
            store(s + i, narrow(v[0], v[1]), n);
            store(s + i + n, narrow(v[2], v[3]), rest);
        }
    }
}

// act(z) and its derivative, given s = sigmoid(z).
inline F32 activated(F32 z, F32 s, Activation activation) {
    return activation == Activation::silu ? mul(z, s) : s;
}
inline F32 activation_slope(F32 z, F32 s, Activation activation) {
    const F32 one = set(1), rest = sub(one, s);
    return mul(s, activation == Activation::silu ? add(one, mul(z, rest)) : rest);
}

// Fills a row with value(i) for the N elements from i on, or with value(i, n) for the last n. `Source` is the
// type whose NaNs a value may hand on (can_carry).
template <class Source, class T, class Value>
void fill_row(T* row, int64_t width, Value value) {
    auto clean = [](F32 v) { return can_carry<Source, T> ? nan_cleaned(v) : v; };
    int64_t i = 0;
    for (; i + 2 * N <= width; i += 2 * N) {
        const F32 a = value(i), b = value(i + N);
        store2(row + i, clean(a), clean(b));
    }
    for (; i < width; i += N) {
        const int64_t n = width - i < N ? width - i : N;
        store(row + i, clean(value(i, n)), n);
    }
}

}  // namespace

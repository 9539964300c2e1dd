// What comes before and after the norm in a forward, a function each, over the vocabulary of one instruction
// set. CONTRIBUTING.md, "Adding a stage".
#pragma once

#include <type_traits>

#include "activation.h"
#include "rotation.h"

namespace {

// ---------------------------------------------------------------- before: the residual

// t + residual.
template <bool scaled, class X, class R, class... Count>
F32 sum_of(const X* x, F32 alpha, const R* residual, Count... n) {
    const F32 t = load(x, n...);
    return add(scaled ? round_to(mul(t, alpha), X{}) : t, load(residual, n...));
}

// h = t + residual, rounded; u is h, or, if `exact`, the sum itself. In 16 bits both loops, this one and that
// over u, are limited by the conversions of their elements, and are faster one after the other.
template <class X, class R, bool scaled, bool exact, class U>
Interval add_row(const X* x, const R* residual, R* h, U* u, float factor, int64_t cols, int log_cols) {
    constexpr int64_t piece = sizeof(X) == 4 && sizeof(R) == 4 ? 2 * N : piece_cols;
    const F32 alpha = set(factor);
    auto rounded = [](F32 v) { return can_carry<X, R> ? nan_cleaned(v) : v; };
    return sum_squares<U>(cols, log_cols, [=](int64_t i, int64_t) {
        int64_t j = i;
        const int64_t end = i % piece ? i : cols - i < piece ? cols : i + piece;
        for (; j + 2 * N <= end; j += 2 * N) {
            const F32 a = sum_of<scaled>(x + j, alpha, residual + j),
                      b = sum_of<scaled>(x + j + N, alpha, residual + j + N);
            if constexpr (exact) store2(u + j, a, b);
            store2(h + j, rounded(a), rounded(b));
        }
        for (; j < end; j += N) {
            const int64_t n = end - j < N ? end - j : N;
            const F32 a = sum_of<scaled>(x + j, alpha, residual + j, n);
            if constexpr (exact) store(u + j, a, n);
            store(h + j, rounded(a), n);
        }
        return static_cast<const U*>(u + i);
    });
}

template <class X, class R, bool scaled, bool exact>
void add_before(const Forward& f, int64_t r0, int64_t count, void* u, int log_cols, Interval* sums) {
    const float alpha = float(f.alpha);  // here, where it is rounded to nearest
    for (int64_t r = 0; r < count; ++r) {
        const X* x = row<X>(f.x, r0 + r);
        const R* residual = row<R>(f.residual, r0 + r);
        R* h = row<R>(f.h, r0 + r);
        if constexpr (exact)
            sums[r] = add_row<X, R, scaled, true>(x, residual, h, static_cast<float*>(u) + r * f.cols, alpha,
                                                  f.cols, log_cols);
        else
            sums[r] = add_row<X, R, scaled, false>(x, residual, h, h, alpha, f.cols, log_cols);
    }
}

template <class X, class R>
Before add_before_of(const Forward& f) {
    const bool scaled = f.alpha != 1;
    if (rmsnorm::keeps_u(f)) return scaled ? add_before<X, R, true, true> : add_before<X, R, false, true>;
    return scaled ? add_before<X, R, true, false> : add_before<X, R, false, false>;
}

// ---------------------------------------------------------------- before and after: the gate

// u = x * act(z), in float32.
template <class X, class Z>
RMSNORM_NOINLINE void gate_row(const X* x, const Z* z, const float* s, Activation activation, float* u,
                               int64_t width) {
    fill_row<float>(u, width, [=](int64_t i, auto... n) {
        return mul(load(x + i, n...), activated(load(z + i, n...), load(s + i, n...), activation));
    });
}

template <class X, class Z>
void gate_before(const Forward& f, int64_t r0, int64_t count, void* u_given, int log_cols, Interval* sums) {
    float* const u = static_cast<float*>(u_given);
    alignas(64) float s[piece_cols];
    auto fill = [&](int64_t r, int64_t rows, float* into) {
        const int64_t later = r + rows < f.rows ? r + rows : r, width = rows * f.cols;
        const X *x = row<X>(f.x, r), *x_later = row<X>(f.x, later);
        const Z *z = row<Z>(f.gate, r), *z_later = row<Z>(f.gate, later);
        for (int64_t i = 0; i < width; i += piece_cols) {
            const int64_t n = width - i < piece_cols ? width - i : piece_cols;
            sigmoid_row(z + i, s, n, x_later + i, z_later + i);
            gate_row(x + i, z + i, s, f.activation, into + i, n);
        }
    };
    const bool joined = f.x.stride == f.cols && f.gate.stride == f.cols;
    if (joined) fill(r0, count, u);
    for (int64_t r = 0; r < count; ++r) {
        float* const row_u = u + r * f.cols;
        if (!joined) fill(r0 + r, 1, row_u);
        sums[r] = sum_squares<float>(
            f.cols, log_cols, [=](int64_t i, int64_t) { return static_cast<const float*>(row_u + i); });
    }
}

// y = n * act(z), n rounded to normed_type. y has x's type.
template <class X, class Z>
void gate_after(const Forward& f, int64_t r, int64_t begin, int64_t count, const float* n) {
    const Z* z = row<Z>(f.gate, r) + begin;
    X* y = row<X>(f.y, r) + begin;
    const Activation activation = f.activation;
    alignas(64) float sigmoids[piece_cols];
    float* const s = sigmoids;  // a lambda would copy the array itself
    sigmoid_row(z, s, count, static_cast<const Z*>(nullptr), static_cast<const Z*>(nullptr), y);
    auto multiply = [&](auto type) {
        fill_row<Z>(y, count, [=](int64_t i, auto... rest) {
            return mul(round_to(load(n + i, rest...), type),
                       activated(load(z + i, rest...), load(s + i, rest...), activation));
        });
    };
    with_type(f.normed_type, multiply);
}

// ---------------------------------------------------------------- after: a residual

// y = n + addend, n rounded to normed_type.
template <class R>
void add_after(const Forward& f, int64_t r, int64_t begin, int64_t count, const float* n) {
    const R* addend = row<R>(f.addend, r) + begin;
    R* y = row<R>(f.y, r) + begin;
    with_type(f.normed_type, [&](auto type) {
        fill_row<R>(y, count, [=](int64_t i, auto... rest) {
            return add(round_to(load(n + i, rest...), type), load(addend + i, rest...));
        });
    });
}

// ---------------------------------------------------------------- after: modulation

// y = n * (1 + scale) + shift, n rounded to normed_type, which is y's if it is any.
template <class Y, class Z>
void modulate_after(const Forward& f, int64_t r, int64_t begin, int64_t count, const float* n) {
    const Z* const scale = f.scale.given ? row<Z>(f.scale, r) + begin : nullptr;
    const Z* const shift = f.shift.given ? row<Z>(f.shift, r) + begin : nullptr;
    const F32 one = set(1);
    auto fill = [&](auto type) {
        fill_row<std::conditional_t<can_carry<Z, Y>, Z, Y>>(
            row<Y>(f.y, r) + begin, count, [=](int64_t i, auto... rest) {
                F32 v = round_to(load(n + i, rest...), type);
                if (scale) v = mul(v, add(load(scale + i, rest...), one));
                return shift ? add(v, load(shift + i, rest...)) : v;
            });
    };
    if (f.normed_type == Dtype::f32)
        fill(float{});
    else
        fill(Y{});
}

// ---------------------------------------------------------------- which of them a call has

// Null where there is none.
inline Before before_of(const Forward& f) {
    if (f.residual.given)
        return with_type(f.x.dtype, [&](auto x) {
            return with_type(f.residual.dtype,
                             [&](auto r) { return add_before_of<decltype(x), decltype(r)>(f); });
        });
    if (f.gate.given && f.gate_first)
        return with_type(f.x.dtype, [&](auto x) {
            return with_type(f.gate.dtype,
                             [&](auto z) -> Before { return gate_before<decltype(x), decltype(z)>; });
        });
    return nullptr;
}

inline After after_of(const Forward& f) {
    if (f.addend.given)
        return with_type(f.addend.dtype, [&](auto r) -> After { return add_after<decltype(r)>; });
    if (f.cos.given) return rotate_after_of(f);
    if (rmsnorm::modulated(f))
        return with_type(f.y.dtype, [&](auto y) {
            return with_type(f.scale.given ? f.scale.dtype : f.shift.dtype,
                             [&](auto z) -> After { return modulate_after<decltype(y), decltype(z)>; });
        });
    if (!f.gate.given || f.gate_first) return nullptr;
    return with_type(f.x.dtype, [&](auto x) {
        return with_type(f.gate.dtype, [&](auto z) -> After { return gate_after<decltype(x), decltype(z)>; });
    });
}

}  // namespace

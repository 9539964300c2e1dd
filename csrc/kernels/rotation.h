// Rotary embedding after the norm and its derivative, over the vocabulary of one instruction set. Pairs of
// columns are rotated; docs/numerics.md, "Rotation".
#pragma once

#include <type_traits>

#include "activation.h"
#include "backward.h"

namespace {

using rmsnorm::RotatedBackward;
using rmsnorm::Rotation;

void backward(const Backward&);

// n * cos + m * sin, or the difference, in values of type T; `each` rounds every product to it, and cos and
// sin before.
template <class T, bool each, bool minus, class In, class C, class Out>
void rotate_columns(const In* n, const In* m, const C* cos, const C* sin, Out* o, int64_t cols) {
    auto clean = [](F32 v) { return can_carry<C, T> ? nan_cleaned(v) : v; };
    auto product = [=](F32 v, F32 angle) {
        return each ? round_to(mul(v, round_to(clean(angle), T{})), T{}) : mul(v, angle);
    };
    fill_row<C>(o, cols, [=](int64_t i, auto... rest) {
        const F32 p = product(load(n + i, rest...), load(cos + i, rest...)),
                  q = product(load(m + i, rest...), load(sin + i, rest...)),
                  sum = minus ? sub(p, q) : add(p, q);
        return std::is_same_v<Out, T> ? sum : round_to(clean(sum), T{});
    });
}

template <class T>
void widen_row(const T* values, float* wide, int64_t cols) {
    fill_row<T>(wide, cols, [=](int64_t i, auto... rest) { return load(values + i, rest...); });
}

// (v1, v0, v3, v2, ...), every other of them negative.
template <bool negate_first, bool negate_second>
void swap_pairs(const float* v, float* swapped, int64_t cols) {
    for (int64_t i = 0; i < cols; i += 2) {
        const float first = v[i + 1], second = v[i];
        swapped[i] = negate_first ? -first : first;
        swapped[i + 1] = negate_second ? -second : second;
    }
}

inline void repeat_each(const float* v, float* repeated, int64_t count) {
    for (int64_t i = 0; i < count; ++i) repeated[2 * i] = repeated[2 * i + 1] = v[i];
}

// One row of n, whose values are of type T; `back` is the transposed rotation. `scratch` has room for
// rotation_scratch(columns) floats.
template <class T, bool each, bool back, class In, class C, class Out>
void rotate_pairs(const Rotation& by, const In* n, const C* cos, const C* sin, Out* o, float* scratch) {
    const int64_t cols = by.cols, half = cols / 2, second = by.half_width ? 0 : half;
    if (!by.interleaved) {
        rotate_columns<T, each, !back>(n, n + half, cos, back ? sin + second : sin, o, half);
        rotate_columns<T, each, back>(n + half, n, cos + second, back ? sin : sin + second, o + half, half);
        return;
    }
    float *u = scratch, *m = u + cols, *c = m + cols, *s = c + cols;
    widen_row(n, u, cols);
    if (by.half_width) {
        widen_row(cos, m, half), repeat_each(m, c, half);
        widen_row(sin, m, half), repeat_each(m, s, half);
    } else {
        widen_row(cos, c, cols);
        widen_row(sin, back ? m : s, cols);
        if (back) swap_pairs<false, false>(m, s, cols);
    }
    swap_pairs<!back, back>(u, m, cols);
    rotate_columns<T, each, false>(u, m, c, s, o, cols);
}

template <class T, bool back, class In, class C, class Out>
void rotate_row(const Rotation& by, const In* n, const C* cos, const C* sin, Out* o, int64_t cols,
                float* scratch) {
    if (by.each && !std::is_same_v<T, float>)
        rotate_pairs<T, !std::is_same_v<T, float>, back>(by, n, cos, sin, o, scratch);
    else
        rotate_pairs<T, false, back>(by, n, cos, sin, o, scratch);
    if (by.cols < cols)
        fill_row<T>(o + by.cols, cols - by.cols,
                    [=](int64_t i, auto... rest) { return load(n + by.cols + i, rest...); });
}

// y of a whole row, n rounded to y's type.
template <class Y, class C>
void rotate_after(const Forward& f, int64_t r, int64_t, int64_t, const float* n) {
    float* const scratch = f.scratch + f.cols;
    if (!std::is_same_v<Y, float>) {
        fill_row<float>(scratch, f.cols,
                        [=](int64_t i, auto... rest) { return round_to(load(n + i, rest...), Y{}); });
        n = scratch;
    }
    rotate_row<Y, false>(f.rotation, n, row<C>(f.cos, r), row<C>(f.sin, r), row<Y>(f.y, r), f.cols,
                         scratch + f.cols);
}

inline After rotate_after_of(const Forward& f) {
    return with_type(f.y.dtype, [&](auto y) {
        return with_type(f.cos.dtype,
                         [&](auto c) -> After { return rotate_after<decltype(y), decltype(c)>; });
    });
}

// The gradient of the norm's result goes through float32 memory, a few rows at a time.
template <class T, class C>
void rotated_backward_rows(const RotatedBackward& b) {
    const int64_t batch = rmsnorm::gate_batch(b.cols);
    float* const gradients = b.scratch + b.cols;  // what comes before is the plain backward's
    float* const scratch = gradients + batch * b.cols;
    for (int64_t r0 = 0; r0 < b.rows; r0 += batch) {
        Backward plain{};
        plain.rows = b.rows - r0 < batch ? b.rows - r0 : batch;
        plain.cols = plain.counted = b.cols, plain.groups = 1;
        plain.gain = b.gain, plain.dweight = b.dweight, plain.scratch = b.scratch;
        for (int64_t r = 0; r < plain.rows; ++r)
            rotate_row<T, true>(b.rotation, row<T>(b.dy, r0 + r), row<C>(b.cos, r0 + r),
                                row<C>(b.sin, r0 + r), gradients + r * b.cols, b.cols, scratch);
        plain.dy = {gradients, b.cols, Dtype::f32, true};
        plain.x = from(b.x, r0), plain.dx = from(b.dx, r0);
        plain.rstd = {b.rstd.data + r0, true};
        backward(plain);
    }
}

}  // namespace

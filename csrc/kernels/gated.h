// Norms with a gate: the plain ones, with the gate applied to a few rows of float32 before or after, over the
// vocabulary of one instruction set.
#pragma once

#include "backward.h"
#include "forward.h"

namespace {

using rmsnorm::Activation;
using rmsnorm::Dtype;
using rmsnorm::GatedBackward;
using rmsnorm::GatedForward;

void forward(const Forward&);
void backward(const Backward&);

// gated_reference._sigmoid of four vectors, step by step together: one alone waits for each of its
// operations.
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

// s = sigmoid(z). Memory has nothing to do meanwhile: what is read or written next may be prefetched.
template <class X>
void sigmoid_row(const X* z, float* s, int64_t width, const X* read_later = nullptr,
                 const X* write_after = nullptr) {
    for (int64_t i = 0; i < width; i += 2 * N) {
        for (int64_t byte = 0; byte < 2 * N * int64_t(sizeof(X)); byte += 64) {
            if (read_later) prefetch(reinterpret_cast<const char*>(read_later + i) + byte);
            if (write_after) prefetch_to_write(reinterpret_cast<const char*>(write_after + i) + byte);
        }
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

inline F32 round_to(F32 v, Dtype dtype) {
    return dtype == Dtype::bf16 ? round_to(v, bf16{}) : dtype == Dtype::f16 ? round_to(v, f16{}) : v;
}

// Fills a row with value(i) for the N elements from i on, or with value(i, n) for the last n.
template <class T, class Value>
void fill_row(T* row, int64_t width, Value value) {
    int64_t i = 0;
    for (; i + 2 * N <= width; i += 2 * N) {
        const F32 a = value(i), b = value(i + N);
        store2(row + i, a, b);
    }
    for (; i < width; i += N) {
        const int64_t n = width - i < N ? width - i : N;
        store(row + i, value(i, n), n);
    }
}

// In what follows s is the sigmoid of z, the gate.

// u = x * act(z).
template <class X>
void gate_row(const X* x, const X* z, const float* s, Activation activation, float* u, int64_t width) {
    fill_row(u, width, [=](int64_t i, auto... n) {
        return mul(load(x + i, n...), activated(load(z + i, n...), load(s + i, n...), activation));
    });
}

// y = normed * act(z), normed rounded before.
template <class X>
void gate_result(const float* normed, Dtype normed_type, const X* z, const float* s, Activation activation,
                 X* y, int64_t width) {
    fill_row(y, width, [=](int64_t i, auto... n) {
        return mul(round_to(load(normed + i, n...), normed_type),
                   activated(load(z + i, n...), load(s + i, n...), activation));
    });
}

// Long rows piece by piece: the sigmoids of one stay in the first-level cache.
template <class Piece>
void in_pieces(int64_t width, Piece piece) {
    constexpr int64_t length = 512;
    for (int64_t i = 0; i < width; i += length) piece(i, width - i < length ? width - i : length);
}

template <class X>
void gated_forward_rows(const GatedForward& g) {
    const Forward& f = g.norm;
    const Activation activation = g.gate.activation;
    const int64_t width = f.groups * f.cols, batch = rmsnorm::gate_batch(width);
    const Rows scratch{g.gate.scratch, width};
    float* const s = g.gate.scratch + batch * width;
    for (int64_t r0 = 0; r0 < f.rows; r0 += batch) {
        Forward part = f;
        part.rows = f.rows - r0 < batch ? f.rows - r0 : batch;
        part.x = from(f.x, r0, f.x_type);
        if (f.rstd) part.rstd = f.rstd + r0 * f.groups;
        if (g.gate.first) {
            for (int64_t r = r0; r < r0 + part.rows; ++r) {
                const int64_t next = r + 1 < f.rows ? r + 1 : r;
                const X *x = row<X>(f.x, r), *z = row<X>(g.gate.rows, r), *next_x = row<X>(f.x, next),
                        *next_z = row<X>(g.gate.rows, next);
                float* u = row<float>(scratch, r - r0);
                in_pieces(width, [&](int64_t i, int64_t n) {
                    sigmoid_row(z + i, s, n, next_x + i, next_z + i);
                    gate_row(x + i, z + i, s, activation, u + i, n);
                });
            }
            part.x = scratch, part.x_type = Dtype::f32;
            part.y = from(f.y, r0, f.y_type);
            forward(part);
        } else {
            part.y = scratch, part.y_type = Dtype::f32, part.stream = false;
            forward(part);
            for (int64_t r = r0; r < r0 + part.rows; ++r) {
                const X *z = row<X>(g.gate.rows, r),
                        *next_x = row<X>(f.x, r + batch < f.rows ? r + batch : r);
                const float* normed = row<float>(scratch, r - r0);
                X* y = row<X>(f.y, r);
                in_pieces(width, [&](int64_t i, int64_t n) {
                    sigmoid_row<X>(z + i, s, n, next_x + i, y + i);
                    gate_result(normed + i, g.normed_type, z + i, s, activation, y + i, n);
                });
            }
        }
    }
}

// Gate last: the gradient of norm(x), g = dy * act(z).
template <class X>
void ungate_result(const X* dy, const X* z, const float* s, Activation activation, float* g, int64_t width) {
    fill_row(g, width, [=](int64_t i, auto... n) {
        return mul(load(dy + i, n...), activated(load(z + i, n...), load(s + i, n...), activation));
    });
}

// Gate last: dgate = dy * norm(x) * act'(z), of one group.
template <class X>
void gate_gradient(const X* dy, const X* x, float rstd, const float* gain, const X* z, const float* s,
                   Activation activation, X* dgate, int64_t cols) {
    const F32 scale = set(rstd);
    fill_row(dgate, cols, [=](int64_t i, auto... n) {
        F32 normed = mul(load(x + i, n...), scale);
        if (gain) normed = mul(normed, load(gain + i, n...));
        return mul(mul(load(dy + i, n...), normed),
                   activation_slope(load(z + i, n...), load(s + i, n...), activation));
    });
}

// Gate first: dx = du * act(z).
template <class X>
void ungate_row(const float* du, const X* z, const float* s, Activation activation, X* dx, int64_t width) {
    fill_row(dx, width, [=](int64_t i, auto... n) {
        return mul(load(du + i, n...), activated(load(z + i, n...), load(s + i, n...), activation));
    });
}

// Gate first: dgate = du * x * act'(z).
template <class X>
void gate_gradient(const float* du, const X* x, const X* z, const float* s, Activation activation, X* dgate,
                   int64_t width) {
    fill_row(dgate, width, [=](int64_t i, auto... n) {
        return mul(mul(load(du + i, n...), load(x + i, n...)),
                   activation_slope(load(z + i, n...), load(s + i, n...), activation));
    });
}

template <class X>
void gated_backward_rows(const GatedBackward& g) {
    const Backward& b = g.norm;
    const Activation activation = g.gate.activation;
    const int64_t width = b.groups * b.cols, batch = rmsnorm::gate_batch(width);
    const Rows scratch{g.gate.scratch, width}, sigmoids{g.gate.scratch + batch * width, width};
    for (int64_t r0 = 0; r0 < b.rows; r0 += batch) {
        Backward part = b;
        part.rows = b.rows - r0 < batch ? b.rows - r0 : batch;
        part.rstd = b.rstd + r0 * b.groups;
        part.x = from(b.x, r0, b.x_type);
        for (int64_t r = 0; r < part.rows; ++r) {
            const X *x = row<X>(b.x, r0 + r), *z = row<X>(g.gate.rows, r0 + r);
            float *u = row<float>(scratch, r), *s = row<float>(sigmoids, r);
            sigmoid_row(z, s, width);
            if (g.gate.first) {
                gate_row(x, z, s, activation, u, width);
                continue;
            }
            const X* dy = row<X>(b.dy, r0 + r);
            ungate_result(dy, z, s, activation, u, width);
            X* dgate = row<X>(g.dgate, r0 + r);
            for (int64_t i = 0; dgate && i < width; i += b.cols)
                gate_gradient(dy + i, x + i, part.rstd[r * b.groups + i / b.cols],
                              b.gain ? b.gain + i : nullptr, z + i, s + i, activation, dgate + i, b.cols);
        }
        if (!g.gate.first) {
            part.dy = scratch, part.dy_type = Dtype::f32;
            part.dx = from(b.dx, r0, b.x_type);
            if (b.dx.data || b.dweight) backward(part);
            continue;
        }
        part.dy = from(b.dy, r0, b.dy_type);
        part.x = scratch, part.x_type = Dtype::f32;
        part.dx = b.dx.data || g.dgate.data ? scratch : Rows{nullptr, 0};  // u becomes du
        backward(part);
        for (int64_t r = 0; r < part.rows; ++r) {
            const X *x = row<X>(b.x, r0 + r), *z = row<X>(g.gate.rows, r0 + r);
            const float *du = row<float>(scratch, r), *s = row<float>(sigmoids, r);
            if (b.dx.data) ungate_row(du, z, s, activation, row<X>(b.dx, r0 + r), width);
            if (g.dgate.data) gate_gradient(du, x, z, s, activation, row<X>(g.dgate, r0 + r), width);
        }
    }
}

}  // namespace

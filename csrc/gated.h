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

// gated_reference._sigmoid: exp(z) = 2^n * (p + q) / (p - q), and so one division in all.
inline F64 sigmoid(F64 z) {
    const F64 magic = set64(0x1.8p52);  // leaves the nearest integer in the last bits of a sum
    const F64 shifted = add(mul(z, set64(0x1.71547652b82fep+0)), magic), n = sub(shifted, magic);
    const F64 r = sub(z, mul(n, set64(0x1.62e42fefa39efp-1)));
    const F64 square = mul(r, r);
    const F64 p = add(mul(add(square, set64(180)), square), set64(1680));
    const F64 q = mul(add(mul(square, set64(20)), set64(840)), r);
    const F64 e = times_two_to(add(p, q), shifted);
    return div(e, add(sub(p, q), e));
}
inline F32 sigmoid(F32 z) {
    F64 low, high;
    widen(clamp(z, 200), low, high);
    return narrow(sigmoid(low), sigmoid(high));
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

// u = x * act(z); sigmoid(z) is kept where there is room for it.
template <class X>
void gate_row(const X* x, const X* z, Activation activation, float* u, float* kept, int64_t width) {
    fill_row(u, width, [=](int64_t i, auto... n) {
        const F32 gate = load(z + i, n...), s = sigmoid(gate);
        if (kept) store(kept + i, s, n...);
        return mul(load(x + i, n...), activated(gate, s, activation));
    });
}

// y = normed * act(z), normed rounded before.
template <class X>
void gate_result(const float* normed, Dtype normed_type, const X* z, Activation activation, X* y,
                 int64_t width) {
    fill_row(y, width, [=](int64_t i, auto... n) {
        const F32 gate = load(z + i, n...), act = activated(gate, sigmoid(gate), activation);
        return mul(round_to(load(normed + i, n...), normed_type), act);
    });
}

template <class X>
void gated_forward_rows(const GatedForward& g) {
    const Forward& f = g.norm;
    const int64_t width = f.groups * f.cols, batch = rmsnorm::gate_batch(width);
    const Rows scratch{g.gate.scratch, width};
    for (int64_t r0 = 0; r0 < f.rows; r0 += batch) {
        Forward part = f;
        part.rows = f.rows - r0 < batch ? f.rows - r0 : batch;
        part.x.data = row<X>(f.x, r0);
        if (f.rstd) part.rstd = f.rstd + r0 * f.groups;
        if (g.gate.first) {
            for (int64_t r = 0; r < part.rows; ++r)
                gate_row(row<X>(f.x, r0 + r), row<X>(g.gate.rows, r0 + r), g.gate.activation,
                         row<float>(scratch, r), nullptr, width);
            part.x = scratch, part.x_type = Dtype::f32;
            part.y.data = static_cast<char*>(f.y.data) + r0 * f.y.stride * rmsnorm::size_of(f.y_type);
            forward(part);
        } else {
            part.y = scratch, part.y_type = Dtype::f32, part.stream = false;
            forward(part);
            for (int64_t r = 0; r < part.rows; ++r)
                gate_result(row<float>(scratch, r), g.normed_type, row<X>(g.gate.rows, r0 + r),
                            g.gate.activation, row<X>(f.y, r0 + r), width);
        }
    }
}

// Gate last: the gradient of norm(x), g = dy * act(z); and dgate = dy * norm(x) * act'(z) where it is wanted.
template <class X>
void ungate_result(const X* dy, const X* x, const X* z, Activation activation, const float* rstd,
                   const float* gain, int64_t groups, int64_t cols, float* g, X* dgate) {
    for (int64_t group = 0; group < groups; ++group) {
        const F32 scale = set(rstd[group]);
        const int64_t begin = group * cols;
        fill_row(g + begin, cols, [=](int64_t i, auto... n) {
            i += begin;
            const F32 gate = load(z + i, n...), s = sigmoid(gate), d = load(dy + i, n...);
            if (dgate) {
                F32 normed = mul(load(x + i, n...), scale);
                if (gain) normed = mul(normed, load(gain + i, n...));
                store(dgate + i, mul(mul(d, normed), activation_slope(gate, s, activation)), n...);
            }
            return mul(d, activated(gate, s, activation));
        });
    }
}

// Gate first: dx = du * act(z), dgate = du * x * act'(z), each where it is wanted.
template <class X>
void ungate_row(const float* du, const float* kept, const X* x, const X* z, Activation activation, X* dx,
                X* dgate, int64_t width) {
    if (dx)
        fill_row(dx, width, [=](int64_t i, auto... n) {
            return mul(load(du + i, n...), activated(load(z + i, n...), load(kept + i, n...), activation));
        });
    if (dgate)
        fill_row(dgate, width, [=](int64_t i, auto... n) {
            const F32 slope = activation_slope(load(z + i, n...), load(kept + i, n...), activation);
            return mul(mul(load(du + i, n...), load(x + i, n...)), slope);
        });
}

template <class X>
void gated_backward_rows(const GatedBackward& g) {
    const Backward& b = g.norm;
    const int64_t width = b.groups * b.cols, batch = rmsnorm::gate_batch(width);
    const Rows scratch{g.gate.scratch, width}, kept{g.gate.scratch + batch * width, width};
    const bool want_du = b.dx.data || g.dgate.data;
    for (int64_t r0 = 0; r0 < b.rows; r0 += batch) {
        Backward part = b;
        part.rows = b.rows - r0 < batch ? b.rows - r0 : batch;
        part.rstd = b.rstd + r0 * b.groups;
        part.x.data = row<X>(b.x, r0);
        if (g.gate.first) {
            for (int64_t r = 0; r < part.rows; ++r)
                gate_row(row<X>(b.x, r0 + r), row<X>(g.gate.rows, r0 + r), g.gate.activation,
                         row<float>(scratch, r), row<float>(kept, r), width);
            part.dy.data = static_cast<char*>(b.dy.data) + r0 * b.dy.stride * rmsnorm::size_of(b.dy_type);
            part.x = scratch, part.x_type = Dtype::f32;
            part.dx = want_du ? scratch : Rows{nullptr, 0};
            backward(part);
            for (int64_t r = 0; r < part.rows; ++r)
                ungate_row(row<float>(scratch, r), row<float>(kept, r), row<X>(b.x, r0 + r),
                           row<X>(g.gate.rows, r0 + r), g.gate.activation, row<X>(b.dx, r0 + r),
                           row<X>(g.dgate, r0 + r), width);
        } else {
            for (int64_t r = 0; r < part.rows; ++r)
                ungate_result(row<X>(b.dy, r0 + r), row<X>(b.x, r0 + r), row<X>(g.gate.rows, r0 + r),
                              g.gate.activation, part.rstd + r * b.groups, b.gain, b.groups, b.cols,
                              row<float>(scratch, r), row<X>(g.dgate, r0 + r));
            part.dy = scratch, part.dy_type = Dtype::f32;
            part.dx.data = row<X>(b.dx, r0);
            if (b.dx.data || b.dweight) backward(part);
        }
    }
}

}  // namespace

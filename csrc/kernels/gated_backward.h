// The backward of rows with a gate: the plain one between the gate's derivatives, over the vocabulary of one
// instruction set. A few rows at a time go through float32 memory.
#pragma once

#include "backward.h"
#include "stages.h"

namespace {

void backward(const Backward&);

// In what follows s is the sigmoid of z, the gate.

// Gate last: the gradient of norm(x), g = dy * act(z).
template <class X, class Z>
void ungate_result(const X* dy, const Z* z, const float* s, Activation activation, float* g, int64_t width) {
    fill_row<float>(g, width, [=](int64_t i, auto... n) {
        return mul(load(dy + i, n...), activated(load(z + i, n...), load(s + i, n...), activation));
    });
}

// Gate last: dgate = dy * norm(x) * act'(z), of one group.
template <class X, class Z>
void gate_gradient(const X* dy, const X* x, float rstd, const float* gain, const Z* z, const float* s,
                   Activation activation, Z* dgate, int64_t cols) {
    const F32 scale = set(rstd);
    fill_row<X>(dgate, cols, [=](int64_t i, auto... n) {
        F32 normed = mul(load(x + i, n...), scale);
        if (gain) normed = mul(normed, load(gain + i, n...));
        return mul(mul(load(dy + i, n...), normed),
                   activation_slope(load(z + i, n...), load(s + i, n...), activation));
    });
}

// Gate first: dx = du * act(z).
template <class X, class Z>
void ungate_row(const float* du, const Z* z, const float* s, Activation activation, X* dx, int64_t width) {
    fill_row<Z>(dx, width, [=](int64_t i, auto... n) {
        return mul(load(du + i, n...), activated(load(z + i, n...), load(s + i, n...), activation));
    });
}

// Gate first: dgate = du * x * act'(z).
template <class X, class Z>
void gate_gradient(const float* du, const X* x, const Z* z, const float* s, Activation activation, Z* dgate,
                   int64_t width) {
    fill_row<X>(dgate, width, [=](int64_t i, auto... n) {
        return mul(mul(load(du + i, n...), load(x + i, n...)),
                   activation_slope(load(z + i, n...), load(s + i, n...), activation));
    });
}

template <class X, class Z>
void gated_backward_rows(const Backward& b) {
    const int64_t width = b.groups * b.cols, batch = rmsnorm::gate_batch(width);
    float* const memory = b.scratch + b.cols;  // what comes before is the plain backward's
    const Rows scratch{memory, width, Dtype::f32, true},
        sigmoids{memory + batch * width, width, Dtype::f32, true};
    Backward plain = b;
    plain.gate.given = plain.dgate.given = false;
    for (int64_t r0 = 0; r0 < b.rows; r0 += batch) {
        Backward part = plain;
        part.rows = b.rows - r0 < batch ? b.rows - r0 : batch;
        part.rstd.data = b.rstd.data + r0 * b.groups;
        part.x = from(b.x, r0);
        for (int64_t r = 0; r < part.rows; ++r) {
            const X* x = row<X>(b.x, r0 + r);
            const Z* z = row<Z>(b.gate, r0 + r);
            float *u = row<float>(scratch, r), *s = row<float>(sigmoids, r);
            sigmoid_row(z, s, width);
            if (b.gate_first) {
                gate_row(x, z, s, b.activation, u, width);
                continue;
            }
            const X* dy = row<X>(b.dy, r0 + r);
            ungate_result(dy, z, s, b.activation, u, width);
            if (!b.dgate.given) continue;
            Z* dgate = row<Z>(b.dgate, r0 + r);
            for (int64_t i = 0; i < width; i += b.cols)
                gate_gradient(dy + i, x + i, part.rstd.data[r * b.groups + i / b.cols],
                              b.gain.given ? b.gain.data + i : nullptr, z + i, s + i, b.activation, dgate + i,
                              b.cols);
        }
        if (!b.gate_first) {
            part.dy = scratch;
            part.dx = from(b.dx, r0);
            if (b.dx.given || b.dweight.given) backward(part);
            continue;
        }
        part.dy = from(b.dy, r0);
        part.x = part.dx = scratch;  // u becomes du
        part.dx.given = b.dx.given || b.dgate.given;
        backward(part);
        for (int64_t r = 0; r < part.rows; ++r) {
            const X* x = row<X>(b.x, r0 + r);
            const Z* z = row<Z>(b.gate, r0 + r);
            const float *du = row<float>(scratch, r), *s = row<float>(sigmoids, r);
            if (b.dx.given) ungate_row(du, z, s, b.activation, row<X>(b.dx, r0 + r), width);
            if (b.dgate.given) gate_gradient(du, x, z, s, b.activation, row<Z>(b.dgate, r0 + r), width);
        }
    }
}

}  // namespace

// The backward of modulated rows: the plain one behind the modulation's derivatives, over the vocabulary of
// one instruction set. The gradient of the norm goes through float32 memory, a few rows at a time.
#pragma once

#include "backward.h"
#include "stages.h"

namespace {

using rmsnorm::ModulatedBackward;

void backward(const Backward&);

// One row: g = dy * (1 + scale), as the norm's result is rounded; sums += dy, and += dy * n. What is not
// wanted is null.
template <class DY, class Z, class Normed>
void unmodulate_row(const DY* dy, const Z* scale, const float* n, float* g, float* dscale, float* dshift,
                    int64_t cols) {
    const F32 one = set(1);
    auto gradient = [=](int64_t i, auto... rest) {
        F32 v = load(dy + i, rest...);
        if (scale) v = mul(v, add(load(scale + i, rest...), one));
        return round_to(sizeof(Normed) == 2 ? nan_cleaned(v) : v, Normed{});
    };
    auto add_terms = [=](float* sums, int64_t i, F32 terms, auto... rest) {
        store(sums + i, add(load(sums + i, rest...), terms), rest...);
    };
    auto take = [=](int64_t i, auto... rest) {
        if (g) store(g + i, gradient(i, rest...), rest...);
        if (dscale) add_terms(dscale, i, mul(load(dy + i, rest...), load(n + i, rest...)), rest...);
        if (dshift) add_terms(dshift, i, load(dy + i, rest...), rest...);
    };
    int64_t i = 0;
    for (; i + N <= cols; i += N) take(i);
    if (i < cols) take(i, cols - i);
}

// n of one row, as modulate_after has it.
template <class DY, class X>
void normed_row(const ModulatedBackward& b, int64_t r, float* n) {
    const X* x = row<X>(b.x, r);
    const float* gain = b.gain.given ? b.gain.data : nullptr;
    with_type(b.x_hat_type, [&](auto x_hat) {
        scale_row<X, float, decltype(x_hat), false>(x, b.rstd.data[r], gain, n, b.cols, x);
    });
    if (b.normed_type != Dtype::f32)
        fill_row<float>(n, b.cols,
                        [=](int64_t i, auto... rest) { return round_to(load(n + i, rest...), DY{}); });
}

template <class DY, class X, class Z>
void modulated_backward_rows(const ModulatedBackward& b) {
    const int64_t batch = rmsnorm::gate_batch(b.cols);
    float* const n = b.scratch + b.cols;  // what comes before is the plain backward's
    float* const gradients = n + b.cols;
    const bool through_norm = b.dx.given || b.dweight.given;
    for (int64_t r0 = 0; r0 < b.rows; r0 += batch) {
        Backward plain{};
        plain.rows = b.rows - r0 < batch ? b.rows - r0 : batch;
        plain.cols = plain.counted = b.cols, plain.groups = 1;
        plain.gain = b.gain, plain.dweight = b.dweight, plain.scratch = b.scratch;
        for (int64_t r = r0; r < r0 + plain.rows; ++r) {
            const Z* scale = b.scale.given ? row<Z>(b.scale, r) : nullptr;
            float* g = through_norm ? gradients + (r - r0) * b.cols : nullptr;
            if (b.dscale.given) normed_row<DY, X>(b, r, n);
            auto unmodulate = [&](auto normed) {
                unmodulate_row<DY, Z, decltype(normed)>(row<DY>(b.dy, r), scale, n, g,
                                                        b.dscale.given ? b.dscale.data : nullptr,
                                                        b.dshift.given ? b.dshift.data : nullptr, b.cols);
            };
            if (b.normed_type == Dtype::f32)
                unmodulate(float{});
            else
                unmodulate(DY{});
        }
        if (!through_norm) continue;
        plain.dy = {gradients, b.cols, Dtype::f32, true};
        plain.x = from(b.x, r0), plain.dx = from(b.dx, r0);
        plain.rstd = {b.rstd.data + r0, true};
        backward(plain);
    }
}

}  // namespace

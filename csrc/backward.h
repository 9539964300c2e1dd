// The backward of rows, and x rebuilt from y, over the vocabulary of one instruction set.
#pragma once

#include "fixed_sum.h"
#include "forward.h"

namespace {

using rmsnorm::Backward;
using rmsnorm::Rebuild;

// u = dy * gain into scratch; the largest magnitude of u.
template <class DY>
float weigh_row(const DY* dy, const float* gain, float* u, int64_t cols) {
    Bits a = no_bits(), b = a;
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N) {
        F32 p = load(dy + i), q = load(dy + i + N);
        if (gain) p = mul(p, load(gain + i)), q = mul(q, load(gain + i + N));
        store2(u + i, p, q);
        a = max_bits(a, p);
        b = max_bits(b, q);
    }
    for (; i < cols; i += N) {
        int64_t n = cols - i < N ? cols - i : N;
        F32 p = load(dy + i, n);
        if (gain) p = mul(p, load(gain + i, n));
        store(u + i, p, n);
        a = max_bits(a, p);
    }
    return largest(max_bits(a, b, float{}), float{});
}

// Columns [i, i + n) of `count` rows: dx, and the terms of dweight in row order.
template <class DY, class X, int64_t count>
inline void finish_columns(const Backward& b, int64_t r0, int64_t i, int64_t n, const float* k) {
    F32 sum = b.dweight ? load(b.dweight + i, n) : set(0);
    for (int64_t r = 0; r < count; ++r) {
        F32 rstd = set(b.rstd[r0 + r]);
        F32 x_hat = mul(load(row<X>(b.x, r0 + r) + i, n), rstd);
        if (b.dweight) sum = add(sum, mul(load(row<DY>(b.dy, r0 + r) + i, n), x_hat));
        if (b.dx) {
            F32 dx = mul(rstd, sub(load(b.scratch + r * b.cols + i, n), mul(x_hat, set(k[r]))));
            if (b.dh) dx = add(dx, load(row<X>(b.dh, r0 + r) + i, n));
            store(row<X>(b.dx, r0 + r) + i, dx, n);
        }
    }
    if (b.dweight) store(b.dweight + i, sum, n);
}

template <class DY, class X, int64_t count>
void finish_rows(const Backward& b, int64_t r0, const float* k) {
    const X* x[count];
    const X* dh[count];
    const DY* dy[count];
    X* dx[count];
    F32 rstd[count], slope[count];
    for (int64_t r = 0; r < count; ++r) {
        x[r] = row<X>(b.x, r0 + r), dy[r] = row<DY>(b.dy, r0 + r), dx[r] = row<X>(b.dx, r0 + r);
        dh[r] = b.dh ? row<X>(b.dh, r0 + r) : nullptr;
        rstd[r] = set(b.rstd[r0 + r]), slope[r] = set(k[r]);
    }
    const bool want_dx = bool(b.dx), want_dweight = b.dweight != nullptr, add_dh = bool(b.dh);
    int64_t i = 0;
    for (; i + 2 * N <= b.cols; i += 2 * N) {
        F32 sums[2];
        if (want_dweight) sums[0] = load(b.dweight + i), sums[1] = load(b.dweight + i + N);
        for (int64_t r = 0; r < count; ++r) {
            F32 p = mul(load(x[r] + i), rstd[r]), q = mul(load(x[r] + i + N), rstd[r]);
            if (want_dweight) {
                sums[0] = add(sums[0], mul(load(dy[r] + i), p));
                sums[1] = add(sums[1], mul(load(dy[r] + i + N), q));
            }
            if (want_dx) {
                const float* u = b.scratch + r * b.cols + i;
                p = mul(rstd[r], sub(load(u), mul(p, slope[r])));
                q = mul(rstd[r], sub(load(u + N), mul(q, slope[r])));
                if (add_dh) p = add(p, load(dh[r] + i)), q = add(q, load(dh[r] + i + N));
                store2(dx[r] + i, p, q);
            }
        }
        if (want_dweight) store(b.dweight + i, sums[0]), store(b.dweight + i + N, sums[1]);
    }
    for (; i < b.cols; i += N) finish_columns<DY, X, count>(b, r0, i, b.cols - i < N ? b.cols - i : N, k);
    for (int64_t r = 0; r < count; ++r)
        if (want_dx && k[r] != k[r]) fill_nan(dx[r], b.cols);  // as in scale_row
}

template <class DY, class X>
void backward_rows(const Backward& b) {
    constexpr int64_t batch = rmsnorm::backward_batch;
    const int log_cols = ceil_log2(b.cols);
    const double reciprocal = 1.0 / double(b.cols);
    float u_max[batch], x_max[batch], k[batch] = {};
    double start[batch];
    F64 sums[batch][4];
    for (int64_t r0 = 0; r0 < b.rows; r0 += batch) {
        const int64_t rows = b.rows - r0 < batch ? b.rows - r0 : batch;
        if (b.dx) {
            for (int64_t r = 0; r < rows; ++r) {
                u_max[r] = weigh_row(row<DY>(b.dy, r0 + r), b.gain, b.scratch + r * b.cols, b.cols);
                x_max[r] = largest_magnitude(row<X>(b.x, r0 + r), b.cols);
            }
            for (int64_t r = 0; r < rows; ++r) {
                bool ordinary = u_max[r] > 0 && x_max[r] > 0 && finite(u_max[r]) && finite(x_max[r]);
                start[r] =
                    start_value(ordinary ? exponent_of(u_max[r]) + exponent_of(x_max[r]) : 0, log_cols);
            }
            sum_products_of_rows<X>(b.scratch, b.x, r0, rows, b.cols, start, sums);
            for (int64_t r = 0; r < rows; ++r) {
                double c =
                    finite(u_max[r]) && finite(x_max[r]) ? drain(sums[r], start[r]) : __builtin_nan("");
                k[r] = float(double(b.rstd[r0 + r]) * c * reciprocal);
            }
        }
        if (rows == batch)
            finish_rows<DY, X, batch>(b, r0, k);
        else
            for (int64_t r = 0; r < rows; ++r) {
                Backward one = b;
                one.scratch = b.scratch + r * b.cols;
                finish_rows<DY, X, 1>(one, r0 + r, k + r);
            }
    }
}

template <class Y, class X>
void rebuild_rows(const Rebuild& f) {
    for (int64_t r = 0; r < f.rows; ++r) {
        const Y* y = row<Y>(f.y, r);
        X* x = row<X>(f.x, r);
        if (f.rstd[r] != f.rstd[r]) {
            fill_nan(x, f.cols);
            continue;
        }
        F32 rstd = set(f.rstd[r]);
        for (int64_t i = 0; i < f.cols; i += N) {
            int64_t n = f.cols - i < N ? f.cols - i : N;
            F32 v = load(y + i, n);
            if (f.gain) v = div(v, load(f.gain + i, n));
            store(x + i, div(v, rstd), n);
        }
    }
}

}  // namespace

// The backward of rows, and x rebuilt from y, over the vocabulary of one instruction set.
#pragma once

#include "fixed_sum.h"
#include "forward.h"

namespace {

using rmsnorm::Backward;
using rmsnorm::Rebuild;

// u = dy * gain, and its largest magnitude. u is kept: where sums set the rounding mode, they could not form
// it again.
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

// dx of `count` rows, and their terms of dweight in row order.
template <class DY, class X, int64_t count>
void finish_rows(const Backward& b, int64_t r0, const float* k) {
    const X* x[count];
    const X* dh[count];
    const DY* dy[count];
    X* dx[count];
    F32 rstd[count], slope[count];
    for (int64_t r = 0; r < count; ++r) {
        x[r] = row<X>(b.x, r0 + r), dy[r] = row<DY>(b.dy, r0 + r), dx[r] = row<X>(b.dx, r0 + r);
        dh[r] = row<X>(b.dh, r0 + r);
        rstd[r] = set(b.rstd[(r0 + r) * b.groups]), slope[r] = set(k[r]);
    }
    const bool want_dx = b.dx.data, want_dweight = b.dweight, add_dh = b.dh.data;
    const float* const gains = b.gain;
    float* const dweight = b.dweight;
    const int64_t cols = b.cols;
    auto dx_of = [&](int64_t r, F32 x_hat, F32 u) { return mul(rstd[r], sub(u, mul(x_hat, slope[r]))); };
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N) {
        F32 sum = set(0), sum2 = sum, gain = sum, gain2 = sum;
        if (want_dweight) sum = load(dweight + i), sum2 = load(dweight + i + N);
        if (gains) gain = load(gains + i), gain2 = load(gains + i + N);
        for (int64_t r = 0; r < count; ++r) {
            const F32 x_hat = mul(load(x[r] + i), rstd[r]), x_hat2 = mul(load(x[r] + i + N), rstd[r]);
            const F32 g = load(dy[r] + i), g2 = load(dy[r] + i + N);
            if (want_dweight) sum = add(sum, mul(g, x_hat)), sum2 = add(sum2, mul(g2, x_hat2));
            if (want_dx) {
                F32 p = dx_of(r, x_hat, gains ? mul(g, gain) : g),
                    q = dx_of(r, x_hat2, gains ? mul(g2, gain2) : g2);
                if (add_dh) p = add(p, load(dh[r] + i)), q = add(q, load(dh[r] + i + N));
                store2(dx[r] + i, p, q);
            }
        }
        if (want_dweight) store(dweight + i, sum), store(dweight + i + N, sum2);
    }
    for (; i < cols; i += N) {
        const int64_t n = cols - i < N ? cols - i : N;
        F32 sum = want_dweight ? load(dweight + i, n) : set(0);
        const F32 gain = gains ? load(gains + i, n) : set(1);
        for (int64_t r = 0; r < count; ++r) {
            const F32 x_hat = mul(load(x[r] + i, n), rstd[r]), g = load(dy[r] + i, n);
            if (want_dweight) sum = add(sum, mul(g, x_hat));
            if (want_dx) {
                F32 p = dx_of(r, x_hat, gains ? mul(g, gain) : g);
                if (add_dh) p = add(p, load(dh[r] + i, n));
                store(dx[r] + i, p, n);
            }
        }
        if (want_dweight) store(dweight + i, sum, n);
    }
    for (int64_t r = 0; r < count; ++r)
        if (want_dx && k[r] != k[r]) fill_nan(dx[r], cols);  // as in scale_row
}

// The first group of rows from r0 on, no more of them than a batch.
template <class DY, class X>
void backward_group(const Backward& b, int64_t r0, int64_t rows) {
    constexpr int64_t batch = rmsnorm::backward_batch;
    const int log_cols = ceil_log2(b.cols);
    const double reciprocal = 1.0 / double(b.cols);
    ProductTask<DY, X> tasks[batch];
    float k[batch] = {};
    if (b.dx.data) {
        float u_max[batch], x_max[batch];
        for (int64_t r = 0; r < rows; ++r) {
            ProductTask<DY, X>& task = tasks[r];
            const int64_t later = r0 + batch + r < b.rows ? r0 + batch + r : r0 + r;
            float* u = b.scratch + r * b.cols;
            u_max[r] = weigh_row(row<DY>(b.dy, r0 + r), b.gain, u, b.cols);
            task.u = u;
            task.x = row<X>(b.x, r0 + r);
            task.dy_later = row<DY>(b.dy, later);
            task.x_later = row<X>(b.x, later);
            task.write_after = row<X>(b.dx, r0 + r);
            x_max[r] = largest_magnitude(task.x, b.cols);
            bool ordinary = u_max[r] > 0 && x_max[r] > 0 && finite(u_max[r]) && finite(x_max[r]);
            task.start = start_value(ordinary ? exponent_of(u_max[r]) + exponent_of(x_max[r]) : 0, log_cols);
        }
        sum_products_of_rows(tasks, rows, b.cols);
        for (int64_t r = 0; r < rows; ++r) {
            bool defined = finite(u_max[r]) && finite(x_max[r]);
            double c = defined ? tasks[r].sum : __builtin_nan("");
            k[r] = float(double(b.rstd[(r0 + r) * b.groups]) * c * reciprocal);
        }
    }
    if (rows == batch)
        finish_rows<DY, X, batch>(b, r0, k);
    else
        for (int64_t r = 0; r < rows; ++r) finish_rows<DY, X, 1>(b, r0 + r, k + r);
}

template <class DY, class X>
void backward_rows(const Backward& b) {
    constexpr int64_t batch = rmsnorm::backward_batch;
    auto skip = [&](Rows& rows, int64_t size) {
        if (rows.data) rows.data = static_cast<char*>(rows.data) + b.cols * size;
    };
    for (int64_t r0 = 0; r0 < b.rows; r0 += batch) {
        Backward part = b;
        for (int64_t g = 0; g < b.groups; ++g) {
            backward_group<DY, X>(part, r0, b.rows - r0 < batch ? b.rows - r0 : batch);
            skip(part.dy, sizeof(DY)), skip(part.x, sizeof(X)), skip(part.dh, sizeof(X)),
                skip(part.dx, sizeof(X));
            ++part.rstd;
            if (b.gain) part.gain += b.cols;
            if (b.dweight) part.dweight += b.cols;
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

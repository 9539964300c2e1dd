// The backward of rows without a gate, and x rebuilt from y, over the vocabulary of one instruction set.
#pragma once

#include "estimate.h"
#include "forward.h"

namespace {

using rmsnorm::Backward;
using rmsnorm::Rebuild;

// Rows in flight: they share what is loaded and stored of dweight.
constexpr int64_t backward_batch = 2;

// The sum of u * x over a row, u = dy * gain. Rows that come later are prefetched meanwhile.
template <class DY, class X>
ProductSum sum_products(const Backward& b, int64_t r, int log_cols) {
    const DY* dy = row<DY>(b.dy, r);
    const X* x = row<X>(b.x, r);
    const int64_t later = r + backward_batch < b.rows ? r + backward_batch : r;
    const char* dy_later = reinterpret_cast<const char*>(row<DY>(b.dy, later));
    const char* x_later = reinterpret_cast<const char*>(row<X>(b.x, later));
    const char* write_after = reinterpret_cast<const char*>(row<X>(b.dx, r));
    const float* gain = b.gain.given ? b.gain.data : nullptr;
    return sum_products(b.cols, log_cols, [=](int64_t i, int64_t n) {
        constexpr int64_t dy_size = sizeof(DY), x_size = sizeof(X);
        if (n == N) {
            if (N * dy_size >= 64 || i % (64 / dy_size) == 0) prefetch(dy_later + i * dy_size);
            if (N * x_size >= 64 || i % (64 / x_size) == 0) {
                prefetch(x_later + i * x_size);
                prefetch_to_write(write_after + i * x_size);
            }
        }
        F32 u = n == N ? load(dy + i) : load(dy + i, n);
        if (gain) u = mul(u, n == N ? load(gain + i) : load(gain + i, n));
        return Factors{u, n == N ? load(x + i) : load(x + i, n)};
    });
}

// The same in fixed point. u is kept in memory: where sums set the rounding mode, they could not form it.
template <class DY, class X>
RMSNORM_NOINLINE double fixed_sum_of_products(const Backward& b, int64_t r, float u_max, float x_max) {
    const DY* dy = row<DY>(b.dy, r);
    for (int64_t i = 0; i < b.cols; i += N) {
        const int64_t n = b.cols - i < N ? b.cols - i : N;
        const F32 u = load(dy + i, n);
        store(b.scratch + i, b.gain.given ? mul(u, load(b.gain.data + i, n)) : u, n);
    }
    return fixed_sum_of_products(b.scratch, row<X>(b.x, r), b.cols, u_max, x_max);
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
        rstd[r] = set(b.rstd.data[(r0 + r) * b.groups]), slope[r] = set(k[r]);
    }
    const bool want_dx = b.dx.given, want_dweight = b.dweight.given, add_dh = b.dh.given;
    const float* const gains = b.gain.given ? b.gain.data : nullptr;
    float* const dweight = b.dweight.data;
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

template <class DY, class X>
void finish_rows(const Backward& b, int64_t r0, int64_t rows, const float* k) {
    if (rows == backward_batch)
        finish_rows<DY, X, backward_batch>(b, r0, k);
    else
        for (int64_t r = 0; r < rows; ++r) finish_rows<DY, X, 1>(b, r0 + r, k + r);
}

// The columns from one on.
inline void skip(Rows& rows, int64_t cols) {
    if (rows.given) rows.data = static_cast<char*>(rows.data) + cols * rmsnorm::size_of(rows.dtype);
}
inline void skip(Vector& values, int64_t count) {
    if (values.given) values.data += count;
}
inline void skip(Backward& b, int64_t cols) {
    skip(b.dy, cols), skip(b.x, cols), skip(b.dh, cols), skip(b.dx, cols);
    skip(b.gain, cols), skip(b.dweight, cols);
}

// The first group of rows from r0 on, no more of them than a batch.
template <class DY, class X>
void backward_group(const Backward& b, int64_t r0, int64_t rows, int log_cols) {
    const double reciprocal = 1.0 / double(b.counted);
    float k[backward_batch] = {};
    for (int64_t r = 0; r < rows && b.dx.given; ++r) {
        const double rstd = double(b.rstd.data[(r0 + r) * b.groups]);
        auto k_of = [&](double c) { return float(rstd * c * reciprocal); };
        const ProductSum c = sum_products<DY, X>(b, r0 + r, log_cols);
        k[r] = k_of(c.sum.low);
        if (!settled(k[r], k_of(c.sum.high)))
            k[r] = k_of(fixed_sum_of_products<DY, X>(b, r0 + r, c.u_max, c.x_max));
    }
    if (b.counted == b.cols) return finish_rows<DY, X>(b, r0, rows, k);
    // On the columns that do not count, rstd does not depend: their k is 0 (NaN where it is not finite).
    Backward part = b;
    part.cols = b.counted;
    finish_rows<DY, X>(part, r0, rows, k);
    part.cols = b.cols - b.counted;
    skip(part, b.counted);
    for (float& each : k) each *= 0.0f;
    finish_rows<DY, X>(part, r0, rows, k);
}

template <class DY, class X>
void backward_rows(const Backward& b) {
    const int log_cols = ceil_log2(b.cols);
    for (int64_t r0 = 0; r0 < b.rows; r0 += backward_batch) {
        Backward part = b;
        for (int64_t g = 0; g < b.groups; ++g) {
            backward_group<DY, X>(part, r0, b.rows - r0 < backward_batch ? b.rows - r0 : backward_batch,
                                  log_cols);
            skip(part, b.cols), skip(part.rstd, 1);
        }
    }
}

template <class Y, class X>
void rebuild_rows(const Rebuild& f) {
    for (int64_t r = 0; r < f.rows; ++r) {
        const Y* y = row<Y>(f.y, r);
        X* x = row<X>(f.x, r);
        if (f.rstd.data[r] != f.rstd.data[r]) {
            fill_nan(x, f.cols);
            continue;
        }
        F32 rstd = set(f.rstd.data[r]);
        Bits m = no_bits();
        for (int64_t i = 0; i < f.cols; i += N) {
            int64_t n = f.cols - i < N ? f.cols - i : N;
            F32 v = load(y + i, n);
            if (sizeof(Y) == 4) m = max_bits(m, v);
            if (f.gain.given) v = div(v, load(f.gain.data + i, n));
            store(x + i, div(v, rstd), n);
        }
        // A y of our own has no NaN with low fraction bits, but this one is given: see scale_row.
        if constexpr (sizeof(Y) == 4) {
            if (bits_of(largest(m, float{})) > 0x7f800000)
                for (int64_t i = 0; i < f.cols; ++i)
                    if (y[i] != y[i]) set_nan(x[i]);
        }
    }
}

}  // namespace

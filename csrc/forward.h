// The forward of rows, plain and with a residual, over the vocabulary of one instruction set.
#pragma once

#include "fixed_sum.h"

namespace {

using rmsnorm::Forward;

// Short rows go through each step together, so that the scalar work of one hides behind that of the others.
constexpr int64_t forward_batch = 4;
constexpr int64_t forward_batch_bytes = 6144;
// Up to this long, the largest magnitude of the next batch is found while this one is summed; longer rows
// would push each other out of the first-level cache.
constexpr int64_t look_ahead_bytes = 8192;

// h = x + residual; the largest magnitude of h.
template <class X>
float add_row(const X* x, const X* residual, X* h, int64_t cols) {
    Largest<X> m;
    int64_t i = 0;
    for (; i + 4 * N <= cols; i += 4 * N) {
        for (int64_t j = i; j < i + 4 * N; j += 2 * N)
            store2(h + j, add(load(x + j), load(residual + j)), add(load(x + j + N), load(residual + j + N)));
        for (int64_t j = i; j < i + 4 * N; j += 2 * m.step) m.see(h + j);
    }
    const int64_t done = i;
    for (; i < cols; i += N) {
        int64_t n = cols - i < N ? cols - i : N;
        store(h + i, add(load(x + i, n), load(residual + i, n)), n);
    }
    m.see_rest(h, done, cols);
    return m.value();
}

template <class T>
void fill_nan(T* p, int64_t cols) {
    for (int64_t i = 0; i < cols; ++i) set_nan(p[i]);
}

template <class XHat, class X>
F32 normalized(const X* x, F32 rstd) {
    return round_to(mul(load(x), rstd), XHat{});
}

// y = x * rstd * gain, past the cache if `stream`; the second half of the row `read_later` is prefetched.
template <class X, class Y, class XHat, bool stream>
void scale_row(const X* x, float rstd, const float* gain, Y* y, int64_t cols, const char* read_later) {
    // A NaN with low fraction bits could carry into the sign when it is rounded to bfloat16.
    if (rstd != rstd) return fill_nan(y, cols);
    F32 scale = set(rstd);
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N) {
        F32 a = normalized<XHat>(x + i, scale), b = normalized<XHat>(x + i + N, scale);
        if (gain) a = mul(a, load(gain + i)), b = mul(b, load(gain + i + N));
        if (sizeof(X) == 4 || i & (2 * N)) prefetch(read_later + (cols + i) * int64_t(sizeof(X)) / 2);
        if (stream)
            stream2(y + i, a, b);
        else
            store2(y + i, a, b);
    }
    for (; i < cols; i += N) {
        int64_t n = cols - i < N ? cols - i : N;
        F32 v = round_to(mul(load(x + i, n), scale), XHat{});
        store(y + i, gain ? mul(v, load(gain + i, n)) : v, n);
    }
}

// Each group a row: kernels.cpp sees to that.
template <class X, class Y, class XHat>
void forward_rows(const Forward& f) {
    const bool fused = f.residual.data;
    const Rows h = fused ? f.h : f.x;
    const int log_cols = ceil_log2(f.cols);
    const double reciprocal = 1.0 / double(f.cols);
    const int64_t row_bytes = f.cols * int64_t(sizeof(X));
    const bool look_ahead = !fused && row_bytes <= look_ahead_bytes;
    int64_t batch = forward_batch_bytes / row_bytes;
    batch = batch < 1 ? 1 : batch > forward_batch ? forward_batch : batch;

    SquareTask<X> tasks[forward_batch];
    float m[forward_batch], rstd[forward_batch];
    double sum[forward_batch];
    for (int64_t r0 = 0; r0 < f.rows; r0 += batch) {
        const int64_t rows = f.rows - r0 < batch ? f.rows - r0 : batch;
        for (int64_t r = 0; r < rows; ++r) {
            if (fused)
                m[r] = add_row(row<X>(f.x, r0 + r), row<X>(f.residual, r0 + r), row<X>(h, r0 + r), f.cols);
            else if (r0 == 0 || !look_ahead)
                m[r] = largest_magnitude(row<X>(h, r0 + r), f.cols);
            const int64_t next = r0 + batch + r, later = look_ahead ? next + batch : next;
            tasks[r].x = row<X>(h, r0 + r);
            tasks[r].start = start_value(m[r] > 0 && finite(m[r]) ? 2 * exponent_of(m[r]) : 0, log_cols);
            tasks[r].next = look_ahead && next < f.rows ? row<X>(h, next) : nullptr;
            tasks[r].read_later = reinterpret_cast<const char*>(row<X>(f.x, later < f.rows ? later : r0 + r));
            tasks[r].write_after = f.stream ? nullptr : reinterpret_cast<const char*>(row<Y>(f.y, r0 + r));
        }
        sum_squares_of_rows(tasks, rows, f.cols);
        for (int64_t r = 0; r < rows; ++r) {
            sum[r] = finite(m[r]) ? tasks[r].sum : double(m[r]) * double(m[r]);
            if (look_ahead) m[r] = tasks[r].next_largest;
        }
        for (int64_t r = 0; r < rows; ++r) rstd[r] = float(1.0 / __builtin_sqrt(sum[r] * reciprocal + f.eps));
        for (int64_t r = 0; r < rows; ++r) {
            if (f.rstd) f.rstd[r0 + r] = rstd[r];
            const X* x = row<X>(h, r0 + r);
            Y* y = row<Y>(f.y, r0 + r);
            const float* gain = f.gain;
            if (gain && f.groups > 1) gain += (r0 + r) % f.groups * f.cols;
            if (f.stream)
                scale_row<X, Y, XHat, true>(x, rstd[r], gain, y, f.cols, tasks[r].read_later);
            else
                scale_row<X, Y, XHat, false>(x, rstd[r], gain, y, f.cols, tasks[r].read_later);
        }
    }
    if (f.stream) stream_end();
}

}  // namespace

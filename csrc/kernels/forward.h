// The forward of rows, plain and with a residual, over the vocabulary of one instruction set.
#pragma once

#include "estimate.h"

namespace {

using rmsnorm::Forward;

// Short rows go through each step together, so that the scalar work of one hides behind that of the others.
constexpr int64_t forward_batch = 4;
constexpr int64_t forward_batch_bytes = 6144;

// The sum of squares of a row, while memory is kept busy with the first half of a row that is read later, the
// rest of which scale_row prefetches, and with where y goes, unless that is past the cache.
template <class X, class Y>
RMSNORM_INLINE Interval read_row(const X* x, int64_t cols, int log_cols, const X* read_later,
                                 const Y* write_after) {
    return sum_squares<X>(cols, log_cols, [=](int64_t i, int64_t n) {
        prefetch(reinterpret_cast<const char*>(read_later) + i * int64_t(sizeof(X)) / 2);
        if (write_after)
            for (int64_t byte = 0; byte < n * int64_t(sizeof(Y)); byte += 64)
                prefetch_to_write(reinterpret_cast<const char*>(write_after + i) + byte);
        return x + i;
    });
}

// h = x + residual, and its sum of squares. In 16 bits both loops are limited by the conversions of their
// elements, and are faster one after the other, on pieces that stay in the nearest cache.
template <class X>
Interval add_row(const X* x, const X* residual, X* h, int64_t cols, int log_cols) {
    constexpr int64_t piece = sizeof(X) == 4 ? 2 * N : 512;
    return sum_squares<X>(cols, log_cols, [=](int64_t i, int64_t) {
        int64_t j = i;
        const int64_t end = i % piece ? i : cols - i < piece ? cols : i + piece;
        for (; j + 2 * N <= end; j += 2 * N)
            store2(h + j, add(load(x + j), load(residual + j)), add(load(x + j + N), load(residual + j + N)));
        for (; j < end; j += N) {
            const int64_t n = end - j < N ? end - j : N;
            store(h + j, add(load(x + j, n), load(residual + j, n)), n);
        }
        return static_cast<const X*>(h + i);
    });
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
void scale_row(const X* x, float rstd, const float* gain, Y* y, int64_t cols, const X* read_later) {
    // A NaN with low fraction bits could carry into the sign when it is rounded to bfloat16.
    if (rstd != rstd) return fill_nan(y, cols);
    F32 scale = set(rstd);
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N) {
        F32 a = normalized<XHat>(x + i, scale), b = normalized<XHat>(x + i + N, scale);
        if (gain) a = mul(a, load(gain + i)), b = mul(b, load(gain + i + N));
        if (sizeof(X) == 4 || i & (2 * N))
            prefetch(reinterpret_cast<const char*>(read_later) + (cols + i) * int64_t(sizeof(X)) / 2);
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
    int64_t batch = forward_batch_bytes / (f.cols * int64_t(sizeof(X)));
    batch = batch < 1 ? 1 : batch > forward_batch ? forward_batch : batch;
    auto rstd_of = [&](double sum) { return float(1.0 / __builtin_sqrt(sum * reciprocal + f.eps)); };

    Interval sum[forward_batch] = {};
    float rstd[forward_batch], least[forward_batch];
    for (int64_t r0 = 0; r0 < f.rows; r0 += batch) {
        const int64_t rows = f.rows - r0 < batch ? f.rows - r0 : batch;
        auto read_later = [&](int64_t r) { return row<X>(f.x, r + batch < f.rows ? r + batch : r); };
        for (int64_t r = 0; r < rows; ++r) {
            const X* x = row<X>(f.x, r0 + r);
            sum[r] = fused ? add_row(x, row<X>(f.residual, r0 + r), row<X>(h, r0 + r), f.cols, log_cols)
                           : read_row(x, f.cols, log_cols, read_later(r0 + r),
                                      f.stream ? nullptr : row<Y>(f.y, r0 + r));
        }
        // All of a batch, for the sake of a loop of known length.
        for (int64_t r = 0; r < forward_batch; ++r) {
            rstd[r] = rstd_of(sum[r].low);
            least[r] = rstd_of(sum[r].high);
        }
        for (int64_t r = 0; r < rows; ++r)
            if (!settled(rstd[r], least[r]))
                rstd[r] = rstd_of(fixed_sum_of_squares(row<X>(h, r0 + r), f.cols));
        for (int64_t r = 0; r < rows; ++r) {
            if (f.rstd) f.rstd[r0 + r] = rstd[r];
            const X* x = row<X>(h, r0 + r);
            Y* y = row<Y>(f.y, r0 + r);
            const float* gain = f.gain;
            if (gain && f.groups > 1) gain += (r0 + r) % f.groups * f.cols;
            if (f.stream)
                scale_row<X, Y, XHat, true>(x, rstd[r], gain, y, f.cols, read_later(r0 + r));
            else
                scale_row<X, Y, XHat, false>(x, rstd[r], gain, y, f.cols, read_later(r0 + r));
        }
    }
    if (f.stream) stream_end();
}

}  // namespace

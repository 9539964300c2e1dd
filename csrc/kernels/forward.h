// The forward of rows over the vocabulary of one instruction set: statistics and scale, between what stages.h
// does before and after.
#pragma once

#include "estimate.h"

namespace {

using rmsnorm::Dtype;
using rmsnorm::Forward;

template <class Call>
auto with_type(Dtype dtype, Call call) {
    if (dtype == Dtype::f32) return call(float{});
    if (dtype == Dtype::bf16) return call(bf16{});
    return call(f16{});
}

// Writes u of `count` rows from r on, where it is not x itself, and gives their sums of squares. Where rows
// of u lie in none of the tensors, they lie side by side.
using Before = void (*)(const Forward& f, int64_t r, int64_t count, void* u, int log_cols, Interval* sums);
// Writes `count` columns of y from column `begin` of row r on, given n of them; rows that are adjacent in
// every tensor come as one. A rotation gets whole rows, one at a time.
using After = void (*)(const Forward& f, int64_t r, int64_t begin, int64_t count, const float* n);

using rmsnorm::piece_cols;

// The sum of squares of x. Memory is kept busy meanwhile: with the first half of a row that is read later,
// the rest of which scale_row prefetches, and with where y goes, unless y bypasses the cache.
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

template <class T>
void fill_nan(T* p, int64_t cols) {
    for (int64_t i = 0; i < cols; ++i) set_nan(p[i]);
}

template <class XHat, class U>
F32 normalized(const U* u, F32 rstd) {
    return round_to(mul(load(u), rstd), XHat{});
}

// y = u * rstd * gain; the second half of the row `read_later` is prefetched.
template <class U, class Y, class XHat, bool nontemporal>
void scale_row(const U* u, float rstd, const float* gain, Y* y, int64_t cols, const U* read_later) {
    // A NaN with low fraction bits could carry into the sign when it is rounded to bfloat16.
    if (rstd != rstd) return fill_nan(y, cols);
    F32 scale = set(rstd);
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N) {
        F32 a = normalized<XHat>(u + i, scale), b = normalized<XHat>(u + i + N, scale);
        if (gain) a = mul(a, load(gain + i)), b = mul(b, load(gain + i + N));
        if (sizeof(U) == 4 || i & (2 * N))
            prefetch(reinterpret_cast<const char*>(read_later) + (cols + i) * int64_t(sizeof(U)) / 2);
        if (nontemporal)
            store2_nontemporal(y + i, a, b);
        else
            store2(y + i, a, b);
    }
    for (; i < cols; i += N) {
        int64_t n = cols - i < N ? cols - i : N;
        F32 v = round_to(mul(load(u + i, n), scale), XHat{});
        store(y + i, gain ? mul(v, load(gain + i, n)) : v, n);
    }
}

// NaNs of elements that do not count leave rstd what it is: see scale_row.
template <class U, class Y, class XHat>
void clean_uncounted(const U* u, Y* y, int64_t counted, int64_t cols) {
    if constexpr (can_carry<U, Y> || can_carry<U, XHat>)
        for (int64_t i = counted; i < cols; ++i)
            if (const float v = widen_one(u[i]); v != v) set_nan(y[i]);
}

// Whether rows lie side by side in every tensor: groups of a row do.
inline bool rows_are_adjacent(const Forward& f) {
    auto adjacent = [&](const Rows& rows) { return !rows.given || rows.stride == f.cols; };
    return !f.cos.given && f.x.stride == f.cols && f.y.stride == f.cols && adjacent(f.gate) &&
           adjacent(f.addend) && adjacent(f.scale) && adjacent(f.shift);
}

// n in float32 for a stage after: of a piece of a row, or of as many adjacent rows as make one.
template <class U, class XHat>
class Normed {
  public:
    Normed(After after, const Forward& f) : after_(after), f_(f), joins_(rows_are_adjacent(f)) {}

    RMSNORM_NOINLINE void add(int64_t r, const U* u, float rstd, const float* gain, const U* read_later) {
        if (f_.cols > piece_cols && !f_.cos.given) return add_pieces(r, u, rstd, gain, read_later);
        if (!joins_ || filled_ + f_.cols > piece_cols) finish();
        if (filled_ == 0) first_ = r;
        scale_row<U, float, XHat, false>(u, rstd, gain, f_.scratch + filled_, f_.cols, read_later);
        filled_ += f_.cols;
    }
    void finish() {
        if (filled_) after_(f_, first_, 0, filled_, f_.scratch);
        filled_ = 0;
    }

  private:
    void add_pieces(int64_t r, const U* u, float rstd, const float* gain, const U* read_later) {
        for (int64_t i = 0; i < f_.cols; i += piece_cols) {
            const int64_t n = f_.cols - i < piece_cols ? f_.cols - i : piece_cols;
            // Its second half begins where that of the row does.
            scale_row<U, float, XHat, false>(u + i, rstd, gain ? gain + i : nullptr, f_.scratch, n,
                                             read_later + (f_.cols + i - n) / 2);
            after_(f_, r, i, n, f_.scratch);
        }
    }

    const After after_;
    const Forward& f_;
    const bool joins_;
    int64_t first_ = 0, filled_ = 0;
};

// Each group is a row: kernels.cpp sees to that. Without a stage before, U is x's type; with one after, Y is
// float.
template <class U, class Y, class XHat>
void forward_rows(const Forward& f, Before before, After after) {
    const bool in_scratch = rmsnorm::keeps_u(f);
    const Rows u = in_scratch ? Rows{f.scratch, f.cols, Dtype::f32, true} : f.residual.given ? f.h : f.x;
    const int log_cols = ceil_log2(f.counted);
    const double reciprocal = 1.0 / double(f.counted);
    const int64_t batch = rmsnorm::rows_together(f.cols, sizeof(U));
    auto rstd_of = [&](double sum) { return float(1.0 / __builtin_sqrt(sum * reciprocal + f.eps)); };

    Normed<U, XHat> normed(after, f);
    constexpr int64_t most = rmsnorm::forward_batch;
    Interval sum[most] = {};
    float rstd[most], least[most];
    for (int64_t r0 = 0; r0 < f.rows; r0 += batch) {
        const int64_t rows = f.rows - r0 < batch ? f.rows - r0 : batch;
        auto u_of = [&](int64_t r) { return row<U>(u, in_scratch ? r : r0 + r); };
        auto read_later = [&](int64_t r) -> const U* {
            if (in_scratch || rmsnorm::size_of(f.x.dtype) != sizeof(U)) return u_of(r);
            return row<U>(f.x, r0 + r + batch < f.rows ? r0 + r + batch : r0 + r);
        };
        if (before)
            before(f, r0, rows, u_of(0), log_cols, sum);
        else
            for (int64_t r = 0; r < rows; ++r)
                sum[r] = read_row(u_of(r), f.counted, log_cols, read_later(r),
                                  f.nontemporal || after ? nullptr : row<Y>(f.y, r0 + r));
        // All of a batch, for the sake of a loop of known length.
        for (int64_t r = 0; r < most; ++r) {
            rstd[r] = rstd_of(sum[r].low);
            least[r] = rstd_of(sum[r].high);
        }
        for (int64_t r = 0; r < rows; ++r)
            if (!settled(rstd[r], least[r])) rstd[r] = rstd_of(fixed_sum_of_squares(u_of(r), f.counted));
        for (int64_t r = 0; r < rows; ++r) {
            if (f.rstd.given) f.rstd.data[r0 + r] = rstd[r];
            const float* gain = f.gain.given ? f.gain.data : nullptr;
            if (gain && f.groups > 1) gain += (r0 + r) % f.groups * f.cols;
            if (after)
                normed.add(r0 + r, u_of(r), rstd[r], gain, read_later(r));
            else if (f.nontemporal)
                scale_row<U, Y, XHat, true>(u_of(r), rstd[r], gain, row<Y>(f.y, r0 + r), f.cols,
                                            read_later(r));
            else
                scale_row<U, Y, XHat, false>(u_of(r), rstd[r], gain, row<Y>(f.y, r0 + r), f.cols,
                                             read_later(r));
            if (f.counted < f.cols)
                clean_uncounted<U, Y, XHat>(u_of(r), row<Y>(f.y, r0 + r), f.counted, f.cols);
        }
    }
    normed.finish();
    if (f.nontemporal) end_nontemporal();
}

}  // namespace

// The loops, once for all instruction sets: this file is compiled once per set, over that set's vocabulary.
//
// Bits: docs/numerics.md. The file is compiled with -ffp-contract=off, so nothing here is fused but fma_down.
#include "kernels.h"

#if defined(RMSNORM_ISA_AVX512)
#include "float_environment.h"
#include "vec_avx512.h"
#elif defined(RMSNORM_ISA_AVX2)
#include "vec_avx2.h"
#elif defined(RMSNORM_ISA_NEON)
#include "vec_neon.h"
#else
#include "vec_portable.h"
#endif

#if defined(_MSC_VER) && !defined(__clang__)
#define RMSNORM_NOINLINE __declspec(noinline)
#else
#define RMSNORM_NOINLINE __attribute__((noinline))
#endif

namespace {

using rmsnorm::Backward;
using rmsnorm::Dtype;
using rmsnorm::Forward;
using rmsnorm::Rebuild;
using rmsnorm::Rows;

template <class T>
T* row(Rows rows, int64_t index) {
    return static_cast<T*>(rows.data) + index * rows.stride;
}

// Short rows go through each step together, so that the scalar work of one hides behind that of the others.
constexpr int64_t forward_batch = 8;
constexpr int64_t forward_batch_bytes =
    16384;  // the rows of a batch stay in the first-level cache between steps

// ---------------------------------------------------------------- fixed-point sums

template <class T>
float largest_magnitude(const T* x, int64_t cols) {
    constexpr int64_t step = 4 * N / int64_t(sizeof(T));
    Bits a = no_bits(), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * step <= cols; i += 4 * step) {
        a = max_bits(a, x + i);
        b = max_bits(b, x + i + step);
        c = max_bits(c, x + i + 2 * step);
        d = max_bits(d, x + i + 3 * step);
    }
    for (; i + step <= cols; i += step) a = max_bits(a, x + i);
    if (i < cols) b = max_bits(b, x + i, cols - i);
    return largest(max_bits(max_bits(a, b, T{}), max_bits(c, d, T{}), T{}), T{});
}

int ceil_log2(int64_t n) {
    int log = 0;
    while ((int64_t(1) << log) < n) ++log;
    return log;
}

// Where an accumulator starts, so that its last bit is worth the quantum q = 2^(E + L - 51): 1.5 * 2^52 * q.
double start_value(int exponent, int log_cols) { return 1.5 * power_of_two(exponent + log_cols + 1); }

double drain(const F64 (&sums)[4], double start) {
    F64 s = set64(start);
    return total(add(add(sub(sums[0], s), sub(sums[1], s)), add(sub(sums[2], s), sub(sums[3], s))));
}

// The two loops below run toward zero (see TowardZero): their sums stay positive, so that is floor.

template <class T>
RMSNORM_NOINLINE void sum_squares(const T* x, int64_t cols, double start, F64 (&result)[4]) {
    F64 sums[4] = {set64(start), set64(start), set64(start), set64(start)}, v[4];
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N) {
        load_wide(x + i, v);
        for (int j = 0; j < 4; ++j) sums[j] = fma_down(v[j], v[j], sums[j]);
    }
    for (; i < cols; i += N) {
        widen(i + N <= cols ? load(x + i) : load(x + i, cols - i), v[0], v[1]);
        for (int j = 0; j < 2; ++j) sums[j] = fma_down(v[j], v[j], sums[j]);
    }
    for (int j = 0; j < 4; ++j) result[j] = sums[j];
}

template <class T>
RMSNORM_NOINLINE void sum_products(const float* u, const T* x, int64_t cols, double start, F64 (&result)[4]) {
    F64 sums[4] = {set64(start), set64(start), set64(start), set64(start)}, a[2], b[2];
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N)
        for (int half = 0; half < 2; ++half) {
            widen(load(u + i + half * N), a[0], a[1]);
            widen(load(x + i + half * N), b[0], b[1]);
            for (int j = 0; j < 2; ++j) sums[2 * half + j] = fma_down(a[j], b[j], sums[2 * half + j]);
        }
    for (; i < cols; i += N) {
        bool whole = i + N <= cols;
        widen(whole ? load(u + i) : load(u + i, cols - i), a[0], a[1]);
        widen(whole ? load(x + i) : load(x + i, cols - i), b[0], b[1]);
        for (int j = 0; j < 2; ++j) sums[j] = fma_down(a[j], b[j], sums[j]);
    }
    for (int j = 0; j < 4; ++j) result[j] = sums[j];
}

template <class T>
RMSNORM_NOINLINE void sum_squares_of_rows(Rows x, int64_t first_row, int64_t rows, int64_t cols,
                                          const double* start, F64 (*sums)[4]) {
    [[maybe_unused]] TowardZero mode;
    for (int64_t r = 0; r < rows; ++r) sum_squares(row<T>(x, first_row + r), cols, start[r], sums[r]);
}

template <class T>
RMSNORM_NOINLINE void sum_products_of_rows(const float* u, Rows x, int64_t first_row, int64_t rows,
                                           int64_t cols, const double* start, F64 (*sums)[4]) {
    [[maybe_unused]] TowardZero mode;
    for (int64_t r = 0; r < rows; ++r)
        sum_products(u + r * cols, row<T>(x, first_row + r), cols, start[r], sums[r]);
}

// ---------------------------------------------------------------- forward

template <class X>
void add_row(const X* x, const X* residual, X* h, int64_t cols) {
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N)
        store2(h + i, add(load(x + i), load(residual + i)), add(load(x + i + N), load(residual + i + N)));
    for (; i < cols; i += N) {
        int64_t n = cols - i < N ? cols - i : N;
        store(h + i, add(load(x + i, n), load(residual + i, n)), n);
    }
}

template <class T>
void fill_nan(T* p, int64_t cols) {
    for (int64_t i = 0; i < cols; ++i) set_nan(p[i]);
}

template <class X, class Y, class XHat>
void scale_row(const X* x, float rstd, const float* gain, Y* y, int64_t cols) {
    // A NaN with low fraction bits could carry into the sign when it is rounded to bfloat16.
    if (rstd != rstd) return fill_nan(y, cols);
    F32 scale = set(rstd);
    int64_t i = 0;
    if (gain) {
        for (; i + 2 * N <= cols; i += 2 * N) {
            F32 a = round_to(mul(load(x + i), scale), XHat{}),
                b = round_to(mul(load(x + i + N), scale), XHat{});
            store2(y + i, mul(a, load(gain + i)), mul(b, load(gain + i + N)));
        }
    } else {
        for (; i + 2 * N <= cols; i += 2 * N)
            store2(y + i, round_to(mul(load(x + i), scale), XHat{}),
                   round_to(mul(load(x + i + N), scale), XHat{}));
    }
    for (; i < cols; i += N) {
        int64_t n = cols - i < N ? cols - i : N;
        F32 v = round_to(mul(load(x + i, n), scale), XHat{});
        store(y + i, gain ? mul(v, load(gain + i, n)) : v, n);
    }
}

template <class X, class Y, class XHat>
void forward_rows(const Forward& f) {
    const Rows h = f.residual ? f.h : f.x;
    const int log_cols = ceil_log2(f.cols);
    const double reciprocal = 1.0 / double(f.cols);
    int64_t batch = forward_batch_bytes / (f.cols * int64_t(sizeof(X)));
    batch = batch < 1 ? 1 : batch > forward_batch ? forward_batch : batch;

    float m[forward_batch], rstd[forward_batch];
    double start[forward_batch], sum[forward_batch];
    F64 sums[forward_batch][4];
    for (int64_t r0 = 0; r0 < f.rows; r0 += batch) {
        const int64_t rows = f.rows - r0 < batch ? f.rows - r0 : batch;
        for (int64_t r = 0; r < rows; ++r) {
            if (f.residual)
                add_row(row<X>(f.x, r0 + r), row<X>(f.residual, r0 + r), row<X>(h, r0 + r), f.cols);
            m[r] = largest_magnitude(row<X>(h, r0 + r), f.cols);
        }
        for (int64_t r = 0; r < rows; ++r)
            start[r] = start_value(m[r] > 0 && finite(m[r]) ? 2 * exponent_of(m[r]) : 0, log_cols);
        sum_squares_of_rows<X>(h, r0, rows, f.cols, start, sums);
        for (int64_t r = 0; r < rows; ++r)
            sum[r] = finite(m[r]) ? drain(sums[r], start[r]) : double(m[r]) * double(m[r]);
        for (int64_t r = 0; r < rows; ++r) rstd[r] = float(1.0 / __builtin_sqrt(sum[r] * reciprocal + f.eps));
        for (int64_t r = 0; r < rows; ++r) {
            scale_row<X, Y, XHat>(row<X>(h, r0 + r), rstd[r], f.gain, row<Y>(f.y, r0 + r), f.cols);
            if (f.rstd) f.rstd[r0 + r] = rstd[r];
        }
    }
}

// ---------------------------------------------------------------- backward

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

// ---------------------------------------------------------------- rebuild

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

// ---------------------------------------------------------------- the weight

template <class W>
void gain_of(const W* weight, float offset, float* gain, int64_t cols) {
    Bits m = no_bits();
    for (int64_t i = 0; i < cols; i += N) {
        int64_t n = cols - i < N ? cols - i : N;
        F32 v = load(weight + i, n);
        if (offset != 0) v = add(v, set(offset));  // adding 0 would turn -0 into +0
        m = max_bits(m, v);
        store(gain + i, v, n);
    }
    // No product of a clean NaN is a NaN with low fraction bits; see scale_row.
    if (bits_of(largest(m, float{})) > 0x7f800000)
        for (int64_t i = 0; i < cols; ++i)
            if (gain[i] != gain[i]) set_nan(gain[i]);
}

template <class T>
void round_row(const float* values, T* result, int64_t cols) {
    for (int64_t i = 0; i < cols; ++i)
        if (values[i] != values[i])
            set_nan(result[i]);
        else
            result[i] = narrow_one(values[i], T{});
}

// ---------------------------------------------------------------- from dtypes to templates

template <class Call>
void with_type(Dtype dtype, Call call) {
    if (dtype == Dtype::f32)
        call(float{});
    else if (dtype == Dtype::bf16)
        call(bf16{});
    else
        call(f16{});
}

void forward(const Forward& f) {
    Ieee arithmetic;
    with_type(f.x_type, [&](auto x) {
        with_type(f.y_type, [&](auto y) {
            with_type(f.x_hat_type,
                      [&](auto x_hat) { forward_rows<decltype(x), decltype(y), decltype(x_hat)>(f); });
        });
    });
}

void backward(const Backward& b) {
    Ieee arithmetic;
    with_type(b.dy_type, [&](auto dy) {
        with_type(b.x_type, [&](auto x) { backward_rows<decltype(dy), decltype(x)>(b); });
    });
}

void rebuild(const Rebuild& f) {
    Ieee arithmetic;
    with_type(f.y_type, [&](auto y) {
        with_type(f.x_type, [&](auto x) { rebuild_rows<decltype(y), decltype(x)>(f); });
    });
}

void gain(const void* weight, Dtype dtype, float offset, float* result, int64_t cols) {
    Ieee arithmetic;
    with_type(dtype, [&](auto w) { gain_of(static_cast<const decltype(w)*>(weight), offset, result, cols); });
}

void accumulate(const float* terms, float* sums, int64_t cols) {
    Ieee arithmetic;
    for (int64_t i = 0; i < cols; ++i) sums[i] += terms[i];
}

void round(const float* values, void* result, Dtype dtype, int64_t cols) {
    Ieee arithmetic;
    with_type(dtype, [&](auto type) { round_row(values, static_cast<decltype(type)*>(result), cols); });
}

}  // namespace

namespace rmsnorm {

extern const Kernels RMSNORM_TABLE;  // kernels_<isa>, which isa.cpp knows
const Kernels RMSNORM_TABLE = {isa_name, forward, backward, rebuild, gain, accumulate, round};

}  // namespace rmsnorm

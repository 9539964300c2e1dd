// Sums that cannot depend on their order (docs/numerics.md, section 2), over the vocabulary of one
// instruction set.
//
// An accumulator starts at 1.5 * 2^52 quanta, so that its last bit is worth one quantum; adding toward zero
// to a positive number is then floor-and-accumulate, and every partial sum is exact.
#pragma once

#include "kernels.h"

#if defined(_MSC_VER) && !defined(__clang__)
#define RMSNORM_NOINLINE __declspec(noinline)
#else
#define RMSNORM_NOINLINE __attribute__((noinline))
#endif

namespace {

using rmsnorm::Rows;

template <class T>
T* row(Rows rows, int64_t index) {
    return static_cast<T*>(rows.data) + index * rows.stride;
}

// The rows from one on.
inline Rows from(Rows rows, int64_t row, rmsnorm::Dtype dtype) {
    if (rows.data) rows.data = static_cast<char*>(rows.data) + row * rows.stride * rmsnorm::size_of(dtype);
    return rows;
}

// Into the second-level cache: the first is full of the rows at work.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 2); }

inline int ceil_log2(int64_t n) {
    int log = 0;
    while ((int64_t(1) << log) < n) ++log;
    return log;
}

// 1.5 * 2^52 * q for terms below 2^exponent, q = 2^(exponent + log_cols - 51).
inline double start_value(int exponent, int log_cols) { return 1.5 * power_of_two(exponent + log_cols + 1); }

// What was added to four accumulators. Their differences from the start add exactly, in any order.
inline double drain(const F64 (&sums)[4], F64 s) {
    return total(add(add(sub(sums[0], s), sub(sums[1], s)), add(sub(sums[2], s), sub(sums[3], s))));
}

// Magnitudes as integers: NaN is larger than infinity, which is larger than everything else.
template <class T>
struct Largest {
    static constexpr int64_t step = 4 * N / int64_t(sizeof(T));
    Bits a = no_bits(), b = a;

    void see(const T* x) {
        a = max_bits(a, x);
        b = max_bits(b, x + step);
    }
    void see_rest(const T* x, int64_t i, int64_t cols) {
        for (; i + step <= cols; i += step) a = max_bits(a, x + i);
        if (i < cols) b = max_bits(b, x + i, cols - i);
    }
    float value() const { return largest(max_bits(a, b, T{}), T{}); }
};

template <class T>
float largest_magnitude(const T* x, int64_t cols) {
    Largest<T> m;
    int64_t i = 0;
    for (; i + 2 * m.step <= cols; i += 2 * m.step) m.see(x + i);
    m.see_rest(x, i, cols);
    return m.value();
}

// One row of a sum of squares. While its arithmetic runs, memory is kept busy with what the next steps need.
template <class T>
struct SquareTask {
    const T* x;
    double start;
    double sum;
    const T* next;       // a row whose largest magnitude is wanted; may be null
    float next_largest;  // of `next`
    // A row further on: its first half is prefetched here, the rest while y is written.
    const char* read_later;
    const char* write_after;  // where y goes; null when it goes past the cache
};

template <class T>
inline void sum_squares(SquareTask<T>& task, int64_t cols) {
    const T* x = task.x;
    F64 s = set64(task.start), sums[4] = {s, s, s, s}, v[4];
    Largest<T> m;
    int64_t i = 0;
    constexpr int64_t step = 2 * m.step;  // as many bytes as 2N floats
    for (; i + step <= cols; i += step) {
#pragma GCC unroll 2
        for (int64_t part = 0; part < step; part += 2 * N) {
            load_wide(x + i + part, v);
            for (int k = 0; k < 4; ++k) sums[k] = fma_down(v[k], v[k], sums[k]);
        }
        if (task.next) m.see(task.next + i);
        const int64_t offset = i * int64_t(sizeof(T));
        prefetch(task.read_later + offset / 2);
        if (task.write_after)
            for (int64_t byte = 0; byte < 8 * N; byte += 64)
                prefetch_to_write(task.write_after + offset + byte);
    }
    if (task.next) m.see_rest(task.next, i, cols);
    for (; i < cols; i += N) {
        widen(i + N <= cols ? load(x + i) : load(x + i, cols - i), v[0], v[1]);
        for (int k = 0; k < 2; ++k) sums[k] = fma_down(v[k], v[k], sums[k]);
    }
    task.sum = drain(sums, s);
    task.next_largest = m.value();
}

// Runs toward zero on instruction sets without a rounding mode in the instruction: nothing but exact
// operations, integers and fma_down may be done in it, and it must not be inlined where other arithmetic
// could slip in.
template <class T>
RMSNORM_NOINLINE void sum_squares_toward_zero(SquareTask<T>* tasks, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; ++r) sum_squares(tasks[r], cols);
}

template <class T>
RMSNORM_NOINLINE void sum_squares_of_rows(SquareTask<T>* tasks, int64_t rows, int64_t cols) {
    [[maybe_unused]] TowardZero mode;
    sum_squares_toward_zero(tasks, rows, cols);
}

// As load_wide, which keeps the order of floats, with the order kept.
inline void load_in_order(const float* p, F64 (&v)[4]) { load_wide(p, v); }
template <class T>
void load_in_order(const T* p, F64 (&v)[4]) {
    widen(load(p), v[0], v[1]);
    widen(load(p + N), v[2], v[3]);
}

// One row of a sum of products, and rows to prefetch meanwhile.
template <class DY, class X>
struct ProductTask {
    const float* u;
    const X* x;
    double start;
    double sum;
    const DY* dy_later;
    const X* x_later;
    const X* write_after;  // where dx goes
};

template <class DY, class X>
inline void sum_products(ProductTask<DY, X>& task, int64_t cols) {
    F64 s = set64(task.start), sums[4] = {s, s, s, s}, u[4], x[4];
    int64_t i = 0;
    for (; i + 2 * N <= cols; i += 2 * N) {
        load_in_order(task.u + i, u);
        load_in_order(task.x + i, x);
        for (int j = 0; j < 4; ++j) sums[j] = fma_down(u[j], x[j], sums[j]);
        for (int64_t byte = 0; byte < 2 * N * int64_t(sizeof(DY)); byte += 64)
            prefetch(reinterpret_cast<const char*>(task.dy_later + i) + byte);
        for (int64_t byte = 0; byte < 2 * N * int64_t(sizeof(X)); byte += 64)
            prefetch(reinterpret_cast<const char*>(task.x_later + i) + byte);
        for (int64_t byte = 0; byte < 2 * N * int64_t(sizeof(X)); byte += 64)
            prefetch_to_write(reinterpret_cast<const char*>(task.write_after + i) + byte);
    }
    for (; i < cols; i += N) {
        const bool whole = i + N <= cols;
        widen(whole ? load(task.u + i) : load(task.u + i, cols - i), u[0], u[1]);
        widen(whole ? load(task.x + i) : load(task.x + i, cols - i), x[0], x[1]);
        for (int j = 0; j < 2; ++j) sums[j] = fma_down(u[j], x[j], sums[j]);
    }
    task.sum = drain(sums, s);
}

template <class DY, class X>
RMSNORM_NOINLINE void sum_products_toward_zero(ProductTask<DY, X>* tasks, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; ++r) sum_products(tasks[r], cols);
}

template <class DY, class X>
RMSNORM_NOINLINE void sum_products_of_rows(ProductTask<DY, X>* tasks, int64_t rows, int64_t cols) {
    [[maybe_unused]] TowardZero mode;
    sum_products_toward_zero(tasks, rows, cols);
}

}  // namespace

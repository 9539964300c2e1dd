// What a set of kernels offers: one table of functions per instruction set, chosen once (isa.cpp).
//
// Kernels see pointers, sizes and strides only. Rows are `cols` adjacent elements; consecutive rows are a
// stride apart, counted in elements. A kernel works on the calling thread and allocates nothing.
#pragma once

#include <cstdint>

namespace rmsnorm {

enum class Dtype : int32_t { f32, bf16, f16 };

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// A stack of rows inside some tensor.
struct Rows {
    void* data;  // null where there are none
    int64_t stride;
};

// y = x_hat * gain, or with a residual h = x + residual first and x_hat of h.
struct Forward {
    Rows x, residual, h, y;  // residual and h: both or neither
    float* rstd;             // one per row, adjacent; may be null
    const float* gain;       // weight + weight_offset; null means 1
    int64_t rows, cols;
    double eps;
    Dtype x_type, y_type;  // residual and h have x's type
    Dtype x_hat_type;      // x_hat is rounded to this before the gain; f32 means not at all
    bool stream;           // y goes past the cache; its rows then start and end at multiples of 64 bytes
};

// The rows of one block: dx of each row, and their terms of dweight added to `dweight` in row order.
struct Backward {
    Rows dy, x, dh, dx;  // dh may be absent; dx too, when only dweight is wanted; dx may be x
    const float* rstd;
    const float* gain;
    float* dweight;  // cols sums, continued; may be null
    float* scratch;  // cols floats
    int64_t rows, cols;
    Dtype dy_type, x_type;  // dh and dx have x's type
};

// x = y / gain / rstd: undoes Forward from its output (memory_efficient).
struct Rebuild {
    Rows y, x;
    const float* rstd;
    const float* gain;
    int64_t rows, cols;
    Dtype y_type, x_type;
};

struct Kernels {
    const char* name;
    void (*forward)(const Forward&);
    void (*backward)(const Backward&);
    void (*rebuild)(const Rebuild&);
    void (*gain)(const void* weight, Dtype dtype, float offset, float* gain, int64_t cols);
    void (*accumulate)(const float* terms, float* sums, int64_t cols);  // sums += terms
    void (*round)(const float* values, void* result, Dtype dtype, int64_t cols);
};

// The table chosen for this process: the best the machine has, or the one RMSNORM_ISA names.
// Null when that name is unknown or unsupported; `error` then says so.
const Kernels* kernels(const char** error);

// Names of the tables that this machine can run, best first, comma-separated.
const char* available();

}  // namespace rmsnorm

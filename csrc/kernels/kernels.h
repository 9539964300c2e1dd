// What a set of kernels offers: one table of functions per instruction set, chosen once (isa.cpp).
//
// Kernels see pointers, sizes and strides only. Rows are `groups * cols` adjacent elements, each group of
// `cols` normalised by itself; consecutive rows are a stride apart, counted in elements. A kernel works on
// the calling thread and allocates nothing.
#pragma once

#include <cstdint>

namespace rmsnorm {

enum class Dtype : int32_t { f32, bf16, f16 };

// Each file's own functions, here and below: one that files of different instruction sets share would be
// merged by the linker.
namespace {
inline int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }
}  // namespace

// A stack of rows inside some tensor.
struct Rows {
    void* data;  // null where there are none
    int64_t stride;
};

// y = x_hat * gain, or with a residual h = x + residual first and x_hat of h.
struct Forward {
    Rows x, residual, h, y;  // residual and h: both or neither
    float* rstd;             // one per group, adjacent; may be null
    const float* gain;       // weight + weight_offset, of a row; null means 1
    int64_t rows, cols;
    int64_t groups = 1;  // more than one only without residual
    double eps;
    Dtype x_type, y_type;  // residual and h have x's type
    Dtype x_hat_type;      // x_hat is rounded to this before the gain; f32 means not at all
    bool stream;           // y goes past the cache; its groups then start and end at multiples of 64 bytes
};

// Rows of one leaf: dx of each row, and their terms of dweight added to `dweight` in row order.
struct Backward {
    Rows dy, x, dh, dx;  // dh may be absent; dx too, when only dweight is wanted; dx may be x
    const float* rstd;
    const float* gain;
    float* dweight;  // a row of sums, continued; may be null
    float* scratch;  // cols floats
    int64_t rows, cols;
    int64_t groups = 1;
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

enum class Activation : int32_t { silu, sigmoid };

// What all gated calls share. act(z) = sigmoid(z), or z * sigmoid(z).
struct Gate {
    Rows rows;  // of x's shape and type
    Activation activation;
    bool first;      // y = norm(x * act(gate)), else norm(x) * act(gate)
    float* scratch;  // gate_scratch(groups * cols) floats
};

struct GatedForward {
    Forward norm;  // without residual
    Gate gate;
    Dtype normed_type;  // gate last: norm(x) is rounded to this before the gate; f32 means not at all
};

// A gate that comes last leaves dy_type x's.
struct GatedBackward {
    Backward norm;  // dx of x, not of what is normalised; without dh
    Gate gate;
    Rows dgate;  // in x's type; may be absent
};

struct Kernels {
    const char* name;
    void (*forward)(const Forward&);
    void (*backward)(const Backward&);
    void (*rebuild)(const Rebuild&);
    void (*gated_forward)(const GatedForward&);
    void (*gated_backward)(const GatedBackward&);
    void (*gain)(const void* weight, Dtype dtype, double offset, float* gain, int64_t cols);
    void (*accumulate)(const float* terms, float* sums, int64_t cols);  // sums += terms
    void (*round)(const float* values, void* result, Dtype dtype, int64_t cols);
};

// Rows that go through a gate together, as float32, and the scratch that takes: enough of them that calls do
// not cost, few enough for the first-level cache, and pairs for the backward.
namespace {
inline int64_t gate_batch(int64_t width) { return width < 2048 ? 4096 / width : 2; }
inline int64_t gate_scratch(int64_t width) { return 2 * gate_batch(width) * width; }
}  // namespace

// The table chosen for this process: the best the machine has, or the one RMSNORM_ISA names.
// Null when that name is unknown or unsupported; `error` then says so.
const Kernels* kernels(const char** error);

// Names of the tables that this machine can run, best first, comma-separated.
const char* available();

}  // namespace rmsnorm

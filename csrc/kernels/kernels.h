// What a set of kernels offers: one table of functions per instruction set, chosen once (isa.cpp).
//
// Kernels see pointers, sizes and strides only. Rows are `groups * cols` adjacent elements, each group of
// `cols` normalised by itself. A kernel works on the calling thread and allocates nothing.
#pragma once

#include <cstdint>

namespace rmsnorm {

enum class Dtype : int32_t { f32, bf16, f16 };
enum class Activation : int32_t { silu, sigmoid };
enum class Quantized : int32_t { int8, e4m3fn, e5m2 };
enum class Scale : int32_t {
    float32,
    e8m0_down,
    e8m0_up
};  // a power of two: below amax's, or not below amax / largest

// A stack of rows inside some tensor, or none: `given` alone says which, never a null pointer.
struct Rows {
    void* data;
    int64_t stride;  // from row to row, in elements
    Dtype dtype;
    bool given;
};

// Float32 values that lie side by side, or none.
struct Vector {
    float* data;
    bool given;
};

// Of the first `cols` columns, by cosines and sines of as many columns, or of half of them for both of a
// pair. Pairs are (i, i + cols / 2), or (2 i, 2 i + 1). `each` rounds every operation to the result's type.
struct Rotation {
    int64_t cols;
    bool half_width, interleaved, each;
};

// The four stages of a norm (docs/design.md):
//
//   before       u = x, or x + residual, or x * act(gate)
//   statistics   rstd of each group of u
//   scale        n = u * rstd, rounded to x_hat_type, * gain
//   after        y = n, or n rounded to normed_type, * act(gate), or + addend, or * (1 + scale) + shift,
//                or n rounded to y's type and rotated
struct Forward {
    Rows x, y;
    Rows residual, h;   // both or neither; h = t + residual in the residual's dtype
    Rows gate;          // only without residual; y has x's dtype where the gate comes last
    Rows addend;        // without residual and gate; y has its dtype
    Rows scale, shift;  // either, of one dtype; without a gate
    Rows cos, sin;      // both, of one dtype, or neither; without any of the others
    Rotation rotation;
    Vector rstd;     // one value per group
    Vector gain;     // weight + weight_offset, of a row; 1 where there is none
    float* scratch;  // forward_scratch(*this) floats
    int64_t rows, cols, groups;
    int64_t counted;  // statistics are of the first so many columns of each group
    double eps;
    double alpha;     // t = x * alpha, rounded to x's dtype; t = x where alpha is 1
    bool exact_sum;   // u is t + residual in float32, not h
    bool gate_first;  // the gate comes before the norm
    Activation activation;
    Dtype x_hat_type, normed_type;  // f32 means not at all
    bool nontemporal;  // y bypasses the cache; its groups then start and end at multiples of 64 bytes
};

// Rows of one leaf: dx of each row, and their terms of dweight added to `dweight` in row order.
struct Backward {
    Rows dy, x;
    Rows gate;       // dy has x's dtype where the gate comes last
    Rows dh;         // in x's dtype, only without gate; added to dx before its rounding
    Rows dx, dgate;  // in x's dtype and in the gate's; dx may be x
    Vector rstd, gain;
    Vector dweight;  // a row of sums, continued
    float* scratch;  // backward_scratch(*this) floats
    int64_t rows, cols, groups, counted;
    bool gate_first;
    Activation activation;
};

// Rows of one leaf of y = n * (1 + scale) + shift: dx of each row, and terms added to sums in row order.
struct ModulatedBackward {
    Rows dy, x;
    Rows scale;  // or none
    Rows dx;     // in x's dtype
    Vector rstd, gain;
    Vector dweight, dscale, dshift;  // rows of sums, continued
    float* scratch;                  // modulated_scratch(cols) floats
    int64_t rows, cols;
    Dtype x_hat_type, normed_type;  // as in Forward
};

// Rows of one leaf of a rotated norm. dy has the type of the norm's result.
struct RotatedBackward {
    Rows dy, x, cos, sin;
    Rows dx;  // in x's dtype
    Vector rstd, gain;
    Vector dweight;  // a row of sums, continued
    Rotation rotation;
    float* scratch;  // rotated_scratch(cols) floats
    int64_t rows, cols;
};

// x = y / gain / rstd: undoes a plain Forward from its output (memory_efficient).
struct Rebuild {
    Rows y, x;
    Vector rstd, gain;
    int64_t rows, cols;
};

// q = y / scale of rows that are blocks side by side, each with its own scale: of its largest magnitude, or
// given.
struct Quantize {
    Rows y;
    void* q;                     // one byte an element, adjacent rows
    void* scales;                // adjacent; float32, or one byte of E8M0 each
    Vector given;                // a scale for each block, taken instead
    float* scratch;              // a row of float32
    int64_t rows, blocks, cols;  // cols of a block
    Quantized type;
    Scale scale;
    float largest;         // of q: amax / largest is the scale
    float most, smallest;  // amax counts as at most `most`; no scale is below `smallest`
    float lowest;          // of q as int8
};

struct Kernels {
    const char* name;
    void (*forward)(const Forward&);
    void (*backward)(const Backward&);
    void (*rebuild)(const Rebuild&);
    void (*modulated_backward)(const ModulatedBackward&);
    void (*rotated_backward)(const RotatedBackward&);
    void (*quantize)(const Quantize&);
    void (*gain)(const void* weight, Dtype dtype, double offset, float* gain, int64_t cols);
    void (*accumulate)(const float* terms, float* sums, int64_t cols);  // sums += terms
    void (*round)(const float* values, void* result, Dtype dtype, int64_t cols);
};

// Each file has its own copy of these: the linker would merge copies that files of different instruction sets
// share.
namespace {

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// Short rows take each step together, so that the scalar work of one hides behind that of the others.
constexpr int64_t forward_batch = 4, forward_batch_bytes = 6144;
inline int64_t rows_together(int64_t cols, int64_t size) {
    const int64_t rows = forward_batch_bytes / (cols * size);
    return rows < 1 ? 1 : rows > forward_batch ? forward_batch : rows;
}

// Whether u is float32 values that lie in none of the tensors.
inline bool keeps_u(const Forward& f) {
    return f.gate.given ? f.gate_first : f.residual.given && f.exact_sum && f.h.dtype != Dtype::f32;
}
inline bool modulated(const Forward& f) { return f.scale.given || f.shift.given; }
// Stages work on pieces of a row, which stay in the first-level cache.
constexpr int64_t piece_cols = 512;
inline int64_t rotation_scratch(int64_t cols) { return 4 * cols; }
inline int64_t forward_scratch(const Forward& f) {
    if (keeps_u(f)) return rows_together(f.cols, sizeof(float)) * f.cols;
    if (f.cos.given) return 2 * f.cols + rotation_scratch(f.cols);
    return f.gate.given || f.addend.given || modulated(f) ? piece_cols : 0;
}

// Rows that go through a gate together in the backward, as float32: enough of them that calls do not cost,
// few enough for the first-level cache.
inline int64_t gate_batch(int64_t width) { return width < 2048 ? 4096 / width : 2; }
inline int64_t backward_scratch(const Backward& b) {
    const int64_t width = b.groups * b.cols;
    return b.cols + (b.gate.given ? 2 * gate_batch(width) * width : 0);
}
inline int64_t modulated_scratch(int64_t cols) { return (2 + gate_batch(cols)) * cols; }
inline int64_t rotated_scratch(int64_t cols) {
    return (1 + gate_batch(cols)) * cols + rotation_scratch(cols);
}

}  // namespace

// The table chosen for this process: the best the machine has, or the one RMSNORM_ISA names.
// Null when that name is unknown or unsupported; `error` then says so.
const Kernels* kernels(const char** error);

// Names of the tables that this machine can run, best first, comma-separated.
const char* available();

}  // namespace rmsnorm

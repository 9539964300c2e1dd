// The loops, once for all instruction sets: this file is compiled once per set, over that set's vocabulary.
//
// Bits: docs/numerics.md. The file is compiled with -ffp-contract=off, so nothing here is fused but fma_down.
#include "kernels.h"

#if defined(RMSNORM_ISA_AVX512)
#include "../vec/vec_avx512.h"
#include "float_environment.h"
#elif defined(RMSNORM_ISA_AVX2)
#include "../vec/vec_avx2.h"
#elif defined(RMSNORM_ISA_NEON)
#include "../vec/vec_neon.h"
#else
#include "../vec/vec_portable.h"
#endif

#include "gated_backward.h"
#include "modulated_backward.h"
#include "quantize.h"
#include "stages.h"

namespace {

// ---------------------------------------------------------------- the weight

template <class W>
void gain_of(const W* weight, double offset, float* gain, int64_t cols) {
    // Where there is none, -0: to add +0 would turn -0 into +0. Others count even if they are 0 in float32.
    const F32 added = set(offset == 0 ? -0.0f : float(offset));
    Bits m = no_bits();
    for (int64_t i = 0; i < cols; i += N) {
        int64_t n = cols - i < N ? cols - i : N;
        const F32 v = add(load(weight + i, n), added);
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
    fill_row<float>(result, cols, [=](int64_t i, auto... n) { return nan_cleaned(load(values + i, n...)); });
}

// ---------------------------------------------------------------- from dtypes to templates

// Groups as rows, which lie a fixed stride apart where whole rows are adjacent; else a row at a time.
template <class Call>
void with_groups_as_rows(const Forward& given, Call call) {
    if (given.groups == 1) return call(given);
    Forward f = given;
    Rows* const all[] = {&f.x, &f.y, &f.residual, &f.h, &f.gate, &f.addend, &f.scale, &f.shift};
    const int64_t width = f.groups * f.cols;
    bool adjacent = true;
    for (Rows* rows : all) adjacent = adjacent && (!rows->given || rows->stride == width);
    const int64_t at_once = adjacent ? f.rows : 1;
    f.rows = at_once * f.groups;
    for (int64_t r = 0; r < given.rows; r += at_once) {
        f.x = from(given.x, r), f.y = from(given.y, r), f.gate = from(given.gate, r);
        f.residual = from(given.residual, r), f.h = from(given.h, r);
        f.addend = from(given.addend, r);
        f.scale = from(given.scale, r), f.shift = from(given.shift, r);
        for (Rows* rows : all) rows->stride = f.cols;
        f.rstd = given.rstd;
        if (f.rstd.given) f.rstd.data += r * f.groups;
        call(f);
    }
}

void forward(const Forward& given) {
    Ieee arithmetic;
    const Before before = before_of(given);
    const After after = after_of(given);
    const Dtype u_type = rmsnorm::keeps_u(given) ? Dtype::f32
                         : given.residual.given  ? given.h.dtype
                                                 : given.x.dtype;
    with_groups_as_rows(given, [&](const Forward& f) {
        with_type(u_type, [&](auto u) {
            with_type(after ? Dtype::f32 : f.y.dtype, [&](auto y) {
                with_type(f.x_hat_type, [&](auto x_hat) {
                    forward_rows<decltype(u), decltype(y), decltype(x_hat)>(f, before, after);
                });
            });
        });
    });
}

void backward(const Backward& b) {
    Ieee arithmetic;
    if (b.gate.given)
        return with_type(b.x.dtype, [&](auto x) {
            with_type(b.gate.dtype, [&](auto z) { gated_backward_rows<decltype(x), decltype(z)>(b); });
        });
    with_type(b.dy.dtype, [&](auto dy) {
        with_type(b.x.dtype, [&](auto x) { backward_rows<decltype(dy), decltype(x)>(b); });
    });
}

void modulated_backward(const ModulatedBackward& b) {
    Ieee arithmetic;
    with_type(b.dy.dtype, [&](auto dy) {
        with_type(b.x.dtype, [&](auto x) {
            with_type(b.scale.given ? b.scale.dtype : Dtype::f32,
                      [&](auto z) { modulated_backward_rows<decltype(dy), decltype(x), decltype(z)>(b); });
        });
    });
}

void rotated_backward(const RotatedBackward& b) {
    Ieee arithmetic;
    with_type(b.dy.dtype, [&](auto dy) {
        with_type(b.cos.dtype, [&](auto c) { rotated_backward_rows<decltype(dy), decltype(c)>(b); });
    });
}

void quantize(const Quantize& call) {
    Ieee arithmetic;
    with_type(call.y.dtype, [&](auto y) { quantize_rows<decltype(y)>(call); });
}

void rebuild(const Rebuild& f) {
    Ieee arithmetic;
    with_type(f.y.dtype, [&](auto y) {
        with_type(f.x.dtype, [&](auto x) { rebuild_rows<decltype(y), decltype(x)>(f); });
    });
}

void gain(const void* weight, Dtype dtype, double offset, float* result, int64_t cols) {
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
const Kernels RMSNORM_TABLE = {isa_name,         forward,  backward, rebuild,    modulated_backward,
                               rotated_backward, quantize, gain,     accumulate, round};

}  // namespace rmsnorm

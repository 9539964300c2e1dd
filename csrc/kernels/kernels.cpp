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

#include "backward.h"
#include "forward.h"
#include "gated.h"

namespace {

using rmsnorm::Dtype;

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

void forward(const Forward& given) {
    Ieee arithmetic;
    Forward f = given;
    if (f.groups > 1) {  // as rows, which lie a fixed stride apart if whole rows are adjacent
        const int64_t width = f.groups * f.cols;
        if (f.rows > 1 && !(f.x.stride == width && f.y.stride == width)) {
            f.rows = 1;
            for (int64_t r = 0; r < given.rows; ++r) {
                f.x = from(given.x, r, f.x_type), f.y = from(given.y, r, f.y_type);
                if (given.rstd) f.rstd = given.rstd + r * f.groups;
                forward(f);
            }
            return;
        }
        f.rows *= f.groups;
        f.x.stride = f.y.stride = f.cols;
    }
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

void gated_forward(const GatedForward& g) {
    Ieee arithmetic;
    with_type(g.norm.x_type, [&](auto x) { gated_forward_rows<decltype(x)>(g); });
}

void gated_backward(const GatedBackward& g) {
    Ieee arithmetic;
    with_type(g.norm.x_type, [&](auto x) { gated_backward_rows<decltype(x)>(g); });
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
const Kernels RMSNORM_TABLE = {isa_name,       forward, backward,   rebuild, gated_forward,
                               gated_backward, gain,    accumulate, round};

}  // namespace rmsnorm

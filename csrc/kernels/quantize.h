// Quantisation of rows, over plain C++: the compiler makes vectors of these loops. docs/numerics.md,
// "Quantised results".
#pragma once

#include <cstring>

#include "activation.h"

namespace {

using rmsnorm::Quantize;
using rmsnorm::Quantized;
using rmsnorm::Scale;

inline uint32_t bits_of_float(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    return bits;
}
inline float float_of_bits(uint32_t bits) {
    float v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

constexpr uint32_t magnitude = 0x7fffffff, infinity = 0x7f800000;

// The largest magnitude; a NaN is larger than all.
inline float largest_magnitude(const float* y, int64_t cols) {
    uint32_t most = 0;
    for (int64_t i = 0; i < cols; ++i) {
        const uint32_t m = bits_of_float(y[i]) & magnitude;
        most = m > most ? m : most;
    }
    return float_of_bits(most);
}

// The exponent field of a power of two: that of amax's, less the largest of q, or of amax / largest, rounded
// up.
inline uint32_t e8m0_of(float amax, const Quantize& call) {
    if ((bits_of_float(amax) & magnitude) >= infinity) return 0xff;
    int32_t field;
    if (call.scale == Scale::e8m0_down) {
        // 448 = 1.75 * 2^8, 57344 = 1.75 * 2^15
        field = int32_t(bits_of_float(amax) >> 23) - (call.type == Quantized::e4m3fn ? 8 : 15);
    } else {
        const uint32_t bits = bits_of_float(amax / call.largest);
        field = int32_t(bits >> 23) + ((bits & 0x7fffff) != 0);
        // 2^-127 is what is below the normal numbers.
        if (bits <= 0x400000) field = 0;
    }
    return uint32_t(field < 0 ? 0 : field > 0xfe ? 0xfe : field);
}

// The scale that an E8M0 number stands for; 2^-127 is subnormal.
inline float value_of_e8m0(uint32_t field) {
    return field == 0xff ? float_of_bits(0x7fc00000)
           : field       ? float_of_bits(field << 23)
                         : float_of_bits(0x400000);
}

// To the nearest integer, half to even, for magnitudes below 2^22.
constexpr float integers = 0x1.8p23f;

// NaN becomes 0.
inline void to_int8(const float* y, float scale, float lowest, int8_t* q, int64_t cols) {
    for (int64_t i = 0; i < cols; ++i) {
        float v = y[i] / scale;
        v = v == v ? v : 0.0f;
        v = v > 127.0f ? 127.0f : v < lowest ? lowest : v;
        q[i] = int8_t(bits_of_float(v + integers) - bits_of_float(integers));
    }
}

// A float8 of `mantissa` bits and a bias. A magnitude below its smallest normal number is a multiple of one
// step: added to a power of two, whose last bit is that step, it is rounded by the addition.
template <int mantissa, int bias>
void to_float8(const float* y, float scale, float largest, uint8_t* q, int64_t cols) {
    constexpr int drop = 23 - mantissa;
    constexpr uint32_t smallest_normal = uint32_t(127 - bias + 1) << 23;
    const float steps = float_of_bits(uint32_t(127 + 1 - bias - mantissa + 23) << 23);
    for (int64_t i = 0; i < cols; ++i) {
        const uint32_t bits = bits_of_float(y[i] / scale), sign = bits >> 24 & 0x80;
        uint32_t m = bits & magnitude;
        const bool nan = m > infinity;
        const uint32_t most = bits_of_float(largest);
        m = m > most ? most : m;
        const uint32_t normal =
            ((m + (m >> drop & 1) + ((1u << (drop - 1)) - 1)) >> drop) - (uint32_t(127 - bias) << mantissa);
        const uint32_t subnormal = bits_of_float(float_of_bits(m) + steps) - bits_of_float(steps);
        q[i] = uint8_t((nan ? 0x7f : m < smallest_normal ? subnormal : normal) | sign);
    }
}

inline void quantize_block(const float* y, float scale, const Quantize& call, int64_t first) {
    if (call.type == Quantized::int8)
        to_int8(y, scale, call.lowest, static_cast<int8_t*>(call.q) + first, call.cols);
    else if (call.type == Quantized::e4m3fn)
        to_float8<3, 7>(y, scale, call.largest, static_cast<uint8_t*>(call.q) + first, call.cols);
    else
        to_float8<2, 15>(y, scale, call.largest, static_cast<uint8_t*>(call.q) + first, call.cols);
}

template <class T>
void quantize_rows(const Quantize& call) {
    for (int64_t r = 0; r < call.rows; ++r) {
        const T* const y = row<T>(call.y, r);
        float* const wide = call.scratch;
        fill_row<float>(wide, call.blocks * call.cols,
                        [=](int64_t i, auto... n) { return load(y + i, n...); });
        for (int64_t b = 0; b < call.blocks; ++b) {
            const int64_t at = r * call.blocks + b;
            const float* const block = wide + b * call.cols;
            float scale;
            if (call.given.given) {
                scale = call.given.data[at];
                static_cast<float*>(call.scales)[at] = scale;
            } else if (call.scale == Scale::float32) {
                float amax = largest_magnitude(block, call.cols);
                amax = amax > call.most ? call.most : amax;
                scale = amax / call.largest;
                scale = scale < call.smallest ? call.smallest : scale;
                static_cast<float*>(call.scales)[at] = scale;
            } else {
                const uint32_t field = e8m0_of(largest_magnitude(block, call.cols), call);
                scale = value_of_e8m0(field);
                static_cast<uint8_t*>(call.scales)[at] = uint8_t(field);
            }
            quantize_block(block, scale, call, at * call.cols);
        }
    }
}

}  // namespace

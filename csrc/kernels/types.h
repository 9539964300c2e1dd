// Scalar types and bit patterns that every instruction set shares. No heavy headers: a function that the
// linker could share between objects of different instruction sets must not exist here, hence the anonymous
// namespace.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

inline float float_of(uint32_t bits) {
    float v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}
inline uint32_t bits_of(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    return bits;
}
inline double double_of(uint64_t bits) {
    double v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}
inline uint64_t bits_of(double v) {
    uint64_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    return bits;
}

inline float widen_one(float v) { return v; }
inline float widen_one(bf16 v) { return float_of(uint32_t(v.bits) << 16); }
inline float widen_one(f16 v) {
    uint32_t sign = uint32_t(v.bits & 0x8000) << 16, exponent = (v.bits >> 10) & 31,
             fraction = v.bits & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = float(fraction) * float_of(103u << 23);  // times 2^-24, exact
    return float_of(sign | bits_of(magnitude));
}

inline float narrow_one(float v, float) { return v; }
// To nearest, ties to even; kernels see to it that no NaN with low fraction bits comes here.
inline bf16 narrow_one(float v, bf16) {
    uint32_t bits = bits_of(v);
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline f16 narrow_one(float v, f16) {
    uint32_t bits = bits_of(v), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // 65520 and up round to infinity
    if (magnitude < 0x38800000) {                                   // below 2^-14: a multiple of 2^-24
        // Adding 0.5 to v leaves v rounded to a multiple of 2^-24 in the low bits.
        float sum = float_of(magnitude) + 0.5f;
        return {uint16_t(sign | (bits_of(sum) - bits_of(0.5f)))};
    }
    uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23);
    return {uint16_t(sign | rounded >> 13)};
}

// not a number, for each type
inline void set_nan(float& v) { v = float_of(0x7fc00000); }
inline void set_nan(bf16& v) { v.bits = 0x7fc0; }
inline void set_nan(f16& v) { v.bits = 0x7e00; }

// Whether a NaN of one type can have low fraction bits that carry into the sign when it is rounded to
// another.
template <class From, class To>
constexpr bool can_carry = false;
template <>
constexpr bool can_carry<float, bf16> = true;
template <>
constexpr bool can_carry<f16, bf16> = true;

// 2^exponent, for normal float64 results
inline double power_of_two(int exponent) { return double_of(uint64_t(exponent + 1023) << 52); }

// Added to a small float64, it leaves the nearest integer in the last bits.
constexpr double integer_magic = 0x1.8p52;

// The e with m < 2^e <= 2m, for finite m > 0.
inline int exponent_of(float m) { return int(bits_of(double(m)) >> 52) - 1022; }

inline bool finite(float m) { return bits_of(m) < 0x7f800000; }  // of a magnitude

}  // namespace

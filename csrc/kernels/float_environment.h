// The rounding mode and the treatment of subnormals, as the processor keeps them for each thread.
#pragma once

#include <cstdint>

#if defined(__SSE2__) || defined(_M_X64)
#include <immintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace {

#if defined(__SSE2__) || defined(_M_X64)
// MXCSR. The low six bits are exception flags, which only ever get set.
using EnvironmentWord = uint32_t;
constexpr EnvironmentWord nearest_word = 0x1f80, toward_zero_word = 0x7f80,
                          mode_bits = ~EnvironmentWord(0x3f);
inline EnvironmentWord read_environment() { return _mm_getcsr(); }
inline void write_environment(EnvironmentWord word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
// FPCR: rounding mode in bits 22 and 23, flush-to-zero in 24.
using EnvironmentWord = uint64_t;
constexpr EnvironmentWord nearest_word = 0, toward_zero_word = 3u << 22, mode_bits = ~EnvironmentWord(0);
inline EnvironmentWord read_environment() {
    EnvironmentWord word;
    asm volatile("mrs %0, fpcr" : "=r"(word)::"memory");
    return word;
}
inline void write_environment(EnvironmentWord word) { asm volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
#else
using EnvironmentWord = int;
constexpr EnvironmentWord nearest_word = FE_TONEAREST, toward_zero_word = FE_TOWARDZERO, mode_bits = ~0;
inline EnvironmentWord read_environment() { return std::fegetround(); }
inline void write_environment(EnvironmentWord word) { std::fesetround(word); }
#endif

// IEEE arithmetic, whatever the caller set: round to nearest, keep subnormals (torch.set_flush_denormal).
struct Ieee {
    EnvironmentWord found = read_environment();
    Ieee() {
        if ((found & mode_bits) != nearest_word) write_environment(nearest_word);
    }
    ~Ieee() {
        if ((found & mode_bits) != nearest_word) write_environment(found);
    }
};

#ifndef RMSNORM_ISA_AVX512
struct TowardZero {
    TowardZero() { write_environment(toward_zero_word); }
    ~TowardZero() { write_environment(nearest_word); }
};
#endif

}  // namespace

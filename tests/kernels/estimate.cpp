// sum_products of rows longer than a test has memory for: every element is the same, and none is stored.
//
// Prints nothing and returns 0 where the intervals are right (test_estimate.py).
#include <cstdio>
#include <initializer_list>

#include "../../csrc/kernels/kernels.h"

#if defined(RMSNORM_ISA_AVX512)
#include "../../csrc/kernels/float_environment.h"
#include "../../csrc/vec/vec_avx512.h"
#elif defined(RMSNORM_ISA_AVX2)
#include "../../csrc/vec/vec_avx2.h"
#elif defined(RMSNORM_ISA_NEON)
#include "../../csrc/vec/vec_neon.h"
#else
#include "../../csrc/vec/vec_portable.h"
#endif

#include "../../csrc/kernels/estimate.h"

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::printf("%s: %s\n", isa_name, what);
    ++failures;
}

// A product just below the largest float whose rounding leaves a rest of nearly half its last bit, 2^103.
Factors largest_rest(float* u_found, float* x_found) {
    const float x = float_of(0x5f7fe4c1);  // just below 2^64
    float best = 0;
    for (uint32_t bits = 0x5f7ff000; bits < 0x5f7fffff; ++bits) {
        const float u = float_of(bits), product = u * x;
        const double rest = double(u) * double(x) - double(product);
        if (product < float_of(0x7f800000) && float(rest) > best)
            best = float(rest), *u_found = u, *x_found = x;
    }
    expect(best > 0.9 * power_of_two(103), "no product leaves a large rest");
    return {set(*u_found), set(*x_found)};
}

ProductSum sum_of(int64_t cols, Factors factors) {
    return sum_products(cols, ceil_log2(cols), [=](int64_t, int64_t) { return factors; });
}

// What the backward asks: k of both ends.
bool is_settled(const ProductSum& c, int64_t cols, double rstd) {
    auto k_of = [&](double sum) { return float(rstd * sum * (1.0 / double(cols))); };
    return settled(k_of(c.sum.low), k_of(c.sum.high));
}

}  // namespace

int main() {
    float u, x;
    const Factors factors = largest_rest(&u, &x);
    const int64_t enough = (int64_t(N) << 25) / 8 * 10, few = enough / 2;  // cols at which the rests overflow
    const ProductSum c = sum_of(enough, factors);
    expect(c.sum.low != c.sum.low && c.sum.high != c.sum.high, "both ends are NaN where the rests overflow");
    expect(!is_settled(c, enough, 1e-38), "an overflow is not settled");

    const ProductSum finite_sum = sum_of(few, factors);
    const double exact = double(u) * double(x) * double(few);
    expect(finite_sum.sum.low <= exact && exact <= finite_sum.sum.high, "the interval has the sum");
    expect(finite_sum.sum.high - finite_sum.sum.low < 1e-6 * exact, "the interval is narrow");

    const float infinity = float_of(0x7f800000);
    for (float factor : {infinity, -infinity, float_of(0x7fc00000)})
        expect(!is_settled(sum_of(64, {set(factor), set(1)}), 64, 1),
               "no factor that is not finite is settled");
    expect(!is_settled(sum_of(64, {set(2e30f), set(1e30f)}), 64, 1e-38),
           "no product beyond float32 is settled");
    // k itself may leave float32: that is an answer.
    expect(is_settled(sum_of(64, {set(1e30f), set(1e3f)}), 64, 1e30),
           "an infinite k of a finite sum is settled");
    expect(is_settled(sum_of(64, {set(0), set(1e3f)}), 64, 1), "zeros are settled");
    return failures;
}

// Chooses one table of kernels per process.
#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels.h"

namespace rmsnorm {

#if defined(__x86_64__)
extern const Kernels kernels_avx512_bf16, kernels_avx512, kernels_avx2;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif
extern const Kernels kernels_portable;

namespace {

struct Candidate {
    const Kernels* table;
    bool supported;
};

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// Best first; the portable table always runs.
const Candidate candidates[] = {
#if defined(__x86_64__)
    {&kernels_avx512_bf16, has_avx512() && __builtin_cpu_supports("avx512bf16")},
    {&kernels_avx512, has_avx512()},
    {&kernels_avx2, has_avx2()},
#elif defined(__aarch64__)
    {&kernels_neon, true},
#endif
    {&kernels_portable, true},
};

struct Choice {
    const Kernels* table = nullptr;
    std::string available, error;

    Choice() {
        const char* wanted = std::getenv("RMSNORM_ISA");
        if (wanted && !*wanted) wanted = nullptr;
        for (const Candidate& c : candidates) {
            if (!c.supported) continue;
            available += (available.empty() ? "" : ",") + std::string(c.table->name);
            if (!table && (!wanted || std::strcmp(wanted, c.table->name) == 0)) table = c.table;
        }
        if (!table)
            error = "RMSNORM_ISA=" + std::string(wanted) +
                    " is not an instruction set of this machine: choose from " + available;
    }
};

const Choice& choice() {
    static const Choice made;
    return made;
}

}  // namespace

const Kernels* kernels(const char** error) {
    *error = choice().error.c_str();
    return choice().table;
}

const char* available() { return choice().available.c_str(); }

}  // namespace rmsnorm

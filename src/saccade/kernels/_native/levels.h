/* Compiles the file that LEVEL names once per instruction set, with LANES (floats per vector) and NAME defined and the
 * compiler's target switched; and says which of them the machine has. That file undefines nothing but what it defines.
 * (Function multi-versioning would be shorter, but GCC splits generic vectors for the base target before it clones.) */

#ifdef __x86_64__
#include <immintrin.h>

#define LANES 4
#define NAME(x) base_##x
#include LEVEL
#undef LANES
#undef NAME

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define LANES 8
#define NAME(x) v3_##x
#include LEVEL
#undef LANES
#undef NAME
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define LANES 16
#define NAME(x) v4_##x
#include LEVEL
#undef LANES
#undef NAME
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define OF_LEVEL(lanes, x) ((lanes) == 16 ? v4_##x : (lanes) == 8 ? v3_##x : base_##x)

#else /* other processors: vectors of 128 bits, which NEON has and every compiler can split */

#define LANES 4
#define NAME(x) base_##x
#include LEVEL
#undef LANES
#undef NAME

#define OF_LEVEL(lanes, x) ((void)(lanes), base_##x)

#endif

/* Floats in the widest vectors that the machine has and that are at most `lanes` wide (0: any). */
static int64_t machine_lanes(int64_t lanes)
{
    const int64_t most = lanes ? lanes : 16;
#ifdef __x86_64__
    __builtin_cpu_init();
    const int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return v4 && most >= 16 ? 16 : v3 && most >= 8 ? 8 : 4;
#else
    (void)most;
    return 4;
#endif
}

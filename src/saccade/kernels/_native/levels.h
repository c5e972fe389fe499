/* Compiles the file that LEVEL names once per instruction set, with LANES (floats per vector) and NAME defined and the
 * compiler's target switched; and says which of them the machine has. That file undefines nothing but what it defines.
 * (Function multi-versioning would be shorter, but GCC splits generic vectors for the base target before it clones.) */

#include "compiler.h"
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

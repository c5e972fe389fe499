/* What GCC and clang spell differently, and what vectors.h is written with. */
#ifndef SACCADE_COMPILER_H
#define SACCADE_COMPILER_H

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bfloat16 is widened as on a little-endian machine"
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
/* In a loop's body: the compiler leaves that loop as it is written. */
#define SCALAR __asm__("")
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL _Pragma("GCC unroll 16")
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

/* Floats in the widest vectors that the machine has and that are at most `lanes` wide (0: any). */
static inline int64_t machine_lanes(int64_t lanes)
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

#endif

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

#endif

/* bfloat16 numbers one by one: of queries and results, which are few. */
#ifndef SACCADE_BFLOAT16_H
#define SACCADE_BFLOAT16_H

#include <stdint.h>
#include <string.h>

/* Round to the nearest bfloat16, ties to even; a NaN stays one. */
static inline uint16_t narrow(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float widen(uint16_t number)
{
    const uint32_t bits = (uint32_t)number << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* Number `index` of an array of either kind. */
static inline float number_at(const void *numbers, int64_t index, int64_t bf16)
{
    return bf16 ? widen(((const uint16_t *)numbers)[index]) : ((const float *)numbers)[index];
}

#endif

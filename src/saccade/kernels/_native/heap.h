/* Entries from the largest key down, without sorting those that nobody asks for. */
#ifndef SACCADE_HEAP_H
#define SACCADE_HEAP_H

#include <stdint.h>
#include <string.h>

struct entry {
    int64_t key, value;
};

/* A key that orders as the floats do, and among equal ones the lower number first. */
static inline int64_t key_of(float score, int32_t number)
{
    int32_t bits;
    score += 0.0f; /* -0.0 equals 0.0 */
    memcpy(&bits, &score, sizeof bits);
    /* Larger bits of a negative number mean a smaller one: all but the sign are inverted. */
    bits ^= (bits >> 31) & INT32_MAX;
    return (int64_t)bits * ((int64_t)1 << 32) + (INT32_MAX - (int64_t)number);
}

static inline void sink(struct entry *heap, int64_t count, int64_t at)
{
    const struct entry moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && heap[child + 1].key > heap[child].key;
        if (heap[child].key <= moved.key)
            break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static inline void heapify(struct entry *heap, int64_t count)
{
    for (int64_t at = count / 2 - 1; at >= 0; at--)
        sink(heap, count, at);
}

/* The largest of `count` entries, which then are one fewer. */
static inline struct entry pop(struct entry *heap, int64_t count)
{
    const struct entry largest = heap[0];
    heap[0] = heap[count - 1];
    sink(heap, count - 1, 0);
    return largest;
}

#endif

/* What vectors.h has defined for one width, taken back for the next one. */
#undef vec
#undef uvec
#undef ivec
#undef half
#undef PAIR
#undef LOW
#undef HIGH
#undef LOW2
#undef HIGH2
#undef BY8
#undef BY4
#undef FOLD
#undef REDUCE
#undef ADD

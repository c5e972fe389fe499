/* What is written once and compiled for every instruction set, for vectors of LANES floats.
 *
 * attention.c includes this file once per instruction set, with LANES, MOST_ROWS and NAME defined and the compiler's
 * target switched. (Function multi-versioning would be shorter, but GCC splits generic vectors for the base target
 * before it clones.) */

#include "vectors.h" /* of which the others are made */

#include "kernel.h"

#include "bounds.h"

#include "update.h"

#include "forget.h"
#undef LANES
#undef MOST_ROWS
#undef NAME

/* Threads that share the items of a kernel's loop. */
#pragma once

#include <stdint.h>

/* Computes one item.   work: what all items share. */
typedef void (*Task)(const void *work, int64_t item);

/* Compute items 0 to items - 1 with at most so many threads, the caller's among them; return when
 * all are computed. An item is computed once, by one thread, so bits do not depend on `threads`.
 */
void share(Task task, const void *work, int64_t items, int threads);

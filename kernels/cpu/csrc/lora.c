/* LoRA on arena tiles: y += scale * (x @ A.T) @ B, per run of tokens (Punica, arXiv 2310.18547).
 *
 * A tile is 8 rank rows: A's [8][in], then B's, rank-major, [8][out]. Tiles are read straight from
 * the arena, at each adapter's true rank, because the bytes read of adapters bound the time.
 */
#include <stddef.h>

#include "pool.h"
#include "vectors.h"

#define RANK_ROWS 8
#define UNIT_BYTES 256
#if LANES == 16
#define MOST_ROWS 3
#define MOST_SUMS 24 /* of 32 registers */
#else
#define MOST_ROWS 6
#define MOST_SUMS 12 /* of 16 registers */
#endif
#define ITEM_ROWS 48   /* tokens of a run that a thread takes at a time */
#define SHARED_ROWS 12 /* the same if there are several threads: one run is enough for all */
#define PARTS 4      /* most vectors of outputs at a time: their sums do not wait for each other */

/* The next tile; each step of the current tile prefetches as much of it as the step itself uses. */
typedef struct {
    const char *from, *end;
} Ahead;

INLINE void fetch(Ahead *ahead, const int vectors) {
    if (ahead->from >= ahead->end) return;
    for (int line = 0; line < vectors * LANES / 16; line++)
        __builtin_prefetch(ahead->from + 64 * line, 0, 2);
    ahead->from += vectors * LANES * sizeof(float);
}

/* shrunk[r] = scale * x[r] @ a.T for `ranks` of the tile's rank rows, from `first` on. */
INLINE void shrink_ranks(const float *x, const float *a, int64_t in, float scale,
                         float shrunk[][RANK_ROWS], Ahead *ahead, const int first, const int ranks,
                         const int rows) {
    vec sums[MOST_ROWS][RANK_ROWS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < ranks; j++) sums[r][j] = (vec){0};
    int64_t k = 0;
    for (; k + LANES <= in; k += LANES) {
        fetch(ahead, ranks);
        vec values[MOST_ROWS];
        for (int r = 0; r < rows; r++) values[r] = load(x + r * in + k);
        for (int j = 0; j < ranks; j++) {
            vec weights = load(a + (first + j) * in + k);
            for (int r = 0; r < rows; r++) sums[r][j] += values[r] * weights;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < ranks; j++) {
            float sum = sum_lanes(sums[r][j]);
            for (int64_t i = k; i < in; i++) sum += x[r * in + i] * a[(first + j) * in + i];
            shrunk[r][first + j] = scale * sum;
        }
}

/* shrunk[r] = scale * x[r] @ a.T */
INLINE void shrink(const float *x, const float *a, int64_t in, float scale,
                   float shrunk[][RANK_ROWS], Ahead *ahead, const int rows) {
    const int most = MOST_SUMS / rows, ranks = most >= RANK_ROWS ? RANK_ROWS : most >= 4 ? 4 : 2;
    for (int first = 0; first < RANK_ROWS; first += ranks)
        shrink_ranks(x, a, in, scale, shrunk, ahead, first, ranks, rows);
}

/* y[r] += shrunk[r] @ b */
INLINE void expand(float *y, int64_t stride, const float *b, int64_t out,
                   float shrunk[][RANK_ROWS], Ahead *ahead, const int rows) {
    const int parts = MOST_SUMS / rows >= PARTS ? PARTS : PARTS / 2;
    int64_t n = 0;
    for (; n + parts * LANES <= out; n += parts * LANES) {
        vec sums[MOST_ROWS][PARTS];
        for (int p = 0; p < parts; p++) fetch(ahead, RANK_ROWS);
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < parts; p++) sums[r][p] = load(y + r * stride + n + p * LANES);
        for (int j = 0; j < RANK_ROWS; j++) {
            vec weights[PARTS];
            for (int p = 0; p < parts; p++) weights[p] = load(b + j * out + n + p * LANES);
            for (int r = 0; r < rows; r++)
                for (int p = 0; p < parts; p++) sums[r][p] += shrunk[r][j] * weights[p];
        }
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < parts; p++) store(y + r * stride + n + p * LANES, sums[r][p]);
    }
    for (; n < out; n++)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < RANK_ROWS; j++) y[r * stride + n] += shrunk[r][j] * b[j * out + n];
}

INLINE void apply(float *y, int64_t stride, const float *x, const float *tile, int64_t in,
                  int64_t out, float scale, Ahead *ahead, const int rows) {
    float shrunk[MOST_ROWS][RANK_ROWS];
    shrink(x, tile, in, scale, shrunk, ahead, rows);
    expand(y, stride, tile + RANK_ROWS * in, out, shrunk, ahead, rows);
}

#define CASE(n) \
    case n: apply(y, stride, x, tile, in, out, scale, ahead, n); break;

static void apply_pass(float *y, int64_t stride, const float *x, const float *tile, int64_t in,
                       int64_t out, float scale, Ahead *ahead, int64_t rows) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3)
#if MOST_ROWS == 6
        CASE(4) CASE(5) CASE(6)
#endif
    }
}

static void apply_rows(float *y, int64_t stride, const float *x, const float *tile, int64_t in,
                       int64_t out, float scale, Ahead ahead, int64_t rows) {
    int64_t passes = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (; passes; passes--) {
        int64_t count = (rows + passes - 1) / passes; /* 8 rows are 3, 3 and 2, or 4 and 4 */
        apply_pass(y, stride, x, tile, in, out, scale, &ahead, count);
        rows -= count, x += count * in, y += count * stride;
    }
}

/* Projections of one layer, side by side in y: [tokens, stride].   x: [tokens, in].
 * bounds: [num_runs, 2].   tables, scales: one per run, [modules, depth] and [modules]; the
 * projections are the modules from `place` on.   depths: one per run.
 */
typedef struct {
    float *y;
    const float *x;
    const char *arena;
    const int32_t *bounds;
    const int32_t *const *tables;
    const float *const *scales;
    const int64_t *depths, *outs;
    int64_t in, stride, num_projections, num_runs, place;
} Work;

INLINE const float *tile_of(const Work *w, int64_t run, int64_t p, int64_t index) {
    if (run == w->num_runs || index == w->depths[run]) return NULL;
    int64_t address = w->tables[run][(w->place + p) * w->depths[run] + index];
    return address < 0 ? NULL : (const float *)(w->arena + address * UNIT_BYTES);
}

/* The tile that is used after tile `index`: the module's next one, or the next module's first. */
INLINE Ahead ahead_of(const Work *w, int64_t run, int64_t p, int64_t index) {
    const float *next = tile_of(w, run, p, index + 1);
    if (!next) {
        p = p + 1 < w->num_projections ? p + 1 : 0;
        next = tile_of(w, run + (p == 0), p, 0);
    }
    const char *from = (const char *)next;
    return (Ahead){from, next ? from + RANK_ROWS * (w->in + w->outs[p]) * sizeof(float) : NULL};
}

/* The work with how a run is cut into items.   most: rows of an item.   most_items: of a run. */
typedef struct {
    Work all;
    int64_t most, most_items;
} Items;

INLINE int64_t rows_of(const Work *w, int64_t run) {
    return w->bounds[2 * run + 1] - w->bounds[2 * run];
}

/* Some rows of a run with one projection; runs of fewer rows have items without work. */
static void add_item(const void *work, int64_t item) {
    const Items *items = work;
    const Work *w = &items->all;
    int64_t i = item % items->most_items, p = item / items->most_items % w->num_projections;
    int64_t run = item / items->most_items / w->num_projections, column = 0;
    int64_t rows = rows_of(w, run), count = (rows + items->most - 1) / items->most;
    if (i >= count) return;
    int64_t first = rows * i / count, end = rows * (i + 1) / count;
    int64_t row = w->bounds[2 * run] + first;
    for (int64_t before = 0; before < p; before++) column += w->outs[before];
    const float *tile;
    for (int64_t t = 0; (tile = tile_of(w, run, p, t)); t++)
        apply_rows(w->y + row * w->stride + column, w->stride, w->x + row * w->in, tile, w->in,
                   w->outs[p], w->scales[run][w->place + p], ahead_of(w, run, p, t), end - first);
}

void add_lora(const Work *w, int threads) {
    Items items = {*w, threads > 1 ? SHARED_ROWS : ITEM_ROWS, 0};
    for (int64_t run = 0; run < w->num_runs; run++) {
        int64_t count = (rows_of(w, run) + items.most - 1) / items.most;
        if (count > items.most_items) items.most_items = count;
    }
    share(add_item, &items, w->num_runs * w->num_projections * items.most_items, threads);
}

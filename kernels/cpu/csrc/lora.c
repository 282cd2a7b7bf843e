/* LoRA on arena tiles: y += scale * (x @ A.T) @ B, per run of tokens (Punica, arXiv 2310.18547).
 *
 * A tile is 8 rank rows: A's [8][in], then B's, rank-major, [8][out]. Tiles are read straight from
 * the arena, at each adapter's true rank, because the bytes read of adapters bound the time.
 */
#include <stddef.h>

#include "vectors.h"

#define RANK_ROWS 8
#define UNIT_BYTES 256
#if LANES == 16
#define MOST_ROWS 3 /* 24 sums of a shrink, and 3 rows of x, fit into 32 registers */
#else
#define MOST_ROWS 1
#endif
#define ITEM_ROWS 48 /* tokens of a run that a thread takes at a time */
#define PARTS 4      /* vectors of outputs at a time: their sums do not wait for each other */

/* The next tile; each step of the current tile prefetches as much of it as the step itself uses. */
typedef struct {
    const char *from, *end;
} Ahead;

INLINE void fetch(Ahead *ahead) {
    if (ahead->from >= ahead->end) return;
    for (int line = 0; line < RANK_ROWS * LANES / 16; line++)
        __builtin_prefetch(ahead->from + 64 * line, 0, 2);
    ahead->from += RANK_ROWS * LANES * sizeof(float);
}

/* shrunk[r] = scale * x[r] @ a.T */
INLINE void shrink(const float *x, const float *a, int64_t in, float scale,
                   float shrunk[][RANK_ROWS], Ahead *ahead, const int rows) {
    vec sums[MOST_ROWS][RANK_ROWS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < RANK_ROWS; j++) sums[r][j] = (vec){0};
    int64_t k = 0;
    for (; k + LANES <= in; k += LANES) {
        fetch(ahead);
        vec values[MOST_ROWS];
        for (int r = 0; r < rows; r++) values[r] = load(x + r * in + k);
        for (int j = 0; j < RANK_ROWS; j++) {
            vec weights = load(a + j * in + k);
            for (int r = 0; r < rows; r++) sums[r][j] += values[r] * weights;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < RANK_ROWS; j++) {
            float sum = sum_lanes(sums[r][j]);
            for (int64_t i = k; i < in; i++) sum += x[r * in + i] * a[j * in + i];
            shrunk[r][j] = scale * sum;
        }
}

/* y[r] += shrunk[r] @ b */
INLINE void expand(float *y, int64_t stride, const float *b, int64_t out,
                   float shrunk[][RANK_ROWS], Ahead *ahead, const int rows) {
    int64_t n = 0;
    for (; n + PARTS * LANES <= out; n += PARTS * LANES) {
        vec sums[MOST_ROWS][PARTS];
        for (int p = 0; p < PARTS; p++) fetch(ahead);
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < PARTS; p++) sums[r][p] = load(y + r * stride + n + p * LANES);
        for (int j = 0; j < RANK_ROWS; j++)
            for (int p = 0; p < PARTS; p++) {
                vec weights = load(b + j * out + n + p * LANES);
                for (int r = 0; r < rows; r++) sums[r][p] += shrunk[r][j] * weights;
            }
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < PARTS; p++) store(y + r * stride + n + p * LANES, sums[r][p]);
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

static void apply_rows(float *y, int64_t stride, const float *x, const float *tile, int64_t in,
                       int64_t out, float scale, Ahead ahead, int64_t rows) {
    for (; rows >= MOST_ROWS; rows -= MOST_ROWS, x += MOST_ROWS * in, y += MOST_ROWS * stride)
        apply(y, stride, x, tile, in, out, scale, &ahead, MOST_ROWS);
#if MOST_ROWS > 1
    if (rows == 2) apply(y, stride, x, tile, in, out, scale, &ahead, 2);
    if (rows == 1) apply(y, stride, x, tile, in, out, scale, &ahead, 1);
#endif
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

void add_lora(const Work *w, int threads) {
    int64_t longest = 0;
    for (int64_t run = 0; run < w->num_runs; run++) {
        int64_t rows = w->bounds[2 * run + 1] - w->bounds[2 * run];
        longest = rows > longest ? rows : longest;
    }
    int64_t num_items = (longest + ITEM_ROWS - 1) / ITEM_ROWS;
#pragma omp parallel for num_threads(threads) schedule(dynamic) collapse(3) if (threads > 1)
    for (int64_t run = 0; run < w->num_runs; run++)
        for (int64_t p = 0; p < w->num_projections; p++)
            for (int64_t item = 0; item < num_items; item++) {
                int64_t first = w->bounds[2 * run] + item * ITEM_ROWS, column = 0;
                int64_t rows = w->bounds[2 * run + 1] - first;
                for (int64_t before = 0; before < p; before++) column += w->outs[before];
                const float *tile;
                for (int64_t i = 0; rows > 0 && (tile = tile_of(w, run, p, i)); i++)
                    apply_rows(w->y + first * w->stride + column, w->stride, w->x + first * w->in,
                               tile, w->in, w->outs[p], w->scales[run][w->place + p],
                               ahead_of(w, run, p, i), rows < ITEM_ROWS ? rows : ITEM_ROWS);
            }
}

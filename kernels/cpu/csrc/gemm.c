/* Products with packed weights: y = x @ weight.T + bias.
 *
 * Weights lie in panels of 48 outputs, [in][48]. A tile of up to 8 rows keeps its sums in
 * registers and goes over all of `in` in order, so a row has the same bits whatever rows are beside
 * it. While a panel is used, the next one is prefetched: each tile fetches a share of it, evenly
 * spread over its own steps, because memory that waits for the end of a burst is time lost.
 *
 * With AVX-512 tiles are 8 x 48: 24 sums, 3 weights and a value fill the registers; 12 x 32 loads
 * more values, and 6 x 64 needs 6 rows. With half as many registers tiles are 2 x 48, 4 x 24 or
 * 6 x 16, and go over their panel in two or three stripes. The products reach 102 to 107 GFLOP/s
 * from 16 rows on, and 98 to 101 from 24 rows on with AVX2 (135M shape, one thread of a Zen 4).
 */
#include "pool.h"
#include "vectors.h"

#define COLUMNS 48
#define PARTS (COLUMNS / LANES)
#if LANES == 16
#define MOST_ROWS 8
#else
#define MOST_ROWS 6
#endif

/* Vectors of a stripe: as many as leave the sums of `rows` rows in registers. */
INLINE int stripe_of(const int rows) {
    if (LANES == 16 || rows <= 2) return PARTS;
    return rows <= 4 ? PARTS / 2 : PARTS / 3;
}

/* One tile.   next: the panel to prefetch, of which this tile fetches the steps `due`,
 * `due + every` and so on.
 */
INLINE void tile(const float *x, const float *panel, const float *bias, const float *next,
                 int64_t due, int64_t every, int64_t in, float *y, int64_t out, const int rows) {
    const int parts = stripe_of(rows);
    for (int first = 0; first < COLUMNS; first += parts * LANES) {
        vec sums[MOST_ROWS][PARTS];
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < parts; p++) sums[r][p] = load(bias + first + p * LANES);
        int64_t fetched = due;
        for (int64_t k = 0; k < in; k++) {
            if (k == fetched) {
                for (int line = 0; line < parts * LANES; line += 16)
                    __builtin_prefetch(next + k * COLUMNS + first + line, 0, 2);
                fetched += every;
            }
            vec weights[PARTS];
            for (int p = 0; p < parts; p++)
                weights[p] = load(panel + k * COLUMNS + first + p * LANES);
            for (int r = 0; r < rows; r++) {
                float value = x[r * in + k];
                for (int p = 0; p < parts; p++) sums[r][p] += value * weights[p];
            }
        }
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < parts; p++)
                store(y + r * out + first + p * LANES, sums[r][p]);
    }
}

#define CASE(n) \
    case n: tile(x, panel, bias, next, due, every, in, y, out, n); break;

static void rows_of(int rows, const float *x, const float *panel, const float *bias,
                    const float *next, int64_t due, int64_t every, int64_t in, float *y,
                    int64_t out) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MOST_ROWS == 8
        CASE(7) CASE(8)
#endif
    }
}

typedef struct {
    const float *x, *panels, *bias;
    float *y;
    int64_t rows, in, out;
} Product;

/* All rows with panel `n`. */
static void use_panel(const void *work, int64_t n) {
    const Product *w = work;
    int64_t in = w->in, out = w->out, width = out - n * COLUMNS;
    int64_t num_tiles = (w->rows + MOST_ROWS - 1) / MOST_ROWS;
    const float *panel = w->panels + n * in * COLUMNS;
    const float *next = width > COLUMNS ? panel + in * COLUMNS : panel;
    float last[MOST_ROWS * COLUMNS];
    for (int64_t t = 0; t < num_tiles; t++) {
        /* Tiles are equally large: 12 rows are 6 and 6, not 8 and 4. */
        int64_t first = w->rows * t / num_tiles, count = w->rows * (t + 1) / num_tiles - first;
        float *to = w->y + first * out + n * COLUMNS;
        int is_last = width < COLUMNS;
        rows_of(count, w->x + first * in, panel, w->bias + n * COLUMNS, next, t, num_tiles, in,
                is_last ? last : to, is_last ? COLUMNS : out);
        if (is_last)
            for (int64_t r = 0; r < count; r++)
                memcpy(to + r * out, last + r * COLUMNS, width * sizeof(float));
    }
}

/* x: [rows, in].   panels: [ceil(out / 48), in, 48].   bias: [ceil(out / 48), 48].
 * y: [rows, out].
 */
void gemm(const float *x, const float *panels, const float *bias, float *y, int64_t rows,
          int64_t in, int64_t out, int threads) {
    Product work = {x, panels, bias, y, rows, in, out};
    share(use_panel, &work, (out + COLUMNS - 1) / COLUMNS, threads);
}

/* Pack weight, [out, in], into panels; the last one is padded with zeros. */
void pack_panels(const float *weight, float *panels, int64_t in, int64_t out) {
    for (int64_t n = 0; n < out; n += COLUMNS)
        for (int64_t k = 0; k < in; k++)
            for (int64_t c = 0; c < COLUMNS; c++)
                panels[(n * in) + k * COLUMNS + c] = n + c < out ? weight[(n + c) * in + k] : 0.0f;
}

/* Rows of the packed weight, as an embedding reads them: y[i] = weight[ids[i]]. */
void take_rows(const float *panels, const int64_t *ids, float *y, int64_t count, int64_t in) {
    for (int64_t i = 0; i < count; i++) {
        const float *from = panels + ids[i] / COLUMNS * COLUMNS * in + ids[i] % COLUMNS;
        for (int64_t k = 0; k < in; k++) y[i * in + k] = from[k * COLUMNS];
    }
}

/* Products with packed weights: y = x @ weight.T + bias.
 *
 * Weights lie in panels of 48 outputs, [in][48]. A tile of up to 8 rows keeps its sums in
 * registers and goes over all of `in` in order, so a row has the same bits whatever rows are beside
 * it. While a panel is used, the next one is prefetched: each tile fetches a share of it.
 *
 * Tiles are 8 x 48: with AVX-512, 24 sums, 3 weights and a value fill the registers; 12 x 32 loads
 * more values, and 6 x 64 needs 6 rows. The products reach 104 to 110 GFLOP/s from 32 rows on, of
 * the processor's 117; oneDNN's packed weights reach 94 to 106, MKL's 64 to 88 (135M shape, one
 * thread of a Zen 4).
 */
#include "vectors.h"

#define COLUMNS 48
#define PARTS (COLUMNS / LANES)
#if LANES == 16
#define MOST_ROWS 8
#else
#define MOST_ROWS 2
#endif

/* One tile.   next, lines: its share of the next panel, `lines` lines of COLUMNS floats, which it
 * prefetches.
 */
INLINE void tile(const float *x, const float *panel, const float *bias, const float *next,
                 int64_t lines, int64_t in, float *y, int64_t out, const int rows) {
    vec sums[MOST_ROWS][PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) sums[r][p] = load(bias + p * LANES);
    for (int64_t k = 0; k < in; k++) {
        vec weights[PARTS];
        for (int p = 0; p < PARTS; p++) weights[p] = load(panel + k * COLUMNS + p * LANES);
        if (k < lines) {
            for (int line = 0; line < COLUMNS; line += 16)
                __builtin_prefetch(next + k * COLUMNS + line, 0, 2);
        }
        for (int r = 0; r < rows; r++) {
            float value = x[r * in + k];
            for (int p = 0; p < PARTS; p++) sums[r][p] += value * weights[p];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) store(y + r * out + p * LANES, sums[r][p]);
}

#define CASE(n) \
    case n: tile(x, panel, bias, next, lines, in, y, out, n); break;

static void rows_of(int rows, const float *x, const float *panel, const float *bias,
                    const float *next, int64_t lines, int64_t in, float *y, int64_t out) {
    switch (rows) {
        CASE(1) CASE(2)
#if MOST_ROWS == 8
        CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#endif
    }
}

/* x: [rows, in].   panels: [ceil(out / 48), in, 48].   bias: [ceil(out / 48), 48].
 * y: [rows, out].
 */
void gemm(const float *x, const float *panels, const float *bias, float *y, int64_t rows,
          int64_t in, int64_t out, int threads) {
    if (!rows) return;
    int64_t num_tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
    int64_t num_panels = (out + COLUMNS - 1) / COLUMNS;
    int64_t lines = (in + num_tiles - 1) / num_tiles;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < num_panels; n++) {
        const float *panel = panels + n * in * COLUMNS, *next = panel + in * COLUMNS;
        int64_t width = out - n * COLUMNS;
        float last[MOST_ROWS * COLUMNS];
        for (int64_t t = 0; t < num_tiles; t++) {
            /* Tiles are equally large: 12 rows are 6 and 6, not 8 and 4. */
            int64_t first = rows * t / num_tiles, count = rows * (t + 1) / num_tiles - first;
            int64_t rest = n + 1 < num_panels ? in - t * lines : 0;
            float *to = y + first * out + n * COLUMNS;
            int is_last = width < COLUMNS;
            rows_of(count, x + first * in, panel, bias + n * COLUMNS, next + t * lines * COLUMNS,
                    rest < lines ? rest : lines, in, is_last ? last : to,
                    is_last ? COLUMNS : out);
            if (is_last)
                for (int64_t r = 0; r < count; r++)
                    memcpy(to + r * out, last + r * COLUMNS, width * sizeof(float));
        }
    }
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

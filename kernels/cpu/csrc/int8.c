/* Products with int8 weights: y = (q . weight) * (scale of the row * scale of the output) + bias.
 *
 * Values are scaled to int8 by the largest of their own row, weights by the largest of their
 * output, and the integers are summed exactly, so a row does not depend on other rows. Where values
 * are stored with 128 added (rounding.h), 128 times the sum of the weights is subtracted again.
 */
#include <stddef.h>

#include "pool.h"
#include "rounding.h"

#if LANES == 16
#define MOST_ROWS 12
#else
#define MOST_ROWS 4
#endif

typedef struct {
    const int8_t *panels;          /* [panels, in / 4, COLUMNS, 4] */
    const int32_t *totals;         /* [panels, COLUMNS], the sum of the weights times the offset */
    const float *scales, *bias;    /* [panels, COLUMNS] */
    int64_t in, out;               /* in: a multiple of 4 */
} Weights;

/* Round x, [dim], to q, [in], padded with zeros.   scale: NaN if a value is not finite. */
static void quantize(const float *x, uint8_t *q, float *scale, int64_t dim, int64_t in) {
    float factor = rounding_factor(x, scale, dim);
    int64_t i = 0;
    for (; i < dim; i++) q[i] = (uint8_t)((int32_t)rintf(x[i] * factor) + VALUE_OFFSET);
    for (; i < in; i++) q[i] = VALUE_OFFSET;
}

INLINE void tile(const uint8_t *q, const float *scales, const Weights *w, int64_t panel,
                 const int8_t *next, float *y, int64_t stride, const int rows) {
    const int8_t *weights = w->panels + panel * COLUMNS * w->in;
    ivec sums[MOST_ROWS][PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) sums[r][p] = (ivec){0};
    for (int64_t k = 0; k < w->in; k += QUAD) {
        ivec quads[PARTS];
        for (int p = 0; p < PARTS; p++)
            quads[p] = *(const ivec *)(weights + k * COLUMNS + p * LANES * QUAD);
        if (next) {
            __builtin_prefetch(next + k * COLUMNS, 0, 2);
            if (LANES == 16) __builtin_prefetch(next + k * COLUMNS + 64, 0, 2);
        }
        for (int r = 0; r < rows; r++) {
            ivec values = four_bytes(q + r * w->in + k);
            for (int p = 0; p < PARTS; p++) sums[r][p] = dot(sums[r][p], values, quads[p]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) {
            int64_t column = panel * COLUMNS + p * LANES;
            ivec sum = sums[r][p] - *(const ivec *)(w->totals + column);
            vec scaled = __builtin_convertvector(sum, vec) * (load(w->scales + column) * scales[r]);
            store(y + r * stride + p * LANES, scaled + load(w->bias + column));
        }
}

#define CASE(n) \
    case n: tile(q, scales, w, panel, next, y, stride, n); break;

static void rows_of(int rows, const uint8_t *q, const float *scales, const Weights *w,
                    int64_t panel, const int8_t *next, float *y, int64_t stride) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if LANES == 16
        CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

typedef struct {
    const Weights *weights;
    const float *x;
    uint8_t *q;
    float *scales, *y;
    int64_t rows, dim;
} Product;

static void quantize_row(const void *work, int64_t r) {
    const Product *w = work;
    int64_t in = w->weights->in;
    quantize(w->x + r * w->dim, w->q + r * in, w->scales + r, w->dim, in);
}

/* All rows with panel `n`. */
static void use_panel(const void *work, int64_t n) {
    const Product *w = work;
    int64_t in = w->weights->in, out = w->weights->out, width = out - n * COLUMNS;
    int64_t num_tiles = (w->rows + MOST_ROWS - 1) / MOST_ROWS;
    const int8_t *next = w->weights->panels + (n + 1) * COLUMNS * in;
    float last[MOST_ROWS * COLUMNS];
    for (int64_t t = 0; t < num_tiles; t++) {
        int64_t first = w->rows * t / num_tiles, count = w->rows * (t + 1) / num_tiles - first;
        float *to = w->y + first * out + n * COLUMNS;
        int is_last = width < COLUMNS;
        rows_of(count, w->q + first * in, w->scales + first, w->weights, n, t ? NULL : next,
                is_last ? last : to, is_last ? COLUMNS : out);
        if (is_last)
            for (int64_t r = 0; r < count; r++)
                memcpy(to + r * out, last + r * COLUMNS, width * sizeof(float));
    }
}

/* x: [rows, dim].   q: [rows, in] and scales: [rows], scratch memory.   y: [rows, out]. */
void gemm_int8(const Weights *w, const float *x, uint8_t *q, float *scales, float *y, int64_t rows,
               int64_t dim, int threads) {
    Product work = {w, x, q, scales, y, rows, dim};
    share(quantize_row, &work, rows, threads);
    share(use_panel, &work, (w->out + COLUMNS - 1) / COLUMNS, threads);
}

/* Outputs of a panel. */
int64_t int8_columns(void) { return COLUMNS; }

/* Pack codes, [out, dim], into the panels and totals of Weights. */
void pack_int8(const int8_t *codes, int8_t *panels, int32_t *totals, int64_t dim, int64_t in,
               int64_t out) {
    for (int64_t n = 0; n < out; n++) {
        int8_t *panel = panels + n / COLUMNS * COLUMNS * in;
        for (int64_t k = 0; k < dim; k++) {
            int8_t value = codes[n * dim + k];
            panel[k / QUAD * QUAD * COLUMNS + n % COLUMNS * QUAD + k % QUAD] = value;
            totals[n] += VALUE_OFFSET * value;
        }
    }
}

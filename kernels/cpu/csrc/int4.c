/* Products with int4 weights in groups: y = (sum over groups of scale * (codes - zero) . q) *
 * (scale of the row) + bias.
 *
 * Values are rounded to int8 by the largest of their own row, and integers are summed exactly in
 * units of at most a group, so a row does not depend on other rows. Codes are stored with 8 added,
 * from 0 to 15, and (8 + zero) times the sum of the unit's values is subtracted again.
 *
 * A byte holds the codes of inputs k and k + 4, so that a mask and a shift make quads of them.
 */
#include <stddef.h>

#include "pool.h"
#include "rounding.h"

#define STEP 8 /* inputs whose codes lie in the same bytes */
#if LANES == 16
#define MOST_ROWS 6
#else
#define MOST_ROWS 4
#endif

typedef struct {
    const uint8_t *panels;         /* [panels, in / 8, COLUMNS, 4] */
    const float *scales;           /* [panels, groups, COLUMNS] */
    const int32_t *zeros;          /* [panels, groups, COLUMNS], with 8 added; NULL if all are 8 */
    const float *bias;             /* [panels, COLUMNS] */
    int64_t in, out, group;        /* in: a multiple of group, which is 8, 16 or a multiple of 32 */
} Int4Weights;

/* Inputs whose products are summed as integers; it divides the group. */
INLINE int64_t unit_of(const Int4Weights *w) {
    return w->group < MOST_CODES ? w->group : MOST_CODES;
}

/* Round x, [in], to q.   sums: [in / unit], of each unit's integers, negative. */
static void quantize(const float *x, int8_t *q, float *scale, int32_t *sums, int64_t in,
                     int64_t unit) {
    float factor = rounding_factor(x, scale, in);
    for (int64_t u = 0; u < in / unit; u++) {
        int32_t sum = 0;
        for (int64_t i = u * unit; i < (u + 1) * unit; i++) {
            int32_t value = (int32_t)rintf(x[i] * factor);
            q[i] = (int8_t)value;
            sum -= value;
        }
        sums[u] = sum;
    }
}

INLINE void tile(const int8_t *q, const float *row_scales, const int32_t *unit_sums,
                 const Int4Weights *w, int64_t panel, const uint8_t *next, float *y,
                 int64_t stride, const int rows) {
    int64_t unit = unit_of(w), units = w->in / unit, groups = w->in / w->group;
    const uint8_t *codes = w->panels + panel * COLUMNS * (w->in / 2);
    const float *scales = w->scales + panel * groups * COLUMNS;
    const int32_t *zeros = w->zeros ? w->zeros + panel * groups * COLUMNS : NULL;
    const ivec mask = (ivec){0} + 0x0f0f0f0f;
    vec sums[MOST_ROWS][PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) sums[r][p] = (vec){0};
    for (int64_t u = 0; u < units; u++) {
        ivec found[MOST_ROWS][PARTS];
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < PARTS; p++) found[r][p] = (ivec){0};
        for (int64_t k = u * unit; k < (u + 1) * unit; k += STEP) {
            ivec low[PARTS], high[PARTS];
            for (int p = 0; p < PARTS; p++) {
                ivec both = *(const ivec *)(codes + k / 2 * COLUMNS + p * LANES * QUAD);
                low[p] = both & mask;
                high[p] = (both >> 4) & mask;
            }
            if (next) {
                __builtin_prefetch(next + k / 2 * COLUMNS, 0, 2);
                if (LANES == 16) __builtin_prefetch(next + k / 2 * COLUMNS + 64, 0, 2);
            }
            for (int r = 0; r < rows; r++) {
                ivec first = four_bytes(q + r * w->in + k);
                ivec second = four_bytes(q + r * w->in + k + QUAD);
                for (int p = 0; p < PARTS; p++) {
                    found[r][p] = add_codes(found[r][p], low[p], first);
                    found[r][p] = add_codes(found[r][p], high[p], second);
                }
            }
        }
        int64_t at = u * unit / w->group * COLUMNS;
        for (int p = 0; p < PARTS; p++) {
            vec scale = load(scales + at + p * LANES);
            for (int r = 0; r < rows; r++) {
                ivec sum = (ivec){0} + unit_sums[r * units + u];
                if (zeros)
                    sum *= *(const ivec *)(zeros + at + p * LANES);
                else
                    sum <<= 3;
                sum += sum_codes(found[r][p]);
                sums[r][p] += __builtin_convertvector(sum, vec) * scale;
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PARTS; p++) {
            vec bias = load(w->bias + panel * COLUMNS + p * LANES);
            store(y + r * stride + p * LANES, sums[r][p] * row_scales[r] + bias);
        }
}

#define CASE(n) \
    case n: tile(q, row_scales, unit_sums, w, panel, next, y, stride, n); break;

static void rows_of(int rows, const int8_t *q, const float *row_scales, const int32_t *unit_sums,
                    const Int4Weights *w, int64_t panel, const uint8_t *next, float *y,
                    int64_t stride) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if LANES == 16
        CASE(5) CASE(6)
#endif
    }
}

typedef struct {
    const Int4Weights *weights;
    const float *x;
    int8_t *q;
    float *row_scales;
    int32_t *unit_sums;
    float *y;
    int64_t rows;
} Product;

static void quantize_row(const void *work, int64_t r) {
    const Product *w = work;
    int64_t in = w->weights->in, unit = unit_of(w->weights);
    quantize(w->x + r * in, w->q + r * in, w->row_scales + r, w->unit_sums + r * (in / unit), in,
             unit);
}

/* All rows with panel `n`. */
static void use_panel(const void *work, int64_t n) {
    const Product *w = work;
    int64_t in = w->weights->in, out = w->weights->out, width = out - n * COLUMNS;
    int64_t num_tiles = (w->rows + MOST_ROWS - 1) / MOST_ROWS, units = in / unit_of(w->weights);
    const uint8_t *next = w->weights->panels + (n + 1) * COLUMNS * (in / 2);
    float last[MOST_ROWS * COLUMNS];
    for (int64_t t = 0; t < num_tiles; t++) {
        int64_t first = w->rows * t / num_tiles, count = w->rows * (t + 1) / num_tiles - first;
        float *to = w->y + first * out + n * COLUMNS;
        int is_last = width < COLUMNS;
        rows_of(count, w->q + first * in, w->row_scales + first, w->unit_sums + first * units,
                w->weights, n, t ? NULL : next, is_last ? last : to, is_last ? COLUMNS : out);
        if (is_last)
            for (int64_t r = 0; r < count; r++)
                memcpy(to + r * out, last + r * COLUMNS, width * sizeof(float));
    }
}

/* x: [rows, in].   q: [rows, in], row_scales: [rows] and unit_sums: [rows, in / 8] are scratch
 * memory.   y: [rows, out].
 */
void gemm_int4(const Int4Weights *w, const float *x, int8_t *q, float *row_scales,
               int32_t *unit_sums, float *y, int64_t rows, int threads) {
    Product work = {w, x, q, row_scales, unit_sums, y, rows};
    share(quantize_row, &work, rows, threads);
    share(use_panel, &work, (w->out + COLUMNS - 1) / COLUMNS, threads);
}

/* Pack codes, [out, in], from -8 to 7, into panels, which are zero. */
void pack_int4(const int8_t *codes, uint8_t *panels, int64_t in, int64_t out) {
    for (int64_t n = 0; n < out; n++) {
        uint8_t *panel = panels + n / COLUMNS * COLUMNS * (in / 2);
        for (int64_t k = 0; k < in; k++) {
            uint8_t code = (uint8_t)(codes[n * in + k] + 8);
            uint8_t *at = panel + k / STEP * COLUMNS * QUAD + n % COLUMNS * QUAD + k % QUAD;
            *at |= k % STEP < QUAD ? code : code << 4;
        }
    }
}

/* Products with int8 weights: y = (q . weight) * (scale of the row * scale of the output) + bias.
 *
 * Values are scaled to int8 by the largest of their own row, weights by the largest of their
 * output, and the integers are summed exactly, so a row does not depend on other rows. The
 * processor's instruction (VNNI) multiplies unsigned with signed bytes, so values are stored with
 * 128 added, and 128 times the sum of the weights is subtracted again.
 */
#include <stddef.h>

#include "vectors.h"

#define COLUMNS 32
#define PARTS (COLUMNS / LANES)
#define QUAD 4 /* bytes that one lane multiplies and adds at a time */

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#define MOST_ROWS 12
INLINE ivec dot(ivec sums, int32_t values, ivec weights) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(values), (__m512i)weights);
}
#elif defined(__AVXVNNI__) && LANES == 8
#include <immintrin.h>
#define MOST_ROWS 3
INLINE ivec dot(ivec sums, int32_t values, ivec weights) {
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, _mm256_set1_epi32(values),
                                         (__m256i)weights);
}
#endif

typedef struct {
    const int8_t *panels;          /* [ceil(out / 32), in / 4, 32, 4] */
    const int32_t *totals;         /* [ceil(out / 32), 32], 128 times the sum of the weights */
    const float *scales, *bias;    /* [ceil(out / 32), 32] */
    int64_t in, out;               /* in: a multiple of 4 */
} Weights;

#ifdef MOST_ROWS
/* Round x, [dim], to q, [in], padded with 128, which is 0.   scale: NaN if a value is not finite.
 */
static void quantize(const float *x, uint8_t *q, float *scale, int64_t dim, int64_t in) {
    vec largest = {0}, zeros = {0};
    float rest = 0.0f, rest_zeros = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vec value = load(x + i);
        largest = larger(larger(value, -value), largest);
        zeros += value - value;
    }
    for (; i < dim; i++) {
        rest = fabsf(x[i]) > rest ? fabsf(x[i]) : rest;
        rest_zeros += x[i] - x[i];
    }
    float most = largest_lane(largest), factor;
    most = most > rest ? most : rest;
    factor = most > 0.0f ? 127.0f / most : 0.0f;
    *scale = most / 127.0f + (sum_lanes(zeros) + rest_zeros);
    for (i = 0; i < dim; i++) q[i] = (uint8_t)((int32_t)rintf(x[i] * factor) + 128);
    for (; i < in; i++) q[i] = 128;
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
            __builtin_prefetch(next + k * COLUMNS + 64, 0, 2);
        }
        for (int r = 0; r < rows; r++) {
            int32_t values;
            memcpy(&values, q + r * w->in + k, sizeof values);
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
        CASE(1) CASE(2) CASE(3)
#if MOST_ROWS == 12
        CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* x: [rows, dim].   q: [rows, in] and scales: [rows], scratch memory.   y: [rows, out]. */
void gemm_int8(const Weights *w, const float *x, uint8_t *q, float *scales, float *y, int64_t rows,
               int64_t dim, int threads) {
    if (!rows) return;
    int64_t num_tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
    int64_t num_panels = (w->out + COLUMNS - 1) / COLUMNS;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t r = 0; r < rows; r++)
            quantize(x + r * dim, q + r * w->in, scales + r, dim, w->in);
#pragma omp for
        for (int64_t n = 0; n < num_panels; n++) {
            int64_t width = w->out - n * COLUMNS;
            float last[MOST_ROWS * COLUMNS];
            for (int64_t t = 0; t < num_tiles; t++) {
                int64_t first = rows * t / num_tiles, count = rows * (t + 1) / num_tiles - first;
                float *to = y + first * w->out + n * COLUMNS;
                int is_last = width < COLUMNS;
                const int8_t *next = w->panels + (n + 1) * COLUMNS * w->in;
                rows_of(count, q + first * w->in, scales + first, w, n, t ? NULL : next,
                        is_last ? last : to, is_last ? COLUMNS : w->out);
                if (is_last)
                    for (int64_t r = 0; r < count; r++)
                        memcpy(to + r * w->out, last + r * COLUMNS, width * sizeof(float));
            }
        }
    }
}
#endif

/* Pack weight, [out, dim], into the arrays of Weights. */
void pack_int8(const float *weight, int8_t *panels, int32_t *totals, float *scales, int64_t dim,
               int64_t in, int64_t out) {
    for (int64_t n = 0; n < out; n++) {
        const float *row = weight + n * dim;
        float most = 0.0f;
        for (int64_t k = 0; k < dim; k++) most = fabsf(row[k]) > most ? fabsf(row[k]) : most;
        scales[n] = most / 127.0f;
        float factor = most > 0.0f ? 127.0f / most : 0.0f;
        int8_t *panel = panels + n / COLUMNS * COLUMNS * in;
        for (int64_t k = 0; k < dim; k++) {
            int8_t value = (int8_t)rintf(row[k] * factor);
            panel[k / QUAD * QUAD * COLUMNS + n % COLUMNS * QUAD + k % QUAD] = value;
            totals[n] += 128 * value;
        }
    }
}

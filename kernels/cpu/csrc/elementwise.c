/* RMSNorm, with or without the addition of a residual, and the gated activations. */
#include <stddef.h>

#include "pool.h"
#include "vectors.h"

typedef struct {
    float *x;
    const float *delta, *weight;
    float *y;
    float eps;
    int64_t dim;
} Norm;

static void norm_row(const void *work, int64_t r) {
    const Norm *w = work;
    int64_t dim = w->dim, i = 0;
    float *x = w->x + r * dim, *y = w->y + r * dim, rest = 0.0f;
    const float *delta = w->delta ? w->delta + r * dim : NULL;
    vec squares = {0};
    for (; i + LANES <= dim; i += LANES) {
        vec value = load(x + i);
        if (delta) store(x + i, value += load(delta + i));
        squares += value * value;
    }
    for (; i < dim; i++) {
        if (delta) x[i] += delta[i];
        rest += x[i] * x[i];
    }
    float factor = 1.0f / sqrtf((sum_lanes(squares) + rest) / dim + w->eps);
    for (i = 0; i < dim; i++) y[i] = w->weight[i] * (x[i] * factor);
}

/* x: [rows, dim]; with `delta`, x += delta first.   y: [rows, dim]. */
void rms_norm(float *x, const float *delta, const float *weight, float *y, float eps, int64_t rows,
              int64_t dim, int threads) {
    Norm work = {x, delta, weight, y, eps, dim};
    share(norm_row, &work, rows, threads);
}

INLINE vec silu(vec x) { return x / (1.0f + exp_lanes(-x)); }

/* The approximation by tanh: (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)). */
INLINE vec gelu(vec x) {
    return x / (1.0f + exp_lanes(-1.59576912f * x * (1.0f + 0.044715f * x * x)));
}

INLINE void gate_row(const float *gate, float *y, int64_t dim, const int is_gelu) {
    const float *up = gate + dim;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        vec x = load(gate + i);
        store(y + i, (is_gelu ? gelu(x) : silu(x)) * load(up + i));
    }
    for (; i < dim; i++) {
        vec x = splat(gate[i]);
        y[i] = (is_gelu ? gelu(x) : silu(x))[0] * up[i];
    }
}

typedef struct {
    const float *gate_up;
    float *y;
    int64_t dim;
    int is_gelu;
} Gate;

static void gate(const void *work, int64_t r) {
    const Gate *w = work;
    const float *from = w->gate_up + 2 * r * w->dim;
    if (w->is_gelu)
        gate_row(from, w->y + r * w->dim, w->dim, 1);
    else
        gate_row(from, w->y + r * w->dim, w->dim, 0);
}

/* gate_up: [rows, 2 * dim], gate and up side by side.   y: [rows, dim]. */
void gated(const float *gate_up, float *y, int64_t rows, int64_t dim, int is_gelu, int threads) {
    share(gate, &(Gate){gate_up, y, dim, is_gelu}, rows, threads);
}

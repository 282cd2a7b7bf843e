/* RMSNorm, with or without the addition of a residual, and the gated activation. */
#include "vectors.h"

/* x: [rows, dim]; with `delta`, x += delta first.   y: [rows, dim]. */
void rms_norm(float *x, const float *delta, const float *weight, float *y, float eps, int64_t rows,
              int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        float *from = x + r * dim, *to = y + r * dim;
        vec squares = {0};
        float rest = 0.0f;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) {
            vec value = load(from + i);
            if (delta) store(from + i, value += load(delta + r * dim + i));
            squares += value * value;
        }
        for (; i < dim; i++) {
            if (delta) from[i] += delta[r * dim + i];
            rest += from[i] * from[i];
        }
        float factor = 1.0f / sqrtf((sum_lanes(squares) + rest) / dim + eps);
        for (i = 0; i < dim; i++) to[i] = weight[i] * (from[i] * factor);
    }
}

INLINE vec silu(vec x) { return x / (1.0f + exp_lanes(-x)); }

/* gate_up: [rows, 2 * dim], gate and up side by side.   y: [rows, dim]. */
void silu_mul(const float *gate_up, float *y, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + 2 * r * dim, *up = gate + dim;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES)
            store(y + r * dim + i, silu(load(gate + i)) * load(up + i));
        for (; i < dim; i++) y[r * dim + i] = silu(splat(gate[i]))[0] * up[i];
    }
}

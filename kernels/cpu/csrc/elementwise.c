/* RMSNorm, with or without the addition of a residual, and the gated activations. */
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

/* gate_up: [rows, 2 * dim], gate and up side by side.   y: [rows, dim]. */
void silu_mul(const float *gate_up, float *y, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) gate_row(gate_up + 2 * r * dim, y + r * dim, dim, 0);
}

void gelu_mul(const float *gate_up, float *y, int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) gate_row(gate_up + 2 * r * dim, y + r * dim, dim, 1);
}

/* Runs the kernels on made-up numbers and prints the results, one number a line. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void pack_panels(const float *, float *, int64_t, int64_t);
void gemm(const float *, const float *, const float *, float *, int64_t, int64_t, int64_t, int);
void rms_norm(float *, const float *, const float *, float *, float, int64_t, int64_t, int);
void gated(const float *, float *, int64_t, int64_t, int, int);
typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    const float *cos, *sin;
    int64_t half, slab;
    float scale, softcap;
} Shape;
void rope_store(const Shape *, float *, const float *, const float *, float, const int64_t *,
                const int64_t *, float *, uint8_t *, int64_t, int);
void attend(const Shape *, const float *, float *, const uint8_t *, float *, const int32_t *,
            const int32_t *, const int32_t *, const int32_t *, int64_t, int64_t, int);
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
void add_lora(const Work *, int);

typedef struct {
    const int8_t *panels;
    const int32_t *totals;
    const float *scales, *bias;
    int64_t in, out;
} Weights;
typedef struct {
    const uint8_t *panels;
    const float *scales;
    const int32_t *zeros;
    const float *bias;
    int64_t in, out, group;
} Int4Weights;
int64_t int8_columns(void);
void pack_int8(const int8_t *, int8_t *, int32_t *, int64_t, int64_t, int64_t);
void gemm_int8(const Weights *, const float *, uint8_t *, float *, float *, int64_t, int64_t, int);
void pack_int4(const int8_t *, uint8_t *, int64_t, int64_t);
void gemm_int4(const Int4Weights *, const float *, int8_t *, float *, int32_t *, float *, int64_t, int);

/* From -1 to 1, others for each seed. */
static float *numbers(uint32_t seed, int count) {
    uint32_t state = seed * 2654435761u;
    float *made = malloc(count * sizeof(float));
    for (int i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        made[i] = (float)(state >> 8) / (1 << 23) - 1.0f;
    }
    return made;
}

static void print(const float *values, int count) {
    for (int i = 0; i < count; i++) printf("%.9g\n", values[i]);
}

enum { ROWS = 13, IN = 67, OUT = 101, THREADS = 2 };

static void run_rows(void) {
    float *panels = calloc(3 * IN * 48, sizeof(float)), *y = calloc(ROWS * OUT, sizeof(float));
    pack_panels(numbers(1, IN * OUT), panels, IN, OUT);
    gemm(numbers(2, ROWS * IN), panels, numbers(3, 3 * 48), y, ROWS, IN, OUT, THREADS);
    print(y, ROWS * OUT);
    rms_norm(numbers(4, ROWS * IN), numbers(5, ROWS * IN), numbers(6, IN), y, 1e-5f, ROWS, IN, THREADS);
    print(y, ROWS * IN);
    gated(numbers(7, 2 * ROWS * IN), y, ROWS, IN, 0, THREADS);
    print(y, ROWS * IN);
}

/* A prompt of 40 tokens in three blocks, then 13 tokens of another one behind 4. */
static void run_attention(void) {
    enum { TOKENS = 53, DIM = 32, HEADS = 4, WIDTH = 8 * DIM, SLAB = 2 * 2 * DIM * 16 };
    int64_t positions[TOKENS], slots[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        positions[t] = t < 40 ? t : t - 36;
        slots[t] = t < 40 ? t : 64 + positions[t];
    }
    Shape shape = {HEADS, 2, DIM, 16, numbers(8, 64 * 16), numbers(9, 64 * 16), 16, SLAB, 0, 5.0f};
    float *kv = numbers(10, 6 * SLAB), *qkv = numbers(11, TOKENS * WIDTH), out[TOKENS * HEADS * DIM];
    uint8_t finite[TOKENS];
    int32_t starts[] = {0, 40, TOKENS}, lengths[] = {40, 17}, blocks[] = {0, 1, 2, 4, 5};
    rope_store(&shape, qkv, numbers(12, DIM), numbers(13, DIM), 1e-5f, positions, slots, kv, finite,
               TOKENS, THREADS);
    attend(&shape, qkv, out, finite, kv, starts, lengths, (int32_t[]){0, 3, 5}, blocks, 2, 30,
           THREADS);
    print(out, TOKENS * HEADS * DIM);
}

static void run_lora(void) {
    enum { TILE = 8 * (64 + 96) };
    int32_t bounds[] = {0, 9, 10, 12}, near[] = {0, TILE * 4 / 256}, far[] = {TILE * 8 / 256, -1};
    const int32_t *tables[] = {near, far};
    float scale[] = {0.5f, 2.0f}, *y = numbers(14, ROWS * 96);
    const float *scales[] = {scale, scale + 1};
    Work work = {y, numbers(15, ROWS * 64), (const char *)numbers(16, 3 * TILE), bounds, tables, scales,
                 (int64_t[]){2, 2}, (int64_t[]){96}, 64, 96, 1, 2, 0};
    add_lora(&work, THREADS);
    print(y, ROWS * 96);
}

static void run_bytes(void) {
    enum { INPUTS = 64, BYTES = (OUT + 31) / 32 * 32 * INPUTS };
    int8_t codes[OUT * INPUTS], few[OUT * INPUTS], *panels = calloc(BYTES, 1);
    float *made = numbers(17, OUT * INPUTS), scales[2 * BYTES / INPUTS], row_scales[ROWS];
    float y[ROWS * OUT], *bias = numbers(18, BYTES), *x = numbers(19, ROWS * INPUTS);
    int32_t totals[BYTES / INPUTS] = {0}, sums[ROWS * INPUTS / 8];
    uint8_t q[ROWS * INPUTS];
    for (int i = 0; i < OUT * INPUTS; i++) codes[i] = (int8_t)(made[i] * 127);
    for (int i = 0; i < OUT * INPUTS; i++) few[i] = (int8_t)(made[i] * 7.9f);
    for (int i = 0; i < 2 * BYTES / INPUTS; i++) scales[i] = 0.01f;
    pack_int8(codes, panels, totals, INPUTS, INPUTS, OUT);
    Weights w = {panels, totals, scales, bias, INPUTS, OUT};
    gemm_int8(&w, x, q, row_scales, y, ROWS, INPUTS, THREADS);
    print(y, ROWS * OUT);
    memset(panels, 0, BYTES);
    pack_int4(few, (uint8_t *)panels, INPUTS, OUT);
    Int4Weights narrow = {(uint8_t *)panels, scales, NULL, bias, INPUTS, OUT, 32};
    gemm_int4(&narrow, x, (int8_t *)q, row_scales, sums, y, ROWS, THREADS);
    print(y, ROWS * OUT);
}

int main(void) {
    run_rows();
    run_bytes();
    run_attention();
    run_lora();
}

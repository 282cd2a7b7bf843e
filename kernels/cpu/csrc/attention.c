/* Rotary embedding, the KV cache's writes, and attention over paged KV.
 *
 * A KV block is [layer][k, v][kv head][..]; keys are [head_dim][token], values [token][head_dim].
 * So a channel of 16 keys is one vector, and the keys' scores need no sum over lanes.
 * Keys are taken 32 at a time, at fixed places and in order, with a running maximum (arXiv
 * 2205.14135). A row's arithmetic does not depend on the rows beside it, so a token has the same
 * bits decoded or prefilled, in any chunk, with any neighbours.
 */
#include <stdlib.h>

#include "vectors.h"

#define HALF 16  /* keys that always lie within one block */
#define GROUP 32 /* keys of one step of the softmax */
#define PARTS (GROUP / LANES)
#define HALF_PARTS (HALF / LANES)
#define MOST_ROWS 6 /* with AVX-512, 24 sums of a tile of 64 channels fill the registers */
#define CHUNK (4 * LANES)

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    const float *cos, *sin; /* [positions, half]: the first 2 * half features are rotated */
    int64_t half;
    int64_t slab;           /* floats from one block to the next */
    float scale;            /* factor of the scores; 0 for 1 / sqrt(head_dim) */
    float softcap;          /* bound of the scores; 0 for none */
} Shape;

/* Place of a token in a block, for one kv head. */
typedef struct {
    int64_t block, offset, head;
} Place;

INLINE float *head_at(const Shape *s, float *kv, int64_t block, int64_t head) {
    return kv + block * s->slab + head * s->head_dim * s->block_size;
}

INLINE float *keys_at(const Shape *s, float *kv, Place at) {
    return head_at(s, kv, at.block, at.head) + at.offset;
}

INLINE float *values_at(const Shape *s, float *kv, Place at) {
    return head_at(s, kv, at.block, s->num_kv_heads + at.head) + at.offset * s->head_dim;
}

/* ---- queries, keys and values ---- */

static void norm_head(float *x, const float *weight, float eps, int64_t dim) {
    vec squares = {0};
    for (int64_t i = 0; i < dim; i += LANES) squares += load(x + i) * load(x + i);
    float factor = 1.0f / sqrtf(sum_lanes(squares) / dim + eps);
    for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) * factor * load(weight + i));
}

static void rotate(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

static int all_finite(const float *x, int64_t count) {
    vec zeros = {0};
    for (int64_t i = 0; i < count; i += LANES) zeros += load(x + i) - load(x + i);
    return sum_lanes(zeros) == 0.0f;
}

static void write_kv(const Shape *s, float *kv, const float *k, const float *v, int64_t slot,
                     int is_finite) {
    int64_t dim = s->head_dim;
    for (int64_t h = 0; h < s->num_kv_heads; h++) {
        Place at = {slot / s->block_size, slot % s->block_size, h};
        float *keys = keys_at(s, kv, at), *values = values_at(s, kv, at);
        for (int64_t d = 0; d < dim; d++) {
            keys[d * s->block_size] = is_finite ? k[h * dim + d] : 0.0f;
            values[d] = is_finite ? v[h * dim + d] : 0.0f;
        }
    }
}

/* qkv: [tokens, (heads + 2 kv heads) * head_dim], rotated in place.   q_norm, k_norm: NULL, or
 * [head_dim].   kv: the layer's part of the first block.   finite: [tokens], written: whether a
 * token's keys and values are finite; if not, they are stored as zeros.
 */
void rope_store(const Shape *s, float *qkv, const float *q_norm, const float *k_norm, float eps,
                const int64_t *positions, const int64_t *slots, float *kv, uint8_t *finite,
                int64_t tokens, int threads) {
    int64_t heads = s->num_heads, dim = s->head_dim, with_keys = heads + s->num_kv_heads;
    int64_t width = (with_keys + s->num_kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        float *row = qkv + t * width, *k = row + heads * dim, *v = row + with_keys * dim;
        int64_t angles = positions[t] * s->half;
        for (int64_t h = 0; h < with_keys; h++) {
            if (q_norm) norm_head(row + h * dim, h < heads ? q_norm : k_norm, eps, dim);
            rotate(row + h * dim, s->cos + angles, s->sin + angles, s->half);
        }
        finite[t] = all_finite(k, 2 * s->num_kv_heads * dim);
        write_kv(s, kv, k, v, slots[t], finite[t]);
    }
}

/* ---- attention ---- */

/* A tile of rows, (token, query head) pairs of one sequence and kv head, from row `first` on.
 * token, position: those of the sequence's first query.
 */
typedef struct {
    const Shape *shape;
    const float *qkv;
    float *out;
    const uint8_t *finite;
    float *kv;
    const int32_t *blocks;
    int64_t width, token, position, head, first, window;
} Tile;

/* The keys [low, high) that a row of a tile sees. */
typedef struct {
    int64_t low, high;
} View;

INLINE int64_t token_of(const Tile *t, int r) {
    return (t->first + r) / (t->shape->num_heads / t->shape->num_kv_heads);
}

INLINE int64_t head_of(const Tile *t, int r) {
    int64_t group = t->shape->num_heads / t->shape->num_kv_heads;
    return t->head * group + (t->first + r) % group;
}

INLINE View view_of(const Tile *t, int r) {
    int64_t position = t->position + token_of(t, r), low = position + 1 - t->window;
    return (View){low > 0 ? low : 0, position + 1};
}

INLINE Place place_of(const Tile *t, int64_t key, int64_t head) {
    int64_t size = t->shape->block_size;
    return (Place){t->blocks[key / size], key % size, head};
}

/* The place to prefetch during the group at `start`: the next group, or the next kv head's first
 * group. Blocks lie anywhere in the arena, so the processor does not fetch them in time by itself:
 * a step of 32 rows takes 26 ms with prefetches, 54 ms without.
 */
INLINE Place place_ahead(const Tile *t, int64_t start, int64_t first_group, int64_t end,
                         int64_t offset) {
    int64_t key = start + GROUP + offset;
    if (key < end) return place_of(t, key, t->head);
    key = first_group + offset < end ? first_group + offset : first_group;
    return place_of(t, key, t->head + (t->head + 1 < t->shape->num_kv_heads));
}

/* scores[r] = q[r] . keys of a half group, as [head_dim][block_size] from `keys` on. */
INLINE void score(const float *const *q, const float *keys, int64_t dim, int64_t stride,
                  const float *ahead, vec scores[][PARTS], const int part, const int rows) {
    vec sums[MOST_ROWS][HALF_PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < HALF_PARTS; p++) sums[r][p] = (vec){0};
    for (int64_t d = 0; d < dim; d++) {
        __builtin_prefetch(ahead + d * stride, 0, 2);
        for (int p = 0; p < HALF_PARTS; p++) {
            vec k = load(keys + d * stride + p * LANES);
            for (int r = 0; r < rows; r++) sums[r][p] += q[r][d] * k;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < HALF_PARTS; p++) scores[r][part + p] = sums[r][p];
}

/* sums[r] += weights[r] . values of a half group, [token][head_dim], the first `count` of them. */
INLINE void add_values(const float *values, const float *ahead, const float weights[][GROUP],
                       int64_t offset, int64_t count, int64_t dim, float *sums, const int rows) {
    for (int64_t d = 0; d < dim; d += CHUNK) {
        int parts = dim - d < CHUNK ? (dim - d) / LANES : 4;
        if (parts == 4) {
            vec s[MOST_ROWS][4];
            for (int r = 0; r < rows; r++)
                for (int p = 0; p < 4; p++) s[r][p] = load(sums + r * dim + d + p * LANES);
            for (int64_t t = 0; t < count; t++) {
                vec v[4];
                for (int p = 0; p < 4; p++) {
                    v[p] = load(values + t * dim + d + p * LANES);
                    __builtin_prefetch(ahead + t * dim + d + p * LANES, 0, 2);
                }
                for (int r = 0; r < rows; r++)
                    for (int p = 0; p < 4; p++) s[r][p] += weights[r][offset + t] * v[p];
            }
            for (int r = 0; r < rows; r++)
                for (int p = 0; p < 4; p++) store(sums + r * dim + d + p * LANES, s[r][p]);
            continue;
        }
        for (int p = 0; p < parts; p++)
            for (int r = 0; r < rows; r++) {
                float *to = sums + r * dim + d + p * LANES;
                vec s = load(to);
                for (int64_t t = 0; t < count; t++)
                    s += weights[r][offset + t] * load(values + t * dim + d + p * LANES);
                store(to, s);
            }
    }
}

/* Running state of a row's softmax. */
typedef struct {
    float largest;
    vec total;
} Running;

/* Turn the scores of the group that starts at key `start` into weights, and scale the sums to the
 * new maximum.
 */
INLINE void weigh(vec scores[PARTS], View view, int64_t start, float scale, float softcap,
                  Running *running, float weights[GROUP], float *sums, int64_t dim) {
    int64_t low = view.low - start, high = view.high - start;
    if (high <= 0 || low >= GROUP) { /* the row sees no key of the group: no bit may change */
        memset(weights, 0, GROUP * sizeof(float));
        return;
    }
    int32_t first = low > 0 ? low : 0, end = high < GROUP ? high : GROUP;
    ivec seen[PARTS];
    vec largest = splat(-INFINITY);
    for (int p = 0; p < PARTS; p++) {
        ivec lane;
        for (int i = 0; i < LANES; i++) lane[i] = p * LANES + i;
        seen[p] = (lane >= first) & (lane < end);
        vec scaled = scores[p] * scale;
        if (softcap) scaled = softcap * tanh_lanes(scaled / softcap);
        scores[p] = choose(seen[p], scaled, splat(-INFINITY));
        largest = larger(scores[p], largest);
    }
    float highest = largest_lane(largest);
    highest = highest > running->largest ? highest : running->largest;
    if (highest > running->largest) {
        float factor = exp_lanes(splat(running->largest - highest))[0];
        running->total *= factor;
        for (int64_t d = 0; d < dim; d += LANES) store(sums + d, load(sums + d) * factor);
        running->largest = highest;
    }
    for (int p = 0; p < PARTS; p++) {
        vec weight = choose(seen[p], exp_lanes(scores[p] - highest), (vec){0});
        running->total += weight;
        store(weights + p * LANES, weight);
    }
}

INLINE void attend_tile(const Tile *t, const int rows) {
    const Shape *s = t->shape;
    int64_t dim = s->head_dim, size = s->block_size;
    const float *q[MOST_ROWS];
    View views[MOST_ROWS];
    Running running[MOST_ROWS];
    float sums[MOST_ROWS * dim];
    memset(sums, 0, rows * dim * sizeof(float));
    for (int r = 0; r < rows; r++) {
        q[r] = t->qkv + (t->token + token_of(t, r)) * t->width + head_of(t, r) * dim;
        views[r] = view_of(t, r);
        running[r] = (Running){-INFINITY, {0}};
    }
    int64_t end = views[rows - 1].high;
    float scale = s->scale ? s->scale : 1.0f / sqrtf((float)dim);
    int64_t first_group = views[0].low / GROUP * GROUP;
    for (int64_t start = first_group; start < end; start += GROUP) {
        vec scores[MOST_ROWS][PARTS];
        float weights[MOST_ROWS][GROUP];
        int halves = end - start > HALF ? 2 : 1;
        for (int half = 0; half < halves; half++) {
            Place here = place_of(t, start + half * HALF, t->head);
            Place ahead = place_ahead(t, start, first_group, end, half * HALF);
            score(q, keys_at(s, t->kv, here), dim, size, keys_at(s, t->kv, ahead), scores,
                  half * HALF_PARTS, rows);
        }
        for (int r = 0; r < rows; r++)
            weigh(scores[r], views[r], start, scale, s->softcap, &running[r], weights[r],
                  sums + r * dim, dim);
        for (int half = 0; half < halves; half++) {
            int64_t left = end - start - half * HALF;
            Place here = place_of(t, start + half * HALF, t->head);
            Place ahead = place_ahead(t, start, first_group, end, half * HALF);
            add_values(values_at(s, t->kv, here), values_at(s, t->kv, ahead), weights, half * HALF,
                       left < HALF ? left : HALF, dim, sums, rows);
        }
    }
    for (int r = 0; r < rows; r++) {
        int64_t token = t->token + token_of(t, r);
        float *to = t->out + (token * s->num_heads + head_of(t, r)) * dim;
        float factor = t->finite[token] ? 1.0f / sum_lanes(running[r].total) : NAN;
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(sums + r * dim + d) * factor);
    }
}

static void attend_rows(const Tile *t, int rows) {
    switch (rows) {
        case 1: attend_tile(t, 1); break;
        case 2: attend_tile(t, 2); break;
        case 3: attend_tile(t, 3); break;
        case 4: attend_tile(t, 4); break;
        case 5: attend_tile(t, 5); break;
        case 6: attend_tile(t, 6); break;
    }
}

/* qkv, kv, finite: as rope_store left them.   out: [tokens, heads, head_dim].
 * The other arrays are as in StepWork.   window: how many positions a token sees.
 */
void attend(const Shape *s, const float *qkv, float *out, const uint8_t *finite, float *kv,
            const int32_t *query_starts, const int32_t *seq_lens, const int32_t *block_starts,
            const int32_t *blocks, int64_t num_seqs, int64_t window, int threads) {
    int64_t group = s->num_heads / s->num_kv_heads;
    int64_t width = (s->num_heads + 2 * s->num_kv_heads) * s->head_dim;
#pragma omp parallel for num_threads(threads) schedule(dynamic) collapse(2) if (threads > 1)
    for (int64_t b = 0; b < num_seqs; b++)
        for (int64_t head = 0; head < s->num_kv_heads; head++) {
            int64_t tokens = query_starts[b + 1] - query_starts[b], rows = tokens * group;
            int64_t num_tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
            for (int64_t i = 0; i < num_tiles; i++) {
                int64_t first = rows * i / num_tiles, end = rows * (i + 1) / num_tiles;
                Tile tile = {s, qkv, out, finite, kv, blocks + block_starts[b], width,
                             query_starts[b], seq_lens[b] - tokens, head, first, window};
                attend_rows(&tile, end - first);
            }
        }
}

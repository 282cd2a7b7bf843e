/* Rotary embedding, the KV cache's writes, and attention over paged KV.
 *
 * A KV block is [layer][k, v][kv head][..]; keys are [head_dim][token], values [token][head_dim].
 * So a channel of 16 keys is one vector, and the keys' scores need no sum over lanes.
 * Keys are taken 32 at a time, at fixed places and in order, with a running maximum (arXiv
 * 2205.14135). A row's arithmetic does not depend on the rows beside it, so a token has the same
 * bits decoded or prefilled, in any chunk, with any neighbours.
 */
#include <stdlib.h>

#include "pool.h"
#include "vectors.h"

#define HALF 16  /* keys that always lie within one block */
#define GROUP 32 /* keys of one step of the softmax */
#define PARTS (GROUP / LANES)
#define HALF_PARTS (HALF / LANES)
#define MOST_ROWS 6 /* with AVX-512, 24 sums of a tile of 64 channels fill the registers */
#define PASS_ROWS (4 * MOST_ROWS) /* 8 tokens of 3 query heads: their queries and sums are 12 kB */

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

typedef struct {
    const Shape *shape;
    float *qkv;
    const float *q_norm, *k_norm;
    float eps;
    const int64_t *positions, *slots;
    float *kv;
    uint8_t *finite;
} Rope;

static void rope_token(const void *work, int64_t t) {
    const Rope *w = work;
    const Shape *s = w->shape;
    int64_t heads = s->num_heads, dim = s->head_dim, with_keys = heads + s->num_kv_heads;
    float *row = w->qkv + t * (with_keys + s->num_kv_heads) * dim, *k = row + heads * dim;
    int64_t angles = w->positions[t] * s->half;
    for (int64_t h = 0; h < with_keys; h++) {
        if (w->q_norm) norm_head(row + h * dim, h < heads ? w->q_norm : w->k_norm, w->eps, dim);
        rotate(row + h * dim, s->cos + angles, s->sin + angles, s->half);
    }
    w->finite[t] = all_finite(k, 2 * s->num_kv_heads * dim);
    write_kv(s, w->kv, k, row + with_keys * dim, w->slots[t], w->finite[t]);
}

/* qkv: [tokens, (heads + 2 kv heads) * head_dim], rotated in place.   q_norm, k_norm: NULL, or
 * [head_dim].   kv: the layer's part of the first block.   finite: [tokens], written: whether a
 * token's keys and values are finite; if not, they are stored as zeros.
 */
void rope_store(const Shape *s, float *qkv, const float *q_norm, const float *k_norm, float eps,
                const int64_t *positions, const int64_t *slots, float *kv, uint8_t *finite,
                int64_t tokens, int threads) {
    Rope work = {s, qkv, q_norm, k_norm, eps, positions, slots, kv, finite};
    share(rope_token, &work, tokens, threads);
}

/* ---- attention ---- */

/* A row is a token and a query head, with the running state of its softmax. */
typedef struct {
    const float *q;
    int64_t low, high; /* it sees the keys [low, high) */
    float largest;
    vec total;
    float *sums; /* [head_dim] */
} Row;

/* A sequence's tokens and one kv head.   token, position: those of the first query. */
typedef struct {
    const Shape *shape;
    const float *qkv;
    float *out;
    const uint8_t *finite;
    float *kv;
    const int32_t *blocks;
    int64_t width, token, position, head, window;
} Sequence;

/* The keys of one step of the softmax, as halves that lie within a block each, and the halves to
 * prefetch meanwhile.   count: how many keys some row sees.
 */
typedef struct {
    int64_t start, count;
    const float *keys[2], *values[2], *next_keys[2], *next_values[2];
} Group;

INLINE Place place_of(const Sequence *q, int64_t key, int64_t head) {
    int64_t size = q->shape->block_size;
    return (Place){q->blocks[key / size], key % size, head};
}

/* The place to prefetch during the group at `start`: the next group, or the next kv head's first
 * group. Blocks lie anywhere in the arena, so the processor does not fetch them in time by itself:
 * a step of 32 rows takes 26 ms with prefetches, 54 ms without.
 */
INLINE Place place_ahead(const Sequence *q, int64_t start, int64_t first_group, int64_t end,
                         int64_t offset) {
    int64_t key = start + GROUP + offset;
    if (key < end) return place_of(q, key, q->head);
    key = first_group + offset < end ? first_group + offset : first_group;
    return place_of(q, key, q->head + (q->head + 1 < q->shape->num_kv_heads));
}

static Group group_at(const Sequence *q, int64_t start, int64_t first_group, int64_t end) {
    Group group = {.start = start, .count = end - start < GROUP ? end - start : GROUP};
    for (int half = 0; half * HALF < group.count; half++) {
        Place here = place_of(q, start + half * HALF, q->head);
        Place ahead = place_ahead(q, start, first_group, end, half * HALF);
        group.keys[half] = keys_at(q->shape, q->kv, here);
        group.values[half] = values_at(q->shape, q->kv, here);
        group.next_keys[half] = keys_at(q->shape, q->kv, ahead);
        group.next_values[half] = values_at(q->shape, q->kv, ahead);
    }
    return group;
}

/* scores[r] = row r's q . keys of a half group, as [head_dim][block_size] from `keys` on. */
INLINE void score(const Row *row, const float *keys, int64_t dim, int64_t stride,
                  const float *ahead, vec scores[][PARTS], const int part, const int rows) {
    vec sums[MOST_ROWS][HALF_PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < HALF_PARTS; p++) sums[r][p] = (vec){0};
    for (int64_t d = 0; d < dim; d++) {
        __builtin_prefetch(ahead + d * stride, 0, 2);
        vec k[HALF_PARTS];
        for (int p = 0; p < HALF_PARTS; p++) k[p] = load(keys + d * stride + p * LANES);
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < HALF_PARTS; p++) sums[r][p] += row[r].q[d] * k[p];
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < HALF_PARTS; p++) scores[r][part + p] = sums[r][p];
}

/* Mask of the lanes of a group's part that lie in [first, end) of the group. */
INLINE ivec lanes_between(int64_t first, int64_t end, int part) {
    int32_t low = first > 0 ? first : 0, high = end < GROUP ? end : GROUP;
    ivec lane = LANE_NUMBERS + part * LANES;
    return (lane >= low) & (lane < high);
}

/* Turn the scores of a group into weights, and scale the rows' sums to their new maxima.
 *
 * Rows are taken together in each pass, as one row's maximum and exponentials are a long chain.
 */
INLINE void weigh(Row *row, int64_t start, const Shape *s, vec scores[][PARTS],
                  float weights[][GROUP], const int rows) {
    for (int r = 0; r < rows; r++) {
        int64_t low = row[r].low - start, high = row[r].high - start;
        if (high <= 0 || low >= GROUP) continue;
        vec largest = splat(-INFINITY);
        for (int p = 0; p < PARTS; p++) {
            vec scaled = scores[r][p] * s->scale;
            if (s->softcap) scaled = s->softcap * tanh_lanes(scaled / s->softcap);
            if (low > 0 || high < GROUP)
                scaled = choose(lanes_between(low, high, p), scaled, splat(-INFINITY));
            scores[r][p] = scaled;
            largest = larger(scaled, largest);
        }
        float highest = largest_lane(largest);
        if (highest > row[r].largest) {
            float factor = exp_lanes(splat(row[r].largest - highest))[0];
            row[r].total *= factor;
            for (int64_t d = 0; d < s->head_dim; d += LANES)
                store(row[r].sums + d, load(row[r].sums + d) * factor);
            row[r].largest = highest;
        }
    }
    for (int r = 0; r < rows; r++) {
        int64_t low = row[r].low - start, high = row[r].high - start;
        if (high <= 0 || low >= GROUP) { /* the row sees no key of the group: no bit may change */
            memset(weights[r], 0, GROUP * sizeof(float));
            continue;
        }
        for (int p = 0; p < PARTS; p++) {
            vec weight = exp_lanes(scores[r][p] - row[r].largest);
            if (low > 0 || high < GROUP)
                weight = choose(lanes_between(low, high, p), weight, (vec){0});
            row[r].total += weight;
            store(weights[r] + p * LANES, weight);
        }
    }
}

/* Add weighted values to the rows' sums from feature `d` on.   values: [count][head_dim]. */
INLINE void add_features(Row *row, const float *values, const float *ahead,
                         const float weights[][GROUP], int64_t offset, int64_t count, int64_t dim,
                         int64_t d, const int parts, const int rows) {
    vec sums[MOST_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < parts; p++) sums[r][p] = load(row[r].sums + d + p * LANES);
    for (int64_t t = 0; t < count; t++) {
        vec v[4];
        for (int p = 0; p < parts; p++) v[p] = load(values + t * dim + d + p * LANES);
        for (int line = 0; line < parts * LANES; line += 16)
            __builtin_prefetch(ahead + t * dim + d + line, 0, 2);
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < parts; p++) sums[r][p] += weights[r][offset + t] * v[p];
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < parts; p++) store(row[r].sums + d + p * LANES, sums[r][p]);
}

/* Add the values of a half group, [token][head_dim], the first `count` of them. */
INLINE void add_values(Row *row, const float *values, const float *ahead,
                       const float weights[][GROUP], int64_t offset, int64_t count, int64_t dim,
                       const int rows) {
    const int parts = LANES == 8 && rows > 3 ? 2 : 4; /* the sums have to stay in registers */
    int64_t d = 0;
    for (; d + parts * LANES <= dim; d += parts * LANES)
        add_features(row, values, ahead, weights, offset, count, dim, d, parts, rows);
    for (; d < dim; d += LANES)
        add_features(row, values, ahead, weights, offset, count, dim, d, 1, rows);
}

/* Add a group's keys to the states of a tile of rows. */
INLINE void add_group(const Shape *s, const Group *g, Row *row, const int rows) {
    int64_t dim = s->head_dim;
    int halves = g->count > HALF ? 2 : 1;
    vec scores[MOST_ROWS][PARTS];
    float weights[MOST_ROWS][GROUP];
    for (int half = 0; half < halves; half++)
        score(row, g->keys[half], dim, s->block_size, g->next_keys[half], scores,
              half * HALF_PARTS, rows);
    weigh(row, g->start, s, scores, weights, rows);
    for (int half = 0; half < halves; half++) {
        int64_t left = g->count - half * HALF;
        add_values(row, g->values[half], g->next_values[half], weights, half * HALF,
                   left < HALF ? left : HALF, dim, rows);
    }
}

static void add_group_to(const Shape *s, const Group *g, Row *row, int64_t rows) {
    switch (rows) {
        case 1: add_group(s, g, row, 1); break;
        case 2: add_group(s, g, row, 2); break;
        case 3: add_group(s, g, row, 3); break;
        case 4: add_group(s, g, row, 4); break;
        case 5: add_group(s, g, row, 5); break;
        case 6: add_group(s, g, row, 6); break;
    }
}

/* Rows [first, first + rows) of a sequence and kv head, which pass over the keys once together:
 * each group of keys is used by all tiles of them while it is in the first cache.
 */
static void attend_rows(const Sequence *q, int64_t first, int64_t rows) {
    const Shape *s = q->shape;
    int64_t dim = s->head_dim, heads = s->num_heads / s->num_kv_heads;
    Row row[PASS_ROWS];
    float sums[PASS_ROWS * dim];
    memset(sums, 0, rows * dim * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = (first + r) / heads, head = q->head * heads + (first + r) % heads;
        int64_t end = q->position + token + 1, low = end - q->window;
        const float *from = q->qkv + (q->token + token) * q->width + head * dim;
        row[r] = (Row){from, low > 0 ? low : 0, end, -INFINITY, {0}, sums + r * dim};
    }
    int64_t first_group = row[0].low / GROUP * GROUP, end = row[rows - 1].high;
    int64_t num_tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t start = first_group; start < end; start += GROUP) {
        Group group = group_at(q, start, first_group, end);
        for (int64_t i = 0; i < num_tiles; i++) {
            int64_t top = rows * i / num_tiles, bottom = rows * (i + 1) / num_tiles;
            if (row[bottom - 1].high > start && row[top].low < start + GROUP)
                add_group_to(s, &group, row + top, bottom - top);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = q->token + (first + r) / heads;
        float *to = q->out + (token * s->num_heads + q->head * heads + (first + r) % heads) * dim;
        float factor = q->finite[token] ? 1.0f / sum_lanes(row[r].total) : NAN;
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(row[r].sums + d) * factor);
    }
}

typedef struct {
    Shape shape;
    const float *qkv;
    float *out;
    const uint8_t *finite;
    float *kv;
    const int32_t *query_starts, *seq_lens, *block_starts, *blocks;
    int64_t window, most_passes; /* of any sequence and kv head */
} Attention;

INLINE int64_t passes_of(const Shape *s, int64_t tokens) {
    return (tokens * (s->num_heads / s->num_kv_heads) + PASS_ROWS - 1) / PASS_ROWS;
}

/* One pass of a sequence and kv head; sequences with fewer passes have items without work. */
static void attend_pass(const void *work, int64_t item) {
    const Attention *w = work;
    const Shape *s = &w->shape;
    int64_t i = item % w->most_passes, head = item / w->most_passes % s->num_kv_heads;
    int64_t b = item / w->most_passes / s->num_kv_heads;
    int64_t tokens = w->query_starts[b + 1] - w->query_starts[b], passes = passes_of(s, tokens);
    if (i >= passes) return;
    int64_t rows = tokens * (s->num_heads / s->num_kv_heads), first = rows * i / passes;
    Sequence sequence = {s, w->qkv, w->out, w->finite, w->kv, w->blocks + w->block_starts[b],
                         (s->num_heads + 2 * s->num_kv_heads) * s->head_dim,
                         w->query_starts[b], w->seq_lens[b] - tokens, head, w->window};
    attend_rows(&sequence, first, rows * (i + 1) / passes - first);
}

/* qkv, kv, finite: as rope_store left them.   out: [tokens, heads, head_dim].
 * The other arrays are as in StepWork.   window: how many positions a token sees.
 */
void attend(const Shape *s, const float *qkv, float *out, const uint8_t *finite, float *kv,
            const int32_t *query_starts, const int32_t *seq_lens, const int32_t *block_starts,
            const int32_t *blocks, int64_t num_seqs, int64_t window, int threads) {
    Attention work = {*s, qkv, out, finite, kv, query_starts, seq_lens, block_starts, blocks,
                      window, 0};
    if (!work.shape.scale) work.shape.scale = 1.0f / sqrtf((float)s->head_dim);
    for (int64_t b = 0; b < num_seqs; b++) {
        int64_t passes = passes_of(s, query_starts[b + 1] - query_starts[b]);
        if (passes > work.most_passes) work.most_passes = passes;
    }
    share(attend_pass, &work, num_seqs * s->num_kv_heads * work.most_passes, threads);
}

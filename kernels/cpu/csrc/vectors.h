/* Vectors as wide as the processor's own, and the few functions that all kernels need.
 *
 * There are no intrinsics: gcc and clang turn these types into AVX-512, AVX2 or NEON. Nothing is
 * reassociated (no -ffast-math), so a sum has the order that is written here, for any batch.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(LANES)
/* The file has its own width. */
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if LANES == 16
#define LANE_NUMBERS ((ivec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif LANES == 8
#define LANE_NUMBERS ((ivec){0, 1, 2, 3, 4, 5, 6, 7})
#else
#define LANE_NUMBERS ((ivec){0, 1, 2, 3})
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(float value) { return (vec){0} + value; }

INLINE vec load(const float *from) { return *(const vec *)from; }

INLINE void store(float *to, vec value) { *(vec *)to = value; }

/* Lanes of `yes` or `no`; a lane of `mask` has all bits set for `yes`, or none for `no`. */
INLINE vec choose(ivec mask, vec yes, vec no) {
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

INLINE float sum_lanes(vec value) {
    float lanes[LANES];
    memcpy(lanes, &value, sizeof lanes);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

INLINE float largest_lane(vec value) {
    float lanes[LANES];
    memcpy(lanes, &value, sizeof lanes);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

/* e^x to 2 units in the last place for x in [-87, 88]; below as at -87, above infinity, NaN stays.
 *
 * 2^n * e^r with |r| <= ln(2) / 2: Cody and Waite's reduction, then Taylor's polynomial to r^7.
 */
INLINE vec exp_lanes(vec x) {
    x = choose(x < splat(-87.0f), splat(-87.0f), x);
    ivec is_large = x > splat(88.0f);
    const vec shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec shifted = x * 1.44269504f + shift;
    vec n = shifted - shift;
    vec r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    vec p = r * 1.98412698e-4f + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    /* Unsigned, because the bits of lanes that are too large or NaN overflow; they are not used. */
    vec power = (vec)((uvec)p + ((uvec)shifted << 23));
    power = choose(is_large, splat(INFINITY), power);
    return choose(x == x, power, x);
}

/* tanh(x), to 1e-7 of 1. */
INLINE vec tanh_lanes(vec x) { return 1.0f - 2.0f / (exp_lanes(2.0f * x) + 1.0f); }

/* How a row of values is rounded to int8, and the products of bytes. */
#pragma once

#if defined(__AVX512F__) && !defined(__AVX512VNNI__) && !defined(GENERIC_DOT)
#define LANES 8 /* products of bytes are AVX2's */
#endif
#include "vectors.h"

#define COLUMNS (2 * LANES) /* outputs of a panel */
#define PARTS 2
#define QUAD 4 /* bytes that one lane multiplies and adds at a time */

/* dot(sums, a, b) adds a[0] b[0] + .. + a[3] b[3] to each lane, exactly.
 *
 * The instruction of VNNI multiplies unsigned with signed bytes, so int8 values have 128 added.
 * AVX2 adds pairs in 16 bits first. That is exact for |b| of a's signs, as 2 * 128 * 127 fits, and
 * for codes of 4 bits, which can even be summed eight times. NEON adds all pairs in 32 bits.
 */
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && LANES == 8) || defined(GENERIC_DOT)
#define VALUE_OFFSET 128
#elif defined(__AVX2__) || defined(__aarch64__)
#define VALUE_OFFSET 0
#else
#define GENERIC_DOT 1
#define VALUE_OFFSET 128
#endif

#if defined(GENERIC_DOT)
/* Plain C, for processors without such instructions, and for tests. */
INLINE ivec dot(ivec sums, ivec unsigned_bytes, ivec signed_bytes) {
    uint8_t a[4 * LANES];
    int8_t b[4 * LANES];
    memcpy(a, &unsigned_bytes, sizeof a);
    memcpy(b, &signed_bytes, sizeof b);
    for (int i = 0; i < 4 * LANES; i++) sums[i / QUAD] += a[i] * b[i];
    return sums;
}
#elif defined(__AVX512VNNI__)
#include <immintrin.h>
INLINE ivec dot(ivec sums, ivec unsigned_bytes, ivec signed_bytes) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}
#elif defined(__AVXVNNI__)
#include <immintrin.h>
INLINE ivec dot(ivec sums, ivec unsigned_bytes, ivec signed_bytes) {
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)unsigned_bytes,
                                         (__m256i)signed_bytes);
}
#elif defined(__aarch64__)
#include <arm_neon.h>
/* Both are signed here. */
INLINE ivec dot(ivec sums, ivec values, ivec weights) {
    int8x16_t a = (int8x16_t)values, b = (int8x16_t)weights;
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    int32x4_t high = vpaddlq_s16(vmull_high_s8(a, b));
    return sums + (ivec)vpaddq_s32(low, high);
}
#else
#include <immintrin.h>
INLINE ivec sum_pairs(ivec pairs) {
    return (ivec)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
}
/* Both are signed here. */
INLINE ivec dot(ivec sums, ivec values, ivec weights) {
    __m256i sizes = _mm256_abs_epi8((__m256i)weights);
    __m256i signs = _mm256_sign_epi8((__m256i)values, (__m256i)weights);
    return sums + sum_pairs((ivec)_mm256_maddubs_epi16(sizes, signs));
}
#endif

/* Exact sums of products of 4-bit codes, 0 to 15, with int8 values: `add_codes` up to
 * MOST_CODES / 4 times from zero, then `sum_codes`.
 */
#if VALUE_OFFSET || defined(__aarch64__)
#define MOST_CODES (1 << 16)
INLINE ivec add_codes(ivec sums, ivec codes, ivec values) { return dot(sums, codes, values); }
INLINE ivec sum_codes(ivec sums) { return sums; }
#else
#define MOST_CODES 32
INLINE ivec add_codes(ivec sums, ivec codes, ivec values) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)values);
    return (ivec)_mm256_add_epi16((__m256i)sums, pairs);
}
INLINE ivec sum_codes(ivec sums) { return sum_pairs(sums); }
#endif

/* The same four bytes in every lane. */
INLINE ivec four_bytes(const void *from) {
    int32_t bytes;
    memcpy(&bytes, from, sizeof bytes);
    return (ivec){0} + bytes;
}

/* The factor of x, [dim], for which its largest value is 127.   scale: what an integer stands for;
 * NaN if a value is not finite.
 */
static inline float rounding_factor(const float *x, float *scale, int64_t dim) {
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
    float most = largest_lane(largest);
    most = most > rest ? most : rest;
    *scale = most / 127.0f + (sum_lanes(zeros) + rest_zeros);
    return most > 0.0f ? 127.0f / most : 0.0f;
}

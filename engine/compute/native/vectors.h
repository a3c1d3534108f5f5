// Sixteen floats at a time: bfloat16 in and out, pairwise products, exponentials, transposition.
//
// GCC's vector types make all of it portable. Where the processor has AVX512-BF16 the two
// operations that matter, `dot2` and `narrow`, are one instruction each.

#pragma once

#include <stdint.h>
#include <string.h>

// Which instructions to use. The tests also compile the portable form and the one without AMX.
#if defined EXPECTS_BF16 && !defined __AVX512BF16__
#error the compiler does not know this processor's avx512_bf16
#endif
#if defined __AVX512BF16__ && !defined PORTABLE
#define HAS_BF16
#include <immintrin.h>
#if defined __AMX_BF16__ && !defined WITHOUT_TILES
#define HAS_TILES
#endif
#endif

typedef uint16_t bf16;
typedef float floats __attribute__((vector_size(64), may_alias));
typedef float floats_packed __attribute__((vector_size(64), may_alias, aligned(4)));
typedef int32_t ints __attribute__((vector_size(64), may_alias));
typedef uint32_t words __attribute__((vector_size(64), may_alias));
typedef bf16 halves __attribute__((vector_size(32), may_alias));
typedef bf16 halves_packed __attribute__((vector_size(32), may_alias, aligned(2)));
typedef uint32_t words_packed __attribute__((vector_size(64), may_alias, aligned(2)));

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

INLINE floats splat(float x) { return (floats){} + x; }
INLINE floats load_floats(const float *p) { return *(const floats_packed *)p; }
INLINE void store_floats(float *p, floats x) { *(floats_packed *)p = x; }
INLINE words load_words(const bf16 *p) { return *(const words_packed *)p; }

// Two neighbouring bfloat16 numbers, in every lane.
INLINE words splat_pair(const bf16 *p) {
    uint32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (words){} + pair;
}

// acc + a.low * b.low + a.high * b.high, lane by lane: two bfloat16 numbers a lane.
INLINE floats dot2(floats acc, words a, words b) {
#ifdef HAS_BF16
    return (floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    const words high = (words){} + 0xffff0000u;
    return acc + (floats)(a << 16) * (floats)(b << 16) + (floats)(a & high) * (floats)(b & high);
#endif
}

// Round to bfloat16, ties to even.
INLINE halves narrow(floats x) {
#ifdef HAS_BF16
    return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
    words bits = (words)x;
    return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, halves);
#endif
}

// Round two vectors and interleave them: `low` in the low halves of the words.
INLINE words narrow_pairs(floats low, floats high) {
#ifdef HAS_BF16
    typedef bf16 values __attribute__((vector_size(64), may_alias));
    values both = (values)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#define PAIR(i) i, 16 + i, i + 1, 17 + i, i + 2, 18 + i, i + 3, 19 + i
    return (words)__builtin_shufflevector(both, both, PAIR(0), PAIR(4), PAIR(8), PAIR(12));
#undef PAIR
#else
    return __builtin_convertvector(narrow(low), words) |
           __builtin_convertvector(narrow(high), words) << 16;
#endif
}

INLINE float widen_one(bf16 x) {
    union {
        uint32_t bits;
        float value;
    } wide = {(uint32_t)x << 16};
    return wide.value;
}

INLINE void store_narrow(bf16 *p, floats x) { *(halves_packed *)p = narrow(x); }

// Select `a` where the comparison held, else `b`, lane by lane.
INLINE floats select_lanes(ints held, floats a, floats b) {
    return (floats)((held & (ints)a) | (~held & (ints)b));
}

#ifdef HAS_BF16

INLINE floats max_lanes(floats a, floats b) { return (floats)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE floats round_floats(floats x) { return (floats)_mm512_roundscale_ps((__m512)x, 0); }
INLINE floats scale_by_power_of_2(floats x, floats n) {
    return (floats)_mm512_scalef_ps((__m512)x, (__m512)n);
}
INLINE float reduce_add(floats x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float reduce_max(floats x) { return _mm512_reduce_max_ps((__m512)x); }

// 1 / x to a few units in the last place.
INLINE floats reciprocal(floats x) {
    floats y = (floats)_mm512_rcp14_ps((__m512)x);
    return y * (2.0f - x * y);
}

#else

INLINE floats max_lanes(floats a, floats b) { return select_lanes(a > b, a, b); }
INLINE floats round_floats(floats x) { return (x + 12582912.0f) - 12582912.0f; } // 1.5 * 2^23
INLINE floats scale_by_power_of_2(floats x, floats n) {
    return x * (floats)((__builtin_convertvector(n, ints) + 127) << 23);
}
INLINE floats reciprocal(floats x) { return 1.0f / x; }

INLINE float reduce_add(floats x) {
    float total = 0;
    for (int i = 0; i < 16; i++) total += x[i];
    return total;
}

INLINE float reduce_max(floats x) {
    float max = x[0];
    for (int i = 1; i < 16; i++) max = x[i] > max ? x[i] : max;
    return max;
}

#endif

// e^x to two units in the last place, for x from -87 to 88; x beyond is clamped to that range.
INLINE floats exponential(floats x) {
    x = -max_lanes(-max_lanes(x, splat(-87.0f)), splat(-88.0f));
    // x = n ln 2 + r with |r| <= ln 2 / 2.
    floats n = round_floats(x * 1.44269504f);
    floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return scale_by_power_of_2(p, n);
}

// Transpose a 16 x 16 matrix of words.
INLINE void transpose(words m[16]) {
    words t[16];
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define LOW(a, b) MIX(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(a, b) MIX(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW2(a, b) MIX(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2(a, b) MIX(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN(a, b) MIX(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD(a, b) MIX(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
    for (int i = 0; i < 8; i++) {
        t[2 * i] = LOW(m[2 * i], m[2 * i + 1]);
        t[2 * i + 1] = HIGH(m[2 * i], m[2 * i + 1]);
    }
    // m[4 i + c]: column c + 4 b of rows 4 i .. 4 i + 3, in 128-bit part b.
    for (int i = 0; i < 4; i++) {
        m[4 * i] = LOW2(t[4 * i], t[4 * i + 2]);
        m[4 * i + 1] = HIGH2(t[4 * i], t[4 * i + 2]);
        m[4 * i + 2] = LOW2(t[4 * i + 1], t[4 * i + 3]);
        m[4 * i + 3] = HIGH2(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        t[c] = EVEN(m[c], m[4 + c]);    // parts 0 and 2 of rows 0-7
        t[4 + c] = ODD(m[c], m[4 + c]); // parts 1 and 3
        t[8 + c] = EVEN(m[8 + c], m[12 + c]);
        t[12 + c] = ODD(m[8 + c], m[12 + c]);
    }
    for (int c = 0; c < 4; c++) {
        // t[c] = [rows 0-3 col c | rows 0-3 col c+8 | rows 4-7 col c | rows 4-7 col c+8]
        m[c] = EVEN(t[c], t[8 + c]);
        m[8 + c] = ODD(t[c], t[8 + c]);
        m[4 + c] = EVEN(t[4 + c], t[12 + c]);
        m[12 + c] = ODD(t[4 + c], t[12 + c]);
    }
}

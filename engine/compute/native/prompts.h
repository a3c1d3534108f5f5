// Attention of a prompt's tokens: 32 queries at a time against 32 keys, by products of tiles.
//
// Scores are computed keys by queries, so that a query is a lane and the softmax needs no
// sums across lanes:
//
//     scores [keys, queries] = K Q^T        K where it lies in the cache, Q^T packed
//     sums   [dims, queries] += V^T P       V^T packed once for all queries of the row
//
// P, the probabilities, is packed as it is rounded: a pair of keys is a word of two numbers.

#pragma once

#include "attention.h"

enum { TILE = 32, KEYS = 256 };

// One row's part of one KV head's V^T: [keys / 32][head_dim / 16][16 dims][32 keys].
static void pack_values(const struct kv_head *head, int64_t start, int64_t end, bf16 *to) {
    int dims = head->head_dim;
    to += start * dims;
    for (; start < end; start += 32, to += 32 * dims)
        for (int d = 0; d < dims; d += 32) {
            words low[16], high[16];
            for (int i = 0; i < 16; i++) {
                words pair[2] = {};
                for (int j = 0; j < 2 && start + 2 * i + j < end; j++)
                    pair[j] = load_words(head->v + slot_at(head, start + 2 * i + j) + d);
                pair_up(pair[0], pair[1], &low[i], &high[i]);
            }
            transpose(low);
            transpose(high);
            memcpy(to + d * 32, low, sizeof low);
            memcpy(to + d * 32 + 512, high, sizeof high);
        }
}

// Scores of keys start .. start + num_keys - 1, in steps of 32; what lies past `end` is anything.
INLINE void score_keys(const struct kv_head *head, const bf16 *q, int64_t start, int num_keys,
                       line *scores) {
    for (int key = 0; key < num_keys; key += 32) {
        const bf16 *first = head->k + slot_at(head, start + key), *second = first;
        if (key + 16 < num_keys) second = head->k + slot_at(head, start + key + 16);
        struct tiles a = {first, second, head->head_dim, 32};
        struct tiles b = {q, q + 512, 32, 1024};
        multiply(a, b, head->head_dim / 32, 32, 0, 0, scores + key);
    }
}

// Mask 16 queries' scores: of those that see fewer positions than there are keys.
INLINE void mask_lanes(line *scores, int num_keys, int64_t start, const int32_t *visible) {
    ints limit;
    memcpy(&limit, visible, sizeof limit);
    limit -= (int)start;
    int least = visible[0] - (int)start; // lanes see in order
    for (int key = least > 0 ? least : 0; key < num_keys; key++)
        store_floats(scores[key],
                     choose(limit > key, load_floats(scores[key]), splat(-__builtin_inff())));
}

// Find the maximum, exponentiate, round and pack 16 queries' scores; returns what the sums so far
// are to be multiplied with. `p` is [keys / 32][2][16 pairs][16 queries][2]. The maximum is one of
// scores without `scale`: its distance from them is exact, whereas a fused product is more exact
// than the maximum of rounded ones, by more than 88 if scores are huge.
INLINE floats soften_lanes(const line *scores, int num_keys, float scale, float *most,
                           float *total, bf16 *p) {
    floats old = load_floats(most), new = splat(-__builtin_inff()), sum = {};
    for (int key = 0; key < num_keys; key++) new = larger(new, load_floats(scores[key]));
    new = larger(new, old);
    // Nothing seen yet: any finite number in its place will do.
    floats from = choose(new > -__builtin_inff(), new, splat(0));
    for (int key = 0; key < num_keys; key += 2) {
        floats even = exponential((load_floats(scores[key]) - from) * scale);
        floats odd = exponential((load_floats(scores[key + 1]) - from) * scale);
        sum += even + odd;
        words pairs = narrow_pairs(even, odd);
        memcpy(p + key / 32 * 1024 + key % 32 / 2 * 32, &pairs, sizeof pairs);
    }
    floats kept = exponential((old - from) * scale);
    store_floats(most, new);
    store_floats(total, load_floats(total) * kept + sum);
    return kept;
}

// Attend 32 queries of one row, packed in `q`, to positions 0 .. end - 1. `sums` [head_dim, 32] and
// `total` [32] are set; `visible` [32] says how many positions
// each may see, the first the fewest.
static void attend_tile(const struct kv_head *head, const bf16 *q, const bf16 *values,
                        const int32_t *visible, int64_t end, line *sums, float *total) {
    line scores[KEYS] ALIGNED;
    bf16 p[KEYS * TILE] ALIGNED;
    float most[TILE] ALIGNED;
    for (int i = 0; i < TILE; i++) most[i] = -__builtin_inff(), total[i] = 0;
    memset(sums, 0, head->head_dim * sizeof *sums);
    for (int64_t start = 0; start < end; start += KEYS) {
        int num_keys = end - start < KEYS ? end - start : KEYS;
        int padded_keys = (num_keys + 31) / 32 * 32;
        score_keys(head, q, start, num_keys, scores);
        floats kept[2];
        for (int half = 0; half < 2; half++) {
            line *lanes = (line *)(scores[0] + 16 * half);
            mask_lanes(lanes, padded_keys, start, visible + 16 * half);
            kept[half] = soften_lanes(lanes, padded_keys, head->scale, most + 16 * half,
                                      total + 16 * half, p + 512 * half);
        }
        for (int d = 0; d < head->head_dim; d++)
            for (int half = 0; half < 2; half++) {
                float *at = sums[d] + 16 * half;
                store_floats(at, load_floats(at) * kept[half]);
            }
        const bf16 *v = values + start * head->head_dim;
        for (int d = 0; d < head->head_dim; d += 32, v += 1024) {
            struct tiles a = {v, v + 512, 32, 32 * head->head_dim};
            struct tiles b = {p, p + 512, 32, 1024};
            multiply(a, b, padded_keys / 32, 32, 0, 1, sums + d);
        }
    }
}

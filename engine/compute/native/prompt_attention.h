// Attention of a prompt's tokens: tiles of 32 queries against 256 keys, each computed by gemms.
//
// Scores are computed keys by queries, so that a query is a lane and the softmax needs no
// sums across lanes:
//
//     scores [keys, queries] = K Q^T        K where it lies in the cache, Q^T packed
//     acc    [dims, queries] += V^T P       V^T packed once for all queries of the row
//
// P, the probabilities, is packed as it is rounded: a pair of keys is a word of two numbers.

#pragma once

#include "decode_attention.h"

enum { PROMPT_QUERIES_PER_TILE = 32, PROMPT_KEYS_PER_TILE = 256 };

// Pack one KV head's V^T for positions start .. end - 1 of a row, into
// [keys / 32][head_dim / 16][16 dims][32 keys].
static void pack_values(const struct kv_head *head, int64_t start, int64_t end, bf16 *to) {
    int dims = head->head_dim;
    to += start * dims;
    for (; start < end; start += 32, to += 32 * dims)
        for (int d = 0; d < dims; d += 32) {
            words low[16], high[16];
            for (int i = 0; i < 16; i++) {
                words pair[2] = {};
                for (int j = 0; j < 2 && start + 2 * i + j < end; j++)
                    pair[j] = load_words(head->v + slot_offset(head, start + 2 * i + j) + d);
                interleave_pairs(pair[0], pair[1], &low[i], &high[i]);
            }
            transpose(low);
            transpose(high);
            memcpy(to + d * 32, low, sizeof low);
            memcpy(to + d * 32 + 512, high, sizeof high);
        }
}

// Compute the scores of a query tile against keys start .. start + num_keys - 1, 32 keys at a time.
// Rows past the last key are written too; what they hold means nothing.
INLINE void score_key_tile(const struct kv_head *head, const bf16 *q, int64_t start, int num_keys,
                           floats32 *scores) {
    for (int key = 0; key < num_keys; key += 32) {
        const bf16 *first = head->k + slot_offset(head, start + key), *second = first;
        if (key + 16 < num_keys) second = head->k + slot_offset(head, start + key + 16);
        struct tile_pair a = {first, second, head->head_dim, 32};
        struct tile_pair b = {q, q + 512, 32, 1024};
        gemm(a, b, head->head_dim / 32, 32, 0, 0, scores + key);
    }
}

// Mask the scores of 16 queries: query i sees positions 0 .. num_visible[i] - 1, in rising order.
INLINE void mask_lanes(floats32 *scores, int num_keys, int64_t start, const int32_t *num_visible) {
    ints limit;
    memcpy(&limit, num_visible, sizeof limit);
    limit -= (int)start;
    int least = num_visible[0] - (int)start;
    for (int key = least > 0 ? least : 0; key < num_keys; key++)
        store_floats(scores[key],
                     select_lanes(limit > key, load_floats(scores[key]), splat(-__builtin_inff())));
}

// Turn the scores of 16 queries into probabilities, rounded and packed as
// [keys / 32][2][16 pairs][16 queries][2]; return the factors that rescale what was accumulated.
//
// The running maximum is that of scores without `scale`. A score's distance from it is then exact.
// A fused multiply-subtract would be more exact than the maximum of rounded products, by more than
// 88 if scores are huge.
INLINE floats online_softmax_lanes(const floats32 *scores, int num_keys, float scale,
                                   float *running_max, float *running_sum, bf16 *probabilities) {
    floats old_max = load_floats(running_max), new_max = splat(-__builtin_inff()), sum = {};
    for (int key = 0; key < num_keys; key++) new_max = max_lanes(new_max, load_floats(scores[key]));
    new_max = max_lanes(new_max, old_max);
    // While no key has been visible any finite number serves.
    floats subtracted = select_lanes(new_max > -__builtin_inff(), new_max, splat(0));
    for (int key = 0; key < num_keys; key += 2) {
        floats even = exponential((load_floats(scores[key]) - subtracted) * scale);
        floats odd = exponential((load_floats(scores[key + 1]) - subtracted) * scale);
        sum += even + odd;
        words pairs = narrow_pairs(even, odd);
        memcpy(probabilities + key / 32 * 1024 + key % 32 / 2 * 32, &pairs, sizeof pairs);
    }
    floats rescale = exponential((old_max - subtracted) * scale);
    store_floats(running_max, new_max);
    store_floats(running_sum, load_floats(running_sum) * rescale + sum);
    return rescale;
}

// Attend a tile of 32 queries of one row, packed in `q`, to positions 0 .. end - 1. Sets `acc`
// [head_dim, 32] and `running_sum` [32]. `num_visible` [32] is in rising order.
static void attend_query_tile(const struct kv_head *head, const bf16 *q, const bf16 *values,
                              const int32_t *num_visible, int64_t end, floats32 *acc,
                              float *running_sum) {
    floats32 scores[PROMPT_KEYS_PER_TILE] ALIGNED;
    bf16 probabilities[PROMPT_KEYS_PER_TILE * PROMPT_QUERIES_PER_TILE] ALIGNED;
    float running_max[PROMPT_QUERIES_PER_TILE] ALIGNED;
    for (int i = 0; i < PROMPT_QUERIES_PER_TILE; i++)
        running_max[i] = -__builtin_inff(), running_sum[i] = 0;
    memset(acc, 0, head->head_dim * sizeof *acc);
    for (int64_t start = 0; start < end; start += PROMPT_KEYS_PER_TILE) {
        int num_keys = end - start < PROMPT_KEYS_PER_TILE ? end - start : PROMPT_KEYS_PER_TILE;
        int padded_keys = round_up(num_keys, 32);
        score_key_tile(head, q, start, num_keys, scores);
        floats rescale[2];
        for (int half = 0; half < 2; half++) {
            floats32 *lanes = (floats32 *)(scores[0] + 16 * half);
            mask_lanes(lanes, padded_keys, start, num_visible + 16 * half);
            rescale[half] =
                online_softmax_lanes(lanes, padded_keys, head->scale, running_max + 16 * half,
                                     running_sum + 16 * half, probabilities + 512 * half);
        }
        for (int d = 0; d < head->head_dim; d++)
            for (int half = 0; half < 2; half++) {
                float *at = acc[d] + 16 * half;
                store_floats(at, load_floats(at) * rescale[half]);
            }
        const bf16 *v = values + start * head->head_dim;
        for (int d = 0; d < head->head_dim; d += 32, v += 1024) {
            struct tile_pair a = {v, v + 512, 32, 32 * head->head_dim};
            struct tile_pair b = {probabilities, probabilities + 512, 32, 1024};
            gemm(a, b, padded_keys / 32, 32, 0, 1, acc + d);
        }
    }
}

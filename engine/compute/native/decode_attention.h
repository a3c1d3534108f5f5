// Attention of decoding tokens: queries against a span of one sequence's context, read in place.
//
// A span is attended one tile of keys at a time: scores in float32, online softmax, probabilities
// in bfloat16, then the values. Scores of positions that a query may not see are masked. Slots
// past the span's end are not read.

#pragma once

#include "linear.h"

// Keys and queries of a tile; queries of a span, which share a KV head; the largest head.
enum {
    DECODE_KEYS_PER_TILE = 512,
    DECODE_QUERIES_PER_TILE = 8,
    DECODE_QUERIES_MAX = 16,
    HEAD_DIM_MAX = 256
};

// One query of one head, and its online softmax over the keys so far.
struct query {
    const bf16 *q;
    int64_t num_visible; // it sees positions 0 .. num_visible - 1
    float running_max, running_sum;
    float *acc; // [head_dim], values weighted by probabilities; `running_sum` divides it at the end
};

// One head's K and V in the cache: block b at `k + b * block_stride`.
struct kv_head {
    const bf16 *k, *v;
    const int32_t *blocks;
    int64_t block_stride, block_size;
    int head_dim;
    float scale;
};

// Distance of a position's K from `k`, and of its V from `v`, in numbers.
INLINE int64_t slot_offset(const struct kv_head *head, int64_t position) {
    return head->blocks[position / head->block_size] * head->block_stride +
           position % head->block_size * head->head_dim;
}

// Compute the scores of up to 8 queries against 16 keys from `position` on. `keys` is transposed:
// a vector holds one pair of dimensions of all 16.
INLINE void score_keys(const struct query *queries, const words *keys, int num_pairs,
                       const int num_queries, float scale, int64_t position, int column,
                       float (*scores)[DECODE_KEYS_PER_TILE]) {
    floats dots[DECODE_QUERIES_PER_TILE] = {};
    for (int pair = 0; pair < num_pairs; pair++)
        for (int i = 0; i < num_queries; i++)
            dots[i] = dot2(dots[i], keys[pair], splat_pair(queries[i].q + 2 * pair));
    const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < num_queries; i++) {
        int64_t seen = queries[i].num_visible - position;
        ints hidden = lanes >= (ints){} + (int)(seen < 16 ? seen : 16);
        store_floats(scores[i] + column,
                     select_lanes(hidden, splat(-__builtin_inff()), dots[i] * scale));
    }
}

// Turn a tile's scores into probabilities in bfloat16 and rescale what was accumulated to the new
// maximum.
INLINE void online_softmax(struct query *query, int head_dim, int num_keys, float *scores,
                           bf16 *probabilities) {
    floats max = splat(query->running_max), sum = {};
    for (int i = 0; i < num_keys; i += 16) max = max_lanes(max, load_floats(scores + i));
    float new_max = reduce_max(max);
    // While no key has been visible any finite number serves: what follows outweighs it.
    float subtracted = new_max > -__builtin_inff() ? new_max : 0;
    for (int i = 0; i < num_keys; i += 16) {
        floats e = exponential(load_floats(scores + i) - subtracted);
        sum += e;
        store_narrow(probabilities + i, e);
    }
    float rescale = exponential(splat(query->running_max - subtracted))[0];
    query->running_sum = query->running_sum * rescale + reduce_add(sum);
    query->running_max = new_max;
    for (int d = 0; d < head_dim; d += 16)
        store_floats(query->acc + d, load_floats(query->acc + d) * rescale);
}

// Interleave two rows of 32 values into words of one number of each: dimensions 0-15 and 16-31.
INLINE void interleave_pairs(words first, words second, words *low, words *high) {
    typedef bf16 values __attribute__((vector_size(64), may_alias));
    values a = (values)first, b = (values)second;
#define PAIRS(i) i, 32 + i, i + 1, 33 + i, i + 2, 34 + i, i + 3, 35 + i
    *low = (words)__builtin_shufflevector(a, b, PAIRS(0), PAIRS(4), PAIRS(8), PAIRS(12));
    *high = (words)__builtin_shufflevector(a, b, PAIRS(16), PAIRS(20), PAIRS(24), PAIRS(28));
#undef PAIRS
}

// Accumulate `num_keys` values, weighted by probabilities, for up to 8 queries: dimensions d to
// d + 31.
INLINE void accumulate_values(struct query *queries, const struct kv_head *head, int d,
                              int64_t start, int num_keys, const int num_queries,
                              bf16 (*probabilities)[DECODE_KEYS_PER_TILE]) {
    floats low[DECODE_QUERIES_PER_TILE] = {}, high[DECODE_QUERIES_PER_TILE] = {};
    for (int first_key = 0; first_key < num_keys; first_key += 16) {
        const bf16 *v = head->v + slot_offset(head, start + first_key) + d;
        int end = num_keys - first_key < 16 ? num_keys - first_key : 16;
        for (int key = 0; key < end; key += 2, v += 2 * head->head_dim) {
            words a, b, next = {};
            if (key + 1 < end) next = load_words(v + head->head_dim);
            interleave_pairs(load_words(v), next, &a, &b);
            for (int i = 0; i < num_queries; i++) {
                words weights = splat_pair(probabilities[i] + first_key + key);
                low[i] = dot2(low[i], a, weights);
                high[i] = dot2(high[i], b, weights);
            }
        }
    }
    for (int i = 0; i < num_queries; i++) {
        float *acc = queries[i].acc + d;
        store_floats(acc, load_floats(acc) + low[i]);
        store_floats(acc + 16, load_floats(acc + 16) + high[i]);
    }
}

// Make `call(n)` for each tile of up to 8 queries, n a constant.
#define FOR_QUERY_TILES(first, num_queries, call)                                  \
    for (int first = 0; first < (num_queries); first += DECODE_QUERIES_PER_TILE) { \
        switch ((num_queries) - first) {                                           \
            case 1: call(1); break;                                                \
            case 2: call(2); break;                                                \
            case 3: call(3); break;                                                \
            case 4: call(4); break;                                                \
            case 5: call(5); break;                                                \
            case 6: call(6); break;                                                \
            case 7: call(7); break;                                                \
            default: call(8);                                                      \
        }                                                                          \
    }

// Attend up to 16 queries, which share a KV head, to positions start .. end - 1. `start` is a
// multiple of 16. Their online softmax continues from its present state.
static void attend_decode(struct query *queries, int num_queries, const struct kv_head *head,
                          int64_t start, int64_t end) {
    float scores[DECODE_QUERIES_MAX][DECODE_KEYS_PER_TILE] ALIGNED;
    bf16 probabilities[DECODE_QUERIES_MAX][DECODE_KEYS_PER_TILE] ALIGNED;
    words keys[HEAD_DIM_MAX / 2];
    for (; start < end; start += DECODE_KEYS_PER_TILE) {
        int num_keys = end - start < DECODE_KEYS_PER_TILE ? end - start : DECODE_KEYS_PER_TILE;
        for (int key = 0; key < num_keys; key += 16) {
            const bf16 *k = head->k + slot_offset(head, start + key);
            int num_rows = num_keys - key < 16 ? num_keys - key : 16;
            const bf16 *v = head->v + slot_offset(head, start + key), *next = k;
            if (key + 16 < num_keys) next = head->k + slot_offset(head, start + key + 16);
            for (int i = 0; i < 16 * head->head_dim; i += 32) {
                __builtin_prefetch(next + i, 0, 3);
                __builtin_prefetch(v + i, 0, 2);
            }
            for (int d = 0; d < head->head_dim; d += 32) {
                words *pairs = keys + d / 2;
                for (int i = 0; i < num_rows; i++)
                    pairs[i] = load_words(k + i * head->head_dim + d);
                for (int i = num_rows; i < 16; i++) pairs[i] = (words){};
                transpose(pairs);
            }
#define SCORE(n)                                                                            \
    score_keys(queries + first, keys, head->head_dim / 2, n, head->scale, start + key, key, \
               scores + first)
            FOR_QUERY_TILES(first, num_queries, SCORE)
#undef SCORE
        }
        for (int i = 0; i < num_queries; i++)
            online_softmax(&queries[i], head->head_dim, num_keys, scores[i], probabilities[i]);
        for (int d = 0; d < head->head_dim; d += 32) {
#define ACCUMULATE(n) \
    accumulate_values(queries + first, head, d, start, num_keys, n, probabilities + first)
            FOR_QUERY_TILES(first, num_queries, ACCUMULATE)
#undef ACCUMULATE
        }
    }
}

// Paged attention: queries that see a span of one sequence's context, read where it lies.
//
// A span is attended in pieces of 512 keys: scores in float32, the softmax's running maximum and
// sum, probabilities in bfloat16, then the values. Scores past what a query may see are masked, and
// slots that nobody may see are not read.

#pragma once

#include "linear.h"

enum { PIECE = 512, QUERIES = 16, TOGETHER = 8, HEAD_DIM_MAX = 256 };

// One query: where its head's bfloat16 numbers are, and what it has seen so far.
struct query {
    const bf16 *q;
    int64_t visible; // it sees the positions below
    float most, total;
    float *sums; // [head_dim], to be divided by `total`
};

// One head's K and V in the cache: block b at `k + b * block_stride`.
struct kv_head {
    const bf16 *k, *v;
    const int32_t *blocks;
    int64_t block_stride, block_size;
    int head_dim;
    float scale;
};

INLINE int64_t slot_at(const struct kv_head *head, int64_t position) {
    return head->blocks[position / head->block_size] * head->block_stride +
           position % head->block_size * head->head_dim;
}

// Scores of up to 8 queries against 16 keys that are transposed: a vector holds one pair of
// dimensions of all 16.
INLINE void score(const struct query *queries, const words *keys, int num_pairs, const int n,
                  float scale, int64_t position, int column, float (*scores)[PIECE]) {
    floats acc[TOGETHER] = {};
    for (int pair = 0; pair < num_pairs; pair++)
        for (int i = 0; i < n; i++)
            acc[i] = dot2(acc[i], keys[pair], splat_pair(queries[i].q + 2 * pair));
    const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < n; i++) {
        int64_t seen = queries[i].visible - position;
        ints hidden = lanes >= (ints){} + (int)(seen < 16 ? seen : 16);
        store_floats(scores[i] + column, choose(hidden, splat(-__builtin_inff()), acc[i] * scale));
    }
}

// Scores to probabilities in bfloat16; sums so far are scaled to the new maximum.
INLINE void soften(struct query *query, int head_dim, int num_keys, float *scores, bf16 *p) {
    floats most = splat(query->most), total = {};
    for (int i = 0; i < num_keys; i += 16) most = larger(most, load_floats(scores + i));
    float new_most = largest(most);
    // Nothing seen yet: any finite number in its place will do, what follows outweighs it.
    float from = new_most > -__builtin_inff() ? new_most : 0;
    for (int i = 0; i < num_keys; i += 16) {
        floats e = exponential(load_floats(scores + i) - from);
        total += e;
        store_narrow(p + i, e);
    }
    float kept = exponential(splat(query->most - from))[0];
    query->total = query->total * kept + sum(total);
    query->most = new_most;
    for (int d = 0; d < head_dim; d += 16)
        store_floats(query->sums + d, load_floats(query->sums + d) * kept);
}

// Two rows of 32 values to words, one number of each: dimensions 0-15 and 16-31.
INLINE void pair_up(words first, words second, words *low, words *high) {
    typedef bf16 values __attribute__((vector_size(64), may_alias));
    values a = (values)first, b = (values)second;
#define PAIRS(i) i, 32 + i, i + 1, 33 + i, i + 2, 34 + i, i + 3, 35 + i
    *low = (words)__builtin_shufflevector(a, b, PAIRS(0), PAIRS(4), PAIRS(8), PAIRS(12));
    *high = (words)__builtin_shufflevector(a, b, PAIRS(16), PAIRS(20), PAIRS(24), PAIRS(28));
}

// Add `num_keys` values, weighted, to the sums of up to 8 queries: 32 dimensions from `d`.
INLINE void weigh(struct query *queries, const struct kv_head *head, int d, int64_t start,
                  int num_keys, const int n, bf16 (*p)[PIECE]) {
    floats low[TOGETHER] = {}, high[TOGETHER] = {};
    for (int tile = 0; tile < num_keys; tile += 16) {
        const bf16 *v = head->v + slot_at(head, start + tile) + d;
        int end = num_keys - tile < 16 ? num_keys - tile : 16;
        for (int key = 0; key < end; key += 2, v += 2 * head->head_dim) {
            words a, b, next = {};
            if (key + 1 < end) next = load_words(v + head->head_dim);
            pair_up(load_words(v), next, &a, &b);
            for (int i = 0; i < n; i++) {
                words weights = splat_pair(p[i] + tile + key);
                low[i] = dot2(low[i], a, weights);
                high[i] = dot2(high[i], b, weights);
            }
        }
    }
    for (int i = 0; i < n; i++) {
        float *at = queries[i].sums + d;
        store_floats(at, load_floats(at) + low[i]);
        store_floats(at + 16, load_floats(at + 16) + high[i]);
    }
}

#define FOR_TOGETHER(first, num_queries, call)                                                    \
    for (int first = 0; first < (num_queries); first += TOGETHER) switch ((num_queries) - first) { \
            case 1: call(1); break;                                                               \
            case 2: call(2); break;                                                               \
            case 3: call(3); break;                                                               \
            case 4: call(4); break;                                                               \
            case 5: call(5); break;                                                               \
            case 6: call(6); break;                                                               \
            case 7: call(7); break;                                                               \
            default: call(8);                                                                     \
        }

// Attend up to 16 queries, which share a KV head, to positions start .. end - 1; `start` is a
// multiple of 16. Their `most`, `total` and `sums` go on from what they are.
static void attend(struct query *queries, int num_queries, const struct kv_head *head,
                   int64_t start, int64_t end) {
    float scores[QUERIES][PIECE] ALIGNED;
    bf16 p[QUERIES][PIECE] ALIGNED;
    words keys[HEAD_DIM_MAX / 2];
    for (; start < end; start += PIECE) {
        int num_keys = end - start < PIECE ? end - start : PIECE;
        for (int tile = 0; tile < num_keys; tile += 16) {
            const bf16 *k = head->k + slot_at(head, start + tile);
            int rows = num_keys - tile < 16 ? num_keys - tile : 16;
            const bf16 *v = head->v + slot_at(head, start + tile), *next = k;
            if (tile + 16 < num_keys) next = head->k + slot_at(head, start + tile + 16);
            for (int i = 0; i < 16 * head->head_dim; i += 32) {
                __builtin_prefetch(next + i, 0, 3);
                __builtin_prefetch(v + i, 0, 2);
            }
            for (int d = 0; d < head->head_dim; d += 32) {
                words *pairs = keys + d / 2;
                for (int i = 0; i < rows; i++) pairs[i] = load_words(k + i * head->head_dim + d);
                for (int i = rows; i < 16; i++) pairs[i] = (words){};
                transpose(pairs);
            }
#define SCORE(n)                                                                            \
    score(queries + first, keys, head->head_dim / 2, n, head->scale, start + tile, tile, \
          scores + first)
            FOR_TOGETHER(first, num_queries, SCORE)
        }
        for (int i = 0; i < num_queries; i++)
            soften(&queries[i], head->head_dim, num_keys, scores[i], p[i]);
        for (int d = 0; d < head->head_dim; d += 32) {
#define WEIGH(n) weigh(queries + first, head, d, start, num_keys, n, p + first)
            FOR_TOGETHER(first, num_queries, WEIGH)
        }
    }
}

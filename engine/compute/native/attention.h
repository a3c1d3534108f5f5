// The work items of attention: a query tile or a context span, for one KV head; their merge

#pragma once

#include "scratch.h"

// Where a token's attention output goes, from `column` of heads x head_dim on.
static bf16 *attended_at(const struct model *model, struct scratch *scratch, int64_t token,
                         int64_t column) {
    int64_t width = model->num_heads * model->head_dim;
    return scratch->attended + tile_offset(token, column, width) + column % 32;
}

static void store_attended(const struct model *model, struct scratch *scratch, int64_t token,
                           int64_t head, const float *acc, float running_sum) {
    for (int64_t d = 0; d < model->head_dim; d += 16)
        store_narrow(attended_at(model, scratch, token, head * model->head_dim + d),
                     load_floats(acc + d) / running_sum);
}

static float *partial_at(const struct model *model, const struct scratch *scratch, int64_t token,
                         int part, int64_t head) {
    int64_t at = (scratch->plan.first_part[token] + part) * model->num_heads + head;
    return scratch->partials + at * (model->head_dim + 16);
}

static struct kv_head kv_head_of(const struct model *model, const struct batch *batch,
                                 int64_t layer, int64_t row, int64_t kv_head) {
    int64_t num_kv_heads = model->num_kv_heads;
    return (struct kv_head){
        .k = cache_slots(model, batch, 0, layer, kv_head),
        .v = cache_slots(model, batch, 0, layer, num_kv_heads + kv_head),
        .blocks = batch->blocks + batch->first_block[row],
        .block_stride = model->num_layers * 2 * num_kv_heads * batch->block_size * model->head_dim,
        .block_size = batch->block_size,
        .head_dim = model->head_dim,
        .scale = 1 / sqrtf(model->head_dim),
    };
}

// One KV head's packed values of a row.
static bf16 *packed_values_of(const struct model *model, const struct batch *batch,
                              struct scratch *scratch, int64_t row, int64_t kv_head) {
    int64_t count = batch->first_token[row + 1] - batch->first_token[row];
    int64_t length = round_up(batch->start[row] + count, VALUES_UNIT);
    int64_t at = scratch->plan.first_value[row] * model->num_kv_heads + kv_head * length;
    return scratch->values + at * model->head_dim;
}

// Compute one query tile of a prompt with one KV head.
static void compute_query_tile(const struct model *model, const struct batch *batch,
                               struct scratch *scratch, int64_t layer,
                               const struct query_tile *tile, int64_t kv_head) {
    bf16 q[PROMPT_QUERIES_PER_TILE * HEAD_DIM_MAX] ALIGNED;
    floats32 acc[HEAD_DIM_MAX] ALIGNED;
    float running_sum[PROMPT_QUERIES_PER_TILE] ALIGNED;
    int32_t num_visible[PROMPT_QUERIES_PER_TILE];
    int64_t d = model->head_dim, group_size = model->num_heads / model->num_kv_heads;
    int num_queries = tile->num_tokens * group_size;
    const bf16 *from =
        scratch->q + (tile->first_token * model->num_heads + kv_head * group_size) * d;
    for (int64_t at = 0; at < d; at += 32)
        for (int first = 0; first < PROMPT_QUERIES_PER_TILE; first += 16) {
            words lanes[16] = {};
            for (int i = 0; i < 16 && first + i < num_queries; i++) {
                int query = first + i;
                int64_t head = query / group_size * model->num_heads + query % group_size;
                lanes[i] = load_words(from + head * d + at);
            }
            transpose(lanes);
            memcpy(q + at * 32 + first * 32, lanes, sizeof lanes);
        }
    for (int i = 0; i < PROMPT_QUERIES_PER_TILE; i++) {
        int64_t token = tile->first_token + (i < num_queries ? i : num_queries - 1) / group_size;
        num_visible[i] = scratch->position[token] + 1;
    }
    struct kv_head head = kv_head_of(model, batch, layer, tile->row, kv_head);
    const bf16 *values = packed_values_of(model, batch, scratch, tile->row, kv_head);
    attend_query_tile(&head, q, values, num_visible, num_visible[num_queries - 1], acc,
                      running_sum);
    for (int64_t at = 0; at < d; at += 16)
        for (int first = 0; first < num_queries; first += 16) {
            words lanes[16];
            for (int i = 0; i < 16; i++) lanes[i] = (words)load_floats(acc[at + i] + first);
            transpose(lanes);
            for (int i = 0; i < 16 && first + i < num_queries; i++) {
                int query = first + i;
                int64_t column = (kv_head * group_size + query % group_size) * d + at;
                int64_t token = tile->first_token + query / group_size;
                store_narrow(attended_at(model, scratch, token, column),
                             (floats)lanes[i] / running_sum[query]);
            }
        }
}

// Compute one span with one KV head.
static void compute_span(const struct model *model, const struct batch *batch,
                         struct scratch *scratch, int64_t layer, const struct span *span,
                         int64_t kv_head) {
    float acc[DECODE_QUERIES_MAX][HEAD_DIM_MAX] ALIGNED;
    struct query queries[DECODE_QUERIES_MAX];
    int64_t d = model->head_dim, group_size = model->num_heads / model->num_kv_heads;
    int num_queries = 0;
    for (int64_t i = 0; i < span->num_readers; i++)
        for (int64_t j = 0; j < group_size; j++, num_queries++) {
            int64_t token = span->readers[i], head = kv_head * group_size + j;
            memset(acc[num_queries], 0, d * sizeof(float));
            queries[num_queries] = (struct query){
                scratch->q + (token * model->num_heads + head) * d, scratch->position[token] + 1,
                -__builtin_inff(), 0, acc[num_queries]};
        }
    struct kv_head head = kv_head_of(model, batch, layer, scratch->row[span->readers[0]], kv_head);
    attend_decode(queries, num_queries, &head, span->start, span->end);
    for (int i = 0; i < num_queries; i++) {
        int64_t token = span->readers[i / group_size];
        int64_t query_head = kv_head * group_size + i % group_size;
        if (scratch->plan.num_parts_of[token] == 1) {
            store_attended(model, scratch, token, query_head, acc[i], queries[i].running_sum);
            continue;
        }
        float *to = partial_at(model, scratch, token, span->part, query_head);
        memcpy(to, acc[i], d * sizeof(float));
        to[d] = queries[i].running_max, to[d + 1] = queries[i].running_sum;
    }
}

// Merge the parts of one token's attention.
static void merge_parts(const struct model *model, struct scratch *scratch, int64_t token) {
    int64_t d = model->head_dim;
    int num_parts = scratch->plan.num_parts_of[token];
    if (num_parts < 2) return;
    for (int64_t head = 0; head < model->num_heads; head++) {
        float acc[HEAD_DIM_MAX] = {}, sum = 0, max = -__builtin_inff();
        for (int part = 0; part < num_parts; part++)
            max = fmaxf(max, partial_at(model, scratch, token, part, head)[d]);
        for (int part = 0; part < num_parts; part++) {
            const float *from = partial_at(model, scratch, token, part, head);
            float share = exponential(splat(from[d] - max))[0];
            sum += share * from[d + 1];
            for (int64_t i = 0; i < d; i += 16)
                store_floats(acc + i, load_floats(acc + i) + load_floats(from + i) * share);
        }
        store_attended(model, scratch, token, head, acc, sum);
    }
}

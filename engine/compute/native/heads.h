// Attention's units of work: a prompt's tile or a span with one KV head, and the merging of parts.

#pragma once

#include "model.h"

// Where a token's attention goes, from `column` of heads x head_dim on.
static bf16 *attended(const struct model *model, struct work *work, int64_t token, int64_t column) {
    int64_t width = model->num_heads * model->head_dim;
    return work->attended + in_tiles(token, column, width) + column % 32;
}

static void keep_attended(const struct model *model, struct work *work, int64_t token, int64_t head,
                          const float *sums, float total) {
    for (int64_t d = 0; d < model->head_dim; d += 16)
        store_narrow(attended(model, work, token, head * model->head_dim + d),
                     load_floats(sums + d) / total);
}

static float *partial(const struct model *model, const struct work *work, int64_t token, int part,
                      int64_t head) {
    int64_t at = (work->spans.first_part[token] + part) * model->num_heads + head;
    return work->partials + at * (model->head_dim + 16);
}

static struct kv_head head_of(const struct model *model, const struct batch *batch, int64_t layer,
                           int64_t row, int64_t kv_head) {
    int64_t kv_heads = model->num_kv_heads;
    return (struct kv_head){
        .k = slot(model, batch, 0, layer, kv_head),
        .v = slot(model, batch, 0, layer, kv_heads + kv_head),
        .blocks = batch->blocks + batch->first_block[row],
        .block_stride = model->num_layers * 2 * kv_heads * batch->block_size * model->head_dim,
        .block_size = batch->block_size,
        .head_dim = model->head_dim,
        .scale = 1 / sqrtf(model->head_dim),
    };
}

// One KV head's packed values of a row.
static bf16 *values_of(const struct model *model, const struct batch *batch, struct work *work,
                       int64_t row, int64_t kv_head) {
    int64_t count = batch->first_token[row + 1] - batch->first_token[row];
    int64_t length = padded(batch->start[row] + count, TILE);
    int64_t at = work->spans.first_value[row] * model->num_kv_heads + kv_head * length;
    return work->values + at * model->head_dim;
}

// One tile of a prompt's tokens with one KV head.
static void attend_prompt(const struct model *model, const struct batch *batch, struct work *work,
                          int64_t layer, const struct tile *tile, int64_t kv_head) {
    bf16 q[TILE * HEAD_DIM_MAX] ALIGNED;
    line sums[HEAD_DIM_MAX] ALIGNED;
    float total[TILE] ALIGNED;
    int32_t visible[TILE];
    int64_t d = model->head_dim, group = model->num_heads / model->num_kv_heads;
    int num_queries = tile->num_tokens * group;
    const bf16 *from = work->q + (tile->first_token * model->num_heads + kv_head * group) * d;
    for (int64_t at = 0; at < d; at += 32)
        for (int first = 0; first < TILE; first += 16) {
            words lanes[16] = {};
            for (int i = 0; i < 16 && first + i < num_queries; i++) {
                int query = first + i;
                int64_t head = query / group * model->num_heads + query % group;
                lanes[i] = load_words(from + head * d + at);
            }
            transpose(lanes);
            memcpy(q + at * 32 + first * 32, lanes, sizeof lanes);
        }
    for (int i = 0; i < TILE; i++) {
        int64_t token = tile->first_token + (i < num_queries ? i : num_queries - 1) / group;
        visible[i] = work->position[token] + 1;
    }
    struct kv_head head = head_of(model, batch, layer, tile->row, kv_head);
    const bf16 *values = values_of(model, batch, work, tile->row, kv_head);
    attend_tile(&head, q, values, visible, visible[num_queries - 1], sums, total);
    for (int64_t at = 0; at < d; at += 16)
        for (int first = 0; first < num_queries; first += 16) {
            words lanes[16];
            for (int i = 0; i < 16; i++) lanes[i] = (words)load_floats(sums[at + i] + first);
            transpose(lanes);
            for (int i = 0; i < 16 && first + i < num_queries; i++) {
                int query = first + i;
                int64_t column = (kv_head * group + query % group) * d + at;
                bf16 *to = attended(model, work, tile->first_token + query / group, column);
                store_narrow(to, (floats)lanes[i] / total[query]);
            }
        }
}

// One span's attention with one KV head.
static void attend_span(const struct model *model, const struct batch *batch, struct work *work,
                        int64_t layer, const struct span *span, int64_t kv_head) {
    float sums[QUERIES][HEAD_DIM_MAX] ALIGNED;
    struct query queries[QUERIES];
    int64_t d = model->head_dim, group = model->num_heads / model->num_kv_heads;
    int num_queries = 0;
    for (int64_t i = 0; i < span->num_members; i++)
        for (int64_t j = 0; j < group; j++, num_queries++) {
            int64_t token = span->members[i], head = kv_head * group + j;
            memset(sums[num_queries], 0, d * sizeof(float));
            queries[num_queries] = (struct query){
                work->q + (token * model->num_heads + head) * d, work->position[token] + 1,
                -__builtin_inff(), 0, sums[num_queries]};
        }
    struct kv_head head = head_of(model, batch, layer, work->row[span->members[0]], kv_head);
    attend(queries, num_queries, &head, span->start, span->end);
    for (int i = 0; i < num_queries; i++) {
        int64_t token = span->members[i / group], query_head = kv_head * group + i % group;
        if (work->spans.parts[token] == 1) {
            keep_attended(model, work, token, query_head, sums[i], queries[i].total);
            continue;
        }
        float *to = partial(model, work, token, span->part, query_head);
        memcpy(to, sums[i], d * sizeof(float));
        to[d] = queries[i].most, to[d + 1] = queries[i].total;
    }
}

// Put the parts of one token's attention together.
static void merge(const struct model *model, struct work *work, int64_t token) {
    int64_t d = model->head_dim;
    int num_parts = work->spans.parts[token];
    if (num_parts < 2) return;
    for (int64_t head = 0; head < model->num_heads; head++) {
        float sums[HEAD_DIM_MAX] = {}, total = 0, most = -__builtin_inff();
        for (int part = 0; part < num_parts; part++)
            most = fmaxf(most, partial(model, work, token, part, head)[d]);
        for (int part = 0; part < num_parts; part++) {
            const float *from = partial(model, work, token, part, head);
            float share = exponential(splat(from[d] - most))[0];
            total += share * from[d + 1];
            for (int64_t i = 0; i < d; i += 16)
                store_floats(sums + i, load_floats(sums + i) + load_floats(from + i) * share);
        }
        keep_attended(model, work, token, head, sums, total);
    }
}

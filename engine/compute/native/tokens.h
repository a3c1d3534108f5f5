// What is done token by token: embedding, RMSNorm, rotary embedding, writing the cache.

#pragma once

#include "model.h"

// Clear what a row leaves unwritten in a block that it begins, in every layer.
static void clear_rest(const struct model *model, const struct batch *batch, int64_t row) {
    int64_t start = batch->start[row];
    int64_t end = start + batch->first_token[row + 1] - batch->first_token[row];
    int64_t written = end % batch->block_size;
    if (written == 0 || end - written < start) return;
    int64_t block = batch->blocks[batch->first_block[row] + end / batch->block_size];
    for (int64_t head = 0; head < model->num_layers * 2 * model->num_kv_heads; head++)
        memset(slot(model, batch, block, 0, head) + written * model->head_dim, 0,
               (batch->block_size - written) * model->head_dim * sizeof(bf16));
}

static void embed(const struct model *model, const struct batch *batch, struct work *work,
                  int64_t token) {
    int64_t id = batch->tokens[token];
    const bf16 *from = model->embedding + id / GROUP * GROUP * model->width + id % GROUP * 2;
    float *x = work->x + token * model->width;
    for (int64_t i = 0; i < model->width; i++) x[i] = widen_one(from[i / 2 * 2 * GROUP + i % 2]);
}

// x / rms(x) * weight, into row `row` of `tiles`.
static void norm(const struct model *model, const float *x, const float *weight, bf16 *tiles,
                 int64_t row) {
    floats squares = {};
    for (int64_t i = 0; i < model->width; i += 16)
        squares += load_floats(x + i) * load_floats(x + i);
    float scale = 1 / sqrtf(sum(squares) / model->hidden_size + model->eps);
    for (int64_t i = 0; i < model->width; i += 16)
        store_narrow(tiles + in_tiles(row, i, model->width) + i % 32,
                     load_floats(x + i) * scale * load_floats(weight + i));
}

// Rotate one head by halves.
static void rotate(const struct model *model, const float *from, int64_t position, bf16 *to) {
    int64_t half = model->head_dim / 2;
    const float *cosines = model->cos + position * half, *sines = model->sin + position * half;
    for (int64_t i = 0; i < half; i += 16) {
        floats first = load_floats(from + i), second = load_floats(from + half + i);
        floats c = load_floats(cosines + i), s = load_floats(sines + i);
        store_narrow(to + i, first * c - second * s);
        store_narrow(to + half + i, second * c + first * s);
    }
}

// One token's q, k and v: rotate, keep q, write k and v into the cache.
static void write_heads(const struct model *model, const struct batch *batch, struct work *work,
                        int64_t layer, int64_t token) {
    int64_t d = model->head_dim, heads = model->num_heads, kv_heads = model->num_kv_heads;
    int64_t position = work->position[token];
    int64_t at = batch->first_block[work->row[token]] + position / batch->block_size;
    const float *from = work->qkv + token * (heads + 2 * kv_heads) * d;
    for (int64_t i = 0; i < heads; i++)
        rotate(model, from + i * d, position, work->q + (token * heads + i) * d);
    bf16 *to = slot(model, batch, batch->blocks[at], layer, 0) + position % batch->block_size * d;
    int64_t stride = batch->block_size * d;
    for (int64_t i = 0; i < kv_heads; i++, to += stride)
        rotate(model, from + (heads + i) * d, position, to);
    from += (heads + kv_heads) * d;
    for (int64_t i = 0; i < kv_heads; i++, to += stride)
        for (int64_t j = 0; j < d; j += 16)
            store_narrow(to + j, load_floats(from + i * d + j));
}

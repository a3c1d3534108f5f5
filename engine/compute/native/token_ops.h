// The operations on single tokens: embedding, RMSNorm, rotary embedding, writing K and V.

#pragma once

#include "scratch.h"

// Clear the slots after a row's last token, in every layer, if the row has begun that block.
static void clear_block_tail(const struct model *model, const struct batch *batch, int64_t row) {
    int64_t start = batch->start[row];
    int64_t end = start + batch->first_token[row + 1] - batch->first_token[row];
    int64_t written = end % batch->block_size;
    if (written == 0 || end - written < start) return;
    int64_t block = batch->blocks[batch->first_block[row] + end / batch->block_size];
    for (int64_t head = 0; head < model->num_layers * 2 * model->num_kv_heads; head++)
        memset(cache_slots(model, batch, block, 0, head) + written * model->head_dim, 0,
               (batch->block_size - written) * model->head_dim * sizeof(bf16));
}

// Unpack a token's embedding into the residual stream.
static void embed(const struct model *model, const struct batch *batch, struct scratch *scratch,
                  int64_t token) {
    int64_t id = batch->token_ids[token];
    const bf16 *from = model->embedding +
                       id / OUTPUTS_PER_PANEL * OUTPUTS_PER_PANEL * model->hidden_width +
                       id % OUTPUTS_PER_PANEL * 2;
    float *x = scratch->x + token * model->hidden_width;
    for (int64_t i = 0; i < model->hidden_width; i++)
        x[i] = widen_one(from[i / 2 * 2 * OUTPUTS_PER_PANEL + i % 2]);
}

// Store x / rms(x) * weight into row `row` of gemm tiles.
static void rms_norm(const struct model *model, const float *x, const float *weight, bf16 *tiles,
                     int64_t row) {
    floats squares = {};
    for (int64_t i = 0; i < model->hidden_width; i += 16)
        squares += load_floats(x + i) * load_floats(x + i);
    float scale = 1 / sqrtf(reduce_add(squares) / model->hidden_size + model->eps);
    for (int64_t i = 0; i < model->hidden_width; i += 16)
        store_narrow(tiles + tile_offset(row, i, model->hidden_width) + i % 32,
                     load_floats(x + i) * scale * load_floats(weight + i));
}

// Apply the rotary embedding to one head: dimension i rotates with i + head_dim / 2.
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

// Rotate one token's q and k; store q into scratch memory, k and v into the cache.
static void rotate_and_store_heads(const struct model *model, const struct batch *batch,
                                   struct scratch *scratch, int64_t layer, int64_t token) {
    int64_t d = model->head_dim, heads = model->num_heads, kv_heads = model->num_kv_heads;
    int64_t position = scratch->position[token];
    int64_t at = batch->first_block[scratch->row[token]] + position / batch->block_size;
    const float *from = scratch->qkv + token * (heads + 2 * kv_heads) * d;
    for (int64_t i = 0; i < heads; i++)
        rotate(model, from + i * d, position, scratch->q + (token * heads + i) * d);
    bf16 *to =
        cache_slots(model, batch, batch->blocks[at], layer, 0) + position % batch->block_size * d;
    int64_t stride = batch->block_size * d;
    for (int64_t i = 0; i < kv_heads; i++, to += stride)
        rotate(model, from + (heads + i) * d, position, to);
    from += (heads + kv_heads) * d;
    for (int64_t i = 0; i < kv_heads; i++, to += stride)
        for (int64_t j = 0; j < d; j += 16) store_narrow(to + j, load_floats(from + i * d + j));
}

// The model as the caller gives it, and the memory of one step.

#pragma once

#include <math.h>

#include "spans.h"

struct layer {
    struct linear qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm; // [width]
};

struct model {
    int64_t hidden_size, width, inner; // `width` is hidden_size padded; `inner` of the MLP too
    int64_t num_layers, num_heads, num_kv_heads, head_dim, vocab_width;
    float eps;
    const struct layer *layers;
    const bf16 *embedding; // packed as a linear's weights: a tied head is the same memory
    const float *norm;       // [width]
    struct linear head;
    const float *cos, *sin;  // [positions, head_dim / 2]
};

// The memory of one step.
struct work {
    float *x;           // [tokens, width], the residual stream
    float *qkv;         // [tokens, q and k and v heads, head_dim]
    bf16 *normed;       // tiles of `width` inputs
    bf16 *q;            // [tokens, heads, head_dim], rotated
    bf16 *attended;     // tiles of heads x head_dim inputs
    bf16 *product;      // tiles of `inner` inputs
    bf16 *values;       // of prompts, packed by `pack_values`
    float *partials;    // [parts, heads, head_dim + 16]: sums, most, total
    int32_t *position;  // [tokens]
    int32_t *row;       // [tokens]
    int32_t *shared;    // [rows]
    struct phase *phases;
    struct spans spans;
};

static int64_t num_phases(const struct model *model) { return 10 * model->num_layers + 4; }

// Place the work's arrays from `base` on; with a null base only count. Returns the bytes.
static int64_t lay_out(const struct model *model, const struct batch *batch, char *base,
                       struct work *work) {
    int64_t used = 0, tokens = padded(batch->num_tokens, 32);
    int64_t heads = model->num_heads + 2 * model->num_kv_heads;
#define PLACE(pointer, count)                                    \
    (pointer) = (void *)(base + used);                           \
    used += padded((int64_t)(count) * (int64_t)sizeof *(pointer), 64)
    PLACE(work->x, tokens * model->width);
    PLACE(work->qkv, tokens * heads * model->head_dim);
    PLACE(work->normed, tokens * model->width);
    PLACE(work->q, tokens * model->num_heads * model->head_dim);
    PLACE(work->attended, tokens * model->num_heads * model->head_dim);
    PLACE(work->product, tokens * model->inner);
    PLACE(work->partials, most_parts(batch) * model->num_heads * (model->head_dim + 16));
    PLACE(work->phases, num_phases(model));
    PLACE(work->position, tokens);
    PLACE(work->row, tokens);
    PLACE(work->shared, batch->num_rows);
    PLACE(work->values, num_values(batch) * model->num_kv_heads * model->head_dim);
    PLACE(work->spans.list, most_parts(batch));
    PLACE(work->spans.members, 2 * batch->num_rows);
    PLACE(work->spans.tiles, tokens);
    PLACE(work->spans.stretches, num_values(batch) / STRETCH + batch->num_rows);
    PLACE(work->spans.first_value, batch->num_rows);
    PLACE(work->spans.parts, tokens);
    PLACE(work->spans.first_part, tokens);
    return used;
}

static bf16 *slot(const struct model *model, const struct batch *batch, int64_t block,
                  int64_t layer, int64_t head) {
    int64_t at = (block * model->num_layers + layer) * 2 * model->num_kv_heads + head;
    return batch->cache + at * batch->block_size * model->head_dim;
}

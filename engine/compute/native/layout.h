// Field offsets as the C compiler sees them, to check structures.py against at load

#pragma once

#include <stddef.h>

#include "structures.h"

struct field {
    const char *name; // of a structure, or of a structure and its field; null after the last
    int64_t offset, size;
};

#define STRUCTURE(type) {#type, 0, sizeof(struct type)}
#define FIELD(type, field) \
    {#type "." #field, offsetof(struct type, field), sizeof(((struct type *)0)->field)}

static const struct field layout[] = {
    STRUCTURE(linear),
    FIELD(linear, weight),
    FIELD(linear, bias),
    FIELD(linear, num_inputs),
    FIELD(linear, num_panels),
    STRUCTURE(layer),
    FIELD(layer, qkv),
    FIELD(layer, output),
    FIELD(layer, gate_up),
    FIELD(layer, down),
    FIELD(layer, attention_norm),
    FIELD(layer, mlp_norm),
    STRUCTURE(model),
    FIELD(model, hidden_size),
    FIELD(model, hidden_width),
    FIELD(model, mlp_width),
    FIELD(model, num_layers),
    FIELD(model, num_heads),
    FIELD(model, num_kv_heads),
    FIELD(model, head_dim),
    FIELD(model, vocab_width),
    FIELD(model, eps),
    FIELD(model, layers),
    FIELD(model, embedding),
    FIELD(model, final_norm),
    FIELD(model, lm_head),
    FIELD(model, cos),
    FIELD(model, sin),
    STRUCTURE(batch),
    FIELD(batch, num_rows),
    FIELD(batch, num_tokens),
    FIELD(batch, num_sampled),
    FIELD(batch, token_ids),
    FIELD(batch, first_token),
    FIELD(batch, start),
    FIELD(batch, first_block),
    FIELD(batch, blocks),
    FIELD(batch, sampled),
    FIELD(batch, cache),
    FIELD(batch, block_size),
    FIELD(batch, logits),
    {0, 0, 0},
};

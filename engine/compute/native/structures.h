// The structures that Python fills and passes: a packed model and one step's batch.
//
// `structures.py` declares the same fields.

#pragma once

#include "vectors.h"

// y = x W^T + b, packed: see linear.h.
struct linear {
    const bf16 *weight;
    const float *bias; // or null
    int64_t num_inputs, num_panels;
};

struct layer {
    struct linear qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm; // [hidden_width]
};

// Widths are sizes rounded up to whole gemm tiles.
struct model {
    int64_t hidden_size, hidden_width, mlp_width;
    int64_t num_layers, num_heads, num_kv_heads, head_dim, vocab_width;
    float eps;
    const struct layer *layers;
    const bf16 *embedding;   // packed as a linear's weights: a tied lm_head is the same memory
    const float *final_norm; // [hidden_width]
    struct linear lm_head;
    const float *cos, *sin; // [positions, head_dim / 2]
};

// One step. Rows are sequences; their tokens lie one after the other.
struct batch {
    int64_t num_rows, num_tokens, num_sampled;
    const int32_t *token_ids;   // [num_tokens]
    const int32_t *first_token; // [num_rows + 1], index of the row's first token in `token_ids`
    const int32_t *start;       // [num_rows], position of the row's first token
    const int32_t *first_block; // [num_rows], index of the row's block table in `blocks`
    const int32_t *blocks;      // the rows' block tables, one after the other
    const int32_t *sampled;     // [num_sampled], indices in `token_ids`
    bf16 *cache;                // [blocks, layers, 2 x kv_heads, block_size, head_dim]
    int64_t block_size;
    float *logits; // [num_sampled, vocab_width]
};

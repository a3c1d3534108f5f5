// The scratch memory of one step: which arrays it holds and where each begins.

#pragma once

#include <math.h>

#include "attention_plan.h"

struct scratch {
    float *x;          // [tokens, hidden_width], the residual stream
    float *qkv;        // [tokens, q and k and v heads, head_dim]
    bf16 *normed;      // gemm tiles of `hidden_width` inputs
    bf16 *q;           // [tokens, heads, head_dim], rotated
    bf16 *attended;    // gemm tiles of heads x head_dim inputs
    bf16 *gated;       // gemm tiles of `mlp_width` inputs
    bf16 *values;      // of prompts, packed by `pack_values`
    float *partials;   // [parts, heads, head_dim + 16]: acc, running_max, running_sum
    int32_t *position; // [tokens]
    int32_t *row;      // [tokens]
    int32_t *shared;   // [rows]
    struct thread_team team;
    struct attention_plan plan;
};

// The phases of a step; those of each layer follow, in the order of the layers.
enum step_phase { CLEAR_TAILS, EMBED, FINAL_NORM, LM_HEAD, NUM_STEP_PHASES };
enum layer_phase {
    ATTENTION_NORM,
    QKV,
    STORE_HEADS,
    PACK_VALUES,
    ATTEND,
    MERGE_PARTS,
    OUTPUT,
    MLP_NORM,
    GATE_UP,
    DOWN,
    NUM_LAYER_PHASES
};

INLINE int64_t layer_phase(int64_t layer, enum layer_phase phase) {
    return NUM_STEP_PHASES + layer * NUM_LAYER_PHASES + phase;
}

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
// Bytes after each array that no access may touch: arrays that touch each other hide an overrun.
enum { GUARD_BYTES = 64 };
#else
enum { GUARD_BYTES = 0 };
#endif

// Return the place of `num_bytes` bytes at `base + *used`, and count them and their guard as used.
static void *place(char *base, int64_t *used, int64_t num_bytes) {
    char *at = base + *used;
    int64_t end = round_up(num_bytes, 64) + GUARD_BYTES;
#ifdef __SANITIZE_ADDRESS__
    if (base) {
        ASAN_UNPOISON_MEMORY_REGION(at, num_bytes);
        ASAN_POISON_MEMORY_REGION(at + num_bytes, end - num_bytes);
    }
#endif
    *used += end;
    return at;
}

// Place the arrays from `base` on; with a null base only count. Returns the bytes.
static int64_t lay_out_scratch(const struct model *model, const struct batch *batch, char *base,
                               struct scratch *scratch) {
    int64_t used = 0, tokens = round_up(batch->num_tokens, 32);
    int64_t heads = model->num_heads + 2 * model->num_kv_heads;
#define PLACE(pointer, count) (pointer) = place(base, &used, (count) * (int64_t)sizeof *(pointer))
    PLACE(scratch->x, tokens * model->hidden_width);
    PLACE(scratch->qkv, tokens * heads * model->head_dim);
    PLACE(scratch->normed, tokens * model->hidden_width);
    PLACE(scratch->q, tokens * model->num_heads * model->head_dim);
    PLACE(scratch->attended, tokens * model->num_heads * model->head_dim);
    PLACE(scratch->gated, tokens * model->mlp_width);
    PLACE(scratch->partials, num_parts_max(batch) * model->num_heads * (model->head_dim + 16));
    scratch->team.num_phases = layer_phase(model->num_layers, 0);
    PLACE(scratch->team.phases, scratch->team.num_phases);
    PLACE(scratch->position, tokens);
    PLACE(scratch->row, tokens);
    PLACE(scratch->shared, batch->num_rows);
    PLACE(scratch->values, num_packed_positions(batch) * model->num_kv_heads * model->head_dim);
    PLACE(scratch->plan.spans, num_parts_max(batch));
    PLACE(scratch->plan.readers, 2 * batch->num_rows);
    PLACE(scratch->plan.query_tiles, tokens);
    PLACE(scratch->plan.pack_ranges,
          num_packed_positions(batch) / POSITIONS_PER_PACK + batch->num_rows);
    PLACE(scratch->plan.first_value, batch->num_rows);
    PLACE(scratch->plan.num_parts_of, tokens);
    PLACE(scratch->plan.first_part, tokens);
    return used;
}

// The slots of one head in a block of the KV cache; K heads come first, then V heads.
static bf16 *cache_slots(const struct model *model, const struct batch *batch, int64_t block,
                         int64_t layer, int64_t head) {
    int64_t at = (block * model->num_layers + layer) * 2 * model->num_kv_heads + head;
    return batch->cache + at * batch->block_size * model->head_dim;
}

// One step of a Llama model: a ragged batch of tokens through all layers, in one parallel region.
//
// The residual stream is float32. The inputs of linears are rounded to bfloat16, and so are q, k, v
// and the probabilities of attention.

#include "attention.h"
#include "layout.h"
#include "token_ops.h"

static void run_layer(const struct model *model, const struct batch *batch, struct scratch *scratch,
                      int64_t index) {
    const struct layer *layer = model->layers + index;
    const struct thread_team *team = &scratch->team;
    const int64_t first = layer_phase(index, 0);
    int64_t tokens = batch->num_tokens, heads = model->num_heads + 2 * model->num_kv_heads;
    struct linear_output qkv = {STORE, scratch->qkv, 0, heads * model->head_dim};
    struct linear_output residual = {ADD, scratch->x, 0, model->hidden_width};
    struct linear_output gated = {GATE, 0, scratch->gated, model->mlp_width};
    FOR_EACH_UNIT(team, first + ATTENTION_NORM, token, tokens, {
        const float *x = scratch->x + token * model->hidden_width;
        rms_norm(model, x, layer->attention_norm, scratch->normed, token);
    });
    run_linear(team, first + QKV, &layer->qkv, scratch->normed, tokens, &qkv);
    FOR_EACH_UNIT(team, first + STORE_HEADS, token, tokens,
                  rotate_and_store_heads(model, batch, scratch, index, token););
    int64_t kv_heads = model->num_kv_heads, num_tiles = scratch->plan.num_query_tiles;
    if (num_tiles)
        FOR_EACH_UNIT(team, first + PACK_VALUES, unit, scratch->plan.num_pack_ranges * kv_heads, {
            const struct pack_range *range = scratch->plan.pack_ranges + unit / kv_heads;
            struct kv_head head = kv_head_of(model, batch, index, range->row, unit % kv_heads);
            pack_values(&head, range->start, range->end,
                        packed_values_of(model, batch, scratch, range->row, unit % kv_heads));
        });
    FOR_EACH_UNIT(team, first + ATTEND, unit, (scratch->plan.num_spans + num_tiles) * kv_heads, {
        int64_t at = unit / kv_heads, kv_head = unit % kv_heads;
        if (at < num_tiles)
            compute_query_tile(model, batch, scratch, index, scratch->plan.query_tiles + at,
                               kv_head);
        else
            compute_span(model, batch, scratch, index, scratch->plan.spans + at - num_tiles,
                         kv_head);
    });
    if (scratch->plan.num_parts)
        FOR_EACH_UNIT(team, first + MERGE_PARTS, token, tokens,
                      merge_parts(model, scratch, token););
    run_linear(team, first + OUTPUT, &layer->output, scratch->attended, tokens, &residual);
    FOR_EACH_UNIT(team, first + MLP_NORM, token, tokens, {
        const float *x = scratch->x + token * model->hidden_width;
        rms_norm(model, x, layer->mlp_norm, scratch->normed, token);
    });
    run_linear(team, first + GATE_UP, &layer->gate_up, scratch->normed, tokens, &gated);
    run_linear(team, first + DOWN, &layer->down, scratch->gated, tokens, &residual);
}

static void run_step(const struct model *model, const struct batch *batch,
                     struct scratch *scratch) {
    const struct thread_team *team = &scratch->team;
    FOR_EACH_UNIT(team, CLEAR_TAILS, row, batch->num_rows, clear_block_tail(model, batch, row););
    FOR_EACH_UNIT(team, EMBED, token, batch->num_tokens, embed(model, batch, scratch, token););
    for (int64_t i = 0; i < model->num_layers; i++) run_layer(model, batch, scratch, i);
    if (batch->num_sampled == 0) return;
    FOR_EACH_UNIT(team, FINAL_NORM, i, batch->num_sampled, {
        const float *x = scratch->x + batch->sampled[i] * model->hidden_width;
        rms_norm(model, x, model->final_norm, scratch->normed, i);
    });
    struct linear_output logits = {STORE, batch->logits, 0, model->vocab_width};
    run_linear(team, LM_HEAD, &model->lm_head, scratch->normed, batch->num_sampled, &logits);
}

// Return the fields of the structures that Python fills, up to one without a name.
const struct field *kvmeter_layout(void) { return layout; }

// Return the bytes of scratch memory that `kvmeter_run` needs for a batch.
int64_t kvmeter_scratch_bytes(const struct model *model, const struct batch *batch) {
    struct scratch scratch;
    return lay_out_scratch(model, batch, 0, &scratch);
}

// Request AMX and return whether this process may use it. Call it once, first.
int kvmeter_open(void) {
    request_amx();
    return has_amx;
}

// Compute a batch in `memory`, scratch memory aligned to 64 bytes.
void kvmeter_run(const struct model *model, const struct batch *batch, char *memory,
                 int num_threads) {
    struct scratch scratch;
    lay_out_scratch(model, batch, memory, &scratch);
    for (int64_t row = 0; row < batch->num_rows; row++)
        for (int64_t i = batch->first_token[row]; i < batch->first_token[row + 1]; i++) {
            scratch.row[i] = row;
            scratch.position[i] = batch->start[row] + i - batch->first_token[row];
        }
    memset(scratch.team.phases, 0, scratch.team.num_phases * sizeof *scratch.team.phases);
    int64_t group_size = model->num_heads / model->num_kv_heads;
    plan_attention(&scratch.plan, batch, scratch.shared, group_size, model->num_kv_heads,
                   num_threads);
#pragma omp parallel num_threads(num_threads)
    {
        configure_tiles();
        run_step(model, batch, &scratch);
        release_tiles();
    }
}

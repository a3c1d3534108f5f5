// One step of a Llama model: a ragged batch of tokens through all layers, in one parallel region.
//
// The residual stream is float32. Rounded to bfloat16 are the inputs of linears, and q, k, v and
// the probabilities in attention.

#include "heads.h"
#include "tokens.h"

static void run_layer(const struct model *model, const struct batch *batch, struct work *work,
                      int64_t index, struct worker *worker) {
    const struct layer *layer = model->layers + index;
    int64_t tokens = batch->num_tokens, heads = model->num_heads + 2 * model->num_kv_heads;
    struct target qkv = {STORE, work->qkv, 0, heads * model->head_dim};
    struct target residual = {ADD, work->x, 0, model->width};
    struct target product = {GATE, 0, work->product, model->inner};
    FOR_EACH_UNIT(token, tokens, worker, {
        const float *x = work->x + token * model->width;
        norm(model, x, layer->attention_norm, work->normed, token);
    });
    apply(worker, &layer->qkv, work->normed, tokens, &qkv);
    FOR_EACH_UNIT(token, tokens, worker, write_heads(model, batch, work, index, token););
    int64_t kv_heads = model->num_kv_heads, num_tiles = work->spans.num_tiles;
    if (num_tiles)
        FOR_EACH_UNIT(unit, work->spans.num_stretches * kv_heads, worker, {
            const struct stretch *stretch = work->spans.stretches + unit / kv_heads;
            struct kv_head head = head_of(model, batch, index, stretch->row, unit % kv_heads);
            pack_values(&head, stretch->start, stretch->end,
                        values_of(model, batch, work, stretch->row, unit % kv_heads));
        });
    FOR_EACH_UNIT(unit, (work->spans.num_spans + num_tiles) * kv_heads, worker, {
        int64_t at = unit / kv_heads, kv_head = unit % kv_heads;
        if (at < num_tiles)
            attend_prompt(model, batch, work, index, work->spans.tiles + at, kv_head);
        else
            attend_span(model, batch, work, index, work->spans.list + at - num_tiles, kv_head);
    });
    if (work->spans.num_parts)
        FOR_EACH_UNIT(token, tokens, worker, merge(model, work, token););
    apply(worker, &layer->output, work->attended, tokens, &residual);
    FOR_EACH_UNIT(token, tokens, worker, {
        const float *x = work->x + token * model->width;
        norm(model, x, layer->mlp_norm, work->normed, token);
    });
    apply(worker, &layer->gate_up, work->normed, tokens, &product);
    apply(worker, &layer->down, work->product, tokens, &residual);
}

static void run(const struct model *model, const struct batch *batch, struct work *work,
                struct worker *worker) {
    FOR_EACH_UNIT(row, batch->num_rows, worker, clear_rest(model, batch, row););
    FOR_EACH_UNIT(token, batch->num_tokens, worker, embed(model, batch, work, token););
    for (int64_t i = 0; i < model->num_layers; i++) run_layer(model, batch, work, i, worker);
    if (batch->num_sampled == 0) return;
    FOR_EACH_UNIT(i, batch->num_sampled, worker, {
        const float *x = work->x + batch->sampled[i] * model->width;
        norm(model, x, model->norm, work->normed, i);
    });
    struct target logits = {STORE, batch->logits, 0, model->vocab_width};
    apply(worker, &model->head, work->normed, batch->num_sampled, &logits);
}

// Bytes of scratch memory that `kvmeter_run` needs for a batch.
int64_t kvmeter_scratch_bytes(const struct model *model, const struct batch *batch) {
    struct work work;
    return lay_out(model, batch, 0, &work);
}

// Ask for AMX; returns whether this process may use it. Call it once, first.
int kvmeter_open(void) {
    ask_for_amx();
    return has_amx;
}

// Compute a batch; `scratch` is aligned to 64 bytes.
void kvmeter_run(const struct model *model, const struct batch *batch, char *scratch,
                 int num_threads) {
    struct work work;
    lay_out(model, batch, scratch, &work);
    for (int64_t row = 0; row < batch->num_rows; row++)
        for (int64_t i = batch->first_token[row]; i < batch->first_token[row + 1]; i++) {
            work.row[i] = row;
            work.position[i] = batch->start[row] + i - batch->first_token[row];
        }
    memset(work.phases, 0, num_phases(model) * sizeof *work.phases);
    int64_t group = model->num_heads / model->num_kv_heads;
    plan(&work.spans, batch, work.shared, group, model->num_kv_heads, num_threads);
#pragma omp parallel num_threads(num_threads)
    {
        struct worker worker = {work.phases};
        open_tiles();
        run(model, batch, &work, &worker);
        close_tiles();
    }
}

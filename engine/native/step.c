// One step of a Llama model: a ragged batch of tokens through all layers, in one parallel region.
//
// The residual stream is float32. Rounded to bfloat16 are the inputs of linears, and q, k, v and
// the probabilities in attention.

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
    const bf16 *embedding;   // [vocabulary, width]
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
    bf16 *values;       // of prompts, packed by `turn_values`
    float *partials;    // [parts, heads, head_dim + 16]: sums, most, total
    int32_t *position;  // [tokens]
    int32_t *row;       // [tokens]
    int32_t *shared;    // [rows]
    struct phase *phases;
    struct spans spans;
};

static int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

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
    PLACE(work->spans.turns, num_values(batch) / TURN + batch->num_rows);
    PLACE(work->spans.first_value, batch->num_rows);
    PLACE(work->spans.parts, tokens);
    PLACE(work->spans.first_part, tokens);
    return used;
}

static bf16 *slot(const struct model *model, const struct batch *batch, int64_t block, int64_t layer,
                  int64_t head) {
    int64_t at = (block * model->num_layers + layer) * 2 * model->num_kv_heads + head;
    return batch->cache + at * batch->block_size * model->head_dim;
}

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
    const bf16 *from = model->embedding + batch->tokens[token] * model->width;
    float *x = work->x + token * model->width;
    for (int64_t i = 0; i < model->width; i += 16) store_floats(x + i, widen(from + i));
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

static struct head head_of(const struct model *model, const struct batch *batch, int64_t layer,
                           int64_t row, int64_t kv_head) {
    int64_t kv_heads = model->num_kv_heads;
    return (struct head){
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
    block sums[HEAD_DIM_MAX] ALIGNED;
    float total[TILE] ALIGNED;
    int32_t visible[TILE] = {0};
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
                visible[query] = work->position[tile->first_token + query / group] + 1;
            }
            transpose(lanes);
            memcpy(q + at * 32 + first * 32, lanes, sizeof lanes);
        }
    struct head head = head_of(model, batch, layer, tile->row, kv_head);
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
    struct head head = head_of(model, batch, layer, work->row[span->members[0]], kv_head);
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
        FOR_EACH_UNIT(unit, work->spans.num_turns * kv_heads, worker, {
            const struct turn *turn = work->spans.turns + unit / kv_heads;
            struct head head = head_of(model, batch, index, turn->row, unit % kv_heads);
            turn_values(&head, turn->start, turn->end,
                        values_of(model, batch, work, turn->row, unit % kv_heads));
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

// Cuts a step's attention into work items for the C kernels; attention_plan.py is torch's
//
// A decoding token's context is cut into spans when there are too few tokens to keep all threads
// busy. A prefix that several of them share becomes a span of all of them, so that it is read once.
// The results of a token's spans are merged afterwards. A prompt's tokens are cut into query tiles.

#pragma once

#include "prompt_attention.h"
#include "structures.h"

// Positions whose values one unit packs; a row's packed values are padded to a multiple of 32.
enum { POSITIONS_PER_PACK = 512, VALUES_UNIT = 32 };
// Parts of a context, and of a shared prefix; the shortest part.
enum { PARTS_MAX = 8, PART_POSITIONS_MIN = 128 };
// How long a shared prefix has to be, and how much reading it has to save.
enum { SHARED_BLOCKS_MIN = 8, SHARED_TOKENS_MIN = 512 };

// Positions start .. end - 1 of a context that all `readers` see: one part of their attention.
struct span {
    const int32_t *blocks;
    const int32_t *readers; // decoding tokens, by their index in the batch
    int64_t num_readers, start, end;
    int part;
};

// Neighbouring tokens of one row with several new tokens.
struct query_tile {
    int32_t row, first_token, num_tokens;
};

// Positions of such a row whose values are packed by one unit.
struct pack_range {
    int32_t row;
    int64_t start, end;
};

struct attention_plan {
    struct span *spans;
    int64_t num_spans, num_parts;
    int32_t *readers; // of all spans
    int64_t num_readers;
    int32_t *num_parts_of; // [num_tokens], how many parts a decoding token's attention has
    int32_t *first_part;   // [num_tokens], where the partial results of those with several begin
    struct query_tile *query_tiles;
    struct pack_range *pack_ranges;
    int64_t num_query_tiles, num_pack_ranges;
    int64_t *first_value; // [num_rows], where a row's packed values begin, in positions
};

// Upper bound of all tokens' parts, to reserve memory by.
static int64_t num_parts_max(const struct batch *batch) { return 2 * PARTS_MAX * batch->num_rows; }

// Cut positions start .. end - 1 into `num_parts` spans of the readers from `first_reader` on.
static void cut_context(struct attention_plan *plan, const int32_t *blocks, int64_t first_reader,
                        int64_t start, int64_t end, int num_parts) {
    int64_t each = round_up((end - start + num_parts - 1) / num_parts, 16);
    const int32_t *readers = plan->readers + first_reader;
    int64_t num_readers = plan->num_readers - first_reader;
    int part = plan->num_parts_of[readers[0]];
    for (; start < end; start += each, part++)
        plan->spans[plan->num_spans++] = (struct span){
            blocks, readers, num_readers, start, start + each < end ? start + each : end, part};
    for (int64_t i = 0; i < num_readers; i++) plan->num_parts_of[readers[i]] = part;
}

// Return into how many parts a context of `length` is cut when there are `num_units` like it.
static int num_parts_for(int64_t length, int64_t num_units, int num_threads) {
    int64_t parts = 4 * num_threads / (num_units > 0 ? num_units : 1);
    if (parts > PARTS_MAX) parts = PARTS_MAX;
    if (parts > length / PART_POSITIONS_MIN) parts = length / PART_POSITIONS_MIN;
    return parts > 1 ? parts : 1;
}

static int is_decode(const struct batch *batch, int64_t row) {
    return batch->first_token[row + 1] - batch->first_token[row] == 1;
}

// Return the positions of all rows with several new tokens, each row's padded.
static int64_t num_packed_positions(const struct batch *batch) {
    int64_t total = 0;
    for (int64_t row = 0; row < batch->num_rows; row++)
        if (!is_decode(batch, row)) {
            int64_t count = batch->first_token[row + 1] - batch->first_token[row];
            total += round_up(batch->start[row] + count, VALUES_UNIT);
        }
    return total;
}

// Return how many leading full blocks two rows have in common, at most `limit`.
static int64_t num_common_blocks(const struct batch *batch, int64_t a, int64_t b, int64_t limit) {
    const int32_t *left = batch->blocks + batch->first_block[a];
    const int32_t *right = batch->blocks + batch->first_block[b];
    if (limit > batch->start[b] / batch->block_size) limit = batch->start[b] / batch->block_size;
    int64_t n = 0;
    while (n < limit && left[n] == right[n]) n++;
    return n;
}

// Make spans of the prefix that `row` shares with later rows, each of up to `readers_max` readers.
// Writes the prefix's length into `shared` of each of them.
static void share_prefix(struct attention_plan *plan, const struct batch *batch, int64_t row,
                         int32_t *shared, int64_t readers_max, int64_t num_kv_heads,
                         int num_threads) {
    int64_t num_blocks = batch->start[row] / batch->block_size, num_readers = 1;
    if (num_blocks < SHARED_BLOCKS_MIN) return;
    for (int64_t i = row + 1; i < batch->num_rows; i++) {
        if (shared[i] || !is_decode(batch, i)) continue;
        int64_t n = num_common_blocks(batch, row, i, num_blocks);
        if (n >= SHARED_BLOCKS_MIN) num_blocks = n, num_readers++;
    }
    int64_t length = num_blocks * batch->block_size;
    if (length * (num_readers - 1) < SHARED_TOKENS_MIN) return;
    int64_t first = plan->num_readers;
    int64_t num_units = (num_readers + readers_max - 1) / readers_max * num_kv_heads;
    int num_parts = num_parts_for(length, num_units, num_threads);
    const int32_t *blocks = batch->blocks + batch->first_block[row];
    for (int64_t i = row; i < batch->num_rows; i++) {
        if (shared[i] || !is_decode(batch, i)) continue;
        if (num_common_blocks(batch, row, i, num_blocks) < num_blocks) continue;
        shared[i] = length;
        plan->readers[plan->num_readers++] = batch->first_token[i];
        if (plan->num_readers - first == readers_max) {
            cut_context(plan, blocks, first, 0, length, num_parts);
            first = plan->num_readers;
        }
    }
    if (plan->num_readers > first) cut_context(plan, blocks, first, 0, length, num_parts);
}

// Cut a row with several new tokens into query tiles, and its positions into pack ranges.
static void cut_prompt(struct attention_plan *plan, const struct batch *batch, int64_t row,
                       int64_t group_size) {
    int32_t token = batch->first_token[row], end = batch->first_token[row + 1];
    int64_t last = batch->start[row] + end - token;
    for (int64_t start = 0; start < last; start += POSITIONS_PER_PACK) {
        int64_t stop = start + POSITIONS_PER_PACK < last ? start + POSITIONS_PER_PACK : last;
        plan->pack_ranges[plan->num_pack_ranges++] = (struct pack_range){row, start, stop};
    }
    for (int32_t each = PROMPT_QUERIES_PER_TILE / group_size; token < end; token += each)
        plan->query_tiles[plan->num_query_tiles++] =
            (struct query_tile){row, token, end - token < each ? end - token : each};
}

// Fill `plan`. `shared` [num_rows] is scratch memory; `group_size` query heads share a KV head.
static void plan_attention(struct attention_plan *plan, const struct batch *batch, int32_t *shared,
                           int64_t group_size, int64_t num_kv_heads, int num_threads) {
    int64_t values_so_far = 0;
    plan->num_spans = plan->num_readers = plan->num_parts = 0;
    plan->num_query_tiles = plan->num_pack_ranges = 0;
    memset(shared, 0, batch->num_rows * sizeof *shared);
    memset(plan->num_parts_of, 0, batch->num_tokens * sizeof *plan->num_parts_of);
    for (int64_t row = 0; row < batch->num_rows; row++)
        if (is_decode(batch, row) && !shared[row])
            share_prefix(plan, batch, row, shared, DECODE_QUERIES_MAX / group_size, num_kv_heads,
                         num_threads);
    for (int64_t row = 0; row < batch->num_rows; row++) {
        int64_t first = plan->num_readers, token = batch->first_token[row];
        int64_t end = batch->start[row] + batch->first_token[row + 1] - token;
        plan->first_value[row] = values_so_far;
        if (!is_decode(batch, row)) {
            values_so_far += round_up(end, VALUES_UNIT);
            cut_prompt(plan, batch, row, group_size);
            continue;
        }
        int64_t num_units = batch->num_rows * num_kv_heads;
        int num_parts = num_parts_for(end - shared[row], num_units, num_threads);
        plan->readers[plan->num_readers++] = token;
        cut_context(plan, batch->blocks + batch->first_block[row], first, shared[row], end,
                    num_parts);
    }
    for (int64_t i = 0; i < batch->num_tokens; i++) {
        plan->first_part[i] = plan->num_parts;
        if (plan->num_parts_of[i] > 1) plan->num_parts += plan->num_parts_of[i];
    }
}

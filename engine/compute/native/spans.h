// A step's attention, cut into units of work.
//
// A decoding token's context is cut into spans when there are too few tokens to keep all threads
// busy, and a prefix that several of them have in common becomes a span of all of them, so that it
// is read once. Their results are merged afterwards. A prompt's tokens are cut into tiles.

#pragma once

#include "prompts.h"

// Positions in a stretch; parts of a context, and of a shared prefix; the shortest part.
enum { STRETCH = 512, PARTS_MAX = 8, PART_MIN = 128 };
// How long a shared prefix has to be, and how much reading it has to save.
enum { SHARED_BLOCKS_MIN = 8, SHARED_TOKENS_MIN = 512 };

// One step, as the caller gives it. Rows are sequences; their tokens lie one after the other.
struct batch {
    int64_t num_rows, num_tokens, num_sampled;
    const int32_t *tokens;      // [num_tokens]
    const int32_t *first_token; // [num_rows + 1], the row's first in `tokens`
    const int32_t *start;       // [num_rows], the first token's position
    const int32_t *first_block; // [num_rows], the block table's begin in `blocks`
    const int32_t *blocks;
    const int32_t *sampled; // [num_sampled], in `tokens`
    bf16 *cache;            // [blocks, layers, 2 x kv_heads, block_size, head_dim]
    int64_t block_size;
    float *logits; // [num_sampled, padded vocabulary]
};

struct span {
    const int32_t *blocks;
    const int32_t *members; // tokens, by their place in the batch
    int64_t num_members, start, end;
    int part;
};

// Some neighbouring tokens of a row that is a prompt's.
struct tile {
    int32_t row, first_token, num_tokens;
};

// Some positions of such a row, whose values are to be packed.
struct stretch {
    int32_t row;
    int64_t start, end;
};

struct spans {
    struct span *list;
    int64_t num_spans, num_parts;
    int32_t *members; // of all spans
    int64_t num_members;
    int32_t *parts;      // [num_tokens], how many parts a decoding token's attention has
    int32_t *first_part; // [num_tokens], where the partial results of those with several begin
    struct tile *tiles;
    struct stretch *stretches;
    int64_t num_tiles, num_stretches;
    int64_t *first_value; // [num_rows], where a row's packed values begin, in positions
};

static int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Upper bounds, to reserve memory by.
static int64_t most_parts(const struct batch *batch) { return 2 * PARTS_MAX * batch->num_rows; }

// Cut positions start .. end - 1 into parts, each a span of the same members.
static void cut(struct spans *spans, const int32_t *blocks, int64_t first_member, int64_t start,
                int64_t end, int num_parts) {
    int64_t each = padded((end - start + num_parts - 1) / num_parts, 16);
    const int32_t *members = spans->members + first_member;
    int64_t num_members = spans->num_members - first_member;
    int part = spans->parts[members[0]];
    for (; start < end; start += each, part++)
        spans->list[spans->num_spans++] = (struct span){
            blocks, members, num_members, start, start + each < end ? start + each : end, part};
    for (int64_t i = 0; i < num_members; i++) spans->parts[members[i]] = part;
}

static int parts_of(int64_t length, int64_t num_units, int num_threads) {
    int64_t parts = 4 * num_threads / (num_units > 0 ? num_units : 1);
    if (parts > PARTS_MAX) parts = PARTS_MAX;
    if (parts > length / PART_MIN) parts = length / PART_MIN;
    return parts > 1 ? parts : 1;
}

static int is_decode(const struct batch *batch, int64_t row) {
    return batch->first_token[row + 1] - batch->first_token[row] == 1;
}

// Positions of all rows that are prompts' parts, each row's padded to a tile.
static int64_t num_values(const struct batch *batch) {
    int64_t total = 0;
    for (int64_t row = 0; row < batch->num_rows; row++)
        if (!is_decode(batch, row)) {
            int64_t count = batch->first_token[row + 1] - batch->first_token[row];
            total += padded(batch->start[row] + count, TILE);
        }
    return total;
}

// How many leading blocks two rows have in common, of those that are full already.
static int64_t common(const struct batch *batch, int64_t a, int64_t b, int64_t most) {
    const int32_t *left = batch->blocks + batch->first_block[a];
    const int32_t *right = batch->blocks + batch->first_block[b];
    if (most > batch->start[b] / batch->block_size) most = batch->start[b] / batch->block_size;
    int64_t n = 0;
    while (n < most && left[n] == right[n]) n++;
    return n;
}

// Make spans of the prefix that `row` shares with later rows; mark in `shared` how much it is.
static void share(struct spans *spans, const struct batch *batch, int64_t row, int32_t *shared,
                  int64_t together, int64_t kv_heads, int num_threads) {
    int64_t num_blocks = batch->start[row] / batch->block_size, readers = 1;
    if (num_blocks < SHARED_BLOCKS_MIN) return;
    for (int64_t i = row + 1; i < batch->num_rows; i++) {
        if (shared[i] || !is_decode(batch, i)) continue;
        int64_t n = common(batch, row, i, num_blocks);
        if (n >= SHARED_BLOCKS_MIN) num_blocks = n, readers++;
    }
    int64_t length = num_blocks * batch->block_size;
    if (length * (readers - 1) < SHARED_TOKENS_MIN) return;
    int64_t first = spans->num_members;
    int parts = parts_of(length, (readers + together - 1) / together * kv_heads, num_threads);
    for (int64_t i = row; i < batch->num_rows; i++) {
        if (shared[i] || !is_decode(batch, i)) continue;
        if (common(batch, row, i, num_blocks) < num_blocks) continue;
        shared[i] = length;
        spans->members[spans->num_members++] = batch->first_token[i];
        if (spans->num_members - first == together) {
            cut(spans, batch->blocks + batch->first_block[row], first, 0, length, parts);
            first = spans->num_members;
        }
    }
    if (spans->num_members > first)
        cut(spans, batch->blocks + batch->first_block[row], first, 0, length, parts);
}

static void cut_prompt(struct spans *spans, const struct batch *batch, int64_t row, int64_t group) {
    int32_t token = batch->first_token[row], end = batch->first_token[row + 1];
    int64_t last = batch->start[row] + end - token;
    for (int64_t start = 0; start < last; start += STRETCH)
        spans->stretches[spans->num_stretches++] =
            (struct stretch){row, start, start + STRETCH < last ? start + STRETCH : last};
    for (int32_t each = TILE / group; token < end; token += each)
        spans->tiles[spans->num_tiles++] =
            (struct tile){row, token, end - token < each ? end - token : each};
}

// Fill `spans`. `shared` is room for a number a row; `group` is how many heads share a KV head.
static void plan(struct spans *spans, const struct batch *batch, int32_t *shared, int64_t group,
                 int64_t kv_heads, int num_threads) {
    int64_t values_so_far = 0;
    spans->num_spans = spans->num_members = spans->num_parts = 0;
    spans->num_tiles = spans->num_stretches = 0;
    memset(shared, 0, batch->num_rows * sizeof *shared);
    memset(spans->parts, 0, batch->num_tokens * sizeof *spans->parts);
    for (int64_t row = 0; row < batch->num_rows; row++)
        if (is_decode(batch, row) && !shared[row])
            share(spans, batch, row, shared, QUERIES / group, kv_heads, num_threads);
    for (int64_t row = 0; row < batch->num_rows; row++) {
        int64_t first = spans->num_members, token = batch->first_token[row];
        int64_t end = batch->start[row] + batch->first_token[row + 1] - token;
        spans->first_value[row] = values_so_far;
        if (!is_decode(batch, row)) {
            values_so_far += padded(end, TILE);
            cut_prompt(spans, batch, row, group);
            continue;
        }
        int parts = parts_of(end - shared[row], batch->num_rows * kv_heads, num_threads);
        spans->members[spans->num_members++] = token;
        cut(spans, batch->blocks + batch->first_block[row], first, shared[row], end, parts);
    }
    for (int64_t i = 0; i < batch->num_tokens; i++) {
        spans->first_part[i] = spans->num_parts;
        if (spans->parts[i] > 1) spans->num_parts += spans->parts[i];
    }
}

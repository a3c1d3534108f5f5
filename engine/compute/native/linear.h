// y = x W^T + b for any number of rows, from one copy of the weights.
//
// Weights are packed once as [outputs / 32][inputs / 2][32 outputs][2 inputs]: a group of 32
// outputs is one stream from memory, and two B tiles every 32 inputs. Inputs are in tiles:
// [rows / 16][inputs / 32][16][32], each an A tile. Both are padded with zeros.

#pragma once

#include "products.h"
#include "team.h"

// Outputs in a group; rows that one thread takes through it; how far weights are prefetched.
enum { GROUP = 32, CHUNK = 512, AHEAD = 2048 };

struct linear {
    const bf16 *weight;
    const float *bias; // or null
    int64_t num_inputs, num_groups;
};

// What becomes of a linear's outputs.
struct target {
    enum { STORE, ADD, GATE } kind; // GATE: 16 gates and 16 ups a group become 16 products
    float *floats;                  // STORE, ADD: [rows, width]
    bf16 *tiles;                    // GATE: tiles of `width` inputs
    int64_t width;
};

// Where the tile's share of a row begins that holds `input`.
INLINE int64_t in_tiles(int64_t row, int64_t input, int64_t width) {
    return (row / 16 * (width / 32) + input / 32) * 512 + row % 16 * 32;
}

INLINE floats silu(floats x) { return x * reciprocal(1.0f + exponential(-x)); }

static void finish(const struct target *to, const struct linear *linear, line *y, int64_t row,
                   int64_t num_rows, int64_t group) {
    floats bias_low = {}, bias_high = {};
    if (linear->bias) {
        bias_low = load_floats(linear->bias + group * GROUP);
        bias_high = load_floats(linear->bias + group * GROUP + 16);
    }
    for (int64_t i = 0; i < num_rows; i++, row++) {
        floats low = load_floats(y[i]) + bias_low, high = load_floats(y[i] + 16) + bias_high;
        if (to->kind == GATE) {
            bf16 *product = to->tiles + in_tiles(row, group * 16, to->width) + group % 2 * 16;
            store_narrow(product, silu(low) * high);
            continue;
        }
        float *at = to->floats + row * to->width + group * GROUP;
        if (to->kind == ADD) low += load_floats(at), high += load_floats(at + 16);
        store_floats(at, low);
        store_floats(at + 16, high);
    }
}

// One phase: a unit is one group for up to CHUNK rows, so that those rows stay in the L2 cache.
static void apply(struct worker *worker, const struct linear *linear, const bf16 *x,
                  int64_t num_rows, const struct target *to) {
    int64_t num_chunks = (num_rows + CHUNK - 1) / CHUNK, num_inputs = linear->num_inputs;
    FOR_EACH_UNIT(unit, num_chunks * linear->num_groups, worker, {
        int64_t group = unit % linear->num_groups, first = unit / linear->num_groups * CHUNK;
        int64_t end = first + CHUNK < num_rows ? first + CHUNK : num_rows;
        const bf16 *w = linear->weight + group * num_inputs * GROUP;
        struct tiles b = {w, w + 32, 64, 1024};
        line y[32] ALIGNED;
        for (int64_t row = first; row < end; row += 32) {
            int64_t here = end - row < 32 ? end - row : 32;
            const bf16 *rows = x + in_tiles(row, 0, num_inputs);
            struct tiles a = {rows, rows + 16 * num_inputs, 32, 512};
            if (row == first)
                multiply(a, b, num_inputs / 32, here, AHEAD, 0, y);
            else
                multiply(a, b, num_inputs / 32, here, 0, 0, y);
            finish(to, linear, y, row, here, group);
        }
    });
}

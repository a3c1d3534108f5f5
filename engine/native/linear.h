// y = x W^T + b for any number of rows, from one copy of the weights.
//
// Weights are packed once: [outputs / 32][inputs / 2][32 outputs][2 inputs]. So a group of 32
// outputs is one stream from memory, a vector of it meets a pair of inputs in `dot2`, and
// 16 pairs of it are a B tile of AMX. Inputs are in tiles: [rows / 16][inputs / 32][16][32], each
// an A tile. Both are padded with zeros; a few rows use `dot2`, more use AMX where there is one.

#pragma once

#include "team.h"

enum { GROUP = 32, CHUNK = 256, FEW = 8, FEW_AMX = 4, PREFETCH = 4096 };

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

typedef float outputs[GROUP];

// Where 32 inputs of a row begin in tiles of `width` inputs.
INLINE int64_t in_tiles(int64_t row, int64_t input, int64_t width) {
    return (row / 16 * (width / 32) + input / 32) * 512 + row % 16 * 32;
}

INLINE void multiply_few(const bf16 *x, const bf16 *w, int64_t num_inputs, const int rows,
                         outputs *y) {
    floats low[FEW] = {}, high[FEW] = {};
    for (int64_t k = 0; k < num_inputs; k += 32, x += 512) {
        for (int pair = 0; pair < 16; pair++, w += 64) {
            __builtin_prefetch(w + PREFETCH / 2, 0, 2);
            __builtin_prefetch(w + PREFETCH / 2 + 32, 0, 2);
            words w_low = load_words(w), w_high = load_words(w + 32);
            for (int i = 0; i < rows; i++) {
                words inputs = splat_pair(x + i * 32 + pair * 2);
                low[i] = dot2(low[i], w_low, inputs);
                high[i] = dot2(high[i], w_high, inputs);
            }
        }
    }
    for (int i = 0; i < rows; i++) {
        store_floats(y[i], low[i]);
        store_floats(y[i] + 16, high[i]);
    }
}

#ifdef __AMX_BF16__

static int has_amx;

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} ALIGNED;

// All eight tiles of the calling thread: 16 rows of 64 bytes.
static void open_tiles(void) {
    struct tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    if (has_amx) _tile_loadconfig(&config);
}

static void close_tiles(void) {
    if (has_amx) _tile_release();
}

// 16 or 32 rows: C tiles 0-3 (rows by outputs), A tiles 4-5, B tiles 6-7.
INLINE void multiply_many(const bf16 *x, const bf16 *w, int64_t num_inputs, const int is_double,
                          outputs *y) {
    const bf16 *below = x + num_inputs * 16;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < num_inputs; k += 32, x += 512, below += 512, w += 1024) {
        for (int line = 0; line < 1024; line += 32)
            __builtin_prefetch(w + PREFETCH / 2 + line, 0, 2);
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 32, 128);
        _tile_dpbf16ps(1, 4, 7);
        if (is_double) {
            _tile_loadd(5, below, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, y, sizeof *y);
    _tile_stored(1, y[0] + 16, sizeof *y);
    if (is_double) {
        _tile_stored(2, y + 16, sizeof *y);
        _tile_stored(3, y[16] + 16, sizeof *y);
    }
}

#else

enum { has_amx = 0 };
static void open_tiles(void) {}
static void close_tiles(void) {}
INLINE void multiply_many(const bf16 *x, const bf16 *w, int64_t num_inputs, const int is_double,
                          outputs *y) {}

#endif

// Up to 32 rows from `row`, a multiple of 16, times one group. Returns how many are done.
static int multiply(const bf16 *x, const bf16 *w, int64_t num_inputs, int64_t row, int64_t rows,
                    outputs *y) {
    x += row / 16 * num_inputs * 16 + row % 16 * 32;
    if (has_amx && rows > FEW_AMX) {
        if (rows > 16) {
            multiply_many(x, w, num_inputs, 1, y);
            return 32;
        }
        multiply_many(x, w, num_inputs, 0, y);
        return 16;
    }
    switch (rows) {
#define ROWS(n) case n: multiply_few(x, w, num_inputs, n, y); return n
    ROWS(1); ROWS(2); ROWS(3); ROWS(4); ROWS(5); ROWS(6); ROWS(7);
#undef ROWS
    }
    multiply_few(x, w, num_inputs, 8, y);
    return 8;
}

INLINE floats silu(floats x) { return x / (1.0f + exponential(-x)); }

static void finish(const struct target *to, const struct linear *linear, outputs *y, int64_t row,
                   int64_t rows, int64_t group) {
    floats bias_low = {}, bias_high = {};
    if (linear->bias) {
        bias_low = load_floats(linear->bias + group * GROUP);
        bias_high = load_floats(linear->bias + group * GROUP + 16);
    }
    for (int64_t i = 0; i < rows; i++, row++) {
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
static void apply(struct worker *worker, const struct linear *linear, const bf16 *x, int64_t num_rows,
                  const struct target *to) {
    int64_t num_chunks = (num_rows + CHUNK - 1) / CHUNK;
    FOR_EACH_UNIT(unit, num_chunks * linear->num_groups, worker, {
        int64_t group = unit % linear->num_groups, row = unit / linear->num_groups * CHUNK;
        int64_t end = row + CHUNK < num_rows ? row + CHUNK : num_rows;
        const bf16 *w = linear->weight + group * linear->num_inputs * GROUP;
        outputs y[32] ALIGNED;
        while (row < end) {
            int64_t done = multiply(x, w, linear->num_inputs, row, end - row, y);
            finish(to, linear, y, row, done < end - row ? done : end - row, group);
            row += done;
        }
    });
}

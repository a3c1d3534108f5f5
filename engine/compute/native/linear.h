// y = x W^T + b for any number of rows, from one copy of the weights.
//
// Weights are packed once, in panels of 32 outputs: [outputs / 32][inputs / 2][32 outputs]
// [2 inputs]. A panel is one stream from memory, and two B tiles every 32 inputs. Inputs lie in
// gemm tiles: [rows / 16][inputs / 32][16][32], each an A tile. Both are padded with zeros.

#pragma once

#include "gemm.h"
#include "structures.h"
#include "thread_team.h"

// Outputs in a panel; rows that one unit takes through it; how far weights are prefetched.
enum { OUTPUTS_PER_PANEL = 32, ROWS_PER_UNIT = 512, PREFETCH_DISTANCE = 2048 };

// Where a linear's outputs go.
struct linear_output {
    enum { STORE, ADD, GATE } kind; // GATE: 16 gates and 16 ups of a panel give 16 gated numbers
    float *floats;                  // STORE, ADD: [rows, width]
    bf16 *tiles;                    // GATE: gemm tiles of `width` inputs
    int64_t width;
};

// Offset of the first number of `row` in the gemm tile that holds its `input`.
INLINE int64_t tile_offset(int64_t row, int64_t input, int64_t width) {
    return (row / 16 * (width / 32) + input / 32) * 512 + row % 16 * 32;
}

INLINE floats silu(floats x) { return x * reciprocal(1.0f + exponential(-x)); }

// Add the bias to one panel's outputs `y` of `num_rows` rows from `row` on, and store them.
static void store_outputs(const struct linear_output *to, const struct linear *linear, floats32 *y,
                          int64_t row, int64_t num_rows, int64_t panel) {
    floats bias_low = {}, bias_high = {};
    if (linear->bias) {
        bias_low = load_floats(linear->bias + panel * OUTPUTS_PER_PANEL);
        bias_high = load_floats(linear->bias + panel * OUTPUTS_PER_PANEL + 16);
    }
    for (int64_t i = 0; i < num_rows; i++, row++) {
        floats low = load_floats(y[i]) + bias_low, high = load_floats(y[i] + 16) + bias_high;
        if (to->kind == GATE) {
            bf16 *gated = to->tiles + tile_offset(row, panel * 16, to->width) + panel % 2 * 16;
            store_narrow(gated, silu(low) * high);
            continue;
        }
        float *at = to->floats + row * to->width + panel * OUTPUTS_PER_PANEL;
        if (to->kind == ADD) low += load_floats(at), high += load_floats(at + 16);
        store_floats(at, low);
        store_floats(at + 16, high);
    }
}

// One phase: a unit is one panel for up to 512 rows, so that those rows stay in the L2 cache.
static void run_linear(const struct thread_team *team, int64_t phase, const struct linear *linear,
                       const bf16 *x, int64_t num_rows, const struct linear_output *to) {
    int64_t num_row_units = (num_rows + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT;
    int64_t num_inputs = linear->num_inputs, num_panels = linear->num_panels;
    FOR_EACH_UNIT(team, phase, unit, num_row_units * num_panels, {
        int64_t panel = unit % num_panels, first = unit / num_panels * ROWS_PER_UNIT;
        int64_t end = first + ROWS_PER_UNIT < num_rows ? first + ROWS_PER_UNIT : num_rows;
        const bf16 *w = linear->weight + panel * num_inputs * OUTPUTS_PER_PANEL;
        struct tile_pair b = {w, w + 32, 64, 1024};
        floats32 y[32] ALIGNED;
        for (int64_t row = first; row < end; row += 32) {
            int64_t here = end - row < 32 ? end - row : 32;
            const bf16 *rows = x + tile_offset(row, 0, num_inputs);
            struct tile_pair a = {rows, rows + 16 * num_inputs, 32, 512};
            if (row == first)
                gemm(a, b, num_inputs / 32, here, PREFETCH_DISTANCE, 0, y);
            else
                gemm(a, b, num_inputs / 32, here, 0, 0, y);
            store_outputs(to, linear, y, row, here, panel);
        }
    });
}

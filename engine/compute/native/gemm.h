// The gemm that linears and attention are made of: up to 32 rows of A times 32 columns of B.
//
//     C [32, 32] float32  =  sum over k of  A_k [32, 32] B_k [32, 32],  A and B in bfloat16
//
// A gemm tile is 16 rows of 64 bytes, what an AMX register holds. A_k is two tiles of 16 rows. B_k
// is two tiles of 16 columns, in pairs of its rows: row i of a tile holds rows 2 i and 2 i + 1 of
// B, column by column. AMX multiplies them; without AMX, and for a few rows, `dot2` does.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

// Rows that `dot_rows` takes at once.
enum { DOT_ROWS_MAX = 8 };

INLINE int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Two tiles of A or B for each k: where they are, and the distances (in numbers, not bytes)
// between their rows and from one k to the next.
struct tile_pair {
    const bf16 *first, *second;
    int64_t stride, step;
};

typedef float floats32[32];

// Compute 1 to 8 rows of C by `dot2`. `ahead` is how far to prefetch B, in numbers; 0 when it is in
// a cache. With `adds`, add to C.
INLINE void dot_rows(const bf16 *a, const struct tile_pair *at, struct tile_pair b,
                     int64_t num_steps, const int num_rows, const int ahead, const int adds,
                     floats32 *c) {
    floats low[DOT_ROWS_MAX] = {}, high[DOT_ROWS_MAX] = {};
    if (adds)
        for (int i = 0; i < num_rows; i++)
            low[i] = load_floats(c[i]), high[i] = load_floats(c[i] + 16);
    for (int64_t k = 0; k < num_steps; k++) {
        for (int pair = 0; pair < 16; pair++) {
            const bf16 *left = b.first + pair * b.stride, *right = b.second + pair * b.stride;
            if (ahead) {
                __builtin_prefetch(left + ahead, 0, 2);
                __builtin_prefetch(right + ahead, 0, 2);
            }
            words b_low = load_words(left), b_high = load_words(right);
            for (int i = 0; i < num_rows; i++) {
                words numbers = splat_pair(a + i * at->stride + 2 * pair);
                low[i] = dot2(low[i], b_low, numbers);
                high[i] = dot2(high[i], b_high, numbers);
            }
        }
        a += at->step, b.first += b.step, b.second += b.step;
    }
    for (int i = 0; i < num_rows; i++) store_floats(c[i], low[i]), store_floats(c[i] + 16, high[i]);
}

#ifdef HAS_TILES

static int has_amx;

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} ALIGNED;

// Request the permission to use AMX from the operating system, once in a process.
static void request_amx(void) {
    const int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    has_amx = __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-tile") &&
              syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}

// Configure the calling thread's eight tile registers: 16 rows of 64 bytes each.
static void configure_tiles(void) {
    struct tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    if (has_amx) _tile_loadconfig(&config);
}

static void release_tiles(void) {
    if (has_amx) _tile_release();
}

// Tile registers 0-3 hold C, 4 and 5 hold A, 6 and 7 hold B.
INLINE void amx_gemm(struct tile_pair a, struct tile_pair b, int64_t num_steps, const int is_double,
                     const int ahead, const int adds, floats32 *c) {
    if (adds) {
        _tile_loadd(0, c, sizeof *c);
        _tile_loadd(1, c[0] + 16, sizeof *c);
        _tile_loadd(2, c + 16, sizeof *c);
        _tile_loadd(3, c[16] + 16, sizeof *c);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < num_steps; k++) {
        if (ahead)
            for (int i = 0; i < 16; i++) {
                __builtin_prefetch(b.first + i * b.stride + ahead, 0, 2);
                __builtin_prefetch(b.second + i * b.stride + ahead, 0, 2);
            }
        _tile_loadd(4, a.first, a.stride * 2);
        _tile_loadd(6, b.first, b.stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b.second, b.stride * 2);
        _tile_dpbf16ps(1, 4, 7);
        if (is_double) {
            _tile_loadd(5, a.second, a.stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        a.first += a.step, a.second += a.step, b.first += b.step, b.second += b.step;
    }
    _tile_stored(0, c, sizeof *c);
    _tile_stored(1, c[0] + 16, sizeof *c);
    if (is_double) {
        _tile_stored(2, c + 16, sizeof *c);
        _tile_stored(3, c[16] + 16, sizeof *c);
    }
}

#else

enum { has_amx = 0 };
static void request_amx(void) {}
static void configure_tiles(void) {}
static void release_tiles(void) {}
INLINE void amx_gemm(struct tile_pair a, struct tile_pair b, int64_t num_steps, const int is_double,
                     const int ahead, const int adds, floats32 *c) {}

#endif

// Compute the first `num_rows` rows of C; later rows may be written too. With `adds`, add to C.
INLINE void gemm(struct tile_pair a, struct tile_pair b, int64_t num_steps, int64_t num_rows,
                 const int ahead, const int adds, floats32 *c) {
    if (has_amx && num_rows > DOT_ROWS_MAX / 2) {
        if (num_rows > 16)
            amx_gemm(a, b, num_steps, 1, ahead, adds, c);
        else
            amx_gemm(a, b, num_steps, 0, ahead, adds, c);
        return;
    }
    for (int64_t row = 0; row < num_rows; row += DOT_ROWS_MAX) {
        const bf16 *from = (row < 16 ? a.first : a.second) + row % 16 * a.stride;
        switch (num_rows - row) {
#define ROWS(n) dot_rows(from, &a, b, num_steps, n, ahead, adds, c + row)
            case 1: ROWS(1); break;
            case 2: ROWS(2); break;
            case 3: ROWS(3); break;
            case 4: ROWS(4); break;
            case 5: ROWS(5); break;
            case 6: ROWS(6); break;
            case 7: ROWS(7); break;
            default: ROWS(8);
#undef ROWS
        }
    }
}

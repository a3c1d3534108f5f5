// The thread team of one step: its threads take units of work, phase by phase.
//
// One parallel region spans a step, since opening one costs a wake-up. A phase is over when its
// units are done, not when every thread has arrived: a thread that lost its processor between two
// units delays no other, and passes through the phases that it missed. A waiting thread spins for
// some microseconds, then sleeps.

#pragma once

#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

enum { SPINS_BEFORE_SLEEP = 1000 };

struct phase {
    int64_t units_taken ALIGNED;
    int32_t units_done ALIGNED;
    int32_t num_sleepers;
};

// One thread's way through the phases of a step, which are zero at its start.
struct worker {
    struct phase *phase;
};

INLINE int64_t take_unit(struct worker *worker) {
    return __atomic_fetch_add(&worker->phase->units_taken, 1, __ATOMIC_RELAXED);
}

// Add `num_done` units to those done and wait until all `num_units` are. Every thread then sees
// what was written in the phase.
static void barrier_wait(struct worker *worker, int32_t num_done, int32_t num_units) {
    struct phase *phase = worker->phase++;
    if (num_done &&
        __atomic_add_fetch(&phase->units_done, num_done, __ATOMIC_SEQ_CST) == num_units) {
        if (__atomic_load_n(&phase->num_sleepers, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &phase->units_done, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0);
        return;
    }
    for (int i = 0; i < SPINS_BEFORE_SLEEP; i++) {
        if (__atomic_load_n(&phase->units_done, __ATOMIC_ACQUIRE) == num_units) return;
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
    __atomic_add_fetch(&phase->num_sleepers, 1, __ATOMIC_SEQ_CST);
    int32_t done;
    while ((done = __atomic_load_n(&phase->units_done, __ATOMIC_SEQ_CST)) != num_units)
        syscall(SYS_futex, &phase->units_done, FUTEX_WAIT_PRIVATE, done, 0, 0, 0);
}

// One phase: `...` runs for each unit 0 .. num_units - 1, each in one thread.
#define FOR_EACH_UNIT(unit, num_units, worker, ...)                                           \
    do {                                                                                      \
        int32_t num_done_ = 0;                                                                \
        for (int64_t unit; (unit = take_unit(worker)) < (num_units); num_done_++) __VA_ARGS__ \
        barrier_wait(worker, num_done_, num_units);                                           \
    } while (0)

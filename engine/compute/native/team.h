// The threads of one step: they take units of work phase by phase.
//
// One parallel region spans a step, since opening one costs a wake-up. A phase is over when its
// units are done, not when every thread has come: one that lost its processor to another process
// between two units holds nobody up, and runs through what it missed. Whoever has to wait spins for
// some microseconds and then sleeps.

#pragma once

#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

enum { SPINS = 1000 };

struct phase {
    int64_t taken ALIGNED; // units
    int32_t done ALIGNED;
    int32_t sleepers;
};

// One thread's way through the phases of a step, which are zero at its start.
struct worker {
    struct phase *phase;
};

INLINE int64_t take(struct worker *worker) {
    return __atomic_fetch_add(&worker->phase->taken, 1, __ATOMIC_RELAXED);
}

// Report `num_done` units of the phase as done and wait until all `num_units` are. What was written
// in the phase is seen by all afterwards.
static void leave(struct worker *worker, int32_t num_done, int32_t num_units) {
    struct phase *phase = worker->phase++;
    if (num_done && __atomic_add_fetch(&phase->done, num_done, __ATOMIC_SEQ_CST) == num_units) {
        if (__atomic_load_n(&phase->sleepers, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &phase->done, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (__atomic_load_n(&phase->done, __ATOMIC_ACQUIRE) == num_units) return;
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
    __atomic_add_fetch(&phase->sleepers, 1, __ATOMIC_SEQ_CST);
    int32_t done;
    while ((done = __atomic_load_n(&phase->done, __ATOMIC_SEQ_CST)) != num_units)
        syscall(SYS_futex, &phase->done, FUTEX_WAIT_PRIVATE, done, 0, 0, 0);
}

// One phase: `...` runs for each unit 0 .. num_units - 1, each in one thread.
#define FOR_EACH_UNIT(unit, num_units, worker, ...)                              \
    do {                                                                         \
        int32_t num_done_ = 0;                                                   \
        for (int64_t unit; (unit = take(worker)) < (num_units); num_done_++)     \
            __VA_ARGS__                                                          \
        leave(worker, num_done_, num_units);                                     \
    } while (0)

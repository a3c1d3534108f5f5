// The thread team of one step: its threads take units of work, phase by phase.
//
// One parallel region spans a step, since opening one costs a wake-up. A phase is over when its
// units are done, not when every thread has arrived: a thread that lost its processor between two
// units delays no other, and passes through the phases that it missed. A waiting thread spins for
// some microseconds, then sleeps.

#pragma once

#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

enum { SPINS_BEFORE_SLEEP = 1000 };

struct phase {
    int64_t units_taken ALIGNED;
    int32_t units_done ALIGNED;
    int32_t num_sleepers;
};

struct thread_team {
    struct phase *phases; // zero at the start of a step
    int64_t num_phases;
};

// Return a phase of the step. Ends the process if there is no such phase: the alternative is to
// write over other memory.
INLINE struct phase *phase_at(const struct thread_team *team, int64_t index) {
    if (index < 0 || index >= team->num_phases) {
        fprintf(stderr, "kvmeter: phase %ld of %ld\n", (long)index, (long)team->num_phases);
        abort();
    }
    return team->phases + index;
}

INLINE int64_t take_unit(struct phase *phase) {
    return __atomic_fetch_add(&phase->units_taken, 1, __ATOMIC_RELAXED);
}

// Add `num_done` units to those done and wait until all `num_units` are. Every thread then sees
// what was written in the phase.
static void barrier_wait(struct phase *phase, int32_t num_done, int32_t num_units) {
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
#define FOR_EACH_UNIT(team, phase_index, unit, num_units, ...)                                \
    do {                                                                                      \
        struct phase *phase_ = phase_at(team, phase_index);                                   \
        int32_t num_done_ = 0;                                                                \
        for (int64_t unit; (unit = take_unit(phase_)) < (num_units); num_done_++) __VA_ARGS__ \
        barrier_wait(phase_, num_done_, num_units);                                           \
    } while (0)

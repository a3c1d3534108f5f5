// The threads of one step: they take units of work from a counter and meet at barriers.
//
// One parallel region spans a step, since opening one costs a wake-up. Whoever waits at a barrier
// spins for some microseconds and then sleeps, so that a peer that lost its processor to another
// process is not waited for at full load.

#pragma once

#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vectors.h"

enum { SPINS = 2000 };

struct team {
    int num_threads;
    int arrived ALIGNED;
    int round ALIGNED; // how many barriers have opened
    int sleepers;
    int64_t taken ALIGNED; // units of the present phase
};

INLINE void pause_briefly(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

// Wait until all threads are here. Everything written before is seen by all afterwards.
static void meet(struct team *team) {
    int round = __atomic_load_n(&team->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == team->num_threads) {
        team->taken = 0;
        team->arrived = 0;
        __atomic_store_n(&team->round, round + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team->sleepers, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &team->round, FUTEX_WAKE_PRIVATE, team->num_threads, 0, 0, 0);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (__atomic_load_n(&team->round, __ATOMIC_ACQUIRE) != round) return;
        pause_briefly();
    }
    __atomic_add_fetch(&team->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team->round, __ATOMIC_SEQ_CST) == round)
        syscall(SYS_futex, &team->round, FUTEX_WAIT_PRIVATE, round, 0, 0, 0);
    __atomic_sub_fetch(&team->sleepers, 1, __ATOMIC_SEQ_CST);
}

// The next unit of this phase that nobody has taken, or any number from `num_units` up.
INLINE int64_t take(struct team *team) {
    return __atomic_fetch_add(&team->taken, 1, __ATOMIC_RELAXED);
}

// One phase: `unit` runs 0 .. num_units - 1, each in one thread, and all meet at the end.
#define FOR_EACH_UNIT(unit, num_units, team, ...)                                    \
    do {                                                                             \
        for (int64_t unit; (unit = take(team)) < (num_units);) __VA_ARGS__           \
        meet(team);                                                                  \
    } while (0)

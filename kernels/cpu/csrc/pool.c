/* A pool of threads. It lasts as long as the process; idle threads sleep.
 *
 * Each thread gets an equal range of a job's items and takes them in order, as a kernel prefetches
 * what its next item needs. A thread without items takes half of what another one has left, so
 * nobody waits for a thread that has lost its core or still sleeps, unless it holds an item.
 *
 * A thread that waits spins for some microseconds, then lets others have its core, and sleeps after
 * some more: within a step the next job is there before that, between steps it is not.
 */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

#define MOST_THREADS 256
#define SPINS 100  /* 4 us */
#define YIELDS 200 /* 100 us if nobody wants the core */

/* A range of items: 24 bits of the job's number, then first and end. One word, so that taking
 * items is one exchange, and fails if the job is over.
 */
#define ITEM_BITS 20
#define ITEM_MASK ((UINT64_C(1) << ITEM_BITS) - 1)
#define JOB_MASK ((UINT64_C(1) << 24) - 1)

typedef struct {
    _Alignas(64) _Atomic uint64_t items;
} Range;

static Range ranges[MOST_THREADS];
static pthread_mutex_t callers = PTHREAD_MUTEX_INITIALIZER; /* held during a job */
static _Atomic int num_threads = 1;                         /* the caller and the pool's */

/* The job. A thread reads it only while it holds an item: before the next one can be written. */
static Task job_task;
static const void *job_work;

static _Alignas(64) _Atomic uint64_t started; /* number of the last job */
static _Alignas(64) _Atomic uint64_t finished;
static _Alignas(64) _Atomic int64_t left; /* items that are not computed */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static _Atomic int sleepers;

static uint64_t range_of(uint64_t job, uint64_t first, uint64_t end) {
    return job << (2 * ITEM_BITS) | first << ITEM_BITS | end;
}
static uint64_t number_of(uint64_t items) { return items >> (2 * ITEM_BITS); }
static uint64_t first_of(uint64_t items) { return items >> ITEM_BITS & ITEM_MASK; }
static uint64_t end_of(uint64_t items) { return items & ITEM_MASK; }

/* Tell the processor that this is a loop that waits. */
static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait until `word` is no longer `old`. */
static void await(_Atomic uint64_t *word, uint64_t old) {
    for (int i = 0; i < SPINS; i++, relax())
        if (*word != old) return;
    for (int i = 0; i < YIELDS; i++, sched_yield())
        if (*word != old) return;
    pthread_mutex_lock(&lock);
    sleepers++; /* before the word is read again: who changes it looks for sleepers afterwards */
    while (*word == old) pthread_cond_wait(&changed, &lock);
    sleepers--;
    pthread_mutex_unlock(&lock);
}

static void change(_Atomic uint64_t *word, uint64_t value) {
    *word = value;
    if (!sleepers) return;
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Take the first item of a thread's own range.   Returns -1 if there is none, or the job is over. */
static int64_t take_own(uint64_t job, int self) {
    uint64_t seen = ranges[self].items;
    while (number_of(seen) == (job & JOB_MASK) && first_of(seen) < end_of(seen)) {
        uint64_t rest = range_of(job, first_of(seen) + 1, end_of(seen));
        if (atomic_compare_exchange_weak(&ranges[self].items, &seen, rest)) return first_of(seen);
    }
    return -1;
}

/* Make the second half of what another thread has left the thread's own range. That one is empty, so
 * nobody else changes it.   Returns whether there was any.
 */
static int take_half(uint64_t job, int self) {
    int threads = num_threads;
    for (int other = self + 1; other < self + threads; other++) {
        Range *from = &ranges[other % threads];
        uint64_t seen = from->items;
        while (number_of(seen) == (job & JOB_MASK) && first_of(seen) < end_of(seen)) {
            uint64_t middle = (first_of(seen) + end_of(seen)) / 2, end = end_of(seen);
            uint64_t rest = range_of(job, first_of(seen), middle);
            if (!atomic_compare_exchange_weak(&from->items, &seen, rest)) continue;
            ranges[self].items = range_of(job, middle, end);
            return 1;
        }
    }
    return 0;
}

/* Compute items of a job until no thread has any left to take. */
static void take_part(uint64_t job, int self) {
    if (number_of(ranges[self].items) != (job & JOB_MASK)) return; /* it has fewer threads */
    int64_t done = 0;
    do {
        for (int64_t item; (item = take_own(job, self)) >= 0; done++) job_task(job_work, item);
    } while (take_half(job, self));
    if (done && atomic_fetch_sub(&left, done) == done) change(&finished, job);
}

static void *work_for_ever(void *self) {
    for (uint64_t job = 0;;) {
        await(&started, job);
        job = started;
        take_part(job, (int)(intptr_t)self);
    }
    return NULL;
}

/* A forked child has none of the pool's threads. */
static void forget_threads(void) {
    num_threads = 1;
    sleepers = 0;
    pthread_mutex_init(&callers, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
}

/* Start threads until there are so many.   Returns how many of them there are. */
static int have_threads(int wanted) {
    static int is_watching_forks;
    if (!is_watching_forks) is_watching_forks = !pthread_atfork(NULL, NULL, forget_threads);
    while (num_threads < wanted) {
        sigset_t all, before;
        pthread_t thread;
        sigfillset(&all); /* signals are the caller's, whose system calls they have to interrupt */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int failed = pthread_create(&thread, NULL, work_for_ever, (void *)(intptr_t)num_threads);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (failed) return num_threads;
        pthread_detach(thread);
        num_threads++;
    }
    return wanted;
}

void share(Task task, const void *work, int64_t items, int threads) {
    if (threads > items) threads = items;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    /* A second caller computes alone. */
    if (threads <= 1 || items > (int64_t)ITEM_MASK || pthread_mutex_trylock(&callers)) {
        for (int64_t item = 0; item < items; item++) task(work, item);
        return;
    }
    threads = have_threads(threads);
    uint64_t job = started + 1;
    job_task = task, job_work = work, left = items;
    for (int t = 0; t < threads; t++)
        ranges[t].items = range_of(job, items * t / threads, items * (t + 1) / threads);
    change(&started, job);
    take_part(job, 0);
    await(&finished, job - 1);
    pthread_mutex_unlock(&callers);
}

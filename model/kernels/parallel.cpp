// The thread pool. Threads block when there is nothing to do: they look for work for at most 20 microseconds, the
// time between two operations of one step, and then sleep in the kernel. (An OpenMP runtime would be a second pool
// beside torch's own, and one whose waiting is set by the environment when it is loaded, too early for us.)
//
// The caller works as well and waits only for ranges that somebody has taken, never for a thread that is still
// asleep or was descheduled: beside a busy neighbour a call is slower, but it does not stand still.
#include "parallel.h"

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <cstdlib>

namespace {

struct Job {
    void (*body)(void*, int64_t, int64_t);
    void* context;
    int64_t items, grain, ranges;
};

constexpr int64_t spin_nanoseconds = 20'000;
constexpr int most_workers = 1023;

Job job;                                // written only while no range is left and none is unfinished
std::atomic<int64_t> unclaimed{0};      // ranges of `job` that nobody has taken; negative once it is exhausted
std::atomic<uint32_t> finished{0};      // ranges of `job` that are done
std::atomic<uint32_t> published{0};     // counts jobs; idle workers sleep on it
std::atomic<int> wanted_workers{0};     // beside the caller
int started_workers = 0;                // guarded by pool_mutex
pthread_mutex_t pool_mutex = PTHREAD_MUTEX_INITIALIZER;

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Wait until `word` differs from `old`: first awake and briefly, then asleep.
void wait_for_change(std::atomic<uint32_t>& word, uint32_t old) {
    const int64_t deadline = now() + spin_nanoseconds;
    do {
        for (int i = 0; i < 8; i++) {
            if (word.load(std::memory_order_acquire) != old) return;
            relax();
        }
    } while (now() < deadline);
    word.wait(old, std::memory_order_acquire);
}

// Take ranges until none is left. `job` is read only after a range was taken: until that range is counted as
// finished, nobody replaces the job.
void work() {
    for (;;) {
        const int64_t left = unclaimed.fetch_sub(1, std::memory_order_acq_rel);
        if (left <= 0) return;
        const Job mine = job;
        const int64_t begin = (mine.ranges - left) * mine.grain;
        const int64_t end = begin + mine.grain < mine.items ? begin + mine.grain : mine.items;
        mine.body(mine.context, begin, end);
        if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 == mine.ranges) finished.notify_all();
    }
}

void* worker(void* index) {
    for (uint32_t seen = 0;;) {
        wait_for_change(published, seen);
        seen = published.load(std::memory_order_acquire);
        if (reinterpret_cast<intptr_t>(index) < wanted_workers.load(std::memory_order_relaxed)) work();
    }
    return nullptr;
}

void start_workers() {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (; started_workers < wanted_workers.load(); started_workers++) {
        pthread_t thread;
        void* index = reinterpret_cast<void*>(static_cast<intptr_t>(started_workers));
        if (pthread_create(&thread, &attributes, worker, index) != 0) break;  // fewer threads: slower, not wrong
    }
    pthread_attr_destroy(&attributes);
}

void publish_and_wait(const Job& next) {
    if (started_workers < wanted_workers.load()) start_workers();
    job = next;
    finished.store(0, std::memory_order_relaxed);
    unclaimed.store(next.ranges, std::memory_order_release);
    published.fetch_add(1, std::memory_order_acq_rel);
    published.notify_all();
    work();
    for (uint32_t done; (done = finished.load(std::memory_order_acquire)) != next.ranges;)
        wait_for_change(finished, done);
}

}  // namespace

// Use this many threads, the calling one included. Threads beyond it stay asleep.
OCTAVO_API void octavo_set_threads(int threads) {
    const int workers = threads - 1;
    wanted_workers.store(workers < 0 ? 0 : workers > most_workers ? most_workers : workers);
}

OCTAVO_API int octavo_threads() { return 1 + wanted_workers.load(std::memory_order_relaxed); }

void* octavo_thread_memory(int64_t bytes) {
    static thread_local void* memory = nullptr;
    static thread_local int64_t size = 0;
    if (bytes > size) {
        std::free(memory);
        size = (bytes + 63) / 64 * 64;
        memory = std::aligned_alloc(64, size);
        if (memory == nullptr) std::abort();
    }
    return memory;
}

void octavo_parallel(int64_t items, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context) {
    if (items <= 0) return;
    const int64_t ranges = (items + grain - 1) / grain;
    if (ranges == 1 || wanted_workers.load(std::memory_order_relaxed) == 0 || pthread_mutex_trylock(&pool_mutex) != 0) {
        body(context, 0, items);
        return;
    }
    publish_and_wait(Job{body, context, items, grain, ranges});
    pthread_mutex_unlock(&pool_mutex);
}

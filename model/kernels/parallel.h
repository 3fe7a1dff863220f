// What every kernel file shares: names per instruction set, and the thread pool.
//
// A kernel file may be compiled several times, once per instruction set ("// variants: plain avx2" in its first lines;
// see build.py). Two rules keep the copies apart: whatever Python calls is declared with OCTAVO_KERNEL(name), which
// yields name_avx2 and so on; everything else is `static` or in an anonymous namespace, and no templates of the
// standard library are used. Otherwise the linker would keep one copy of a function, perhaps the one this CPU lacks.
#pragma once
#include <cstdint>

#define OCTAVO_JOIN_(a, b) a##_##b
#define OCTAVO_JOIN(a, b) OCTAVO_JOIN_(a, b)
#define OCTAVO_API extern "C" __attribute__((visibility("default")))
#define OCTAVO_NAME(name) OCTAVO_JOIN(name, OCTAVO_VARIANT)
#define OCTAVO_KERNEL(name) OCTAVO_API void OCTAVO_NAME(name)

// Call body(context, begin, end) for consecutive ranges of at most `grain` items that cover 0 .. items-1, on the pool
// and the calling thread, and return when all are done. Which thread takes which range is left open, so a body must
// not let its results depend on that. May be called from several threads and from within a body: only one call at a
// time has the pool, the others run on their own thread.
extern "C" void octavo_parallel(int64_t items, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context);

// The same for a lambda (begin, end).
template <class Body>
static inline void parallel_for(int64_t items, int64_t grain, const Body& body) {
    auto call = [](void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); };
    octavo_parallel(items, grain, call, const_cast<Body*>(&body));
}

// An operation on fewer elements than this is not worth waking a thread for.
constexpr int64_t elements_per_range = 16384;

// The same for a lambda (token), which has so many elements to work on.
template <class Body>
static inline void for_each_token(int64_t tokens, int64_t elements, const Body& body) {
    parallel_for(tokens, 1 + elements_per_range / elements, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) body(token);
    });
}

// How many threads a call may use, the calling one included.
extern "C" int octavo_threads();

// At least this many bytes that belong to the calling thread and are kept for its next request, aligned to 64.
extern "C" void* octavo_thread_memory(int64_t bytes);

/* The CPU kernels: every pass reads its maps once and writes its result once.

   Plain C for gcc and clang, without headers of Python or PyTorch: one build works with every version of both. It uses
   the compilers' vector extension; x86 needs AVX2, FMA and F16C (Haswell, Zen and later), checked at run time.

   The threads are PyTorch's. A second OpenMP runtime would bring a second thread pool that competes with the first, so
   none is linked: cpu.py passes three functions of the runtime that PyTorch has loaded. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#endif

typedef float floats __attribute__((vector_size(32))), quads __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16)));
typedef int32_t masks __attribute__((vector_size(32)));
typedef double doubles __attribute__((vector_size(64)));

enum { LANES = 8, LINE = 64 };         /* values in a vector, bytes in a cache line */
enum { WIDEST = 2048, RUN = 1 << 12 }; /* channels in a chunk, values in a run */

static inline floats splat(float value) { return value - (floats){0}; }
static inline floats positive(floats v) { return (floats)((words)v & (words)~(v < 0)); } /* keeps NaN */
static inline floats where(masks keep, floats v) { return (floats)((masks)v & keep); }

static inline float total(floats v) {
    quads low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, (char *)&v + sizeof low, sizeof high);
    low += high;
    return (low[0] + low[1]) + (low[2] + low[3]);
}

/* A mask of the last `count` lanes. */
static inline masks last(long count) {
    static const int32_t lanes[2 * LANES] = {[LANES] = -1, -1, -1, -1, -1, -1, -1, -1};
    masks m;
    memcpy(&m, lanes + count, sizeof m);
    return m;
}

static inline void accumulate(double *sums, floats v, int first) {
    doubles wide = __builtin_convertvector(v, doubles), before;
    memcpy(&before, sums, sizeof before);
    if (!first) wide += before;
    memcpy(sums, &wide, sizeof wide);
}

/* ---- number formats: load eight values as floats, store them rounded to nearest even ---- */

typedef struct { uint16_t bits; } bfloat;
typedef struct { uint16_t bits; } half;

static inline floats load_float(const float *p) {
    floats v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store_float(float *p, floats v) { memcpy(p, &v, sizeof v); }

static inline floats load_bfloat(const bfloat *p) {
#if defined(__x86_64__)
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    halves bits;
    memcpy(&bits, p, sizeof bits);
    return (floats)(__builtin_convertvector(bits, words) << 16);
#endif
}

static inline halves rounded(floats v) {
    words bits = (words)v, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, number = (words)(v == v);
    up = (up & number) | (0x7fc0 & ~number);
#if defined(__x86_64__)
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)up, (__m256i)up), 0x08);
    return (halves)_mm256_castsi256_si128(packed);
#else
    return __builtin_convertvector(up, halves);
#endif
}

static inline void store_bfloat(bfloat *p, floats v) {
    halves bits = rounded(v);
    memcpy(p, &bits, sizeof bits);
}

#if defined(__x86_64__)
static inline floats load_half(const half *p) { return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

static inline __m128i narrow(floats v) {
    return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline void store_half(half *p, floats v) { _mm_storeu_si128((__m128i *)p, narrow(v)); }
#else
typedef _Float16 narrow __attribute__((vector_size(16)));

static inline floats load_half(const half *p) {
    narrow v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, floats);
}

static inline void store_half(half *p, floats v) {
    narrow few = __builtin_convertvector(v, narrow);
    memcpy(p, &few, sizeof few);
}
#endif

/* Nontemporal stores bypass the caches: they neither read a line before overwriting it nor evict what is needed. */
#if defined(__x86_64__)
static inline void stream_float(float *p, floats v) { _mm256_stream_ps(p, (__m256)v); }
static inline void stream_bfloat(bfloat *p, floats v) { _mm_stream_si128((__m128i *)p, (__m128i)rounded(v)); }
static inline void stream_half(half *p, floats v) { _mm_stream_si128((__m128i *)p, narrow(v)); }
static inline void fence(void) { _mm_sfence(); }
#else
static inline void stream_float(float *p, floats v) { store_float(p, v); }
static inline void stream_bfloat(bfloat *p, floats v) { store_bfloat(p, v); }
static inline void stream_half(half *p, floats v) { store_half(p, v); }
static inline void fence(void) {}
#endif

/* ---- jobs and threads ---- */

enum kernel { /* the order of Kernel in cpu.py */
    POOL, POOL_BACKWARD, EXCITE, EXCITE_BACKWARD, EXCITE_ADD_RELU, EXCITE_ADD_RELU_BACKWARD,
    POOL_BOTH, POOL_BOTH_BACKWARD, /* the mean beside the mean square */
    RELU_SQUARE, RELU_SQUARE_BACKWARD, BLEND_SQUARE, BLEND_SQUARE_BACKWARD
};
static inline int pool(int kernel) { return kernel == POOL || kernel == POOL_BOTH; }
static inline int pool_backward(int kernel) { return kernel == POOL_BACKWARD || kernel == POOL_BOTH_BACKWARD; }
static inline int excite_backward(int kernel) {
    return kernel == EXCITE_BACKWARD || kernel == EXCITE_ADD_RELU_BACKWARD;
}
static inline int two_sums(int kernel) { return kernel == POOL_BOTH || excite_backward(kernel); }

/* One call: maps of n × c planes of `hw` values, all in one layout. */
typedef struct job job;
typedef void (*runner)(const job *, long from, long to); /* runs a range of tasks */
struct job {
    const void *x, *grad, *residual, *result; /* input maps */
    void *y, *dresidual;                      /* output maps; y is the gradient of x in a backward kernel */
    const float *factor;                      /* input, one value per plane; two rows for POOL_BOTH_BACKWARD */
    float *per_plane;                         /* output, one value per plane: its mean square; or two rows of them: its
                                                 mean and mean square, or its parts of dα and dβ */
    float alpha, beta;
    long n, c, hw;
    double inverse;                 /* 1 / hw */
    long nontemporal;               /* whether stores bypass the caches */
    long tasks, parts;              /* a task is a plane or, in channels_last, one of `parts` parts of an image */
    long pass;                      /* BOTH, or one pass over all tasks, where an image has several parts */
    double (*sums)[WIDEST + LANES]; /* of the first pass, two rows per task */
    runner run;
};
enum { BOTH, FIRST, SECOND };

static inline void add_parts(double (*total)[WIDEST + LANES], double (*sums)[WIDEST + LANES], long parts, long width) {
    for (int row = 0; row < 2; row++)
        for (long k = 0; k < width; k++) {
            total[row][k] = sums[row][k];
            for (long part = 1; part < parts; part++) total[row][k] += sums[2 * part + row][k];
        }
}

static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_num)(void), (*num_threads)(void);

/* GOMP_parallel, omp_get_thread_num and omp_get_num_threads. */
void deepsquare_use_threads(void *run, void *num, void *count) {
    parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))run;
    thread_num = (int (*)(void))num;
    num_threads = (int (*)(void))count;
}

static void run_slice(const job *j, long thread, long threads) {
    j->run(j, j->tasks * thread / threads, j->tasks * (thread + 1) / threads);
    if (j->nontemporal) fence();
}

static void run_thread(void *j) { run_slice(j, thread_num(), num_threads()); }

static void start(job *j, long threads) {
    enum { SMALL = 1 << 15 }; /* values, PyTorch's own grain size: below it a second thread costs more than it gains */
    if (threads < 2 || j->tasks < 2 || !parallel || j->n * j->c * j->hw < SMALL)
        run_slice(j, 0, 1);
    else
        parallel(run_thread, j, (unsigned)threads, 0);
}

/* The number of parts of an image: several where there are few images. It does not depend on the number of threads, so
   neither does the order of additions. */
static long parts_per_image(const job *j) {
    enum { TASKS = 4, ROWS = 64 };
    long parts = (TASKS + j->n - 1) / j->n, most = j->hw / ROWS;
    return most < 1 ? 1 : parts < most ? parts : most;
}

/* ---- Equation (25): the factor 1 - β + β·s of a plane and its derivatives in G, α and β ---- */

typedef struct { float scale, slope, alpha_slope, beta_slope; int identity; } excited;

static inline excited excitation(float g, float alpha, float beta) {
    float offset = alpha * alpha, sum = g + offset, scale = g / sum, inverse = 1 / sum;
    int identity = offset == 0 || sum < 1.17549435e-38f || g == INFINITY, flat = identity || sum == INFINITY;
    return (excited){
        identity ? 1 + (beta - beta) : 1 - beta + beta * scale, /* NaN for a β that is */
        flat ? 0 : beta * offset * inverse * inverse, flat ? 0 : -2 * beta * alpha * scale * inverse,
        identity ? 0 : sum == INFINITY ? -1 : -offset * inverse, identity};
}

#define T float
#define NAME(name) name##_float
#include "cpu_loops.h"
#undef T
#undef NAME

#define T bfloat
#define NAME(name) name##_bfloat
#include "cpu_loops.h"
#undef T
#undef NAME

#define T half
#define NAME(name) name##_half
#include "cpu_loops.h"

int deepsquare_supported(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return 1;
#endif
}

/* Runs a kernel on maps of `format` 0 float, 1 bfloat, 2 half. */
void deepsquare_run(job *j, int kernel, int format, int channels_last, long threads) {
    enum { LARGE = 1 << 24 }; /* bytes: more than the last-level cache keeps until the next operation */
    long bytes = j->n * j->c * j->hw * (format == 0 ? 4 : 2);
    j->nontemporal = bytes >= LARGE && j->y != j->x /* in place the line is in a cache already */
        && ((uintptr_t)j->y | (uintptr_t)j->dresidual) % LINE == 0;
    j->inverse = 1 / (double)j->hw;
    j->run = (format == 0 ? runners_float : format == 1 ? runners_bfloat : runners_half)[kernel][channels_last];
    if (kernel >= RELU_SQUARE) {
        j->tasks = (j->hw + RUN - 1) / RUN;
    } else if (channels_last) {
        j->parts = parts_per_image(j);
        j->tasks = j->n * ((j->c + WIDEST - 1) / WIDEST) * j->parts;
    } else {
        j->tasks = j->n * j->c;
    }
    j->pass = BOTH;
    if (channels_last && !pool_backward(kernel) && kernel < RELU_SQUARE && j->parts > 1) {
        j->sums = malloc((size_t)(2 * j->tasks) * sizeof *j->sums);
        if (j->sums) {
            j->pass = FIRST;
            start(j, threads);
            j->pass = SECOND;
        } else {
            j->tasks /= j->parts;
            j->parts = 1;
        }
    }
    start(j, threads);
    if (j->pass == SECOND) free(j->sums);
}

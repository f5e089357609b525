/* The CPU kernels: every pass reads its maps once and writes its result once.

   Plain C for gcc and clang, without headers of Python or PyTorch: one build works with every version of both. It uses
   the compilers' vector extension. On x86 cpu_avx512.c includes this file and compiles the kernels a second time, with
   vectors of sixteen floats instead of eight. x86 needs AVX2, FMA and F16C (Haswell, Zen and later), and the wider
   vectors AVX-512 with its F, BW, DQ and VL (Skylake-X, Zen 4 and later); both are checked at run time.

   To add a kernel: its name in `enum kernel` and in Kernel of cpu.py, its fields in `struct job` and in `call`, which
   cpu.py packs, its arithmetic in cpu_loops.h with its KERNEL(...) and its line of `runners`. Nothing is written for one
   instruction set or one number format alone.

   The threads are PyTorch's. A second OpenMP runtime would bring a second thread pool that competes with the first, so
   none is linked: cpu.py passes three functions of the runtime that PyTorch has loaded. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(AVX512) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#elif defined(AVX512)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#endif

enum { LINE = 64, RUN = 1 << 12 };              /* bytes in a cache line, values in a run */
enum { WIDEST = 2048, PADDED = WIDEST + 16 };   /* channels in a chunk, and with those that a last vector adds */
#include "cpu_vectors.h"

/* ---- jobs ---- */

enum kernel { /* the order of Kernel in cpu.py */
    POOL, POOL_BACKWARD, EXCITE, EXCITE_BACKWARD, EXCITE_ADD_RELU, EXCITE_ADD_RELU_BACKWARD,
    POOL_BOTH, POOL_BOTH_BACKWARD, /* the mean beside the mean square */
    RELU_SQUARE, RELU_SQUARE_BACKWARD, BLEND_SQUARE, BLEND_SQUARE_BACKWARD,
    BLOCK_ADD, BLOCK_SHUFFLE, /* the end of a building block at inference: cpu_blocks.h */
    NORM_SUMS, NORM_FACTORS, NORM_ADD_RELU, /* and in training: cpu_norm.h and cpu_training.h */
    NORM_BACKWARD_SUMS, NORM_BACKWARD_FACTORS, NORM_BACKWARD
};
static inline int pool(int kernel) { return kernel == POOL || kernel == POOL_BOTH; }
static inline int pool_backward(int kernel) { return kernel == POOL_BACKWARD || kernel == POOL_BOTH_BACKWARD; }
static inline int excite_backward(int kernel) {
    return kernel == EXCITE_BACKWARD || kernel == EXCITE_ADD_RELU_BACKWARD;
}
static inline int norm_sums(int kernel) { return kernel == NORM_SUMS || kernel == NORM_BACKWARD_SUMS; }
static inline int normalizes(int kernel) { return kernel >= NORM_SUMS; }
static inline int two_sums(int kernel) {
    return kernel == POOL_BOTH || excite_backward(kernel) || norm_sums(kernel);
}

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
    double (*sums)[PADDED];         /* of the first pass, two rows per task */
    runner run;
    /* The end of a building block, of its main branch and its shortcut: */
    const float *a[2], *b[2];       /* one value per channel */
    float floor[2];
    long excited;                   /* whether the main branch is */
    long image, row;                /* of the shortcut: values from one image, in channels_last position, to the next */
    long width;                     /* channels of a task in channels_last */
    /* The same in training, all but the last in rows of `stride` channels for each image: */
    double *moments[2], *products[2]; /* cpu_norm.h */
    float *scale, *slope, *offset, *center;
    float *per_channel;             /* output, rows of `stride`: the mean and variance; or dw, db and parts of dα and dβ */
    const float *weight, *bias;
    double eps;
    long stride;
};
enum { BOTH, FIRST, SECOND };

static inline void add_parts(double (*total)[PADDED], double (*sums)[PADDED], long parts, long width) {
    for (int row = 0; row < 2; row++)
        for (long k = 0; k < width; k++) {
            total[row][k] = sums[row][k];
            for (long part = 1; part < parts; part++) total[row][k] += sums[2 * part + row][k];
        }
}

/* ---- Equation (25): the factor 1 - β + β·s of a plane and its derivatives in G, α and β ---- */

typedef struct { floats scale, slope, alpha_slope, beta_slope; masks identity; } excited;

static inline excited excitation(floats g, float alpha, float beta) {
    float offset = alpha * alpha;
    floats sum = g + offset, scale = g / sum, inverse = 1 / sum, zero = {0};
    masks infinite = sum == INFINITY, identity = (sum < 1.17549435e-38f) | (g == INFINITY);
    if (offset == 0) identity = ~(masks){0};
    masks flat = identity | infinite;
    return (excited){
        choose(identity, splat(1 + (beta - beta)), 1 - beta + beta * scale), /* NaN for a β that is */
        choose(flat, zero, beta * offset * inverse * inverse),
        choose(flat, splat(0 * alpha), -2 * beta * alpha * scale * inverse), /* NaN for an α that is, or infinite */
        choose(identity, zero, choose(infinite, splat(-1), -offset * inverse)), identity};
}

#include "cpu_norm.h"

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
#undef T
#undef NAME

/* The runners of each format, compiled for one instruction set. */
#if defined(AVX512)
const runner (*const deepsquare_avx512[])[2] = {runners_float, runners_bfloat, runners_half};
#else
static const runner (*const lanes8[])[2] = {runners_float, runners_bfloat, runners_half};
#endif

#if defined(__x86_64__) && defined(__clang__)
#pragma clang attribute pop
#elif defined(__x86_64__)
#pragma GCC pop_options
#endif

#if !defined(AVX512)
/* ---- threads: from here on for any machine, since it runs before the instruction set is known ---- */

#if defined(__x86_64__)
extern const runner (*const deepsquare_avx512[])[2]; /* cpu_avx512.c */
#endif

static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_num)(void), (*num_threads)(void);

/* GOMP_parallel, omp_get_thread_num and omp_get_num_threads. */
void deepsquare_use_threads(void *run, void *num, void *count) {
    parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))run;
    thread_num = (int (*)(void))num;
    num_threads = (int (*)(void))count;
}

/* Orders nontemporal stores before what follows. */
static inline void fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
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

/* 0 where the kernels cannot run, 1 with vectors of eight floats, 2 with AVX-512. */
int deepsquare_supported(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned a, b, features = 0, d; /* clang 14's __builtin_cpu_supports does not know F16C */
    if (!__get_cpuid(1, &a, &b, &features, &d) || !(features & bit_F16C)) return 0;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return 1;
    return __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? 2 : 1;
#else
    return 1;
#endif
}

static int selected = 1;

/* Selects the widest vectors that the machine has, up to `most` as counted above; returns which. */
int deepsquare_select(int most) {
    int widest = deepsquare_supported();
    return selected = most < widest ? most : widest;
}

/* Contiguous floats and small planes keep vectors of eight: planes seldom begin at a cache line, and of loads as long as
   a line each then takes two. Half types and channels_last gain by AVX-512. */
static runner find_runner(const job *j, int kernel, int format, int channels_last) {
    enum { SMALL_PLANE = 64 };
    (void)j;
#if defined(__x86_64__)
    if (selected == 2 && (channels_last || (format && j->hw >= SMALL_PLANE)))
        return deepsquare_avx512[format][kernel][channels_last];
#endif
    return lanes8[format][kernel][channels_last];
}

/* Runs a kernel on maps of `format` 0 float, 1 bfloat, 2 half. */
static void run_job(job *j, int kernel, int format, int channels_last, long threads) {
    enum { LARGE = 1 << 24 }; /* bytes: more than the last-level cache keeps until the next operation */
    long bytes = j->n * j->c * j->hw * (format == 0 ? 4 : 2);
    j->nontemporal = bytes >= LARGE && j->y != j->x /* in place the line is in a cache already */
        && ((uintptr_t)j->y | (uintptr_t)j->dresidual) % LINE == 0;
    j->inverse = 1 / (double)j->hw;
    j->run = find_runner(j, kernel, format, channels_last);
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

/* A call of run_job, as cpu.py packs it; addresses are 0 where there is none. */
typedef struct {
    long kernel, format, channels_last, threads;
    const void *x, *grad, *residual, *result;
    void *y, *dresidual;
    const float *factor;
    float *per_plane;
    const float *alpha, *beta;
    long n, c, hw;
} call;

void deepsquare_call(const call *k) {
    job j = {
        .x = k->x, .grad = k->grad, .residual = k->residual, .result = k->result, .y = k->y, .dresidual = k->dresidual,
        .factor = k->factor, .per_plane = k->per_plane, .alpha = k->alpha ? *k->alpha : 0,
        .beta = k->beta ? *k->beta : 1, .n = k->n, .c = k->c, .hw = k->hw};
    run_job(&j, (int)k->kernel, (int)k->format, (int)k->channels_last, k->threads);
}

/* The end of a building block, as cpu.py packs it. */
typedef struct {
    long kernel, format, channels_last, threads;
    const void *z, *shortcut;
    void *y;
    const float *norms[2][4]; /* running mean, running variance, weight and bias; no means: not normalized */
    double eps[2];
    const float *alpha, *beta; /* no α: not excited */
    long relu[2], n, c, hw, image, row;
} block_end;

/* Batch normalization as a·z + b. */
static void affine_of(const float *const *norm, float eps, long c, float *a, float *b) {
    const float *mean = norm[0], *variance = norm[1];
    for (long k = 0; k < c; k++) a[k] = mean ? 1 / sqrtf(variance[k] + eps) : 1;
    for (long k = 0; norm[2] && k < c; k++) a[k] *= norm[2][k];
    for (long k = 0; k < c; k++) b[k] = (norm[3] ? norm[3][k] : 0) - (mean ? mean[k] * a[k] : 0);
}

/* The channels of a task in channels_last: so many that an image's stay in the L2 cache, and several tasks where there
   are few images. It does not depend on the number of threads. */
static long chunk_width(const block_end *e) {
    enum { L2 = 1 << 19, TASKS = 4, LEAST = 64 };
    long width = L2 / (e->hw * (e->format == 0 ? 4 : 2)), most = (e->c * e->n + TASKS - 1) / TASKS;
    if (most < width) width = most;
    width = width / LEAST * LEAST;
    return width < LEAST ? LEAST : width < WIDEST ? width : WIDEST;
}

/* Runs BLOCK_ADD or BLOCK_SHUFFLE; 0 if there is no memory. */
int deepsquare_block_end(const block_end *e) {
    long padded = e->c + PADDED - WIDEST;
    float *affine = calloc((size_t)(4 * padded), sizeof *affine);
    if (!affine) return 0;
    job j = {.x = e->z, .residual = e->shortcut, .y = e->y, .n = e->n, .c = e->c, .hw = e->hw};
    j.inverse = 1 / (double)e->hw;
    j.excited = e->alpha != 0;
    j.alpha = e->alpha ? *e->alpha : 0;
    j.beta = e->beta ? *e->beta : 1;
    j.image = e->image;
    j.row = e->row;
    j.width = chunk_width(e);
    for (int k = 0; k < 2; k++) {
        j.a[k] = affine + 2 * k * padded;
        j.b[k] = affine + (2 * k + 1) * padded;
        j.floor[k] = e->relu[k] ? 0 : -INFINITY;
        affine_of(e->norms[k], (float)e->eps[k], e->c, (float *)j.a[k], (float *)j.b[k]);
    }
    j.tasks = e->channels_last ? e->n * ((e->c + j.width - 1) / j.width) : e->n * e->c;
    j.run = find_runner(&j, (int)e->kernel, (int)e->format, (int)e->channels_last);
    start(&j, e->threads);
    free(affine);
    return 1;
}

/* The end of a building block in training, as cpu.py packs it: forward, or backward where there is a gradient. */
typedef struct {
    long format, channels_last, threads;
    const void *z, *shortcut, *grad, *result;
    void *y, *dshortcut;
    const float *weight, *bias, *alpha, *beta;
    double *moments;    /* written forward and read backward, two rows of n × stride */
    float *per_channel; /* output: two rows of `stride`, or four */
    float *running[2];  /* mean and variance, updated forward; or 0 */
    double eps, momentum;
    long n, c, hw;
} block_training;

/* Whether the statistics are finite; if so, they update the running ones. */
static int update_running(const block_training *e, long stride) {
    double count = (double)e->n * (double)e->hw, factors[2] = {1, count / (count - 1)}; /* the unbiased variance */
    for (long k = 0; k < e->c; k++)
        if (!isfinite(e->per_channel[k]) || !isfinite(e->per_channel[stride + k])) return 0;
    for (int row = 0; row < 2; row++)
        for (long k = 0; e->running[row] && k < e->c; k++) {
            double value = e->per_channel[row * stride + k] * factors[row];
            e->running[row][k] = (float)(value * e->momentum + e->running[row][k] * (1 - e->momentum));
        }
    return 1;
}

static void run_pass(job *j, int kernel, const block_training *e) {
    j->run = find_runner(j, kernel, (int)e->format, (int)e->channels_last);
    start(j, e->threads);
}

/* 0 if there is no memory, 2 if the statistics are not finite; then nothing is computed. */
int deepsquare_block_training(const block_training *e) {
    enum { LARGE = 1 << 24, IMAGES = 4, LEAST = 64 };
    long stride = (e->c + GROUP - 1) / GROUP * GROUP, planes = e->n * stride, backward = e->grad != 0;
    double *products = calloc((size_t)(2 * planes), sizeof *products);
    float *factors = calloc((size_t)(4 * planes + GROUP), sizeof *factors); /* a last vector may be read past the end */
    int result = products && factors;
    if (result) {
        job j = {
            .x = e->z, .residual = e->shortcut, .grad = e->grad, .result = e->result, .y = e->y,
            .dresidual = e->dshortcut, .weight = e->weight, .bias = e->bias, .excited = e->alpha != 0,
            .alpha = e->alpha ? *e->alpha : 0, .beta = e->beta ? *e->beta : 1, .n = e->n, .c = e->c, .hw = e->hw,
            .inverse = 1 / (double)e->hw, .eps = e->eps, .stride = stride, .per_channel = e->per_channel};
        for (int k = 0; k < 2; k++) {
            j.moments[k] = e->moments + k * planes;
            j.products[k] = products + k * planes;
        }
        j.scale = factors, j.slope = factors + planes, j.offset = factors + 2 * planes, j.center = factors + 3 * planes;
        j.width = e->n < IMAGES ? e->c * e->n / IMAGES / LEAST * LEAST : e->c;
        j.width = j.width < LEAST ? LEAST : j.width < WIDEST ? j.width : WIDEST;
        long tasks = e->channels_last ? e->n * ((e->c + j.width - 1) / j.width) : e->n * e->c;
        j.tasks = tasks;
        run_pass(&j, backward ? NORM_BACKWARD_SUMS : NORM_SUMS, e);
        j.tasks = stride / GROUP;
        run_pass(&j, backward ? NORM_BACKWARD_FACTORS : NORM_FACTORS, e);
        if (!backward && !update_running(e, stride)) result = 2;
        j.tasks = result == 2 ? 0 : tasks;
        j.grad = e->dshortcut; /* the gradient where the ReLU is active, which the first pass wrote */
        j.dresidual = 0;
        j.nontemporal = e->n * e->c * e->hw * (e->format == 0 ? 4 : 2) >= LARGE && (uintptr_t)e->y % LINE == 0;
        run_pass(&j, backward ? NORM_BACKWARD : NORM_ADD_RELU, e);
    }
    free(products);
    free(factors);
    return result;
}
#endif

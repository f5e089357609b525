/* Vectors of LANES floats, and the number formats that they are loaded from and stored to.

   Written with the compilers' vector extension. Intrinsics stand only where compilers make several instructions of one. */

#if defined(AVX512)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int32_t masks __attribute__((vector_size(4 * LANES)));
typedef float floats8 __attribute__((vector_size(32))), floats4 __attribute__((vector_size(16)));
typedef float half_floats __attribute__((vector_size(2 * LANES))); /* half of the lanes */
typedef double half_doubles __attribute__((vector_size(4 * LANES)));

static inline floats splat(float value) { return value - (floats){0}; }
static inline floats positive(floats v) { return (floats)((words)v & (words)~(v < 0)); } /* keeps NaN */
static inline floats where(masks keep, floats v) { return (floats)((masks)v & keep); }

static inline floats choose(masks condition, floats yes, floats no) {
    return (floats)(((masks)yes & condition) | ((masks)no & ~condition));
}

static inline float total8(floats8 v) {
    floats4 low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, (char *)&v + sizeof low, sizeof high);
    low += high;
    return (low[0] + low[1]) + (low[2] + low[3]);
}

static inline float total(floats v) {
#if defined(AVX512)
    return total8((floats8)_mm512_extractf32x8_ps((__m512)v, 0) + (floats8)_mm512_extractf32x8_ps((__m512)v, 1));
#else
    return total8(v);
#endif
}

/* A mask of the last `count` lanes. */
static inline masks last(long count) {
    static const int32_t lanes[2 * LANES] = {[LANES ... 2 * LANES - 1] = -1};
    masks m;
    memcpy(&m, lanes + count, sizeof m);
    return m;
}

static inline void accumulate(double *sums, floats v) {
    for (int k = 0; k < 2; k++) {
        half_floats part;
        half_doubles before;
        memcpy(&part, (char *)&v + k * sizeof part, sizeof part);
        memcpy(&before, sums + k * LANES / 2, sizeof before);
        half_doubles wide = __builtin_convertvector(part, half_doubles);
        wide += before;
        memcpy(sums + k * LANES / 2, &wide, sizeof wide);
    }
}

static inline floats from_doubles(const double *p, double factor) {
    floats v;
    for (int k = 0; k < 2; k++) {
        half_doubles wide;
        memcpy(&wide, p + k * LANES / 2, sizeof wide);
        half_floats part = __builtin_convertvector(wide * factor, half_floats);
        memcpy((char *)&v + k * sizeof part, &part, sizeof part);
    }
    return v;
}

/* ---- number formats: load values as floats, store them rounded to nearest even ---- */

typedef struct { uint16_t bits; } bfloat;
typedef struct { uint16_t bits; } half;

static inline floats load_float(const float *p) {
    floats v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store_float(float *p, floats v) { memcpy(p, &v, sizeof v); }

static inline words widened(const bfloat *p) {
#if defined(AVX512)
    return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__x86_64__)
    return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    halves bits;
    memcpy(&bits, p, sizeof bits);
    return __builtin_convertvector(bits, words);
#endif
}

static inline floats load_bfloat(const bfloat *p) { return (floats)(widened(p) << 16); }

static inline halves rounded(floats v) {
    words bits = (words)v, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#if defined(AVX512)
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    return (halves)_mm512_cvtepi32_epi16(_mm512_mask_set1_epi32((__m512i)up, nan, 0x7fc0));
#else
    words number = (words)(v == v);
    up = (up & number) | (0x7fc0 & ~number);
#if defined(__x86_64__)
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)up, (__m256i)up), 0x08);
    return (halves)_mm256_castsi256_si128(packed);
#else
    return __builtin_convertvector(up, halves);
#endif
#endif
}

static inline void store_bfloat(bfloat *p, floats v) {
    halves bits = rounded(v);
    memcpy(p, &bits, sizeof bits);
}

#if defined(__x86_64__)
static inline floats load_half(const half *p) {
#if defined(AVX512)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#endif
}

static inline halves narrow(floats v) {
#if defined(AVX512)
    return (halves)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return (halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
}
#else
typedef _Float16 float16s __attribute__((vector_size(2 * LANES)));

static inline floats load_half(const half *p) {
    float16s v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, floats);
}

static inline halves narrow(floats v) { return (halves)__builtin_convertvector(v, float16s); }
#endif

static inline void store_half(half *p, floats v) {
    halves few = narrow(v);
    memcpy(p, &few, sizeof few);
}

/* Nontemporal stores bypass the caches: they neither read a line before overwriting it nor evict what is needed. */
#if defined(AVX512)
static inline void stream_float(float *p, floats v) { _mm512_stream_ps(p, (__m512)v); }
static inline void stream_halves(void *p, halves v) { _mm256_stream_si256((__m256i *)p, (__m256i)v); }
#elif defined(__x86_64__)
static inline void stream_float(float *p, floats v) { _mm256_stream_ps(p, (__m256)v); }
static inline void stream_halves(void *p, halves v) { _mm_stream_si128((__m128i *)p, (__m128i)v); }
#else
static inline void stream_float(float *p, floats v) { store_float(p, v); }
static inline void stream_halves(void *p, halves v) { memcpy(p, &v, sizeof v); }
#endif
static inline void stream_bfloat(bfloat *p, floats v) { stream_halves(p, rounded(v)); }
static inline void stream_half(half *p, floats v) { stream_halves(p, narrow(v)); }

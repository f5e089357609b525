/* The kernels for one number format T, stored as T and computed in float; cpu.c includes this file for each format.

   In the contiguous layout a map is a sequence of planes, and a task is one plane. In channels_last an image has `hw`
   rows of all channels, and a task is an image or, where there are few images, a part of its rows. Either way the
   values of a task are summed in a first pass and read again, from a cache, in a second. Long runs are read in memory
   order and without prefetch instructions: hardware then prefetches more than a core's own loads may have under way.

   Rows rarely divide into whole vectors. The last vector of a row ends where the row ends and overlaps the previous
   one: sums mask what was counted already, and results are written twice with the same value, unless in place. */

#define INLINE static inline __attribute__((always_inline))

/* Eight values, or the `left` ones of a row shorter than a vector. */
INLINE floats NAME(read)(const T *p, long left) {
    if (left >= LANES) return NAME(load)(p);
    T few[LANES] = {0};
    for (long i = 0; i < left; i++) few[i] = p[i];
    return NAME(load)(few);
}

INLINE void NAME(write)(T *p, long left, floats v) {
    if (left >= LANES) {
        NAME(store)(p, v);
        return;
    }
    T few[LANES];
    NAME(store)(few, v);
    for (long i = 0; i < left; i++) p[i] = few[i];
}

/* The maps of a job at an offset; a kernel never dereferences those that it does not use. */
typedef struct { const T *x, *grad, *residual, *result; T *y, *dresidual; const float *center, *offset; } NAME(maps);

INLINE NAME(maps) NAME(maps_from)(const job *j, long offset) {
    return (NAME(maps)){
        (const T *)j->x + offset, (const T *)j->grad + offset, (const T *)j->residual + offset,
        (const T *)j->result + offset, (T *)j->y + offset, (T *)j->dresidual + offset, 0, 0};
}

/* The gradient of the sum of branch and residual: 0 where the ReLU is inactive. */
INLINE floats NAME(grad_masked)(const NAME(maps) * m, long i, long left, int kernel) {
    floats g = NAME(read)(m->grad + i, left);
    if (kernel != EXCITE_ADD_RELU_BACKWARD && kernel != NORM_BACKWARD_SUMS) return g;
    return where(~(NAME(read)(m->result + i, left) <= 0), g);
}

/* Prefetches the inputs. */
INLINE void NAME(fetch)(const NAME(maps) * m, long i, int kernel) {
    __builtin_prefetch(m->x + i);
    if (excite_backward(kernel)) __builtin_prefetch(m->grad + i);
    if (kernel == EXCITE_ADD_RELU_BACKWARD) __builtin_prefetch(m->result + i);
}

typedef struct { floats squares, products; } NAME(sums);

INLINE void NAME(add)(
    NAME(sums) * sums, const NAME(maps) * m, long i, long left, masks counted, floats center, int kernel) {
    floats v = NAME(read)(m->x + i, left), g;
    if (kernel == NORM_BACKWARD_SUMS) {
        g = NAME(grad_masked)(m, i, left, kernel);
        NAME(write)(m->dresidual + i, left, g);
        g = where(counted, g);
        sums->squares += g * (v - center);
        sums->products += g;
        return;
    }
    v = where(counted, kernel == NORM_SUMS ? v - center : v);
    sums->squares += v * v;
    if (kernel == POOL_BOTH || kernel == NORM_SUMS) sums->products += v;
    if (excite_backward(kernel)) sums->products += where(counted, v * NAME(grad_masked)(m, i, left, kernel));
}

/* Σ x² of a plane and, in a backward kernel, Σ x·g, in POOL_BOTH Σ x: in floats over 128 values of a lane, in doubles
   beyond. In NORM_SUMS Σ x² and Σ x, in NORM_BACKWARD_SUMS Σ x·g and Σ g, with x less the center. */
INLINE void NAME(plane_sums)(
    const NAME(maps) * m, long count, double *squares, double *products, int kernel) {
    enum { STEP = 4 * LANES, BLOCK = 1 << 12 };
    const masks all = ~(masks){0};
    const floats center = normalizes(kernel) ? splat(*m->center) : (floats){0};
    *squares = *products = 0;
    for (long from = 0; from < count; from += BLOCK) {
        long to = count - from < BLOCK ? count : from + BLOCK, i = from;
        NAME(sums) s[4] = {0};
        for (; i + STEP <= to; i += STEP)
            for (int k = 0; k < 4; k++) NAME(add)(&s[k], m, i + k * LANES, LANES, all, center, kernel);
        for (; i + LANES <= to; i += LANES) NAME(add)(&s[0], m, i, LANES, all, center, kernel);
        if (i < to && count >= LANES) NAME(add)(&s[1], m, to - LANES, LANES, last(to - i), center, kernel);
        if (i < to && count < LANES) NAME(add)(&s[1], m, i, to - i, ~last(LANES - (to - i)), center, kernel);
        *squares += total(s[0].squares + s[1].squares + s[2].squares + s[3].squares);
        if (two_sums(kernel)) *products += total(s[0].products + s[1].products + s[2].products + s[3].products);
    }
}

/* The vectors at `channel` of `tile` rows, added to the sums of their channels: a sum is loaded and stored once for them
   all. */
INLINE void NAME(add_rows)(
    floats *squares, floats *products, const NAME(maps) * m, long row, long channel, long stride, int tile, long left,
    masks counted, int kernel) {
    const floats center = normalizes(kernel) ? load_float(m->center + channel) : (floats){0};
    NAME(sums) s = {*squares, two_sums(kernel) ? *products : *squares};
    for (int k = 0; k < tile; k++) NAME(add)(&s, m, row + channel + k * stride, left, counted, center, kernel);
    *squares = s.squares;
    if (two_sums(kernel)) *products = s.products;
}

/* Adds `tile` rows to the sums of their channels. The last vector ends where the row ends. */
INLINE void NAME(tile_sums)(
    floats *squares, floats *products, const NAME(maps) * m, long i, long width, long stride, int tile, int kernel) {
    const masks all = ~(masks){0};
    long v = 0, whole = width / LANES;
    for (; v < whole; v++)
        NAME(add_rows)(squares + v, products + v, m, i, v * LANES, stride, tile, LANES, all, kernel);
    if (width < LANES)
        NAME(add_rows)(squares, products, m, i, 0, stride, tile, width, all, kernel);
    else if (width % LANES)
        NAME(add_rows)
        (squares + v, products + v, m, i, width - LANES, stride, tile, LANES, last(width % LANES), kernel);
}

/* The same for each channel of a chunk: in floats over 64 rows, in doubles beyond. Short rows one by one, in memory
   order, which is what hardware prefetches; of rows longer than a page it prefetches several at once. */
INLINE void NAME(chunk_sums)(
    const NAME(maps) * m, long rows, long width, long stride, double *squares, double *products, int kernel) {
    enum { BLOCK = 64, TILE = 4, PAGE = 1 << 12 };
    floats part[2][WIDEST / LANES];
    long vectors = (width + LANES - 1) / LANES;
    int both = two_sums(kernel), tiles = stride * (long)sizeof(T) > PAGE;
    memset(squares, 0, (size_t)(vectors * LANES) * sizeof *squares);
    if (both) memset(products, 0, (size_t)(vectors * LANES) * sizeof *products);
    for (long row = 0, end; row < rows; row = end) {
        end = row + BLOCK < rows ? row + BLOCK : rows;
        memset(part[0], 0, (size_t)vectors * sizeof *part[0]);
        if (both) memset(part[1], 0, (size_t)vectors * sizeof *part[1]);
        for (; tiles && row + TILE <= end; row += TILE)
            NAME(tile_sums)(part[0], part[1], m, row * stride, width, stride, TILE, kernel);
        for (; row < end; row++) NAME(tile_sums)(part[0], part[1], m, row * stride, width, stride, 1, kernel);
        for (long v = 0; v < vectors; v++) {
            long i = (v + 1) * LANES <= width || width < LANES ? v * LANES : width - LANES;
            accumulate(squares + i, part[0][v]);
            if (both) accumulate(products + i, part[1][v]);
        }
    }
}

typedef struct { floats y, dresidual; } NAME(results);

INLINE NAME(results) NAME(compute)(
    const NAME(maps) * m, long i, long left, floats scale, floats slope, int shared, int kernel) {
    floats v = NAME(read)(m->x + i, left), w = {0};
    if (normalizes(kernel)) {
        floats center = shared ? splat(*m->center) : load_float(m->center + i);
        floats offset = shared ? splat(*m->offset) : load_float(m->offset + i);
        v = (v - center) * scale + offset;
        if (kernel == NORM_ADD_RELU) v = positive(v + NAME(read)(m->residual + i, left));
        if (kernel == NORM_BACKWARD) v += NAME(read)(m->grad + i, left) * slope;
    } else if (excite_backward(kernel)) {
        w = NAME(grad_masked)(m, i, left, kernel);
        v = w * scale + v * slope;
    } else if (kernel == POOL_BOTH_BACKWARD) {
        v = v * scale + slope;
    } else {
        v *= scale;
        if (kernel == EXCITE_ADD_RELU) v = positive(v + NAME(read)(m->residual + i, left));
    }
    return (NAME(results)){v, w};
}

INLINE void NAME(put)(const NAME(maps) * m, long i, long left, NAME(results) r, int kernel) {
    NAME(write)(m->y + i, left, r.y);
    if (kernel == EXCITE_ADD_RELU_BACKWARD) NAME(write)(m->dresidual + i, left, r.dresidual);
}

/* The same with nontemporal stores, to an address aligned to a vector. */
INLINE void NAME(put_nontemporal)(const NAME(maps) * m, long i, NAME(results) r, int kernel) {
    NAME(stream)(m->y + i, r.y);
    if (kernel == EXCITE_ADD_RELU_BACKWARD) NAME(stream)(m->dresidual + i, r.dresidual);
}

/* The second pass over a row: scale and slope are `shared` by all values, or one for each. The output maps have the
   same alignment. Only whole lines are stored nontemporally: a line stored both ways goes to memory and back, which
   costs more than all the others together. */
INLINE void NAME(apply)(
    const NAME(maps) * m, long width, const float *scale, const float *slope, int shared, long ahead, int nontemporal,
    int kernel) {
#define AT(i, count) \
    NAME(compute)(m, i, count, shared ? splat(*scale) : load_float(scale + (i)), \
                  shared ? splat(*slope) : load_float(slope + (i)), shared, kernel)
#define PUT(i, count) NAME(put)(m, i, count, AT(i, count), kernel)
    enum { VALUES = LINE / sizeof(T) };
    long i = 0, start = 0, stop = width;
    if (nontemporal) {
        start = (long)(-(uintptr_t)m->y % LINE / sizeof(T));
        if (start > width) start = width;
        stop = start + (width - start) / VALUES * VALUES;
    }
    for (; i + LANES <= start; i += LANES) PUT(i, LANES);
    if (i < start) PUT(i, start - i);
    for (i = start; i + VALUES <= stop; i += VALUES) {
        if (ahead) NAME(fetch)(m, i + ahead, kernel);
        for (long k = i; k < i + VALUES; k += LANES) {
            if (nontemporal)
                NAME(put_nontemporal)(m, k, AT(k, LANES), kernel);
            else
                PUT(k, LANES);
        }
    }
    for (; i + LANES <= width; i += LANES) PUT(i, LANES);
    if (i < width) {
        if (nontemporal || width < LANES || m->x == m->y) /* in place, nothing may be written twice */
            PUT(i, width - i);
        else
            PUT(width - LANES, LANES);
    }
#undef PUT
#undef AT
}

/* Between the passes: the scale, slope and output of `count` planes, vector by vector: the arrays of sums, scales and
   slopes have room for a last whole one. Of the output, `second` is the second row. */
INLINE void NAME(plane_values)(
    const job *j, long plane, long count, const double *squares, const double *products, float *scale, float *slope,
    float *per_plane, float *second, int kernel) {
    if (kernel == POOL_BACKWARD) memcpy(scale, j->factor + plane, (size_t)count * sizeof *scale);
    if (kernel == POOL_BOTH_BACKWARD) {
        memcpy(slope, j->factor + plane, (size_t)count * sizeof *slope);
        memcpy(scale, j->factor + j->n * j->c + plane, (size_t)count * sizeof *scale);
    }
    if (pool_backward(kernel)) return;
    double inverse = j->inverse;
    for (long k = 0; k < count; k += LANES) {
        floats mean = from_doubles(squares + k, inverse), first = mean, other = mean;
        if (kernel == POOL_BOTH) first = from_doubles(products + k, inverse);
        if (kernel != POOL && kernel != POOL_BOTH) {
            excited e = excitation(mean, j->alpha, j->beta);
            store_float(scale + k, e.scale);
            if (!excite_backward(kernel)) continue;
            floats product = from_doubles(products + k, 1), zero = {0};
            store_float(slope + k, choose(e.identity, zero, from_doubles(products + k, 2 * inverse) * e.slope));
            first = choose(e.identity, splat(0 * j->alpha), product * e.alpha_slope); /* not 0 · inf */
            other = product * e.beta_slope;
        }
        size_t bytes = (size_t)(count - k < LANES ? count - k : LANES) * sizeof *scale;
        memcpy(per_plane + k, &first, bytes);
        if (two_sums(kernel)) memcpy(second + k, &other, bytes);
    }
}

/* Small planes are processed in groups, as many as the L1 cache keeps between the passes. */
INLINE void NAME(planes)(const job *j, long from, long to, long hw, int kernel) {
    enum { L1 = 1 << 12, MOST = 16 }; /* values, planes */
    double squares[MOST] = {0}, products[MOST] = {0};
    float scale[MOST], slope[MOST] = {0};
    long group = L1 / hw, count;
    group = group < 1 ? 1 : group < MOST ? group : MOST;
    long ahead = pool_backward(kernel) || sizeof(T) < sizeof(float) ? 0 : group * hw; /* measured: halves lose by it */
    for (long plane = from; plane < to; plane += count) {
        count = to - plane < group ? to - plane : group;
        for (long k = 0; !pool_backward(kernel) && k < count; k++) {
            NAME(maps) m = NAME(maps_from)(j, (plane + k) * hw);
            NAME(plane_sums)(&m, hw, squares + k, products + k, kernel);
        }
        float *per_plane = j->per_plane + plane;
        NAME(plane_values)(
            j, plane, count, squares, products, scale, slope, per_plane, per_plane + j->n * j->c, kernel);
        for (long k = 0; !pool(kernel) && k < count; k++) {
            NAME(maps) m = NAME(maps_from)(j, (plane + k) * hw);
            NAME(apply)(&m, hw, scale + k, slope + k, 1, ahead, j->nontemporal, kernel);
        }
    }
}

/* channels_last: a task is a part of the rows of a chunk of channels. With several parts the first pass runs over all
   tasks before the second, which needs the sums of all parts. */
INLINE void NAME(chunks)(const job *j, long from, long to, int kernel) {
    double local[2][PADDED];
    float scale[PADDED], slope[PADDED], unused[PADDED];
    long chunks = (j->c + WIDEST - 1) / WIDEST;
    for (long task = from; task < to; task++) {
        long part = task % j->parts, image = task / j->parts / chunks, first = task / j->parts % chunks * WIDEST;
        long width = j->c - first < WIDEST ? j->c - first : WIDEST, plane = image * j->c + first;
        long start = j->hw * part / j->parts, end = j->hw * (part + 1) / j->parts;
        NAME(maps) m = NAME(maps_from)(j, (image * j->hw + start) * j->c + first);
        double(*sums)[PADDED] = j->pass == FIRST ? j->sums + 2 * task : local;
        if (!pool_backward(kernel) && j->pass != SECOND)
            NAME(chunk_sums)(&m, end - start, width, j->c, sums[0], sums[1], kernel);
        if (j->pass == FIRST) continue;
        if (j->pass == SECOND) add_parts(local, j->sums + 2 * (task - part), j->parts, (width + LANES - 1) / LANES * LANES);
        float *per_plane = part ? unused : j->per_plane + plane, *second = part ? unused : per_plane + j->n * j->c;
        NAME(plane_values)(j, plane, width, local[0], local[1], scale, slope, per_plane, second, kernel);
        if (pool(kernel)) continue;
        for (long row = start; row < end; row++) {
            NAME(maps) at = NAME(maps_from)(j, (image * j->hw + row) * j->c + first);
            NAME(apply)(&at, width, scale, slope, 0, 0, j->nontemporal, kernel);
        }
    }
}

/* Specialized for each kernel, and for the small planes at the end of nearly every network. */
#define KERNEL(kernel) \
    static void NAME(kernel##_planes)(const job *j, long from, long to) { \
        if (j->hw == 7 * 7) NAME(planes)(j, from, to, 7 * 7, kernel); \
        else if (j->hw == 14 * 14) NAME(planes)(j, from, to, 14 * 14, kernel); \
        else NAME(planes)(j, from, to, j->hw, kernel); \
    } \
    static void NAME(kernel##_chunks)(const job *j, long from, long to) { NAME(chunks)(j, from, to, kernel); }
KERNEL(POOL)
KERNEL(POOL_BACKWARD)
KERNEL(EXCITE)
KERNEL(EXCITE_BACKWARD)
KERNEL(EXCITE_ADD_RELU)
KERNEL(EXCITE_ADD_RELU_BACKWARD)
KERNEL(POOL_BOTH)
KERNEL(POOL_BOTH_BACKWARD)
#undef KERNEL

/* ---- elementwise squares and their gradients: any dense layout, a task is a run of RUN values ---- */

INLINE floats NAME(squared)(const job *j, long i, long left, int kernel, floats *sum) {
    floats v = NAME(read)((const T *)j->x + i, left), beta = splat(j->beta), rest = splat(1 - j->beta);
    if (kernel == BLEND_SQUARE) return v * (rest + beta * v);
    if (kernel == BLEND_SQUARE_BACKWARD) {
        floats g = NAME(read)((const T *)j->grad + i, left);
        *sum += g * v * (v - 1);
        return g * (rest + 2 * beta * v);
    }
    v = positive(v);
    if (kernel == RELU_SQUARE) return v * v;
    floats product = NAME(read)((const T *)j->grad + i, left) * v; /* doubled last: v itself may be huge */
    return where(~(v <= 0), product + product);
}

/* BLEND_SQUARE_BACKWARD also returns each run's part of dβ. */
INLINE void NAME(squares)(const job *j, long from, long to, int kernel) {
    T *y = j->y;
    for (long run = from; run < to; run++) {
        long i = run * RUN, end = i + RUN < j->hw ? i + RUN : j->hw;
        floats sum = {0};
        if (j->nontemporal)
            for (; i + LANES <= end; i += LANES) NAME(stream)(y + i, NAME(squared)(j, i, LANES, kernel, &sum));
        for (; i + LANES <= end; i += LANES) NAME(store)(y + i, NAME(squared)(j, i, LANES, kernel, &sum));
        if (i < end) NAME(write)(y + i, end - i, NAME(squared)(j, i, end - i, kernel, &sum));
        if (kernel == BLEND_SQUARE_BACKWARD) j->per_plane[run] = total(sum);
    }
}

#define KERNEL(kernel) \
    static void NAME(kernel##_runs)(const job *j, long from, long to) { NAME(squares)(j, from, to, kernel); }
KERNEL(RELU_SQUARE)
KERNEL(RELU_SQUARE_BACKWARD)
KERNEL(BLEND_SQUARE)
KERNEL(BLEND_SQUARE_BACKWARD)
#undef KERNEL

#include "cpu_blocks.h"
#include "cpu_training.h"

static const runner NAME(runners)[][2] = {
    {NAME(POOL_planes), NAME(POOL_chunks)},
    {NAME(POOL_BACKWARD_planes), NAME(POOL_BACKWARD_chunks)},
    {NAME(EXCITE_planes), NAME(EXCITE_chunks)},
    {NAME(EXCITE_BACKWARD_planes), NAME(EXCITE_BACKWARD_chunks)},
    {NAME(EXCITE_ADD_RELU_planes), NAME(EXCITE_ADD_RELU_chunks)},
    {NAME(EXCITE_ADD_RELU_BACKWARD_planes), NAME(EXCITE_ADD_RELU_BACKWARD_chunks)},
    {NAME(POOL_BOTH_planes), NAME(POOL_BOTH_chunks)},
    {NAME(POOL_BOTH_BACKWARD_planes), NAME(POOL_BOTH_BACKWARD_chunks)},
    {NAME(RELU_SQUARE_runs), NAME(RELU_SQUARE_runs)},
    {NAME(RELU_SQUARE_BACKWARD_runs), NAME(RELU_SQUARE_BACKWARD_runs)},
    {NAME(BLEND_SQUARE_runs), NAME(BLEND_SQUARE_runs)},
    {NAME(BLEND_SQUARE_BACKWARD_runs), NAME(BLEND_SQUARE_BACKWARD_runs)},
    {NAME(BLOCK_ADD_planes), NAME(BLOCK_ADD_chunks)},
    {NAME(BLOCK_SHUFFLE_planes), NAME(BLOCK_SHUFFLE_chunks)},
    {NAME(NORM_SUMS_planes), NAME(NORM_SUMS_chunks)},
    {norm_factors, norm_factors},
    {NAME(NORM_ADD_RELU_planes), NAME(NORM_ADD_RELU_chunks)},
    {NAME(NORM_BACKWARD_SUMS_planes), NAME(NORM_BACKWARD_SUMS_chunks)},
    {norm_backward_factors, norm_backward_factors},
    {NAME(NORM_BACKWARD_planes), NAME(NORM_BACKWARD_chunks)},
};

#undef INLINE

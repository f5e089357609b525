/* The kernels for one number format T, held in memory as T and computed in float; cpu.c includes this for each format.

   A map in the usual layout is a row of planes, and a task is one plane. In channels_last an image is a row of
   hw with all channels at each, and a task is an image or, where there are few of them, a part of its rows.
   Either way the values of a task are summed first and then read again from a cache.

   Rows rarely divide into whole vectors. The last vector of a row ends where the row ends and overlaps the one before:
   sums mask what was counted already, results are written twice alike, unless they take the place of what is read. */

#define INLINE static inline __attribute__((always_inline))

/* Eight values, or the fewer that a row of less than a vector has. */
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

/* The maps of a job from one task on; those that a kind does not use are never touched. */
typedef struct { const T *x, *gradient, *residual, *result; T *y, *residual_gradient; } NAME(maps);

INLINE NAME(maps) NAME(maps_from)(const job *j, long offset) {
    return (NAME(maps)){
        (const T *)j->x + offset, (const T *)j->gradient + offset, (const T *)j->residual + offset,
        (const T *)j->result + offset, (T *)j->y + offset, (T *)j->residual_gradient + offset};
}

/* The gradient that reaches the sum of branch and residual: nothing where the ReLU cut it off. */
INLINE floats NAME(grad_masked)(const NAME(maps) * m, long i, long left, int kind) {
    floats g = NAME(read)(m->gradient + i, left);
    return kind == EXCITE_ADD_RELU_BACKWARD ? where(~(NAME(read)(m->result + i, left) <= 0), g) : g;
}

/* What is read soon, into the caches. */
INLINE void NAME(fetch)(const NAME(maps) * m, long i, int kind) {
    __builtin_prefetch(m->x + i);
    if (backward(kind)) __builtin_prefetch(m->gradient + i);
    if (kind == EXCITE_ADD_RELU_BACKWARD) __builtin_prefetch(m->result + i);
}

typedef struct { floats squares, products; } NAME(sums);

INLINE void NAME(add)(NAME(sums) * sums, const NAME(maps) * m, long i, long left, masks counted, int kind) {
    floats v = where(counted, NAME(read)(m->x + i, left));
    sums->squares += v * v;
    if (backward(kind)) sums->products += where(counted, v * NAME(grad_masked)(m, i, left, kind));
}

/* While a plane is read: Square-Pooling fetches what comes next, as nothing else does, and the others the lines that the
   second pass will write, unless it writes nontemporal the caches. */
INLINE void NAME(prepare)(const NAME(maps) * m, long i, long count, int nontemporal, int kind) {
    enum { VALUES = LINE / sizeof(T), AHEAD = 32 * VALUES };
    for (long end = i + count; i < end; i += VALUES) {
        if (kind == POOL) {
            __builtin_prefetch(m->x + i + AHEAD);
        } else if (!nontemporal) {
            __builtin_prefetch(m->y + i, 1);
            if (kind == EXCITE_ADD_RELU_BACKWARD) __builtin_prefetch(m->residual_gradient + i, 1);
        }
    }
}

/* Σ x² and, in the backward pass, Σ x·g of a plane. Floats add up over 128 values a lane, doubles beyond. */
INLINE void NAME(plane_sums)(
    const NAME(maps) * m, long count, double *squares, double *products, int nontemporal, int kind) {
    enum { STEP = 4 * LANES, BLOCK = 1 << 12 };
    const masks all = ~(masks){0};
    *squares = *products = 0;
    for (long from = 0; from < count; from += BLOCK) {
        long to = count - from < BLOCK ? count : from + BLOCK, i = from;
        NAME(sums) s[4] = {0};
        for (; i + STEP <= to; i += STEP) {
            NAME(prepare)(m, i, STEP, nontemporal, kind);
            for (int k = 0; k < 4; k++) NAME(add)(&s[k], m, i + k * LANES, LANES, all, kind);
        }
        NAME(prepare)(m, i, to - i, nontemporal, kind);
        for (; i + LANES <= to; i += LANES) NAME(add)(&s[0], m, i, LANES, all, kind);
        if (i < to && count >= LANES) NAME(add)(&s[1], m, to - LANES, LANES, last(to - i), kind);
        if (i < to && count < LANES) NAME(add)(&s[1], m, i, to - i, all, kind);
        *squares += total(s[0].squares + s[1].squares + s[2].squares + s[3].squares);
        if (backward(kind)) *products += total(s[0].products + s[1].products + s[2].products + s[3].products);
    }
}

/* The same for each channel of a chunk: floats over 32 rows, doubles beyond. Row by row, in the order of memory. */
INLINE void NAME(chunk_sums)(
    const NAME(maps) * m, long rows, long width, long stride, double *squares, double *products, int kind) {
    enum { BLOCK = 32, AHEAD = 16 };
    const masks all = ~(masks){0};
    NAME(sums) part[WIDEST / LANES];
    long vectors = (width + LANES - 1) / LANES, whole = width / LANES;
    for (long row = 0; row < rows; row++) {
        if (row % BLOCK == 0) memset(part, 0, (size_t)vectors * sizeof *part);
        for (long v = 0; v < whole; v++) {
            NAME(fetch)(m, (row + AHEAD) * stride + v * LANES, kind);
            NAME(add)(&part[v], m, row * stride + v * LANES, LANES, all, kind);
        }
        if (whole < vectors) NAME(add)(&part[whole], m, row * stride + whole * LANES, width % LANES, all, kind);
        if (row % BLOCK == BLOCK - 1 || row == rows - 1)
            for (long v = 0; v < vectors; v++) {
                accumulate(squares + v * LANES, part[v].squares, row < BLOCK);
                if (backward(kind)) accumulate(products + v * LANES, part[v].products, row < BLOCK);
            }
    }
}

typedef struct { floats y, residual_gradient; } NAME(results);

INLINE NAME(results) NAME(compute)(const NAME(maps) * m, long i, long left, floats scale, floats slope, int kind) {
    floats v = NAME(read)(m->x + i, left), w = {0};
    if (backward(kind)) {
        w = NAME(grad_masked)(m, i, left, kind);
        v = w * scale + v * slope;
    } else {
        v *= scale;
        if (kind == EXCITE_ADD_RELU) v = positive(v + NAME(read)(m->residual + i, left));
    }
    return (NAME(results)){v, w};
}

INLINE void NAME(put)(const NAME(maps) * m, long i, long left, NAME(results) r, int kind) {
    NAME(write)(m->y + i, left, r.y);
    if (kind == EXCITE_ADD_RELU_BACKWARD) NAME(write)(m->residual_gradient + i, left, r.residual_gradient);
}

/* The same nontemporal the caches, to an address that a whole vector divides. */
INLINE void NAME(put_past)(const NAME(maps) * m, long i, NAME(results) r, int kind) {
    NAME(stream)(m->y + i, r.y);
    if (kind == EXCITE_ADD_RELU_BACKWARD) NAME(stream)(m->residual_gradient + i, r.residual_gradient);
}

/* The second pass over a row: scale and slope are `one` for all, or one for each value. The maps that are written begin
   at like addresses. Only whole lines are written nontemporal the caches: a line that is written both ways goes to memory and
   back for it, which costs more than all the others together. */
INLINE void NAME(apply)(
    const NAME(maps) * m, long width, const float *scale, const float *slope, int one, long ahead, int nontemporal, int kind) {
#define AT(i, count) \
    NAME(compute)(m, i, count, one ? splat(*scale) : load_float(scale + (i)), one ? splat(*slope) : load_float(slope + (i)), kind)
#define PUT(i, count) NAME(put)(m, i, count, AT(i, count), kind)
    enum { VALUES = LINE / sizeof(T) };
    long i = 0;
    if (nontemporal && width >= 2 * VALUES) {
        long start = (long)(-(uintptr_t)m->y % LINE / sizeof(T)), stop = start + (width - start) / VALUES * VALUES;
        for (; i + LANES <= start; i += LANES) PUT(i, LANES);
        if (i < start) PUT(i, start - i);
        for (i = start; i < stop; i += LANES) {
            if (ahead) NAME(fetch)(m, i + ahead, kind);
            NAME(put_past)(m, i, AT(i, LANES), kind);
        }
    }
    for (; i + LANES <= width; i += LANES) {
        if (ahead) NAME(fetch)(m, i + ahead, kind);
        PUT(i, LANES);
    }
    if (i < width) {
        if (nontemporal || width < LANES || m->x == m->y) /* nothing is written twice where it would be read again */
            PUT(i, width - i);
        else
            PUT(width - LANES, LANES);
    }
#undef PUT
#undef AT
}

/* The numbers of `count` planes, between the passes. */
INLINE void NAME(conclude)(
    const job *j, long plane, long count, const double *squares, const double *products, float *scale, float *slope,
    float *dalpha_partial, int kind) {
    if (kind == SCALE) {
        memcpy(scale, j->factor + plane, (size_t)count * sizeof *scale);
        return;
    }
    float alpha = j->alpha;
    double inverse = j->inverse;
    for (long k = 0; k < count; k++) {
        float mean = (float)(squares[k] * inverse);
        if (kind == POOL) {
            dalpha_partial[k] = mean;
            continue;
        }
        excited e = excitation(mean, alpha);
        scale[k] = e.scale;
        if (backward(kind)) {
            slope[k] = e.slope == 0 ? 0 : (float)(2 * products[k] * inverse) * e.slope; /* 0 · inf is not meant */
            dalpha_partial[k] = e.alpha_slope == 0 ? 0 : (float)products[k] * e.alpha_slope;
        }
    }
}

/* Small planes go together, as many as the nearest cache keeps between the passes: their numbers are computed at once. */
INLINE void NAME(planes)(const job *j, long from, long to, long hw, int kind) {
    enum { NEAREST = 1 << 12, TOGETHER = 16 };
    double squares[TOGETHER], products[TOGETHER];
    float scale[TOGETHER], slope[TOGETHER] = {0};
    long group = NEAREST / hw, count;
    group = group < 1 ? 1 : group < TOGETHER ? group : TOGETHER;
    long ahead = kind == SCALE ? 0 : group * hw;
    for (long plane = from; plane < to; plane += count) {
        count = to - plane < group ? to - plane : group;
        for (long k = 0; kind != SCALE && k < count; k++) {
            NAME(maps) m = NAME(maps_from)(j, (plane + k) * hw);
            NAME(plane_sums)(&m, hw, squares + k, products + k, (int)j->nontemporal, kind);
        }
        NAME(conclude)(j, plane, count, squares, products, scale, slope, j->dalpha_partial + plane, kind);
        for (long k = 0; kind != POOL && k < count; k++) {
            NAME(maps) m = NAME(maps_from)(j, (plane + k) * hw);
            NAME(apply)(&m, hw, scale + k, slope + k, 1, ahead, j->nontemporal, kind);
        }
    }
}

/* A task is a part of the rows of a chunk. Where there are several, the first pass over all of them comes first, since
   the second needs the sums of all. */
INLINE void NAME(chunks)(const job *j, long from, long to, int kind) {
    double own[2][WIDEST + LANES];
    float scale[WIDEST + LANES], slope[WIDEST + LANES], unused[WIDEST + LANES];
    long chunks = (j->c + WIDEST - 1) / WIDEST;
    for (long task = from; task < to; task++) {
        long part = task % j->parts, image = task / j->parts / chunks, first = task / j->parts % chunks * WIDEST;
        long width = j->c - first < WIDEST ? j->c - first : WIDEST, plane = image * j->c + first;
        long start = j->hw * part / j->parts, end = j->hw * (part + 1) / j->parts;
        NAME(maps) m = NAME(maps_from)(j, (image * j->hw + start) * j->c + first);
        double(*sums)[WIDEST + LANES] = j->pass == FIRST ? j->sums + 2 * task : own;
        if (kind != SCALE && j->pass != SECOND) NAME(chunk_sums)(&m, end - start, width, j->c, sums[0], sums[1], kind);
        if (j->pass == FIRST) continue;
        if (j->pass == SECOND) add_parts(own, j->sums + 2 * (task - part), j->parts, width);
        NAME(conclude)(j, plane, width, own[0], own[1], scale, slope, part ? unused : j->dalpha_partial + plane, kind);
        if (kind == POOL) continue;
        for (long row = end - 1; row >= start; row--) { /* the last rows are still in the nearest cache */
            NAME(maps) at = NAME(maps_from)(j, (image * j->hw + row) * j->c + first);
            NAME(apply)(&at, width, scale, slope, 0, 0, j->nontemporal, kind);
        }
    }
}

/* Code of its own for each kind, and for the small planes that nearly every network ends with. */
#define KIND(kind) \
    static void NAME(kind##_planes)(const job *j, long from, long to) { \
        if (j->hw == 7 * 7) NAME(planes)(j, from, to, 7 * 7, kind); \
        else if (j->hw == 14 * 14) NAME(planes)(j, from, to, 14 * 14, kind); \
        else NAME(planes)(j, from, to, j->hw, kind); \
    } \
    static void NAME(kind##_chunks)(const job *j, long from, long to) { NAME(chunks)(j, from, to, kind); }
KIND(POOL)
KIND(SCALE)
KIND(EXCITE)
KIND(EXCITE_BACKWARD)
KIND(EXCITE_ADD_RELU)
KIND(EXCITE_ADD_RELU_BACKWARD)
#undef KIND

/* ---- ReLU-Square and its gradient: any layout, a task is a run of RUN values ---- */

INLINE floats NAME(relu_squared)(const job *j, long i, long left, int backward) {
    floats v = positive(NAME(read)((const T *)j->x + i, left));
    if (!backward) return v * v;
    floats product = NAME(read)((const T *)j->gradient + i, left) * v; /* doubled last: v itself may be huge */
    return where(~(v <= 0), product + product);
}

INLINE void NAME(relu_squares)(const job *j, long from, long to, int backward) {
    long i = from * RUN, end = to * RUN < j->hw ? to * RUN : j->hw;
    T *y = j->y;
    if (j->nontemporal)
        for (; i + LANES <= end; i += LANES) NAME(stream)(y + i, NAME(relu_squared)(j, i, LANES, backward));
    for (; i + LANES <= end; i += LANES) NAME(store)(y + i, NAME(relu_squared)(j, i, LANES, backward));
    if (i < end) NAME(write)(y + i, end - i, NAME(relu_squared)(j, i, end - i, backward));
}

static void NAME(relu_square)(const job *j, long from, long to) { NAME(relu_squares)(j, from, to, 0); }
static void NAME(relu_square_backward)(const job *j, long from, long to) { NAME(relu_squares)(j, from, to, 1); }

static const runner NAME(runners)[][2] = {
    {NAME(POOL_planes), NAME(POOL_chunks)},
    {NAME(SCALE_planes), NAME(SCALE_chunks)},
    {NAME(EXCITE_planes), NAME(EXCITE_chunks)},
    {NAME(EXCITE_BACKWARD_planes), NAME(EXCITE_BACKWARD_chunks)},
    {NAME(EXCITE_ADD_RELU_planes), NAME(EXCITE_ADD_RELU_chunks)},
    {NAME(EXCITE_ADD_RELU_BACKWARD_planes), NAME(EXCITE_ADD_RELU_BACKWARD_chunks)},
    {NAME(relu_square), NAME(relu_square)},
    {NAME(relu_square_backward), NAME(relu_square_backward)},
};

#undef INLINE

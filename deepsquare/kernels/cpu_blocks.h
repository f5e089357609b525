/* The end of a building block at inference, for one number format T; cpu_loops.h includes this file.

   Both branches may be normalized and have a ReLU: x = max(floor, a·z + b) with a and b of the channel, the floor 0 or -inf. The main branch is then scaled by s, Equation (25) of the mean of its x², where it is excited. The result is

       BLOCK_ADD     max(0, s·x + shortcut), which may be written over z
       BLOCK_SHUFFLE shortcut and s·x, concatenated, their channels taken in turn from each

   The sums are those of x itself, not of z: a² · mean z² + 2ab · mean z + b² would cancel. */

/* What the values of one branch are computed with; `shared` by all values of a row, or one for each. */
typedef struct { const float *a, *b, *scale; floats floor; } NAME(branch);

INLINE floats NAME(value)(const T *p, long i, long left, const NAME(branch) * b, int shared) {
    floats factor = shared ? splat(*b->a) : load_float(b->a + i), offset = shared ? splat(*b->b) : load_float(b->b + i);
    floats v = NAME(read)(p + i, left) * factor + offset;
    return choose(v < b->floor, b->floor, v); /* keeps NaN */
}

INLINE floats NAME(scaled)(const T *p, long i, long left, const NAME(branch) * b, int shared) {
    return NAME(value)(p, i, left, b, shared) * (shared ? splat(*b->scale) : load_float(b->scale + i));
}

/* Σ x² of a plane: in floats over 128 values of a lane, in doubles beyond. Prefetches the shortcut for the second pass. */
INLINE double NAME(energy)(const T *z, const T *shortcut, long count, const NAME(branch) * b) {
    enum { STEP = 4 * LANES, BLOCK = 1 << 12, VALUES = LINE / sizeof(T) };
    double energy = 0;
    for (long from = 0; from < count; from += BLOCK) {
        long to = count - from < BLOCK ? count : from + BLOCK, i = from;
        floats s[4] = {0}, v;
        for (; i + STEP <= to; i += STEP) {
            for (long at = i; at < i + STEP; at += VALUES) __builtin_prefetch(shortcut + at);
            for (int k = 0; k < 4; k++) {
                v = NAME(value)(z, i + k * LANES, LANES, b, 1);
                s[k] += v * v;
            }
        }
        for (; i + LANES <= to; i += LANES) {
            v = NAME(value)(z, i, LANES, b, 1);
            s[0] += v * v;
        }
        if (i < to) {
            v = count < LANES ? NAME(value)(z, i, to - i, b, 1) : NAME(value)(z, to - LANES, LANES, b, 1);
            s[1] += where(count < LANES ? ~last(LANES - (to - i)) : last(to - i), v * v);
        }
        energy += total(s[0] + s[1] + s[2] + s[3]);
    }
    return energy;
}

/* The same for each channel of a chunk, row by row: in floats over 32 rows, in doubles beyond. */
INLINE void NAME(energies)(const T *z, long rows, long width, long stride, const NAME(branch) * b, double *energies) {
    enum { BLOCK = 32, AHEAD = 8 };
    floats part[WIDEST / LANES], tail = {0}, v;
    long whole = width / LANES, rest = width % LANES, overlap = width < LANES ? 0 : width - LANES;
    masks counted = width < LANES ? ~last(LANES - rest) : last(rest);
    memset(energies, 0, (size_t)(width + LANES) * sizeof *energies);
    for (long row = 0; row < rows; row++, z += stride) {
        if (row % BLOCK == 0) {
            memset(part, 0, (size_t)whole * sizeof *part);
            tail = (floats){0};
        }
        for (long k = 0; k < whole; k++) {
            __builtin_prefetch(z + AHEAD * stride + k * LANES);
            v = NAME(value)(z, k * LANES, LANES, b, 0);
            part[k] += v * v;
        }
        if (rest) {
            v = NAME(value)(z, overlap, width < LANES ? rest : LANES, b, 0);
            tail += where(counted, v * v);
        }
        if (row % BLOCK < BLOCK - 1 && row < rows - 1) continue;
        for (long k = 0; k < whole; k++) accumulate(energies + k * LANES, part[k]);
        if (rest) accumulate(energies + overlap, tail);
    }
}

/* The results of a row. The last vector ends where the row ends and overlaps the one before; in place it must be computed
   before that one is written. */
INLINE void NAME(added)(
    const T *z, const T *shortcut, T *y, long count, const NAME(branch) * main, const NAME(branch) * other, int shared) {
#define AT(i, left) positive(NAME(scaled)(z, i, left, main, shared) + NAME(value)(shortcut, i, left, other, shared))
    if (count < LANES) {
        NAME(write)(y, count, AT(0, count));
        return;
    }
    long i = 0;
    floats end = {0};
    if (count % LANES) end = AT(count - LANES, LANES);
    for (; i + LANES <= count; i += LANES) NAME(store)(y + i, AT(i, LANES));
    if (i < count) NAME(store)(y + count - LANES, end);
#undef AT
}

/* A row of one branch, contiguous: the planes of a shuffled concatenation. */
INLINE void NAME(copied)(const T *x, T *y, long count, const NAME(branch) * b) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) NAME(store)(y + i, NAME(scaled)(x, i, LANES, b, 1));
    if (i < count && count < LANES) NAME(write)(y, count, NAME(scaled)(x, 0, count, b, 1));
    if (i < count && count >= LANES) NAME(store)(y + count - LANES, NAME(scaled)(x, count - LANES, LANES, b, 1));
}

/* The channels of one position: those of the two branches in turn. */
INLINE void NAME(woven)(
    const T *z, const T *shortcut, T *y, long count, const NAME(branch) * main, const NAME(branch) * other) {
    T even[LANES], odd[LANES];
    for (long i = 0, from = 0, left; from < count; from += LANES) {
        left = count < LANES ? count : LANES;
        i = count - from < left ? count - left : from;
        NAME(store)(even, NAME(value)(shortcut, i, left, other, 0));
        NAME(store)(odd, NAME(scaled)(z, i, left, main, 0));
        if (left == LANES)
            for (int k = 0; k < LANES; k++) y[2 * (i + k)] = even[k], y[2 * (i + k) + 1] = odd[k];
        else
            for (int k = 0; k < left; k++) y[2 * k] = even[k], y[2 * k + 1] = odd[k];
    }
}

/* s of `count` planes or channels; arrays are padded to whole vectors. */
INLINE void NAME(scales)(const job *j, const double *energies, long count, float *scale) {
    for (long k = 0; k < count; k += LANES) {
        floats s = splat(1);
        if (j->excited) s = excitation(from_doubles(energies + k, j->inverse), j->alpha, j->beta).scale;
        store_float(scale + k, s);
    }
}

INLINE void NAME(block_planes)(const job *j, long from, long to, long hw, int kernel) {
    enum { L1 = 1 << 12, MOST = 16 }; /* values, planes */
    static const float one = 1;
    double energies[MOST] = {0};
    float scale[MOST];
    long group = L1 / hw, count;
    group = group < 1 ? 1 : group < MOST ? group : MOST;
    for (long plane = from; plane < to; plane += count) {
        count = to - plane < group ? to - plane : group;
        for (int sums = j->excited ? 1 : 0; sums >= 0; sums--) {
            if (!sums) NAME(scales)(j, energies, count, scale);
            for (long k = 0; k < count; k++) {
                long image = (plane + k) / j->c, channel = (plane + k) % j->c;
                const T *z = (const T *)j->x + (plane + k) * hw;
                const T *shortcut = (const T *)j->residual + image * j->image + channel * hw;
                NAME(branch) main = {j->a[0] + channel, j->b[0] + channel, scale + k, splat(j->floor[0])};
                NAME(branch) other = {j->a[1] + channel, j->b[1] + channel, &one, splat(j->floor[1])};
                if (sums) {
                    energies[k] = NAME(energy)(z, shortcut, hw, &main);
                } else if (kernel == BLOCK_ADD) {
                    NAME(added)(z, shortcut, (T *)j->y + (plane + k) * hw, hw, &main, &other, 1);
                } else {
                    NAME(copied)(shortcut, (T *)j->y + 2 * (plane + k) * hw, hw, &other);
                    NAME(copied)(z, (T *)j->y + (2 * (plane + k) + 1) * hw, hw, &main);
                }
            }
        }
    }
}

/* channels_last: a task is a chunk of `width` channels of an image, few enough to stay in the L2 cache. */
INLINE void NAME(block_chunks)(const job *j, long from, long to, int kernel) {
    double energies[PADDED];
    float scale[PADDED];
    long chunks = (j->c + j->width - 1) / j->width;
    for (long task = from; task < to; task++) {
        long image = task / chunks, first = task % chunks * j->width;
        long width = j->c - first < j->width ? j->c - first : j->width;
        const T *z = (const T *)j->x + image * j->hw * j->c + first;
        NAME(branch) main = {j->a[0] + first, j->b[0] + first, scale, splat(j->floor[0])};
        NAME(branch) other = {j->a[1] + first, j->b[1] + first, scale, splat(j->floor[1])};
        if (j->excited) NAME(energies)(z, j->hw, width, j->c, &main, energies);
        NAME(scales)(j, energies, width, scale);
        for (long row = j->hw - 1; row >= 0; row--) { /* the last rows are still in the L1 cache */
            const T *shortcut = (const T *)j->residual + image * j->image + row * j->row + first;
            long at = (image * j->hw + row) * j->c + first;
            for (long k = 0; k < width; k += LINE / sizeof(T)) __builtin_prefetch(shortcut - 8 * j->row + k);
            if (kernel == BLOCK_ADD)
                NAME(added)(z + row * j->c, shortcut, (T *)j->y + at, width, &main, &other, 0);
            else
                NAME(woven)(z + row * j->c, shortcut, (T *)j->y + 2 * at, width, &main, &other);
        }
    }
}

#define KERNEL(kernel) \
    static void NAME(kernel##_planes)(const job *j, long from, long to) { \
        if (j->hw == 7 * 7) NAME(block_planes)(j, from, to, 7 * 7, kernel); \
        else if (j->hw == 14 * 14) NAME(block_planes)(j, from, to, 14 * 14, kernel); \
        else NAME(block_planes)(j, from, to, j->hw, kernel); \
    } \
    static void NAME(kernel##_chunks)(const job *j, long from, long to) { NAME(block_chunks)(j, from, to, kernel); }
KERNEL(BLOCK_ADD)
KERNEL(BLOCK_SHUFFLE)
#undef KERNEL

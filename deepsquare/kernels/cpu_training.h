/* The end of a building block in training, for one number format T; cpu_loops.h includes this file.

   Two passes over the maps, forward and backward, with the factors of cpu_norm.h computed in between. Both run in memory
   order, which is what hardware prefetches. */

/* The median of three values of a plane, the first of which is at `p`: near the mean, and seldom one far from it. */
INLINE float NAME(typical)(const T *p, long hw, long stride) {
    float a = NAME(read)(p + hw * 5 / 16 * stride, 1)[0], b = NAME(read)(p + hw * 9 / 17 * stride, 1)[0];
    float c = NAME(read)(p + hw * 11 / 16 * stride, 1)[0], low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

INLINE void NAME(norm_planes)(const job *j, long from, long to, int kernel) {
    for (long plane = from; plane < to; plane++) {
        long at = plane / j->c * j->stride + plane % j->c;
        NAME(maps) m = NAME(maps_from)(j, plane * j->hw);
        if (norm_sums(kernel)) {
            float center = kernel == NORM_SUMS ? NAME(typical)(m.x, j->hw, 1) : (float)j->moments[0][at];
            double products, sum;
            m.center = &center;
            NAME(plane_sums)(&m, j->hw, &products, &sum, kernel);
            put_sums(j, at, 1, &center, &sum, &products, kernel);
        } else {
            m.center = j->center + at;
            m.offset = j->offset + at;
            NAME(apply)(&m, j->hw, j->scale + at, j->slope + at, 1, 0, j->nontemporal, kernel);
        }
    }
}

/* channels_last: a task is a chunk of `width` channels of an image. */
INLINE void NAME(norm_chunks)(const job *j, long from, long to, int kernel) {
    long chunks = (j->c + j->width - 1) / j->width;
    for (long task = from; task < to; task++) {
        long image = task / chunks, first = task % chunks * j->width;
        long width = j->c - first < j->width ? j->c - first : j->width, at = image * j->stride + first;
        NAME(maps) m = NAME(maps_from)(j, image * j->hw * j->c + first);
        if (norm_sums(kernel)) {
            double products[PADDED], sums[PADDED];
            float center[PADDED];
            for (long i = 0; i < width; i++)
                center[i] = kernel == NORM_SUMS ? NAME(typical)(m.x + i, j->hw, j->c) : (float)j->moments[0][at + i];
            m.center = center;
            NAME(chunk_sums)(&m, j->hw, width, j->c, products, sums, kernel);
            put_sums(j, at, width, center, sums, products, kernel);
            continue;
        }
        for (long row = 0; row < j->hw; row++) {
            NAME(maps) r = NAME(maps_from)(j, (image * j->hw + row) * j->c + first);
            r.center = j->center + at;
            r.offset = j->offset + at;
            NAME(apply)(&r, width, j->scale + at, j->slope + at, 0, 0, j->nontemporal, kernel);
        }
    }
}

#define KERNEL(kernel) \
    static void NAME(kernel##_planes)(const job *j, long from, long to) { NAME(norm_planes)(j, from, to, kernel); } \
    static void NAME(kernel##_chunks)(const job *j, long from, long to) { NAME(norm_chunks)(j, from, to, kernel); }
KERNEL(NORM_SUMS)
KERNEL(NORM_ADD_RELU)
KERNEL(NORM_BACKWARD_SUMS)
KERNEL(NORM_BACKWARD)
#undef KERNEL

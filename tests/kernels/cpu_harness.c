/* Runs the CPU kernels without Python, for test_kernels_machines.py: on another processor, or with narrower vectors.

   harness MOST: selects the vectors, as deepsquare_select counts them, and writes which were selected, one byte. Then,
   for each case on standard input, it runs a kernel and writes its outputs: y, dresidual, per_plane. A case is eight
   longs (kernel, format, channels_last, n, c, hw, bytes of a map, floats per output row), α, β, two rows of the factor
   and the maps x, grad, residual and result. NORM_SUMS and NORM_BACKWARD_SUMS stand for the end of a block in training,
   forward and backward, with weight and bias at the beginning of the factor's rows; per_plane is then per_channel. */

#include "cpu.c"

#include <stdio.h>

enum { GUARD = 256, FILL = 0x5a };

static void *take(size_t bytes) {
    unsigned char *p = aligned_alloc(LINE, (bytes + LINE + GUARD) / LINE * LINE);
    if (!p || fread(p, 1, bytes, stdin) != bytes) exit(2);
    return p;
}

static void *blank(size_t bytes) {
    unsigned char *p = malloc(bytes + 2 * GUARD);
    if (!p) exit(2);
    memset(p, FILL, bytes + 2 * GUARD);
    memset(p + GUARD, 0, bytes);
    return p + GUARD;
}

/* Writes an output, and exits with 3 where a kernel wrote before or behind it. */
static void give(void *output, size_t bytes) {
    unsigned char *p = (unsigned char *)output - GUARD;
    for (size_t k = 0; k < GUARD; k++)
        if (p[k] != FILL || p[GUARD + bytes + k] != FILL) exit(3);
    fwrite(output, 1, bytes, stdout);
    free(p);
}

static void train(const call *k, int backward) {
    double *moments = calloc((size_t)(2 * k->n * (k->c + GROUP)), sizeof *moments);
    block_training e = {
        .format = k->format, .channels_last = k->channels_last, .threads = 1, .z = k->x, .shortcut = k->residual,
        .y = k->y, .weight = k->factor, .bias = k->factor + 2 * ((k->c + GROUP - 1) / GROUP * GROUP),
        .alpha = k->alpha, .beta = k->beta, .moments = moments, .per_channel = k->per_plane, .eps = 0.1, .n = k->n,
        .c = k->c, .hw = k->hw};
    if (!moments || !deepsquare_block_training(&e)) exit(4);
    e.grad = k->grad, e.result = k->result, e.dshortcut = k->dresidual;
    if (backward && !deepsquare_block_training(&e)) exit(4);
    free(moments);
}

int main(int argc, char **argv) {
    int selected_here = deepsquare_select(argc > 1 ? atoi(argv[1]) : 2);
    putchar(selected_here);
    long head[8];
    float scalars[2];
    while (selected_here && fread(head, sizeof head, 1, stdin) == 1 && fread(scalars, sizeof scalars, 1, stdin) == 1) {
        size_t map = (size_t)head[6], rows = 2 * (size_t)head[7] * sizeof(float);
        float *factor = take(rows);
        void *x = take(map), *grad = take(map), *residual = take(map), *result = take(map);
        void *y = blank(map), *dresidual = blank(map), *per_plane = blank(rows);
        call k = {
            .kernel = head[0], .format = head[1], .channels_last = head[2], .threads = 1, .x = x, .grad = grad,
            .residual = residual, .result = result, .y = y, .dresidual = dresidual, .factor = factor,
            .per_plane = per_plane, .alpha = scalars, .beta = scalars + 1, .n = head[3], .c = head[4], .hw = head[5]};
        if (k.kernel < NORM_SUMS)
            deepsquare_call(&k);
        else
            train(&k, k.kernel == NORM_BACKWARD_SUMS);
        give(y, map);
        give(dresidual, map);
        give(per_plane, rows);
        free(factor), free(x), free(grad), free(residual), free(result);
    }
    return fflush(stdout);
}

/* Between the passes of cpu_training.h: from sums over planes to what each value is multiplied with.

   Batch normalization gives y = w·(z - μ)·r + bias with μ and 1/r² = variance + eps of the batch. A plane of y is then
   scaled by s, Equation (25) of its mean square G. A plane p of hw values is known by its mean m and by the sum M of
   (z - m)²: its sums of y, y² and of their products with ẑ = (z - μ)·r follow without cancellation.

   The gradient of y in a plane is g·s + y·q, where g is that of s·y and q = 2/hw · ds/dG · Σ g·y, and from its sums over
   the batch the gradients of w and bias are dw = Σ dy·ẑ and db = Σ dy. Then dz = w·r·(dy - (db + ẑ·dw) / values).

   Everything per plane is computed in double precision, for GROUP channels at a time. */

enum { GROUP = 16 };

typedef struct { double mean[GROUP], r[GROUP], weight[GROUP], bias[GROUP], a[GROUP]; } norms;

/* Σ (z - center) and Σ (z - center)² to the mean and M of `count` planes; or the sums of a gradient as they are. */
static inline void put_sums(
    const job *j, long at, long count, const float *center, const double *sums, const double *products, int kernel) {
    for (long k = 0; k < count; k++) {
        if (kernel == NORM_BACKWARD_SUMS) {
            j->products[0][at + k] = sums[k];
            j->products[1][at + k] = products[k];
            continue;
        }
        double rest = products[k] - sums[k] * sums[k] * j->inverse;
        j->moments[0][at + k] = center[k] + sums[k] * j->inverse;
        j->moments[1][at + k] = rest < 0 ? 0 : rest; /* keeps NaN */
    }
}

static inline norms norms_of(const job *j, long first, double *variance) {
    norms b = {0};
    for (long at = first; at < j->n * j->stride; at += j->stride)
        for (int k = 0; k < GROUP; k++) b.mean[k] += j->moments[0][at + k] / (double)j->n;
    for (int k = 0; k < GROUP; k++) variance[k] = 0;
    for (long at = first; at < j->n * j->stride; at += j->stride)
        for (int k = 0; k < GROUP; k++) {
            double d = j->moments[0][at + k] - b.mean[k];
            variance[k] += (j->moments[1][at + k] * j->inverse + d * d) / (double)j->n;
        }
    for (int k = 0; k < GROUP; k++) {
        int known = first + k < j->c;
        b.r[k] = 1 / sqrt(variance[k] + j->eps);
        b.weight[k] = known && j->weight ? j->weight[first + k] : 1;
        b.bias[k] = known && j->bias ? j->bias[first + k] : 0;
        b.a[k] = b.weight[k] * b.r[k];
    }
    return b;
}

/* The mean of y and of y² of the planes at `at`. */
static inline void energies_of(const job *j, long at, const norms *b, double *mean, double *energy) {
    for (int k = 0; k < GROUP; k++) {
        mean[k] = b->a[k] * (j->moments[0][at + k] - b->mean[k]) + b->bias[k];
        energy[k] = b->a[k] * b->a[k] * j->moments[1][at + k] * j->inverse + mean[k] * mean[k];
    }
}

static void norm_factors(const job *j, long from, long to) {
    for (long first = from * GROUP; first < to * GROUP; first += GROUP) {
        double variance[GROUP], mean[GROUP], energy[GROUP];
        norms b = norms_of(j, first, variance);
        for (int k = 0; k < GROUP; k++) {
            j->per_channel[first + k] = (float)b.mean[k];
            j->per_channel[j->stride + first + k] = (float)variance[k];
        }
        for (long at = first; at < j->n * j->stride; at += j->stride) {
            energies_of(j, at, &b, mean, energy);
            for (int k = 0; k < GROUP; k += LANES) {
                floats s = splat(1);
                if (j->excited) s = excitation(from_doubles(energy + k, 1), j->alpha, j->beta).scale;
                store_float(j->scale + at + k, s * from_doubles(b.a + k, 1));
                store_float(j->offset + at + k, s * from_doubles(b.bias + k, 1));
                store_float(j->center + at + k, from_doubles(b.mean + k, 1));
            }
        }
    }
}

static void norm_backward_factors(const job *j, long from, long to) {
    for (long first = from * GROUP; first < to * GROUP; first += GROUP) {
        double variance[GROUP], mean[GROUP], energy[GROUP], along[GROUP], product[GROUP];
        double dweight[GROUP] = {0}, dbias[GROUP] = {0}, dalpha[GROUP] = {0}, dbeta[GROUP] = {0};
        norms b = norms_of(j, first, variance);
        for (long at = first; at < j->n * j->stride; at += j->stride) {
            energies_of(j, at, &b, mean, energy);
            for (int k = 0; k < GROUP; k++) { /* Σ g·ẑ and Σ g·y; the second sum is that with z - (float)m */
                double d = (float)j->moments[0][at + k] - b.mean[k];
                along[k] = b.r[k] * (j->products[1][at + k] + d * j->products[0][at + k]);
                product[k] = b.weight[k] * along[k] + b.bias[k] * j->products[0][at + k];
            }
            for (int k = 0; k < GROUP; k += LANES) {
                floats s = splat(1), q = {0};
                if (j->excited) {
                    excited e = excitation(from_doubles(energy + k, 1), j->alpha, j->beta);
                    floats sum = from_doubles(product + k, 1), zero = {0};
                    s = e.scale;
                    q = choose(e.identity, zero, from_doubles(product + k, 2 * j->inverse) * e.slope);
                    accumulate(dalpha + k, choose(e.identity, splat(0 * j->alpha), sum * e.alpha_slope));
                    accumulate(dbeta + k, sum * e.beta_slope);
                }
                store_float(j->slope + at + k, s);
                store_float(j->scale + at + k, q);
            }
            for (int k = 0; k < GROUP; k++) {
                double s = j->slope[at + k], q = j->scale[at + k], d = j->moments[0][at + k] - b.mean[k];
                double hw = (double)j->hw, squares = b.r[k] * b.r[k] * (j->moments[1][at + k] + hw * d * d);
                dbias[k] += s * j->products[0][at + k] + q * hw * mean[k];
                dweight[k] += s * along[k] + q * (b.weight[k] * squares + b.bias[k] * hw * b.r[k] * d);
            }
        }
        double share = j->inverse / (double)j->n;
        for (long at = first; at < j->n * j->stride; at += j->stride)
            for (int k = 0; k < GROUP; k++) {
                double a = b.a[k], q = j->scale[at + k];
                j->slope[at + k] = (float)(a * j->slope[at + k]);
                j->scale[at + k] = (float)(a * (a * q - b.r[k] * dweight[k] * share));
                j->offset[at + k] = (float)(a * (b.bias[k] * q - dbias[k] * share));
                j->center[at + k] = (float)b.mean[k];
            }
        for (int k = 0; k < GROUP; k++) {
            float *row = j->per_channel + first + k;
            row[0] = (float)dweight[k];
            row[j->stride] = (float)dbias[k];
            row[2 * j->stride] = (float)dalpha[k];
            row[3 * j->stride] = (float)dbeta[k];
        }
    }
}

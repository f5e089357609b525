/* The kernels with AVX-512's vectors of sixteen floats; cpu.c selects them where the machine has them. */

#if defined(__x86_64__)
#define AVX512
#include "cpu.c"
#endif

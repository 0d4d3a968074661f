/* The tile kernel for AVX2 and FMA. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>
#define VL 8
#define LOGIT_VECS 2
#define OUTPUT_VECS 3
#define OUTPUT_GROUPS 4
#define OUTPUT_GROUPS_ONE 8
#define bcast4(p) _mm256_broadcast_ps((const __m128 *)(p))
#define vmax(a, b) _mm256_max_ps(a, b)
#include "attention_body.h"

const struct rx_tile_kernel rx_tile_avx2 = {"avx2", body_scratch_bytes, body_prepare,
                                            body_attend, body_fold, body_finish};
#endif

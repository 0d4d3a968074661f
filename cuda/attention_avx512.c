/* The tile kernel for AVX-512. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#include "attention_avx512.h"
#include "attention_body.h"

const struct rx_tile_kernel rx_tile_avx512 = {"avx512", body_scratch_bytes, body_prepare,
                                              body_attend, body_fold, body_finish};
#endif

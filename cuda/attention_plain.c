/* The tile kernel in vectors of 128 bits, which every target has or is lowered to. */
#define VL 4
#define LOGIT_VECS 3
#define OUTPUT_VECS 3
#define OUTPUT_GROUPS 4
#define OUTPUT_GROUPS_ONE 8
typedef float rx_v4 __attribute__((vector_size(16), aligned(4), may_alias));
#define bcast4(p) (*(const rx_v4 *)(p))
/* b where either is not a number, as in SSE. */
static inline __attribute__((always_inline)) rx_v4 vmax(rx_v4 a, rx_v4 b) {
    for (int i = 0; i < 4; i++) b[i] = a[i] > b[i] ? a[i] : b[i];
    return b;
}
#include "attention_body.h"

const struct rx_tile_kernel rx_tile_plain = {"plain", body_scratch_bytes, body_prepare,
                                             body_attend, body_fold, body_finish};

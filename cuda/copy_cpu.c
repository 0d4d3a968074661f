/* Page copies in host memory. Runs of pages that are neighbours on both sides are one copy. */
#include "kernels.h"

#include <string.h>

const char *rx_copy_cpu(const struct rx_copy *c) {
    const int whole = c->nbytes == c->src_stride && c->nbytes == c->dst_stride;
    for (int64_t i = 0; i < c->num_pages;) {
        int64_t n = 1;
        while (whole && i + n < c->num_pages && c->src_ids[i + n] == c->src_ids[i] + n &&
               c->dst_ids[i + n] == c->dst_ids[i] + n)
            n++;
        memcpy(c->dst + c->dst_ids[i] * c->dst_stride + c->dst_offset,
               c->src + c->src_ids[i] * c->src_stride + c->src_offset, (size_t)(n * c->nbytes));
        i += n;
    }
    return NULL;
}

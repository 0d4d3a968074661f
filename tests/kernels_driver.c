/* Runs the C kernels on small ragged batches in memory of exactly the size they may touch, for the
 * sanitizers. Exit status 0: outputs agree between one thread and three, and are finite. */
#include "../cuda/kernels.h"
#include "../cuda/threads.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQS = 5 };

static void *filled(size_t bytes, int dtype, int count) {
    char *memory = malloc(bytes ? bytes : 1);
    for (int i = 0; i < count; i++) {
        const float x = (float)(rand() % 2001 - 1000) / 500;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        const uint16_t half = (uint16_t)(bits >> 16);
        if (dtype == RX_F32) memcpy(memory + 4 * i, &x, 4);
        else memcpy(memory + 2 * i, &half, 2);
    }
    return memory;
}

static int32_t *copied(const int32_t *from, int n) {
    int32_t *to = malloc(sizeof *to * (size_t)(n ? n : 1));
    memcpy(to, from, sizeof *to * (size_t)n);
    return to;
}

static int run(int dtype, int page_size, int head_dim, int group, int window, int grouped) {
    const int32_t q_lens[SEQS] = {1, 40, 0, 1, 3}, kv_lens[SEQS] = {1200, 700, 0, 1100, 3};
    const int kv_heads = 2, q_heads = 2 * group;
    int32_t cu[SEQS + 1] = {0}, indptr[SEQS + 1] = {0}, pages[8192];
    int num_pages = 0;
    for (int s = 0; s < SEQS; s++) {
        cu[s + 1] = cu[s] + q_lens[s];
        indptr[s + 1] = indptr[s] + (kv_lens[s] + page_size - 1) / page_size;
    }
    for (int i = 0; i < indptr[SEQS]; i++) pages[i] = num_pages++;
    for (int i = 0; grouped && i < 1024 / page_size; i++) pages[indptr[3] + i] = pages[indptr[0] + i];
    const int tokens = cu[SEQS], item = dtype == RX_F32 ? 4 : 2;
    const int elems = 2 * kv_heads * page_size * head_dim;
    const int32_t group_indptr[2] = {0, 2}, group_seqs[2] = {0, 3}, group_lens[1] = {1024};
    int32_t *arrays[] = {copied(cu, SEQS + 1),      copied(kv_lens, SEQS), copied(indptr, SEQS + 1),
                         copied(pages, num_pages),  copied(group_indptr, 2), copied(group_seqs, 2),
                         copied(group_lens, 1)};
    void *pool = filled((size_t)num_pages * elems * item, dtype, num_pages * elems);
    void *q = filled((size_t)tokens * q_heads * head_dim * item, dtype, tokens * q_heads * head_dim);
    void *k = filled((size_t)tokens * kv_heads * head_dim * item, dtype, tokens * kv_heads * head_dim);
    void *v = filled((size_t)tokens * kv_heads * head_dim * item, dtype, tokens * kv_heads * head_dim);
    const size_t out_bytes = (size_t)tokens * q_heads * head_dim * item;
    char *out[2] = {malloc(out_bytes), malloc(out_bytes)};
    const struct rx_batch batch = {
        .num_seqs = SEQS, .num_tokens = tokens, .page_size = page_size, .cu_seqlens_q = arrays[0],
        .kv_lens = arrays[1], .page_indptr = arrays[2], .pages = arrays[3], .num_groups = grouped,
        .group_indptr = arrays[4], .group_seqs = arrays[5], .group_lens = arrays[6]};
    struct rx_layer layer = {
        .dtype = (enum rx_dtype)dtype, .q_heads = q_heads, .kv_heads = kv_heads,
        .head_dim = head_dim, .pool = pool, .page_stride = elems, .q = q, .k = k, .v = v,
        .q_stride = q_heads * head_dim, .q_head_stride = head_dim,
        .k_stride = kv_heads * head_dim, .k_head_stride = head_dim,
        .v_stride = kv_heads * head_dim, .v_head_stride = head_dim,
        .out_stride = q_heads * head_dim, .out_head_stride = head_dim,
        .scale = 0.1f, .softcap = window ? 20.0f : 0.0f, .window = window};
    for (int i = 0; i < 2; i++) {
        rx_set_num_threads(i ? 3 : 1);
        layer.out = out[i];
        const char *error = rx_attention_cpu(&layer, &batch);
        if (error) return puts(error), 1;
    }
    int bad = memcmp(out[0], out[1], out_bytes) != 0;
    for (size_t i = 0; dtype == RX_F32 && i < out_bytes / 4; i++) bad |= !isfinite(((float *)out[0])[i]);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
    free(pool), free(q), free(k), free(v), free(out[0]), free(out[1]);
    if (bad) printf("%s: dtype %d page %d dim %d group %d window %d\n", rx_cpu_isa(), dtype, page_size,
                    head_dim, group, window);
    return bad;
}

static int copies(void) {
    const int32_t from[4] = {3, 0, 1, 4}, to[4] = {1, 3, 4, 0};
    char *src = filled(5 * 64, RX_F32, 80), *dst = calloc(5, 64);
    const struct rx_copy copy = {.src = src, .dst = dst, .src_stride = 64, .dst_stride = 64,
                                 .nbytes = 64, .src_ids = from, .dst_ids = to, .num_pages = 4};
    uint32_t crcs[4];
    int bad = 0;
    rx_copy_cpu(&copy, NULL);
    for (int i = 0; i < 4; i++) bad |= memcmp(src + 64 * from[i], dst + 64 * to[i], 64) != 0;
    memset(dst, 0, 5 * 64);
    rx_copy_cpu(&copy, crcs);
    for (int i = 0; i < 4; i++) bad |= memcmp(src + 64 * from[i], dst + 64 * to[i], 64) != 0;
    free(src), free(dst);
    return bad;
}

int main(void) {
    const char *isas[] = {"plain", "avx2", "avx512", "amx"};
    int bad = copies();
    for (int i = 0; i < 4; i++) {
        if (rx_select_isa(isas[i])) continue;
        for (int dtype = RX_F32; dtype <= RX_BF16; dtype++) {
            bad |= run(dtype, 16, 64, 3, 0, 1);
            bad |= run(dtype, 1, 20, 2, 700, 0);
            bad |= run(dtype, 8, 96, 7, 5, 1);
        }
    }
    return bad;
}

/* What the back ends share: the layout of pages, one step's ragged batch, one layer's call.
 *
 * A pool is num_pages pages, page_stride elements apart. Inside a page, at a layer's offset:
 *
 *     [2: keys, values][kv_head][page_size][head_dim]
 *
 * Sequence s of a batch has q_len = cu_seqlens_q[s+1] - cu_seqlens_q[s] new tokens, rows of q, k
 * and v; its context, the new tokens included, is kv_lens[s] tokens long and lies in the pages
 * pages[page_indptr[s]] ... pages[page_indptr[s+1] - 1]. New token i is at position
 * kv_lens[s] - q_len + i, its keys and values are written there, and it attends to every position
 * up to its own or, in a layer with a window, to the last `window` of them, its own included.
 *
 * The Python wrapper has checked shapes, strides, lengths and page ids; nothing here checks again.
 * Functions return NULL, or a sentence that says what failed (static storage). */
#ifndef RX_KERNELS_H
#define RX_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum rx_dtype { RX_F32 = 0, RX_BF16 = 1, RX_F16 = 2 };

/* The CUDA kernels' work lists of a step (plan.h): what the host knows of them. For a captured
 * graph the counts are the most that a replay may need, and num_prefill is 0. */
struct rx_plan {
    const int32_t *words; /* in device memory when kernels are launched */
    int64_t num_words;
    int32_t num_decode, num_shared, num_prefill;
    int64_t num_partials; /* splits of all decoding sequences */
};

/* Same for all layers of a step. The arrays lie in the memory of the device that reads them. */
struct rx_batch {
    int32_t num_seqs, num_tokens, page_size;
    const int32_t *cu_seqlens_q; /* [num_seqs + 1] */
    const int32_t *kv_lens;      /* [num_seqs] */
    const int32_t *page_indptr;  /* [num_seqs + 1] */
    const int32_t *pages;
    /* Sequences whose first tokens lie in the same pages: group g is the sequences
     * group_seqs[group_indptr[g]] ... group_seqs[group_indptr[g+1] - 1], which share their first
     * group_lens[g] tokens (whole pages, all before the first new token). A sequence is in at most
     * one group. */
    int32_t num_groups;
    const int32_t *group_indptr; /* [num_groups + 1] */
    const int32_t *group_seqs;
    const int32_t *group_lens; /* [num_groups] */
    void *workspace;           /* what a back end plans once per step; owned by the wrapper */
    int64_t workspace_bytes;   /* CUDA: num_partials * q_heads * (head_dim + 2) floats */
    struct rx_plan plan;       /* CUDA only */
};

/* One layer's call. Strides and offsets count elements; the last dimension is contiguous. */
struct rx_layer {
    enum rx_dtype dtype; /* of the pool, q, k, v and out alike */
    int32_t q_heads, kv_heads, head_dim;
    void *pool;
    int64_t page_stride, layer_offset;
    const void *q, *k, *v; /* [num_tokens][heads][head_dim]; k is NULL: nothing to append */
    void *out;
    int64_t q_stride, q_head_stride, k_stride, k_head_stride;
    int64_t v_stride, v_head_stride, out_stride, out_head_stride;
    float scale, softcap; /* softcap 0: none */
    int32_t window;       /* 0: none */
    const float *sinks;   /* [q_heads] or NULL */
};

/* The first nbytes of page src_ids[i] of one arena onto page dst_ids[i] of another. No page is in
 * both lists of one arena. */
struct rx_copy {
    const char *src;
    char *dst;
    int64_t src_stride, dst_stride, nbytes; /* bytes */
    const int32_t *src_ids, *dst_ids;
    int64_t num_pages;
};

/* Rows of fp32 or bf16 to be normed (weight is given), rotated (cos and sin are) or gated (none is):
 * token t's head h lies at t * stride + h * dim. `out` may be x, but not of what is gated: there a
 * row of x is 2 * dim long. */
struct rx_rows {
    enum rx_dtype dtype; /* of all that follows */
    int64_t num_tokens;
    int32_t num_heads, dim, rotary_dim;
    const void *x;
    void *out;
    int64_t x_stride, out_stride; /* elements */
    const void *weight;           /* [dim] or NULL */
    const void *cos, *sin;        /* [num_tokens][rotary_dim], the second half as the first */
    float eps;
};

void rx_rows_cpu(struct rx_rows *rows);
const char *rx_attention_cpu(const struct rx_layer *layer, const struct rx_batch *batch);
/* The CRC32C of each goes to `crcs` unless that is NULL; then dst may be. */
void rx_copy_cpu(const struct rx_copy *copy, uint32_t *crcs);
const char *rx_cpu_isa(void); /* the instruction set in use: "plain", "avx2", "avx512", "amx" */
const char *rx_select_isa(const char *name); /* "": the best there is */

/* CUDA: pointers are device pointers (copy: device, or registered host memory as the device sees
 * it; the id lists lie where the device can read them). The device is the pool's, or of a copy
 * the side that is no host memory; work is queued on `stream`, a cudaStream_t of that device. */
const char *rx_attention_cuda(const struct rx_layer *layer, const struct rx_batch *batch,
                              void *stream);
const char *rx_copy_cuda(const struct rx_copy *copy, int max_blocks, void *stream);

/* The work lists of `batch`, whose arrays lie in host memory, written to `words`. With NULL they
 * are counted only. */
struct rx_plan rx_plan_cuda(const struct rx_batch *batch, int32_t *words);

#ifdef __cplusplus
}
#endif
#endif

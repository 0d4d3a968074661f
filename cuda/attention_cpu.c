/* Appends new keys and values, then cuts a ragged batch into tiles and hands them to the threads.
 *
 * A tile is up to MAX_ROWS rows of one sequence and one key/value head, a row being a new token's
 * query head. Its splits are computed and folded in order by one thread, except for those stored
 * beforehand, in a first round of jobs, in slots of [split][kv head][row] per sequence:
 *
 *   - the whole splits that a group of sequences shares, for the rows of all its members at once;
 *   - all splits of a tile that is too large a part of the step to be left to one thread.
 *
 * The result is the same bit for bit however the work is cut (attention_tile.h). */
#include "attention_tile.h"
#include "threads.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { SERIAL_APPEND_BYTES = 1 << 18, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

struct plan {
    const struct rx_layer *layer;
    const struct rx_batch *batch;
    const struct rx_tile_kernel *kernel;
    int64_t item;       /* bytes of an element */
    int32_t group_size; /* query heads of a key/value head */
    int32_t stride;     /* floats of a partial result */
    size_t scratch_bytes;
    atomic_int out_of_memory;
    float *slots;
    /* Per sequence: its first tile, its first slot, its first split job, splits stored, of these
     * by its group. Tiles and jobs are [kv head][tile of rows]. */
    int64_t *first_tile, *first_slot, *first_job, *first_group_job;
    int32_t *stored, *shared;
};

static _Atomic(const struct rx_tile_kernel *) chosen;

static const struct rx_tile_kernel *const kernels[] = {
#if defined(__x86_64__)
#if defined(__linux__)
    &rx_tile_amx,
#endif
    &rx_tile_avx512,
    &rx_tile_avx2,
#endif
    &rx_tile_plain,
};

static int is_supported(const struct rx_tile_kernel *kernel) {
#if defined(__x86_64__)
#if defined(__linux__)
    if (kernel == &rx_tile_amx) /* the kernel saves tiles of processes that asked for them */
        return is_supported(&rx_tile_avx512) && __builtin_cpu_supports("amx-bf16") &&
               __builtin_cpu_supports("avx512bf16") &&
               !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#endif
    if (kernel == &rx_tile_avx512)
        return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    if (kernel == &rx_tile_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return kernel == &rx_tile_plain;
}

const char *rx_select_isa(const char *name) {
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if ((!*name || !strcmp(name, kernels[i]->name)) && is_supported(kernels[i])) {
            atomic_store(&chosen, kernels[i]);
            return NULL;
        }
    return "this processor or build has no such instruction set";
}

static const struct rx_tile_kernel *kernel_in_use(void) {
    if (!atomic_load(&chosen)) rx_select_isa("");
    return atomic_load(&chosen);
}

const char *rx_cpu_isa(void) { return kernel_in_use()->name; }

static int32_t q_len(const struct rx_batch *b, int s) {
    return b->cu_seqlens_q[s + 1] - b->cu_seqlens_q[s];
}

static int num_tiles(int32_t rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }

/* The sequence (or group) that job `i` belongs to: the last with first[s] <= i. */
static int owner(const int64_t *first, int n, int64_t i) {
    int lo = 0, hi = n;
    while (hi - lo > 1) {
        const int mid = (lo + hi) / 2;
        if (first[mid] <= i) lo = mid;
        else hi = mid;
    }
    return lo;
}

static char *cache_row(const struct plan *p, int s, int head, int value, int32_t pos) {
    const struct rx_layer *l = p->layer;
    const int32_t ps = p->batch->page_size;
    const int64_t page = p->batch->pages[p->batch->page_indptr[s] + pos / ps];
    const int64_t row = ((int64_t)value * l->kv_heads + head) * ps + pos % ps;
    const int64_t at = page * l->page_stride + l->layer_offset + row * l->head_dim;
    return (char *)l->pool + at * p->item;
}

static void append_token(void *context, int64_t token) {
    const struct plan *p = context;
    const struct rx_layer *l = p->layer;
    const struct rx_batch *b = p->batch;
    int lo = 0, hi = b->num_seqs;
    while (hi - lo > 1) {
        const int mid = (lo + hi) / 2;
        if (b->cu_seqlens_q[mid] <= token) lo = mid;
        else hi = mid;
    }
    const int32_t pos = b->kv_lens[lo] - b->cu_seqlens_q[lo + 1] + (int32_t)token;
    const size_t bytes = (size_t)(l->head_dim * p->item);
    for (int h = 0; h < l->kv_heads; h++) {
        const int64_t k = token * l->k_stride + h * l->k_head_stride;
        const int64_t v = token * l->v_stride + h * l->v_head_stride;
        memcpy(cache_row(p, lo, h, 0, pos), (const char *)l->k + k * p->item, bytes);
        memcpy(cache_row(p, lo, h, 1, pos), (const char *)l->v + v * p->item, bytes);
    }
}

static float *slot(const struct plan *p, int s, int split, int head, int row) {
    const int64_t rows = (int64_t)q_len(p->batch, s) * p->group_size;
    const int64_t at = ((int64_t)split * p->layer->kv_heads + head) * rows + row;
    return p->slots + (p->first_slot[s] + at) * p->stride;
}

static void open_tile(const struct plan *p, struct rx_tile *t, int s, int head) {
    const struct rx_layer *l = p->layer;
    const int64_t head_elems = (int64_t)p->batch->page_size * l->head_dim;
    t->layer = l;
    t->k = (const char *)l->pool + (l->layer_offset + head * head_elems) * p->item;
    t->v = t->k + l->kv_heads * head_elems * p->item;
    t->page_bytes = l->page_stride * p->item;
    t->row_bytes = l->head_dim * p->item;
    t->pages = p->batch->pages + p->batch->page_indptr[s];
    t->page_size = p->batch->page_size;
    t->num_rows = 0;
    t->begin = t->min_high = INT32_MAX;
    t->end = t->max_low = 0;
}

static void add_row(const struct plan *p, struct rx_tile *t, int s, int head, int row,
                    float *part) {
    const struct rx_layer *l = p->layer;
    const int r = t->num_rows++, q_head = head * p->group_size + row % p->group_size;
    const int32_t i = row / p->group_size;
    const int64_t token = p->batch->cu_seqlens_q[s] + i;
    const int32_t high = p->batch->kv_lens[s] - q_len(p->batch, s) + i + 1;
    const int32_t low = l->window && high > l->window ? high - l->window : 0;
    t->q[r] = (const char *)l->q + (token * l->q_stride + q_head * l->q_head_stride) * p->item;
    t->out[r] = (char *)l->out + (token * l->out_stride + q_head * l->out_head_stride) * p->item;
    t->part[r] = part;
    t->sink[r] = l->sinks ? l->sinks[q_head] : 0;
    t->low[r] = low;
    t->high[r] = high;
    if (low < t->begin) t->begin = low;
    if (low > t->max_low) t->max_low = low;
    if (high > t->end) t->end = high;
    if (high < t->min_high) t->min_high = high;
}

static void attend_split(const struct plan *p, const struct rx_tile *t, void *scratch, int split,
                         int ahead) {
    const int first = split * SPLIT, begin = t->begin > first ? t->begin / BLOCK * BLOCK : first;
    const int end = t->end < first + SPLIT ? t->end : first + SPLIT;
    p->kernel->attend(t, scratch, begin, end, ahead < t->end ? ahead : t->end);
}

/* Round one, a sequence's own split: [tile of rows][split][kv head]. */
static void own_split(const struct plan *p, int64_t job, void *scratch) {
    const int s = owner(p->first_job, p->batch->num_seqs, job);
    const int heads = p->layer->kv_heads, own = p->stored[s] - p->shared[s];
    const int64_t at = job - p->first_job[s];
    const int head = (int)(at % heads), split = p->shared[s] + (int)(at / heads % own);
    const int rows = q_len(p->batch, s) * p->group_size, from = (int)(at / heads / own) * MAX_ROWS;
    struct rx_tile t;
    open_tile(p, &t, s, head);
    for (int row = from; row < rows && row < from + MAX_ROWS; row++)
        add_row(p, &t, s, head, row, slot(p, s, split, head, row));
    if (split < t.begin / SPLIT || split * SPLIT >= t.end) return;
    p->kernel->prepare(&t, scratch);
    attend_split(p, &t, scratch, split, (split + 1) * SPLIT);
}

/* Round one, a group's shared split: [tile of rows][split][kv head]. */
static void group_split(const struct plan *p, int64_t job, void *scratch) {
    const struct rx_batch *b = p->batch;
    const int g = owner(p->first_group_job, b->num_groups, job);
    const int heads = p->layer->kv_heads, splits = b->group_lens[g] / SPLIT;
    const int64_t at = job - p->first_group_job[g];
    const int head = (int)(at % heads), split = (int)(at / heads % splits);
    int64_t skip = at / heads / splits * MAX_ROWS;
    struct rx_tile t;
    open_tile(p, &t, b->group_seqs[b->group_indptr[g]], head);
    for (int i = b->group_indptr[g]; i < b->group_indptr[g + 1] && t.num_rows < MAX_ROWS; i++) {
        const int s = b->group_seqs[i], rows = q_len(b, s) * p->group_size;
        for (int row = skip < rows ? (int)skip : rows; row < rows && t.num_rows < MAX_ROWS; row++)
            add_row(p, &t, s, head, row, slot(p, s, split, head, row));
        skip = skip < rows ? 0 : skip - rows;
    }
    if (split < t.begin / SPLIT) return;
    p->kernel->prepare(&t, scratch);
    attend_split(p, &t, scratch, split, (split + 1) * SPLIT);
}

static void *scratch_of_thread(struct plan *p) {
    void *scratch = rx_thread_memory(0, p->scratch_bytes);
    if (!scratch) atomic_store(&p->out_of_memory, 1);
    return scratch;
}

static void first_round(void *context, int64_t job) {
    struct plan *p = context;
    void *scratch = scratch_of_thread(p);
    const int64_t group_jobs = p->first_group_job[p->batch->num_groups];
    if (!scratch) return;
    if (job < group_jobs) group_split(p, job, scratch);
    else own_split(p, job - group_jobs, scratch);
}

/* Round two, a tile: [kv head][tile of rows] of each sequence. */
static void second_round(void *context, int64_t job) {
    struct plan *p = context;
    char *scratch = scratch_of_thread(p);
    if (!scratch) return;
    const int s = owner(p->first_tile, p->batch->num_seqs, job);
    const int rows = q_len(p->batch, s) * p->group_size, tiles = num_tiles(rows);
    const int head = (int)((job - p->first_tile[s]) / tiles);
    const int from = (int)((job - p->first_tile[s]) % tiles) * MAX_ROWS;
    float *total = (float *)scratch, *part = total + (size_t)MAX_ROWS * p->stride;
    float *work = part + (size_t)MAX_ROWS * p->stride;
    struct rx_tile t;
    open_tile(p, &t, s, head);
    for (int row = from; row < rows && row < from + MAX_ROWS; row++)
        add_row(p, &t, s, head, row, part + (size_t)t.num_rows * p->stride);
    for (int r = 0; r < t.num_rows; r++) {
        memset(total + (size_t)r * p->stride, 0, (size_t)p->stride * 4);
        total[(size_t)(r + 1) * p->stride - 16] = RX_NONE;
    }
    int prepared = 0;
    for (int split = t.begin / SPLIT; split * SPLIT < t.end; split++) {
        const float *done = part;
        if (split < p->stored[s]) {
            done = slot(p, s, split, head, from);
        } else {
            if (!prepared++) p->kernel->prepare(&t, work);
            attend_split(p, &t, work, split, t.end);
        }
        p->kernel->fold(total, done, t.num_rows, p->layer->head_dim);
    }
    p->kernel->finish(&t, total);
}

/* Decides what round one stores. Returns the number of its jobs, and of round two's in *tiles. */
static int64_t make_plan(struct plan *p, int64_t *tiles, int64_t *slots) {
    const struct rx_batch *b = p->batch;
    const int heads = p->layer->kv_heads, threads = rx_num_threads();
    int64_t work = 0, jobs = 0;
    p->first_group_job[0] = *tiles = *slots = 0;
    memset(p->shared, 0, (size_t)b->num_seqs * sizeof *p->shared);
    for (int g = 0; g < b->num_groups; g++) {
        const int32_t splits = b->group_lens[g] / SPLIT;
        int32_t rows = 0;
        for (int i = b->group_indptr[g]; i < b->group_indptr[g + 1]; i++) {
            rows += q_len(b, b->group_seqs[i]) * p->group_size;
            p->shared[b->group_seqs[i]] = splits;
        }
        const int64_t jobs_of_group = (int64_t)num_tiles(rows) * heads * splits;
        p->first_group_job[g + 1] = p->first_group_job[g] + jobs_of_group;
    }
    for (int s = 0; s < b->num_seqs; s++) {
        const int64_t rest = b->kv_lens[s] - p->shared[s] * (int64_t)SPLIT;
        work += rest * num_tiles(q_len(b, s) * p->group_size) * heads;
    }
    for (int s = 0; s < b->num_seqs; s++) {
        const int32_t rows = q_len(b, s) * p->group_size;
        const int64_t rest = b->kv_lens[s] - p->shared[s] * (int64_t)SPLIT;
        const int cut = threads > 1 && rest > 2 * SPLIT && rest * 4 * threads > work;
        p->stored[s] = cut ? (b->kv_lens[s] + SPLIT - 1) / SPLIT : p->shared[s];
        p->first_tile[s] = *tiles;
        p->first_slot[s] = *slots;
        p->first_job[s] = jobs;
        *tiles += (int64_t)num_tiles(rows) * heads;
        *slots += (int64_t)p->stored[s] * heads * rows;
        jobs += (int64_t)num_tiles(rows) * heads * (p->stored[s] - p->shared[s]);
    }
    return p->first_group_job[b->num_groups] + jobs;
}

const char *rx_attention_cpu(const struct rx_layer *layer, const struct rx_batch *batch) {
    static const char no_memory[] = "no memory for the attention's partial results";
    if (batch->num_seqs == 0 || batch->num_tokens == 0) return NULL;
    struct plan p = {.layer = layer, .batch = batch, .kernel = kernel_in_use()};
    p.item = layer->dtype == RX_F32 ? 4 : 2;
    p.group_size = layer->q_heads / layer->kv_heads;
    p.stride = rx_part_stride(layer->head_dim);
    p.scratch_bytes = p.kernel->scratch_bytes(layer) + (size_t)2 * MAX_ROWS * p.stride * 4;
    if (layer->k) {
        const int64_t bytes = batch->num_tokens * p.item * layer->head_dim * layer->kv_heads;
        if (bytes > SERIAL_APPEND_BYTES) rx_parallel(batch->num_tokens, append_token, &p);
        else
            for (int64_t token = 0; token < batch->num_tokens; token++) append_token(&p, token);
    }
    const size_t n = (size_t)batch->num_seqs + 1, groups = (size_t)batch->num_groups + 1;
    int64_t *tables = malloc((3 * n + groups) * sizeof(int64_t) + 2 * n * sizeof(int32_t));
    if (!tables) return no_memory;
    p.first_tile = tables;
    p.first_slot = tables + n;
    p.first_job = tables + 2 * n;
    p.first_group_job = tables + 3 * n;
    p.stored = (int32_t *)(tables + 3 * n + groups);
    p.shared = p.stored + n;
    int64_t tiles, slots;
    const int64_t jobs = make_plan(&p, &tiles, &slots);
    p.slots = slots ? rx_thread_memory(1, (size_t)slots * p.stride * 4) : NULL;
    if (slots && !p.slots) {
        free(tables);
        return no_memory;
    }
    if (jobs) rx_parallel(jobs, first_round, &p);
    rx_parallel(tiles, second_round, &p);
    free(tables);
    return atomic_load(&p.out_of_memory) ? no_memory : NULL;
}

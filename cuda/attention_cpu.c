/* Appends new keys and values, then cuts a ragged batch into tiles and hands them to the threads.
 *
 * A tile is up to MAX_ROWS rows of one sequence, a row being a new token's query head: all heads
 * of decoding tokens, or one key/value head of many tokens. Its splits are computed and folded in
 * order by one thread, except for those stored beforehand, in a first round of jobs, in slots of
 * [split][kv head][row] per sequence. Such a run of splits is
 *
 *   - what a group of sequences shares, for the rows of all its members at once;
 *   - the own splits of a sequence that is too large a part of the step to be left to one thread.
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

/* Splits to be stored, for all rows of its sequences. Jobs are [tile of rows][split][heads]. */
struct run {
    const int32_t *seqs;
    int32_t num_seqs, num_rows, first_split, num_splits, heads; /* of a tile */
};

struct plan {
    const struct rx_layer *layer;
    const struct rx_batch *batch;
    const struct rx_tile_kernel *kernel;
    int64_t item;       /* bytes of an element */
    int32_t group_size; /* query heads of a key/value head */
    int32_t stride;     /* floats of a partial result */
    size_t scratch_bytes; /* of a thread */
    char *scratch;
    float *slots;
    struct run *runs;
    int32_t num_runs;
    int32_t *first_job; /* of a run, in round one */
    /* Per sequence: its id, its first tile in round two, splits stored, its first slot. */
    int32_t *ids, *first_tile, *stored;
    int64_t *first_slot;
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

/* Tiles of up to MAX_ROWS rows, or of up to `heads` heads. */
static int num_tiles(int32_t rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
static int num_chunks(const struct plan *p, int heads) {
    return (p->layer->kv_heads + heads - 1) / heads;
}

/* Heads of a tile of so many rows: as many as fit, yet such that `splits` of them make four jobs
 * for each thread. */
static int heads_of_tile(const struct plan *p, int32_t rows, int64_t splits) {
    int heads = rows < MAX_ROWS ? MAX_ROWS / rx_padded(rows) : 1;
    if (heads > p->layer->kv_heads) heads = p->layer->kv_heads;
    while (heads > 1 && splits * num_chunks(p, heads) < 4 * rx_num_threads()) heads /= 2;
    return heads < 1 ? 1 : heads;
}

/* The sequence or run that job (or token) `i` belongs to: the last with first[s] <= i. */
static int owner(const int32_t *first, int n, int64_t i) {
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

static void append_token(void *context, int64_t token, int thread) {
    (void)thread;
    const struct plan *p = context;
    const struct rx_layer *l = p->layer;
    const struct rx_batch *b = p->batch;
    const int s = owner(b->cu_seqlens_q, b->num_seqs, token);
    const int32_t pos = b->kv_lens[s] - b->cu_seqlens_q[s + 1] + (int32_t)token;
    const size_t bytes = (size_t)(l->head_dim * p->item);
    for (int h = 0; h < l->kv_heads; h++) {
        const int64_t k = token * l->k_stride + h * l->k_head_stride;
        const int64_t v = token * l->v_stride + h * l->v_head_stride;
        memcpy(cache_row(p, s, h, 0, pos), (const char *)l->k + k * p->item, bytes);
        memcpy(cache_row(p, s, h, 1, pos), (const char *)l->v + v * p->item, bytes);
    }
}

static float *slot(const struct plan *p, int s, int split, int head, int row) {
    const int64_t rows = (int64_t)q_len(p->batch, s) * p->group_size;
    const int64_t at = ((int64_t)split * p->layer->kv_heads + head) * rows + row;
    return p->slots + (p->first_slot[s] + at) * p->stride;
}

/* A tile of up to `heads` heads from `head` on, without rows. */
static void open_tile(const struct plan *p, struct rx_tile *t, int s, int head, int heads) {
    const struct rx_layer *l = p->layer;
    t->layer = l;
    t->row_bytes = l->head_dim * p->item;
    t->head_bytes = p->batch->page_size * t->row_bytes;
    t->page_bytes = l->page_stride * p->item;
    t->k = (const char *)l->pool + l->layer_offset * p->item + head * t->head_bytes;
    t->v = t->k + l->kv_heads * t->head_bytes;
    t->pages = p->batch->pages + p->batch->page_indptr[s];
    t->page_size = p->batch->page_size;
    t->num_heads = heads < l->kv_heads - head ? heads : l->kv_heads - head;
    t->num_rows = 0;
    t->begin = t->min_high = INT32_MAX;
    t->end = t->max_low = 0;
}

/* Row `row` of sequence s joins a tile of `rows` rows, for each head from `head` on. */
static void add_row(const struct plan *p, struct rx_tile *t, int s, int head, int row, int rows) {
    const struct rx_layer *l = p->layer;
    const int r = t->num_rows++;
    const int32_t i = row / p->group_size;
    const int64_t token = p->batch->cu_seqlens_q[s] + i;
    const int32_t high = p->batch->kv_lens[s] - q_len(p->batch, s) + i + 1;
    const int32_t low = l->window && high > l->window ? high - l->window : 0;
    for (int h = 0; h < t->num_heads; h++) {
        const int at = h * rows + r, q_head = (head + h) * p->group_size + row % p->group_size;
        t->q[at] = (const char *)l->q + (token * l->q_stride + q_head * l->q_head_stride) * p->item;
        t->out[at] =
            (char *)l->out + (token * l->out_stride + q_head * l->out_head_stride) * p->item;
        t->sink[at] = l->sinks ? l->sinks[q_head] : 0;
    }
    t->low[r] = low;
    t->high[r] = high;
    if (low < t->begin) t->begin = low;
    if (low > t->max_low) t->max_low = low;
    if (high > t->end) t->end = high;
    if (high < t->min_high) t->min_high = high;
}

static void attend_split(const struct plan *p, const struct rx_tile *t, void *scratch, int split,
                         int up_to) {
    const int first = split * SPLIT, begin = t->begin > first ? t->begin / BLOCK * BLOCK : first;
    const int end = t->end < first + SPLIT ? t->end : first + SPLIT;
    p->kernel->attend(t, scratch, begin, end, up_to < t->end ? up_to : t->end);
}

/* Round one: a split of a run, for one tile of its rows. */
static void store_split(void *context, int64_t job, int thread) {
    struct plan *p = context;
    const struct rx_batch *b = p->batch;
    const int i = owner(p->first_job, p->num_runs, job);
    const struct run *run = &p->runs[i];
    const int chunks = num_chunks(p, run->heads);
    const int64_t at = job - p->first_job[i];
    const int head = (int)(at % chunks) * run->heads;
    const int split = run->first_split + (int)(at / chunks % run->num_splits);
    int32_t skip = (int32_t)(at / chunks / run->num_splits) * MAX_ROWS;
    const int32_t left = run->num_rows - skip, rows = left < MAX_ROWS ? left : MAX_ROWS;
    void *scratch = p->scratch + thread * p->scratch_bytes;
    struct rx_tile t;
    open_tile(p, &t, run->seqs[0], head, run->heads);
    for (int j = 0; t.num_rows < rows; j++) {
        const int s = run->seqs[j];
        const int32_t of_seq = q_len(b, s) * p->group_size;
        for (int row = skip < of_seq ? skip : of_seq; row < of_seq && t.num_rows < rows; row++) {
            for (int h = 0; h < t.num_heads; h++)
                t.part[h * rows + t.num_rows] = slot(p, s, split, head + h, row);
            add_row(p, &t, s, head, row, rows);
        }
        skip = skip < of_seq ? 0 : skip - of_seq;
    }
    if (split < t.begin / SPLIT || split * SPLIT >= t.end) return;
    p->kernel->prepare(&t, scratch);
    attend_split(p, &t, scratch, split, (split + 1) * SPLIT);
}

/* Round two: a tile, [heads][tile of rows] of each sequence. */
static void finish_tile(void *context, int64_t job, int thread) {
    struct plan *p = context;
    char *scratch = p->scratch + thread * p->scratch_bytes;
    const int s = owner(p->first_tile, p->batch->num_seqs, job);
    const int32_t of_seq = q_len(p->batch, s) * p->group_size;
    const int tiles = num_tiles(of_seq), heads = heads_of_tile(p, of_seq, INT32_MAX);
    const int head = (int)(job - p->first_tile[s]) / tiles * heads;
    const int from = (int)(job - p->first_tile[s]) % tiles * MAX_ROWS;
    const int rows = of_seq - from < MAX_ROWS ? of_seq - from : MAX_ROWS;
    float *total = (float *)scratch, *part = total + (size_t)MAX_ROWS * p->stride;
    float *work = part + (size_t)MAX_ROWS * p->stride;
    struct rx_tile t;
    open_tile(p, &t, s, head, heads);
    for (int row = from; row < from + rows; row++) add_row(p, &t, s, head, row, rows);
    for (int r = 0; r < t.num_heads * rows; r++) {
        t.part[r] = part + (size_t)r * p->stride;
        memset(total + (size_t)r * p->stride, 0, (size_t)p->stride * 4);
        total[(size_t)(r + 1) * p->stride - 16] = RX_NONE;
    }
    int prepared = 0;
    for (int split = t.begin / SPLIT; split * SPLIT < t.end; split++) {
        const float *done = part;
        if (split < p->stored[s]) { /* heads follow each other, since such tiles hold all rows */
            done = slot(p, s, split, head, from);
        } else {
            if (!prepared++) p->kernel->prepare(&t, work);
            attend_split(p, &t, work, split, t.end);
        }
        p->kernel->fold(total, done, t.num_heads * rows, p->layer->head_dim);
    }
    p->kernel->finish(&t, total);
}

/* Adds a run; returns the number of round one's jobs with it. */
static int32_t add_run(struct plan *p, const int32_t *seqs, int num_seqs, int first_split,
                       int num_splits, int32_t jobs) {
    int32_t rows = 0;
    for (int i = 0; i < num_seqs; i++) rows += q_len(p->batch, seqs[i]) * p->group_size;
    const int heads = heads_of_tile(p, rows, num_splits);
    p->first_job[p->num_runs] = jobs;
    p->runs[p->num_runs++] =
        (struct run){seqs, num_seqs, rows, first_split, num_splits, heads};
    return jobs + num_tiles(rows) * num_splits * num_chunks(p, heads);
}

/* Decides what round one stores. Returns its number of jobs, of round two's in *tiles. */
static int32_t make_plan(struct plan *p, int32_t *tiles, int64_t *slots) {
    const struct rx_batch *b = p->batch;
    const int threads = rx_num_threads();
    int64_t work = 0;
    int32_t jobs = 0;
    memset(p->stored, 0, (size_t)b->num_seqs * sizeof *p->stored);
    for (int g = 0; g < b->num_groups; g++) {
        const int32_t *seqs = b->group_seqs + b->group_indptr[g];
        const int num_seqs = b->group_indptr[g + 1] - b->group_indptr[g];
        const int32_t splits = b->group_lens[g] / SPLIT;
        for (int i = 0; i < num_seqs; i++) p->stored[seqs[i]] = splits;
        jobs = add_run(p, seqs, num_seqs, 0, splits, jobs);
    }
    for (int s = 0; s < b->num_seqs; s++) {
        const int64_t rest = b->kv_lens[s] - p->stored[s] * (int64_t)SPLIT;
        work += rest * num_tiles(q_len(b, s) * p->group_size) * p->layer->kv_heads;
    }
    *tiles = 0, *slots = 0;
    for (int s = 0; s < b->num_seqs; s++) {
        const int32_t rows = q_len(b, s) * p->group_size;
        const int heads = heads_of_tile(p, rows, INT32_MAX);
        const int64_t rest = b->kv_lens[s] - p->stored[s] * (int64_t)SPLIT;
        p->ids[s] = s;
        if (rows && threads > 1 && rest > 2 * SPLIT && rest * heads * 4 * threads > work) {
            const int splits = (int)((rest + SPLIT - 1) / SPLIT);
            jobs = add_run(p, &p->ids[s], 1, p->stored[s], splits, jobs);
            p->stored[s] += splits;
        }
        p->first_tile[s] = *tiles;
        p->first_slot[s] = *slots;
        *tiles += num_tiles(rows) * num_chunks(p, heads);
        *slots += (int64_t)p->stored[s] * p->layer->kv_heads * rows;
    }
    return jobs;
}

const char *rx_attention_cpu(const struct rx_layer *layer, const struct rx_batch *batch) {
    static const char no_memory[] = "no memory for the attention's partial results";
    if (batch->num_seqs == 0 || batch->num_tokens == 0) return NULL;
    struct plan p = {.layer = layer, .batch = batch, .kernel = kernel_in_use()};
    p.item = layer->dtype == RX_F32 ? 4 : 2;
    p.group_size = layer->q_heads / layer->kv_heads;
    p.stride = rx_part_stride(layer->head_dim);
    if (!p.kernel->scratch_bytes(layer)) p.kernel = &rx_tile_avx512;
    p.scratch_bytes = p.kernel->scratch_bytes(layer) + (size_t)2 * MAX_ROWS * p.stride * 4;
    if (layer->k) {
        const int64_t bytes = batch->num_tokens * p.item * layer->head_dim * layer->kv_heads;
        if (bytes > SERIAL_APPEND_BYTES)
            rx_parallel(rx_num_threads(), batch->num_tokens, append_token, &p);
        else
            for (int64_t token = 0; token < batch->num_tokens; token++) append_token(&p, token, 0);
    }
    const size_t n = (size_t)batch->num_seqs, runs = n + (size_t)batch->num_groups;
    char *tables = malloc(n * sizeof *p.first_slot + runs * sizeof *p.runs +
                          (runs + 3 * n) * sizeof(int32_t));
    if (!tables) return no_memory;
    p.first_slot = (int64_t *)tables;
    p.runs = (struct run *)(p.first_slot + n);
    p.first_job = (int32_t *)(p.runs + runs);
    p.ids = p.first_job + runs;
    p.first_tile = p.ids + n;
    p.stored = p.first_tile + n;
    int32_t tiles;
    int64_t slots;
    const int32_t jobs = make_plan(&p, &tiles, &slots);
    p.scratch_bytes = (p.scratch_bytes + 63) / 64 * 64;
    const int threads = rx_num_threads(); /* one number for all that follows */
    const size_t of_threads = (size_t)threads * p.scratch_bytes;
    char *memory = malloc(64 + of_threads + (size_t)slots * p.stride * 4);
    if (!memory) {
        free(tables);
        return no_memory;
    }
    p.scratch = (char *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    p.slots = (float *)(p.scratch + of_threads);
    rx_parallel(threads, jobs, store_split, &p);
    rx_parallel(threads, tiles, finish_tile, &p);
    free(memory);
    free(tables);
    return NULL;
}

/* Attention of one tile: query rows that share a page table, as many for each of its key/value
 * heads. A row is one query head of one new token, so a group of query heads reads keys and values
 * once. Heads that decode are taken together, block by block, since memory is read fastest where
 * it lies in a row, and a page's heads do.
 *
 * Positions are cut into splits of SPLIT and those into blocks of BLOCK, at absolute multiples.
 * Within a split a row keeps its running maximum m (of logits in base 2), sum l and output o;
 * splits are folded in ascending order. All that happens to a row is a function of its own query,
 * positions and keys and values, in that order: which rows share the tile, whether splits are
 * computed here or elsewhere, and which were skipped because the row sees none of them, change
 * no bit. So prefill, in whatever chunks, decode, and shared prefixes all agree.
 *
 * A partial result is floats [o: head_dim][zeros up to a multiple of 16][m][l][14 unused]. */
#ifndef RX_ATTENTION_TILE_H
#define RX_ATTENTION_TILE_H

#include "kernels.h"

enum { SPLIT = 512, BLOCK = 64, MAX_ROWS = 96 };

struct rx_tile {
    const struct rx_layer *layer;
    const char *k, *v; /* of the first head in page 0 */
    int64_t page_bytes, head_bytes, row_bytes;
    const int32_t *pages;
    int32_t page_size;
    int32_t num_heads, num_rows;  /* rows of each head; heads * rx_padded(rows) <= MAX_ROWS */
    int32_t begin, end;           /* positions some row sees: min(low), max(high) */
    int32_t max_low, min_high;    /* all rows see [max_low, min_high) */
    int32_t low[MAX_ROWS], high[MAX_ROWS]; /* row r of every head sees positions in [low, high) */
    /* Of row r of head h at h * num_rows + r: */
    const char *q[MAX_ROWS];
    char *out[MAX_ROWS];
    float *part[MAX_ROWS]; /* where attend() leaves a row's partial result */
    float sink[MAX_ROWS];
};

struct rx_tile_kernel {
    const char *name;
    size_t (*scratch_bytes)(const struct rx_layer *layer); /* 0: does not take such layers */
    /* Packs the queries into scratch; call before attend(). */
    void (*prepare)(const struct rx_tile *tile, void *scratch);
    /* Positions [begin, end) of one split into tile->part; asks ahead for those up to `up_to`. */
    void (*attend)(const struct rx_tile *tile, void *scratch, int begin, int end, int up_to);
    /* total = total, then part. Rows `stride` floats apart; a fresh total has m = RX_NONE. */
    void (*fold)(float *total, const float *part, int num_rows, int head_dim);
    /* Sinks and the division; writes out. */
    void (*finish)(const struct rx_tile *tile, const float *total);
};

/* Rows of a head as they take room in registers. */
static inline int rx_padded(int num_rows) { return num_rows <= 4 ? 4 : (num_rows + 15) / 16 * 16; }

#define RX_NONE -1e30f /* the maximum of no logits */

static inline int rx_part_stride(int head_dim) { return (head_dim + 15) / 16 * 16 + 16; }

extern const struct rx_tile_kernel rx_tile_plain, rx_tile_avx2, rx_tile_avx512, rx_tile_amx;

#endif

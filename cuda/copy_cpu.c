/* Page copies in host memory. Runs of pages that are neighbours on both sides are one copy.
 *
 * What is larger than the caches is written past them: a plain store first reads the line it
 * overwrites, a third of all traffic. Four blocks at a time keep more of memory's banks open:
 *
 *     run = [4 KiB block 0][block 1][block 2][block 3] [4][5][6][7] ... rest
 *           line 0 of 0, 1, 2, 3, then line 1 of 0, 1, 2, 3, ...
 *
 * The processor foresees no line beyond a block, so each is asked for one group ahead, those of the
 * next run's first group too.
 */
#include "crc32c.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

enum { LINE = 64, BLOCK = 4096, GROUP = 4 * BLOCK };

/* Copies whole groups of blocks; returns how many bytes that was. `dst` is aligned to 16; `next` is
 * what is read after this. */
static int64_t stream_blocks(char *dst, const char *src, int64_t nbytes, const char *next) {
    const int64_t whole = nbytes - nbytes % GROUP;
    for (int64_t at = 0; at < whole; at += GROUP) {
        const char *ahead = at + GROUP < whole ? src + at + GROUP : next;
        for (int64_t line = 0; line < BLOCK; line += LINE)
            for (int64_t i = line; i < line + GROUP; i += BLOCK) {
                const __m128i *from = (const __m128i *)(src + at + i);
                __m128i *to = (__m128i *)(dst + at + i);
                _mm_prefetch(ahead + i, _MM_HINT_T0);
                const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
                const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
                _mm_stream_si128(to, a);
                _mm_stream_si128(to + 1, b);
                _mm_stream_si128(to + 2, c);
                _mm_stream_si128(to + 3, d);
            }
    }
    _mm_sfence();
    return whole;
}
#else
static int64_t stream_blocks(char *dst, const char *src, int64_t nbytes, const char *next) {
    (void)dst, (void)src, (void)nbytes, (void)next;
    return 0;
}
#endif

enum { STREAM_FROM = 8 << 20 }; /* bytes of a call; fewer are likely to be read from a cache soon */

static void sum_pages(const struct rx_copy *c, uint32_t *crcs) {
    const struct rx_crc32c how = rx_crc32c_of(c->nbytes);
    const int is_staging = c->dst_stride != c->nbytes; /* slots, about to be written */
    for (int64_t i = 0; i < c->num_pages; i++)
        crcs[i] = rx_crc32c(&how, c->dst ? c->dst + c->dst_ids[i] * c->dst_stride : NULL,
                            c->src + c->src_ids[i] * c->src_stride, is_staging);
}

void rx_copy_cpu(const struct rx_copy *c, uint32_t *crcs) {
    if (crcs) return sum_pages(c, crcs);
    const int whole = c->nbytes == c->src_stride && c->nbytes == c->dst_stride;
    const int large = c->num_pages * c->nbytes >= STREAM_FROM;
    for (int64_t i = 0; i < c->num_pages;) {
        int64_t n = 1;
        while (whole && i + n < c->num_pages && c->src_ids[i + n] == c->src_ids[i] + n &&
               c->dst_ids[i + n] == c->dst_ids[i] + n)
            n++;
        char *dst = c->dst + c->dst_ids[i] * c->dst_stride;
        const char *src = c->src + c->src_ids[i] * c->src_stride;
        const int64_t nbytes = n * c->nbytes;
        const char *next = i + n < c->num_pages ? c->src + c->src_ids[i + n] * c->src_stride : src;
        const int64_t done =
            large && (uintptr_t)dst % 16 == 0 ? stream_blocks(dst, src, nbytes, next) : 0;
        memcpy(dst + done, src + done, (size_t)(nbytes - done));
        i += n;
    }
}

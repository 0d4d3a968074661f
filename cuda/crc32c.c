/* CRC32C (Castagnoli) of a run of bytes, copied on the way: the copy is what takes the time.
 *
 * States are polynomials over GF(2) modulo P, bit 31 the coefficient of x^0. The instruction takes
 * 8 bytes in 3 cycles and can begin one each cycle, so three parts of the run go side by side:
 *
 *     state(a|b|c) = (state(a) * x^(8 part) + state0(b)) * x^(8 part) + state0(c)
 */
#include "crc32c.h"

#include <pthread.h>
#include <string.h>

enum { P = 0x82f63b78u, ONE = 1u << 31, X8 = 1u << 23 };

static uint32_t times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = ONE; bit; bit >>= 1, b = b >> 1 ^ (b & 1 ? P : 0))
        if (a & bit) product ^= b;
    return product;
}

/* x^(8n) */
static uint32_t shift_by(int64_t n) {
    uint32_t power = ONE, square = X8;
    for (; n; n >>= 1, square = times(square, square))
        if (n & 1) power = times(power, square);
    return power;
}

/* Eight bytes at a time through tables: table[k][b] is the state of byte b with k zeros behind. */
static uint32_t table[8][256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void fill_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t state = i;
        for (int bit = 0; bit < 8; bit++) state = state >> 1 ^ (state & 1 ? P : 0);
        table[0][i] = state;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
}

static uint32_t sum_plain(uint32_t state, const unsigned char *p, int64_t n) {
    pthread_once(&table_once, fill_table);
    for (; n >= 8; n -= 8, p += 8)
        state = table[7][p[0] ^ (state & 255)] ^ table[6][p[1] ^ (state >> 8 & 255)] ^
                table[5][p[2] ^ (state >> 16 & 255)] ^ table[4][p[3] ^ state >> 24] ^
                table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
    for (; n; n--) state = state >> 8 ^ table[0][(state ^ *p++) & 255];
    return state;
}

#ifdef __x86_64__
#include <nmmintrin.h>

#define SSE __attribute__((target("sse4.2")))

enum store { NONE, CACHED, STREAMED };

SSE static inline __attribute__((always_inline)) uint64_t pass(enum store store, char *dst,
                                                               const char *src, int64_t at) {
    long long word;
    memcpy(&word, src + at, 8);
    if (store == STREAMED) _mm_stream_si64((long long *)(dst + at), word);
    if (store == CACHED) memcpy(dst + at, &word, 8);
    return (uint64_t)word;
}

SSE static inline __attribute__((always_inline)) uint32_t sum_parts(
    enum store store, char *dst, const char *src, int64_t part, uint32_t shift) {
    uint64_t a = ~0u, b = 0, c = 0;
    for (int64_t i = 0; i < part; i += 8) {
        a = _mm_crc32_u64(a, pass(store, dst, src, i));
        b = _mm_crc32_u64(b, pass(store, dst, src, part + i));
        c = _mm_crc32_u64(c, pass(store, dst, src, 2 * part + i));
    }
    return times(times((uint32_t)a, shift) ^ (uint32_t)b, shift) ^ (uint32_t)c;
}

/* `part` is a multiple of 8, as is the address of dst; `shift` is x^(8 part). */
SSE static uint32_t sum_three(char *dst, const char *src, int64_t part, uint32_t shift,
                              int is_read_soon) {
    if (!dst) return sum_parts(NONE, dst, src, part, shift);
    if (is_read_soon) return sum_parts(CACHED, dst, src, part, shift);
    const uint32_t state = sum_parts(STREAMED, dst, src, part, shift);
    _mm_sfence();
    return state;
}

static int is_fast(void) { return __builtin_cpu_supports("sse4.2"); }
#else
static uint32_t sum_three(char *dst, const char *src, int64_t part, uint32_t shift,
                          int is_read_soon) {
    (void)dst, (void)src, (void)part, (void)shift, (void)is_read_soon;
    return ~0u;
}

static int is_fast(void) { return 0; }
#endif

struct rx_crc32c rx_crc32c_of(int64_t nbytes) {
    const int64_t part = is_fast() && strcmp(rx_cpu_isa(), "plain") ? nbytes / 24 * 8 : 0;
    return (struct rx_crc32c){nbytes, part, shift_by(part)};
}

uint32_t rx_crc32c(const struct rx_crc32c *how, char *dst, const char *src, int is_read_soon) {
    const int64_t part = (uintptr_t)dst % 8 ? 0 : how->part, done = 3 * part;
    const uint32_t state =
        part ? sum_three(dst, src, part, how->shift, is_read_soon) : ~0u;
    if (dst) memcpy(dst + done, src + done, (size_t)(how->nbytes - done));
    return ~sum_plain(state, (const unsigned char *)src + done, how->nbytes - done);
}

/* CRC32C of runs of bytes of one length. */
#ifndef RX_CRC32C_H
#define RX_CRC32C_H

#include "kernels.h"

struct rx_crc32c {
    int64_t nbytes, part;
    uint32_t shift;
};

struct rx_crc32c rx_crc32c_of(int64_t nbytes);

/* The sum of nbytes at `src`, which are copied to `dst` unless that is NULL: past the caches where
 * they are not read soon. */
uint32_t rx_crc32c(const struct rx_crc32c *how, char *dst, const char *src, int is_read_soon);

#endif

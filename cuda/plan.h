/* The CUDA kernels' work lists of one step, as 32-bit words in device memory.
 *
 * The host writes them once per step for all layers, so they know sequences, tokens and splits but
 * no heads. Kernels read the counts from memory too: a captured graph follows the words.
 *
 *     header   [RX_PLAN_HEADER]  counts, and where each list begins
 *     singles  (seq, split)                  one decoding sequence, one split of its context
 *     shared   (first member, count, split)  up to RX_MEMBERS decoding sequences whose keys and
 *                                            values of this whole split lie in the same pages
 *     members  seq
 *     decode   seq                           sequences with one new token
 *     partials [num_seqs]                    a decoding sequence's first slot of partial results
 *     prefill  (seq, block)                  RX_BLOCK_TOKENS of a sequence's several new tokens
 *     tokens   [num_tokens] seq              -1: a padded row
 *
 * A context is cut into splits at absolute multiples of RX_SPLIT, whatever the batch: that is why
 * a result does not depend on who else is in it. */
#ifndef RX_PLAN_H
#define RX_PLAN_H

enum { RX_SPLIT = 256, RX_MEMBERS = 64, RX_BLOCK_TOKENS = 64 };

enum rx_plan_header {
    RX_NUM_SINGLES,
    RX_NUM_SHARED,
    RX_NUM_DECODE,
    RX_SINGLES,
    RX_SHARED,
    RX_MEMBER_SEQS,
    RX_DECODE,
    RX_PARTIALS,
    RX_PREFILL,
    RX_TOKENS,
    RX_PLAN_HEADER = 16
};

#endif

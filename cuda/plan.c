/* Builds the CUDA kernels' work lists (plan.h) on the host. */
#include "plan.h"

#include "kernels.h"

static int32_t q_len(const struct rx_batch *b, int32_t seq) {
    return b->cu_seqlens_q[seq + 1] - b->cu_seqlens_q[seq];
}

static int32_t div_up(int32_t n, int32_t by) { return (n + by - 1) / by; }

/* A list that is counted when there is nowhere to write. */
struct list {
    int32_t *words;
    int64_t at, end;
};

static struct list begin(struct list before, int32_t header) {
    struct list l = {before.words, before.end, before.end};
    if (l.words) l.words[header] = (int32_t)l.at;
    return l;
}

static void put(struct list *l, int32_t word) {
    if (l->words) l->words[l->end] = word;
    l->end++;
}

static int32_t num_decoding(const struct rx_batch *b, int32_t group) {
    int32_t members = 0;
    for (int32_t i = b->group_indptr[group]; i < b->group_indptr[group + 1]; i++) {
        members += q_len(b, b->group_seqs[i]) == 1;
    }
    return members;
}

/* Splits that a group's decoding members attend to together. With one member there are none. */
static int32_t shared_splits(const struct rx_batch *b, int32_t group) {
    return num_decoding(b, group) > 1 ? b->group_lens[group] / RX_SPLIT : 0;
}

static int32_t first_own_split(const struct rx_batch *b, int32_t seq) {
    for (int32_t group = 0; group < b->num_groups; group++) {
        for (int32_t i = b->group_indptr[group]; i < b->group_indptr[group + 1]; i++) {
            if (b->group_seqs[i] == seq) return shared_splits(b, group);
        }
    }
    return 0;
}

struct rx_plan rx_plan_cuda(const struct rx_batch *b, int32_t *words) {
    struct rx_plan plan = {0};
    struct list header = {words, 0, RX_PLAN_HEADER};

    int32_t max_q_len = 0;
    struct list partials = begin(header, RX_PARTIALS);
    for (int32_t seq = 0; seq < b->num_seqs; seq++) {
        if (max_q_len < q_len(b, seq)) max_q_len = q_len(b, seq);
        const int decodes = q_len(b, seq) == 1;
        put(&partials, decodes ? (int32_t)plan.num_partials : -1);
        if (decodes) plan.num_partials += div_up(b->kv_lens[seq], RX_SPLIT);
    }
    struct list decode = begin(partials, RX_DECODE);
    for (int32_t seq = 0; seq < b->num_seqs; seq++) {
        if (q_len(b, seq) == 1) put(&decode, seq);
    }
    plan.num_decode = (int32_t)(decode.end - decode.at);

    struct list singles = begin(decode, RX_SINGLES);
    for (int32_t seq = 0; seq < b->num_seqs; seq++) {
        if (q_len(b, seq) != 1) continue;
        for (int32_t s = first_own_split(b, seq); s < div_up(b->kv_lens[seq], RX_SPLIT); s++) {
            put(&singles, seq);
            put(&singles, s);
        }
    }
    struct list members = begin(singles, RX_MEMBER_SEQS);
    for (int32_t i = 0; i < (b->num_groups ? b->group_indptr[b->num_groups] : 0); i++) {
        if (q_len(b, b->group_seqs[i]) == 1) put(&members, b->group_seqs[i]);
    }
    struct list shared = begin(members, RX_SHARED);
    int32_t first = 0;
    for (int32_t group = 0; group < b->num_groups; group++) {
        const int32_t count = num_decoding(b, group);
        for (int32_t split = 0; split < shared_splits(b, group); split++) {
            for (int32_t i = 0; i < count; i += RX_MEMBERS) {
                put(&shared, first + i);
                put(&shared, count - i < RX_MEMBERS ? count - i : RX_MEMBERS);
                put(&shared, split);
            }
        }
        first += count;
    }
    plan.num_shared = (int32_t)(shared.end - shared.at) / 3;

    /* The blocks that attend to most come first: the last ones to run are short. */
    struct list prefill = begin(shared, RX_PREFILL);
    for (int32_t block = div_up(max_q_len, RX_BLOCK_TOKENS) - 1; block >= 0; block--) {
        for (int32_t seq = 0; seq < b->num_seqs; seq++) {
            if (q_len(b, seq) < 2 || block * RX_BLOCK_TOKENS >= q_len(b, seq)) continue;
            put(&prefill, seq);
            put(&prefill, block);
        }
    }
    plan.num_prefill = (int32_t)(prefill.end - prefill.at) / 2;

    struct list tokens = begin(prefill, RX_TOKENS);
    for (int32_t seq = 0; seq < b->num_seqs; seq++) {
        for (int32_t i = 0; i < q_len(b, seq); i++) put(&tokens, seq);
    }
    for (int64_t i = tokens.end - tokens.at; i < b->num_tokens; i++) put(&tokens, -1);
    plan.num_words = tokens.end;
    if (words) {
        words[RX_NUM_SINGLES] = (int32_t)(singles.end - singles.at) / 2;
        words[RX_NUM_SHARED] = plan.num_shared;
        words[RX_NUM_DECODE] = plan.num_decode;
    }
    plan.words = words;
    return plan;
}

// emulated.cpp - the CUDA sources as one unit for the host compiler, and what the tests steer.
// `simt_host.h` stands in for the CUDA toolkit: it is found before any other of that name.
extern "C" {
#include "plan.c"
}
#include "append.cu"
#include "attention.cu"
#include "conformance.cu"
#include "decode.cu"
#include "page_copy.cu"
#include "prefill.cu"
#include "reference.cu"

extern "C" {
void simt_configure(int order, unsigned seed, int late_copies, int num_sms) {
    simt::config = {order, seed, late_copies, num_sms};
}

// Switches, blocks, matrices loaded, bank conflicts, since the last call.
void simt_take_stats(long out[4]) {
    memcpy(out, &simt::stats, sizeof simt::stats);
    simt::stats = {};
}
}

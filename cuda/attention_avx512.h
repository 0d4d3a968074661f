/* attention_body.h in AVX-512. */
#include <immintrin.h>
#define VL 16
#define LOGIT_VECS 6
#define OUTPUT_VECS 3
#define OUTPUT_GROUPS 8
#define OUTPUT_GROUPS_ONE 16
#define bcast4(p) _mm512_broadcast_f32x4(_mm_loadu_ps(p))
#define vmax(a, b) _mm512_max_ps(a, b)
#define round_vf(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define exp2_scale(p, n) _mm512_scalef_ps(p, n)

// AdamW with PyTorch's arithmetic, one pass over memory. ELEMENT is the type of the gradients, OTHER that of the rounded copy.
#include "spans.cuh"

// Elements of a block, which each thread walks over in groups of four.
#define ADAMW_TILE 4096
#define ADAMW_SPANS 64

// One range of parameters.
struct Span {
    f32 *p;
    const ELEMENT *g;
    f32 *m, *v;
    // May be null.
    OTHER *rounded;
    u64 n;
    u32 first;
    // 1 - learning rate * weight decay.
    f32 keep;
};

// Updates p, m and v of each span in place from g * gradient_scale; `rounded`, where given, gets a copy of p. The factors are
// those of the step, rounded once from f64 by the host.
extern "C" __global__ void adamw(const __grid_constant__ Spans<Span, ADAMW_SPANS> table, u32 count, const f32 *gradient_scale,
                                 f32 blend1, f32 beta2, f32 blend2, f32 step_size, f32 root_correction2, f32 eps) {
    const Span span = table.spans[span_of_block(table, count)];
    const f32 scale = *gradient_scale;
    const bool p_aligned = is_aligned(span.p), g_aligned = is_aligned(span.g), m_aligned = is_aligned(span.m);
    const bool v_aligned = is_aligned(span.v), rounded_aligned = is_aligned(span.rounded);
    const u64 start = (u64)(blockIdx.x - span.first) * ADAMW_TILE;
    const u64 end = start + ADAMW_TILE < span.n ? start + ADAMW_TILE : span.n;
    for (u64 i = start + 4 * threadIdx.x; i < end; i += 4 * blockDim.x) {
        f32 ps[4], gs[4], ms[4], vs[4];
        load4((const f32 *)span.p, i, span.n, p_aligned, ps);
        load4(span.g, i, span.n, g_aligned, gs);
        load4((const f32 *)span.m, i, span.n, m_aligned, ms);
        load4((const f32 *)span.v, i, span.n, v_aligned, vs);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const f32 gradient = gs[j] * scale;
            ms[j] = fmaf(blend1, gradient - ms[j], ms[j]);
            vs[j] = fmaf(blend2 * gradient, gradient, vs[j] * beta2);
            const f32 denominator = sqrtf(vs[j]) / root_correction2 + eps;
            ps[j] = ps[j] * span.keep - step_size * (ms[j] / denominator);
        }
        store4(span.p, i, span.n, p_aligned, ps);
        store4(span.m, i, span.n, m_aligned, ms);
        store4(span.v, i, span.n, v_aligned, vs);
        if (span.rounded != nullptr) store4(span.rounded, i, span.n, rounded_aligned, ps);
    }
}

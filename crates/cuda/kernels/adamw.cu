// AdamW with PyTorch's arithmetic, one pass over memory. ELEMENT is the type of the gradients, OTHER that of the rounded copy.
#include "numbers.cuh"

// Updates p, m and v in place from g * gradient_scale; `rounded`, where given, gets a copy of p. The factors are those of
// the step, rounded once from f64 by the host.
extern "C" __global__ void adamw(f32 *p, const ELEMENT *g, f32 *m, f32 *v, const f32 *gradient_scale, OTHER *rounded, u64 n,
                                 f32 keep, f32 blend1, f32 beta2, f32 blend2, f32 step_size, f32 root_correction2,
                                 f32 eps) {
    const f32 scale = *gradient_scale;
    const bool p_aligned = is_aligned(p), g_aligned = is_aligned(g), m_aligned = is_aligned(m), v_aligned = is_aligned(v);
    const bool rounded_aligned = is_aligned(rounded);
    FOR_FOURS(i, n) {
        f32 ps[4], gs[4], ms[4], vs[4];
        load4((const f32 *)p, i, n, p_aligned, ps);
        load4(g, i, n, g_aligned, gs);
        load4((const f32 *)m, i, n, m_aligned, ms);
        load4((const f32 *)v, i, n, v_aligned, vs);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const f32 gradient = gs[j] * scale;
            ms[j] = fmaf(blend1, gradient - ms[j], ms[j]);
            vs[j] = fmaf(blend2 * gradient, gradient, vs[j] * beta2);
            const f32 denominator = sqrtf(vs[j]) / root_correction2 + eps;
            ps[j] = ps[j] * keep - step_size * (ms[j] / denominator);
        }
        store4(p, i, n, p_aligned, ps);
        store4(m, i, n, m_aligned, ms);
        store4(v, i, n, v_aligned, vs);
        if (rounded != nullptr) store4(rounded, i, n, rounded_aligned, ps);
    }
}

// SGD with momentum in PyTorch's form, one pass over memory. ELEMENT is the type of the gradients, OTHER that of the rounded
// copy.
#include "numbers.cuh"

// g' = g * gradient_scale + weight_decay * p; velocity = momentum * velocity + g' (g' itself in the first step);
// p -= lr * velocity. `rounded`, where given, gets a copy of p.
extern "C" __global__ void sgd(f32 *p, const ELEMENT *g, f32 *velocity, const f32 *gradient_scale, OTHER *rounded, u64 n,
                               f32 lr, f32 momentum, f32 weight_decay, int first) {
    const f32 scale = *gradient_scale;
    const bool p_aligned = is_aligned(p), g_aligned = is_aligned(g), v_aligned = is_aligned(velocity);
    const bool rounded_aligned = is_aligned(rounded);
    FOR_FOURS(i, n) {
        f32 ps[4], gs[4], vs[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        load4((const f32 *)p, i, n, p_aligned, ps);
        load4(g, i, n, g_aligned, gs);
        if (!first) load4((const f32 *)velocity, i, n, v_aligned, vs);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const f32 gradient = fmaf(weight_decay, ps[j], gs[j] * scale);
            vs[j] = first ? gradient : fmaf(momentum, vs[j], gradient);
            ps[j] = fmaf(-lr, vs[j], ps[j]);
        }
        store4(p, i, n, p_aligned, ps);
        store4(velocity, i, n, v_aligned, vs);
        if (rounded != nullptr) store4(rounded, i, n, rounded_aligned, ps);
    }
}

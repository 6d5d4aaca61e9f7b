// Rotary positions, in place.
#include "numbers.cuh"

// Most frequencies of a head.
#define FREQUENCIES 128

// By how many radians each pair of a head's elements turns from one position to the next.
struct Frequencies {
    f64 radians[FREQUENCIES];
};

template <class T, int COUNT> struct alignas(COUNT * sizeof(T)) Piece {
    T x[COUNT];
};

// Cosine and sine of an angle of at least 0, by the processor's formula (crates/cpu/src/rotary.rs says why it is right).
__device__ __forceinline__ void cos_sin(f64 angle, f64 &cosine, f64 &sine) {
    const f64 round = 6755399441055744.0, rounded = angle * 0.63661977236758138 + round, quarters = rounded - round;
    const u64 bits = (u64)__double_as_longlong(rounded);
    const f64 r = (angle - quarters * 1.5707963267341256) - quarters * 6.077100506506192e-11;
    const f64 z = r * r;
    f64 p = -1.1359647557788195e-11;
    p = p * z + 2.087572321298175e-9;
    p = p * z + -2.7557314351390663e-7;
    p = p * z + 2.480158728947673e-5;
    p = p * z + -1.388888888887411e-3;
    p = p * z + 4.16666666666666e-2;
    const f64 c = 1.0 - 0.5 * z + z * z * p;
    p = 1.58969099521155e-10;
    p = p * z + -2.5050760253406863e-8;
    p = p * z + 2.7557313707070068e-6;
    p = p * z + -1.984126982985795e-4;
    p = p * z + 8.33333333332249e-3;
    p = p * z + -1.6666666666666632e-1;
    const f64 s = r + r * z * p;
    const bool odd = bits & 1;
    cosine = odd ? s : c;
    sine = odd ? c : s;
    // The cosine is negative in the second and third quarter, the sine in the last two.
    if (bits + 1 & 2) cosine = -cosine;
    if (bits & 2) sine = -sine;
}

// Turns the pairs of all heads of a row, COUNT neighbouring ones at a time.
template <int COUNT>
__device__ __forceinline__ void turn(const f32 *cosines, const f32 *sines, u32 count, ELEMENT *row, u32 head_dim, u32 heads) {
    using Elements = Piece<ELEMENT, COUNT>;
    using Factors = Piece<f32, COUNT>;
    const u32 pieces = count / COUNT;
    for (u32 i = threadIdx.x; i < heads * pieces; i += blockDim.x) {
        const u32 head = i / pieces, first = i % pieces * COUNT;
        ELEMENT *low = row + (u64)head * head_dim + first, *high = low + count;
        Elements a = *(const Elements *)low, b = *(const Elements *)high;
        const Factors cs = *(const Factors *)(cosines + first), ss = *(const Factors *)(sines + first);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const f32 x = to_f32(a.x[j]), y = to_f32(b.x[j]);
            a.x[j] = from_f32<ELEMENT>(fmaf(0.0f - y, ss.x[j], x * cs.x[j]));
            b.x[j] = from_f32<ELEMENT>(fmaf(x, ss.x[j], y * cs.x[j]));
        }
        *(Elements *)low = a;
        *(Elements *)high = b;
    }
}

// Turns the first `heads` heads of each row of x `[batch, seq, width]` by its position, which is its own of `positions` `[batch, seq]`
// or, if they are null, `first + row mod seq`: elements i and
// i + count of a head, a and b, become a c - b s and b c + a s, with the cosine c times `cos_scale` and the sine s times
// `sin_scale`. A block computes a row.
extern "C" __global__ void rotary(const __grid_constant__ Frequencies frequencies, f64 cos_scale, f64 sin_scale, u32 count,
                                  ELEMENT *x, u64 seq, u64 width, u32 head_dim, u32 heads, u64 first,
                                  const u32 *positions) {
    __shared__ alignas(32) f32 cosines[FREQUENCIES], sines[FREQUENCIES];
    const u64 row = blockIdx.x;
    if (threadIdx.x < count) {
        f64 cosine, sine;
        cos_sin((f64)(positions ? positions[row] : first + row % seq) * frequencies.radians[threadIdx.x], cosine, sine);
        cosines[threadIdx.x] = (f32)(cos_scale * cosine);
        sines[threadIdx.x] = (f32)(sin_scale * sine);
    }
    __syncthreads();
    constexpr int COUNT = Chunk<ELEMENT>::COUNT;
    const bool chunks = has_chunks(x) && width % COUNT == 0 && head_dim % COUNT == 0 && count % COUNT == 0;
    if (chunks) turn<COUNT>(cosines, sines, count, x + row * width, head_dim, heads);
    else turn<1>(cosines, sines, count, x + row * width, head_dim, heads);
}

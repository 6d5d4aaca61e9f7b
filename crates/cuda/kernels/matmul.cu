// Matrix products of linear layers and their gradients. ELEMENT is the type of the operands, OTHER that of the result, and
// of bias, residual and what is added to.
//
// With sums s: s += bias; s += add; to = round(s), or with GELU: pre = round(s); to = round(gelu(pre)).
#include "product.cuh"

#ifdef SMALL
// For results of few tiles.
using S = Shape<ELEMENT, 2, 2, 2, 4>;
#else
using S = Shape<ELEMENT, 2, 4, 4, 4>;
#endif

struct Target {
    OTHER *to;
    // A row, added to each row; may be null.
    const OTHER *bias;
    // A matrix like `to`, or `to` itself, added; may be null.
    const OTHER *add;
    // Where the argument of GELU is stored; null: no GELU.
    OTHER *pre;
    int gelu;
};

__device__ __forceinline__ void finish(const Target &target, u64 at, u64 column, f32 x) {
    if (target.bias != nullptr) x += to_f32(target.bias[column]);
    if (target.add != nullptr) x += to_f32(target.add[at]);
    OTHER rounded = from_f32<OTHER>(x);
    if (target.pre != nullptr) {
        target.pre[at] = rounded;
        rounded = from_f32<OTHER>(gelu_value(to_f32(rounded), target.gelu));
    }
    target.to[at] = rounded;
}

// Strides are those of the rows of a and b.
template <bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ __forceinline__ void product(const ELEMENT *a, const ELEMENT *b, const Target &target, u64 m, u64 n, u64 k,
                                        u64 a_stride, u64 b_stride) {
    const Source<ELEMENT> left = source(a, a_stride, A_TRANSPOSED ? m : k);
    const Source<ELEMENT> right = source(b, b_stride, B_TRANSPOSED ? k : n);
    const TilePlace place = tile_of_block<S>(m, n);
    Sums<S> sums;
    product_tile<ELEMENT, S, A_TRANSPOSED, B_TRANSPOSED>(sums, left, right, place, m, n, k);
    for_pairs(sums, [&](int r, int c, f32 x0, f32 x1) {
        const u64 row = place.row + r, column = place.column + c;
        if (row >= m) return;
        if (column < n) finish(target, row * n + column, column, x0);
        if (column + 1 < n) finish(target, row * n + column + 1, column + 1, x1);
    });
}

#define PRODUCT(NAME, A_TRANSPOSED, B_TRANSPOSED)                                                                      \
    extern "C" __global__ void __launch_bounds__(S::THREADS)                                                           \
        NAME(const ELEMENT *a, const ELEMENT *b, OTHER *to, const OTHER *bias, const OTHER *add, OTHER *pre, int gelu, \
             u64 m, u64 n, u64 k, u64 a_stride, u64 b_stride) {                                                        \
        product<A_TRANSPOSED, B_TRANSPOSED>(a, b, Target{to, bias, add, pre, gelu}, m, n, k, a_stride, b_stride);      \
    }

// a `[m, k]`, b `[k, n]`.
PRODUCT(product, false, false)
// a `[m, k]`, b stored `[n, k]`.
PRODUCT(product_with_transposed, false, true)
// a stored `[k, m]`, b `[k, n]`.
PRODUCT(product_of_transposed, true, false)

// Spans: calls of one kernel that follow each other and are computed by one launch. Their arguments are a table, which is the
// launch's first argument; a block finds the span that it belongs to.
#pragma once
#include "numbers.cuh"

// Spans of a launch. Each has a number `first`: how many blocks those before it have.
template <class Span, int MAX> struct Spans {
    Span spans[MAX];
};

// The number of the span of this block, among `count`: the last one that begins at it or before.
template <class Span, int MAX> __device__ __forceinline__ u32 span_of_block(const Spans<Span, MAX> &table, u32 count) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (table.spans[middle].first <= blockIdx.x) low = middle;
        else high = middle;
    }
    return low;
}

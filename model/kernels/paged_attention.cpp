// The products of paged attention in vector registers; see paged_attention.h.
// variants: plain avx2 avx512 avx512_bf16
#include "paged_attention.h"

namespace {

constexpr int WIDE = 4;  // vectors of each query whose sums stay in registers, for Type::GROUP queries at once

// A product of weights and operands, for queries x vectors sums:
// sums[query][vector] = sums[query][vector] * decay[query] + sum over r, i of factors[query][r * run + i] * operand(vector, r, i)
// where operand(vector, r, i) lies `step` * i elements behind the start of run r.
template <class Type>
struct Product {
    const typename Type::Factor* factors;
    int factor_stride;
    const float* decay;  // null: the sums start at 0
    Floats* sums;
    int sum_stride;
    int runs, run, step;
};

// Where operands begin, and where those of the span after this one do: they are fetched from memory meanwhile.
template <class Type>
struct Start {
    const typename Type::Element* now;
    const typename Type::Element* next;
};

// The one inner loop of both products. Its sums stay in registers, and all queries share every load.
// starts: [runs][VECTORS]
template <class Type, int QUERIES, int VECTORS>
void accumulate(const Product<Type>& product, const Start<Type>* starts, Floats* sums) {
    Floats sum[QUERIES][VECTORS];
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            sum[q][v] = product.decay ? sums[q * product.sum_stride + v] * product.decay[q] : Floats{};
    const size_t step = product.step;
    for (int r = 0; r < product.runs; r++) {
        const typename Type::Factor* factors = product.factors + r * product.run;
        Start<Type> start[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) start[v] = starts[r * VECTORS + v];
        for (int i = 0; i < product.run; i++) {
            typename Type::Operand operand[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                operand[v] = Type::load_operand(start[v].now + i * step);
                __builtin_prefetch(start[v].next + i * step);
            }
#pragma GCC unroll 8
            for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++)
                    sum[q][v] = Type::multiply_add(sum[q][v], operand[v], factors[q * product.factor_stride + i]);
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[q * product.sum_stride + v] = sum[q][v];
}

template <class Type, int VECTORS>
void accumulate_some(int queries, const Product<Type>& product, const Start<Type>* starts, Floats* sums) {
    switch (queries) {
        case 1: return accumulate<Type, 1, VECTORS>(product, starts, sums);
        case 2: return accumulate<Type, 2, VECTORS>(product, starts, sums);
        case 3: return accumulate<Type, 3, VECTORS>(product, starts, sums);
#if defined(__AVX512F__)
        case 4: return accumulate<Type, 4, VECTORS>(product, starts, sums);
        case 5: return accumulate<Type, 5, VECTORS>(product, starts, sums);
        case 6: return accumulate<Type, 6, VECTORS>(product, starts, sums);
#endif
    }
}

// start_of(vector, run) is where a run's first operand lies.
template <class Type, class StartOf>
void multiply(int queries, int vectors, const Product<Type>& product, const StartOf& start_of) {
    for (int first = 0; first < vectors;) {
        const int wide = vectors - first >= WIDE ? WIDE : 1;
        Start<Type> starts[SPAN / BLOCK * WIDE];
        for (int r = 0; r < product.runs; r++)
            for (int v = 0; v < wide; v++) starts[r * wide + v] = start_of(first + v, r);
        if (wide == WIDE)
            accumulate_some<Type, WIDE>(queries, product, starts, product.sums + first);
        else
            accumulate_some<Type, 1>(queries, product, starts, product.sums + first);
        first += wide;
    }
}

// Add one span to the state of `count` queries, at most Type::GROUP.
template <class Type>
void add_to_group(Tile<Type>& tile, const Span<Type>& span, const Span<Type>& next, int first, int count) {
    constexpr int PACK = Type::PACK;
    using Factor = typename Type::Factor;
    Floats scores[Type::GROUP * SPAN_VECTORS];
    Factor weights[Type::GROUP * SPAN / PACK];
    float decay[Type::GROUP + LANES];
    const int head_dim = tile.plan().head_dim, head_vectors = tile.head_vectors(), vectors = span.blocks * BLOCK / LANES;
    const Product<Type> score{tile.factors + first * head_dim / PACK, head_dim / PACK, nullptr, scores, SPAN_VECTORS,
                              1, head_dim / PACK, BLOCK * PACK};
    multiply(count, vectors, score, [&](int vector, int) {
        const int block = vector * LANES / BLOCK, offset = vector * LANES % BLOCK * PACK;
        return Start<Type>{span.keys[block] + offset, next.keys[block] + offset};
    });
    tile.weigh(first, count, span, vectors, scores, weights, decay, [](int) {});
    const Product<Type> output{weights, SPAN / PACK, decay, tile.sums + first * head_vectors, head_vectors,
                               span.blocks, BLOCK / PACK, head_dim * PACK};
    multiply(count, head_vectors, output, [&](int vector, int block) {
        const int dimension = tile.dimension(vector) * PACK;
        return Start<Type>{span.values[block] + dimension, next.values[block] + dimension};
    });
}

template <class Type>
void Tile<Type>::add(const Span<Type>& span, const Span<Type>& next) {
    for (int first = 0; first < queries;) {
        const int count = Type::next_group(queries - first);
        if (sees(span, first, count)) add_to_group(*this, span, next, first, count);
        first += count;
    }
}

}  // namespace

OCTAVO_PAGED_ATTENTION(paged_attention_bf16, BFloat16)
#if !defined(__AVX512BF16__)
OCTAVO_PAGED_ATTENTION(paged_attention_f32, Float32)
#endif

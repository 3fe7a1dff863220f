// Paged attention for a step of mixed rows: decodes, chunks and whole prompts take one path.
//
// The cache of one KV head is made of blocks of 16 positions, laid out so that neither product needs a sum across lanes:
//
//   K: [head_dim / PACK][16 positions][PACK]    scores: lanes are positions, one query number is broadcast
//   V: [16 / PACK positions][head_dim][PACK]    outputs: lanes are dimensions, one weight is broadcast
//
// with PACK = 2 for bfloat16 (a pair fills a 32-bit lane, as vdpbf16ps wants it) and 1 for float32. A block of the pool
// with more positions is a run of such blocks: [block_size / 16][kv_heads] of them, and K and V are separate arrays.
//
// A *query* is one head of one token. It looks at the cache in spans of 128 positions, counted from position 0, in
// ascending order, with an online softmax (Milakov and Gimelshein, 2018). No sum of a query depends on which queries
// share its loads, so its bits depend neither on chunking nor on neighbours nor on threads. A span in which a query sees
// nothing leaves its state as it was: its sums are multiplied by 2^0 = 1, and weights of +0 are added.
#pragma once
#include <cstddef>

#include "paged_attention_vector.h"
#include "parallel.h"

namespace {

constexpr int BLOCK = 16;          // positions
constexpr int SPAN = 128;          // positions
constexpr int MAX_HEAD_DIM = 256;  // as in cpu.py
constexpr int TILE = 96;           // queries of one unit of parallel work, as in cpu.py
constexpr int APPEND_TOKENS = 16;  // tokens of one unit of parallel work
constexpr float LOWEST = -1e30f;   // below any score; finite, so that LOWEST - LOWEST is 0
constexpr float LOG2_E = 1.44269504088896340736f;

constexpr int SPAN_VECTORS = SPAN / LANES;
constexpr int MAX_HEAD_VECTORS = MAX_HEAD_DIM / LANES;

inline int smaller(int a, int b) { return a < b ? a : b; }

// What does not change from layer to layer. Mirrored by `Plan` in cpu.py; the arrays are those of AttentionBatch.
struct Plan {
    const int32_t* query_indptr;
    const int32_t* kv_lengths;
    const int32_t* block_indptr;
    const int32_t* block_indices;
    const int32_t* slots;
    const int32_t* tile_indptr;  // [rows + 1]: tiles of the rows before
    int32_t rows, tokens;
    int32_t kv_heads, group;  // group: query heads of one KV head
    int32_t head_dim, block_size;
    int32_t window;  // positions a query sees at most
    float scale;     // of the scores
};

// [tokens, heads, head_dim], its tokens token_stride elements apart.
template <class Element>
struct View {
    Element* data;
    int64_t token_stride;
};

template <class Type>
struct Layer {
    const Plan& plan;
    typename Type::Element* keys;
    typename Type::Element* values;

    // Elements of one block of 16 positions of one KV head.
    size_t block_elements() const { return size_t(BLOCK) * plan.head_dim; }
    size_t offset(size_t block, int head) const { return (block * plan.kv_heads + head) * block_elements(); }
    // Where the 16 positions from `position` of a row lie.
    size_t offset_of_position(int row, int head, int position) const {
        const int block = plan.block_indices[plan.block_indptr[row] + position / plan.block_size];
        return offset(size_t(block) * (plan.block_size / BLOCK) + position % plan.block_size / BLOCK, head);
    }
};

template <class Type>
void append(const Layer<Type>& layer, int token, View<const typename Type::Element> k, View<const typename Type::Element> v) {
    constexpr int PACK = Type::PACK;
    const int head_dim = layer.plan.head_dim;
    const int slot = layer.plan.slots[token], position = slot % BLOCK;
    for (int head = 0; head < layer.plan.kv_heads; head++) {
        const typename Type::Element* key = k.data + token * k.token_stride + head * head_dim;
        const typename Type::Element* value = v.data + token * v.token_stride + head * head_dim;
        const size_t block = layer.offset(slot / BLOCK, head);
        typename Type::Element* keys = layer.keys + block + position * PACK;
        typename Type::Element* values = layer.values + block + position / PACK * PACK * head_dim + position % PACK;
        for (int d = 0; d < head_dim; d += PACK) std::memcpy(keys + d * BLOCK, key + d, PACK * sizeof(key[0]));
        for (int d = 0; d < head_dim; d++) values[d * PACK] = value[d];
    }
}

// The blocks of one span of a row, for one KV head.
template <class Type>
struct Span {
    int base;    // first position
    int blocks;  // how many hold positions that any query of the tile sees
    const typename Type::Element* keys[SPAN / BLOCK];
    const typename Type::Element* values[SPAN / BLOCK];
};

// The row that tile number `tile` belongs to.
int row_of_tile(const Plan& plan, int tile) {
    int low = 0, high = plan.rows - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (plan.tile_indptr[middle + 1] <= tile)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// One unit of work: up to TILE queries that are neighbours in [tokens][group] order of one row and KV head.
template <class Type>
struct Unit {
    const Layer<Type>& layer;
    const int row, head;
    const int first_query, queries;  // of the row's [tokens][group]

    Unit(const Layer<Type>& layer, int row, int head, int first_query)
        : layer(layer), row(row), head(head), first_query(first_query), queries(smaller(TILE, queries_from(first_query))) {}

    // Units are counted tile by tile, and head by head within a tile.
    static Unit of(const Layer<Type>& layer, int number) {
        const int tile = number / layer.plan.kv_heads, row = row_of_tile(layer.plan, tile);
        return Unit(layer, row, number % layer.plan.kv_heads, (tile - layer.plan.tile_indptr[row]) * TILE);
    }

    const Plan& plan() const { return layer.plan; }
    int computed() const { return plan().query_indptr[row + 1] - plan().query_indptr[row]; }  // tokens of the row
    int queries_from(int first) const { return computed() * plan().group - first; }
    int token(int query) const { return (first_query + query) / plan().group; }  // of the row
    int last_seen(int query) const {
        return plan().kv_lengths[row] - computed() + token(query);
    }
    int first_seen(int query) const { return first_of(last_seen(query)); }
    // The first position that a query sees whose last is this one.
    int first_of(int last) const { return last < plan().window ? 0 : last - plan().window + 1; }
    int end() const { return last_seen(queries - 1) + 1; }

    Span<Type> span(int base) const {
        const int last = end() - 1;
        Span<Type> span;
        span.base = base;
        span.blocks = last - base >= SPAN ? SPAN / BLOCK : (last - base) / BLOCK + 1;
        for (int b = 0; b < SPAN / BLOCK; b++) {
            const int seen = b < span.blocks ? b : 0;  // what is never seen is only ever fetched ahead
            const size_t offset = layer.offset_of_position(row, head, base + seen * BLOCK);
            span.keys[b] = layer.keys + offset;
            span.values[b] = layer.values + offset;
        }
        return span;
    }
    Span<Type> first_span() const { return span(first_seen(0) / SPAN * SPAN); }
};

// What is computed of a unit.
template <class Type>
struct Tile : Unit<Type> {
    static constexpr int PACK = Type::PACK;
    using Element = typename Type::Element;
    using Factor = typename Type::Factor;
    using Unit<Type>::plan, Unit<Type>::row, Unit<Type>::head, Unit<Type>::first_query, Unit<Type>::queries;
    using Unit<Type>::token, Unit<Type>::first_of;

    int last[TILE];  // position that each query sees
    Floats sums[TILE * MAX_HEAD_VECTORS];
    Floats totals[TILE];  // sums of weights, still spread over lanes
    float highest[TILE];  // highest score so far, not yet scaled
    Factor factors[TILE * MAX_HEAD_DIM / PACK];
    Element tail[BLOCK * MAX_HEAD_DIM];  // V of the row's last block, unwritten positions set to zero

    explicit Tile(const Unit<Type>& unit) : Unit<Type>(unit) {}

    int head_vectors() const { return (plan().head_dim + LANES - 1) / LANES; }
    // The last vector overlaps the one before where head_dim is no multiple of LANES.
    int dimension(int vector) const {
        const int last = plan().head_dim - LANES;
        return vector * LANES < last ? vector * LANES : last;
    }
    int64_t element(int query, int64_t token_stride) const {
        const int query_head = head * plan().group + (first_query + query) % plan().group;
        return (plan().query_indptr[row] + token(query)) * token_stride + query_head * plan().head_dim;
    }

    void begin(View<const Element> q) {
        for (int query = 0; query < queries; query++) {
            Type::make_factors(q.data + element(query, q.token_stride), plan().head_dim,
                               factors + query * plan().head_dim / PACK);
            for (int v = 0; v < head_vectors(); v++) sums[query * head_vectors() + v] = Floats{};
            totals[query] = Floats{};
            highest[query] = LOWEST;
            last[query] = this->last_seen(query);
        }
    }

    // A weight of 0 does not silence a NaN, and memory that nobody has written may hold one.
    void clean_tail(Span<Type>& span) {
        const int written = plan().kv_lengths[row] - span.base;  // from the first of its positions on
        const int b = written / BLOCK, last = written % BLOCK;
        if (b >= span.blocks || last == 0) return;
        const Element* values = span.values[b];
        const int pair = plan().head_dim * PACK, whole = last / PACK * pair;
        std::memcpy(tail, values, whole * sizeof(Element));
        std::memset(tail + whole, 0, (BLOCK * plan().head_dim - whole) * sizeof(Element));
        for (int i = 0; i < last % PACK * pair; i += PACK) tail[whole + i] = values[whole + i];
        span.values[b] = tail;
    }

    // Whether any of `count` queries from `first` on sees a position of the span.
    bool sees(const Span<Type>& span, int first, int count) const {
        return span.base <= last[first + count - 1] && span.base + SPAN > first_of(last[first]);
    }

    // Add one span to the state of all queries that see it. `next` will be fetched from memory meanwhile.
    // Defined beside the products of each Type.
    void add(const Span<Type>& span, const Span<Type>& next);

    // Turn the scores [count][SPAN] of neighbouring queries into weights relative to the highest score of each, and set
    // what their older sums are multiplied by. No branch depends on a score, and no query waits for the one before.
    // decay: room for a multiple of LANES. after_query(i) is called once the weights of query i are known.
    template <class After>
    void weigh(int first, int count, const Span<Type>& span, int vectors, const Floats* scores, Factor* weights,
               float* decay, const After& after_query) {
        constexpr int room = (Type::GROUP + LANES - 1) / LANES * LANES;
        const float unit = plan().scale * LOG2_E;
        float before[room] = {}, after[room] = {};
        for (int i = 0; i < count; i++) {
            before[i] = highest[first + i];
            after[i] = highest[first + i] = highest_seen(first + i, span.base, vectors, scores + i * SPAN_VECTORS);
        }
        for (int i = 0; i < count; i += LANES) {
            const Floats old = load<Floats>(before + i), now = load<Floats>(after + i);
            store(decay + i, exp2_of_nonpositive(old == now ? Floats{} : old * unit - now * unit));
        }
        for (int i = 0; i < count; i++) {
            const Range seen = range(first + i, span.base);
            const Floats shift = broadcast(after[i] * unit);
            Floats total = totals[first + i] * decay[i];
            const auto add = [&](int vector, Floats weight) {
                total = total + weight;
                Type::store_weights(weight, weights + (i * SPAN + vector * LANES) / PACK);
            };
            const Floats* own = scores + i * SPAN_VECTORS;
            if (seen.all())
                for (int v = 0; v < SPAN_VECTORS; v++) add(v, exp2_of_nonpositive(own[v] * unit - shift));
            else
                for (int v = 0; v < vectors; v++)
                    add(v, seen.lanes(v) ? exp2_of_nonpositive(own[v] * unit - shift) : Floats{});
            totals[first + i] = total;
            after_query(i);
        }
    }

    // Which positions of a span a query sees.
    struct Range {
        int from, to;
        bool all() const { return from <= 0 && to >= SPAN - 1; }
        Ints lanes(int vector) const {
            const Ints position = lane_numbers() + vector * LANES;
            return (position >= from) & (position <= to);
        }
    };
    Range range(int query, int base) const { return {first_of(last[query]) - base, last[query] - base}; }

    // The highest score of a query so far.
    float highest_seen(int query, int base, int vectors, const Floats* scores) const {
        const Range seen = range(query, base);
        Floats maximum = broadcast(highest[query]);
        if (seen.all())
            for (int v = 0; v < SPAN_VECTORS; v++) maximum = larger(maximum, scores[v]);
        else
            for (int v = 0; v < vectors; v++) maximum = larger(maximum, seen.lanes(v) ? scores[v] : broadcast(LOWEST));
        return highest_lane(maximum);
    }

    void finish(View<Element> out) {
        for (int query = 0; query < queries; query++) {
            Element* target = out.data + element(query, out.token_stride);
            const float total = sum_of_lanes(totals[query]);
            // Adding +0 turns -0 into +0: masked positions may have done so before, or not.
            for (int v = 0; v < head_vectors(); v++)
                Type::store_output(sums[query * head_vectors() + v] / total + 0.0f, target + dimension(v));
        }
    }

    // `following` will be attended next by this thread.
    void attend(View<const Element> q, View<Element> out, const Unit<Type>& following) {
        const typename Type::Setup setup(queries);
        begin(q);
        const int end = this->end();
        Span<Type> next = this->first_span();
        for (int base = next.base; base < end; base += SPAN) {
            Span<Type> span = next;
            next = base + SPAN < end ? this->span(base + SPAN) : following.first_span();
            clean_tail(span);
            add(span, next);
        }
        finish(out);
    }
};

// q, out: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim].
template <class Type>
struct Operands {
    View<const typename Type::Element> q, k, v;
    View<typename Type::Element> out;
};

// Appends K and V of all tokens, then attends; out's rows from plan.tokens up to out_tokens become zero.
template <class Type>
void forward(const Layer<Type>& layer, const Operands<Type>& operands, int out_tokens) {
    const Plan& plan = layer.plan;
    parallel_for(plan.tokens, APPEND_TOKENS, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) append(layer, token, operands.k, operands.v);
    });
    const int64_t tiles = plan.tile_indptr[plan.rows];
    const int64_t grain = tiles >= 4 * octavo_threads() ? plan.kv_heads : 1;
    parallel_for(tiles * plan.kv_heads, grain, [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; unit++) {
            const auto following = Unit<Type>::of(layer, unit + 1 < end ? unit + 1 : unit);
            Tile<Type>(Unit<Type>::of(layer, unit)).attend(operands.q, operands.out, following);
        }
    });
    const size_t bytes = sizeof(typename Type::Element) * plan.kv_heads * plan.group * plan.head_dim;
    for (int token = plan.tokens; token < out_tokens; token++)
        std::memset(operands.out.data + token * operands.out.token_stride, 0, bytes);
}

}  // namespace

// keys and values: those of one layer.
#define OCTAVO_PAGED_ATTENTION(NAME, TYPE)                                                          \
    OCTAVO_KERNEL(NAME)(const Plan* plan, TYPE::Element* keys, TYPE::Element* values,               \
                        const Operands<TYPE>* operands, int32_t out_tokens) {                       \
        forward<TYPE>({*plan, keys, values}, *operands, out_tokens);                                \
    }


/* turboquant_avx512.h - attention with AVX-512, straight from the packed codes; read by turboquant.c, once.
 *
 * Nothing is decoded to memory: a centroid is looked up in a register and used at once. A unit is eight codes, 8 * bits
 * bits. A part is 16, 8, 4 or 2 units, one to a lane, the lanes filled 1, 2, 4 or 8 times; each time the units are
 * shifted on, so that shifting all lanes by `bits` 8, 4, 2 or 1 times gives every code once: a register of 16
 * coordinates each time. A vector is cut into as many parts of 16 units as it has, then at most one of 8, 4 and 2.
 * Queries are brought into that order of coordinates once, totals back once. Attention is not part of the bit-exact
 * format: fused multiply-add is welcome here.
 */

#define TQ_512 static inline __attribute__((always_inline, target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")))
#define TQ_512_OUTER \
    static __attribute__((target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi"), aligned(64)))
#define TQ_TOGETHER 4 /* queries that share a look-up */

/* log2 of how often the lanes are filled by the part that begins at coordinate j of `padded`, a multiple of 16. */
TQ_512 int tq_512_kind(size_t padded, size_t j) {
    const size_t rest = padded - j;
    return rest >= 128 ? 0 : rest >= 64 ? 1 : rest >= 32 ? 2 : 3;
}

/* The coordinate, counted from the part's first, that register i holds in lane l. */
TQ_512 size_t tq_512_place(int kind, size_t i, size_t l) {
    const size_t units = (size_t)16 >> kind;
    return 8 * (l % units) + l / units * (8 >> kind) + i;
}

/* The bytes and bits that bring a part's units to their lanes. */
typedef struct {
    __m512i bytes, shift;
} tq_512_spread;

TQ_512 tq_512_spread tq_512_spread_of(int kind, int bits) {
    uint8_t bytes[64];
    int32_t shift[16];
    for (int l = 0; l < 16; l++) {
        const int unit = l % (16 >> kind), again = l / (16 >> kind);
        shift[l] = again * (8 >> kind) * bits;
        for (int b = 0; b < 4; b++) bytes[4 * l + b] = (uint8_t)(unit * bits + b < 64 ? unit * bits + b : 63);
    }
    tq_512_spread spread;
    spread.bytes = _mm512_loadu_si512(bytes);
    spread.shift = _mm512_loadu_si512(shift);
    return spread;
}

/* A side's tables in registers; `rest` is bytes of a row from the last part on, all that may be read of it. */
typedef struct {
    __m512 centroids; /* repeated, so that an index needs no mask */
    tq_512_spread spread[4];
} tq_512_book;

TQ_512 tq_512_book tq_512_load_book(const tq_side *t) {
    tq_512_book book;
    float table[16];
    for (int k = 0; k < 16; k++) table[k] = t->centroids[k & ((1 << t->bits) - 1)];
    book.centroids = _mm512_loadu_ps(table);
    for (int kind = 0; kind < 4; kind++) book.spread[kind] = tq_512_spread_of(kind, t->bits);
    return book;
}

/* The codes of a part, the first of each lane in its lowest bits. */
TQ_512 __m512i tq_512_codes(const tq_512_book *book, const uint8_t *row, size_t bytes, size_t j, int kind, int bits) {
    const size_t from = j * (size_t)bits / 8, own = ((size_t)16 >> kind) * (size_t)bits;
    const size_t count = bytes - from < own ? bytes - from : own;
    const __mmask64 mask = count >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << count) - 1;
    const __m512i packed = _mm512_maskz_loadu_epi8(mask, row + from);
    if (kind == 0 && bits == 4) return packed;
    const __m512i spread = _mm512_permutexvar_epi8(book->spread[kind].bytes, packed);
    return kind == 0 ? spread : _mm512_srlv_epi32(spread, book->spread[kind].shift);
}

TQ_512 __m512 tq_512_centroid(const tq_512_book *book, __m512i codes, int i, int bits) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, (unsigned)(bits * i)), book->centroids);
}

/* Sums of the lanes of 16 registers, in their order. */
TQ_512 __m512 tq_512_lane_sums(const __m512 v[16]) {
    __m512 a[8], b[4];
    TQ_UNROLL for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    TQ_UNROLL for (int i = 0; i < 4; i++) {
        const __m512d even = _mm512_castps_pd(a[2 * i]), odd = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
    }
    const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
}

/* Runs a statement for each part: it begins at coordinate j, its kind is a constant. */
#define TQ_512_PARTS(statement)                                \
    do {                                                       \
        size_t j = 0;                                          \
        for (; padded - j >= 128; j += 128) TQ_512_PART(0, statement); \
        if (padded & 64) {                                     \
            TQ_512_PART(1, statement);                         \
            j += 64;                                           \
        }                                                      \
        if (padded & 32) {                                     \
            TQ_512_PART(2, statement);                         \
            j += 32;                                           \
        }                                                      \
        if (padded & 16) TQ_512_PART(3, statement);            \
    } while (0)
#define TQ_512_PART(number, statement) \
    {                                  \
        const int kind = number;       \
        statement;                     \
    }

/* even, odd += products of a part's registers. */
TQ_512 void tq_512_part_products(const tq_512_book *book, const uint8_t *row, size_t bytes, size_t j, int kind,
                                 const float *const *queries, __m512 *even, __m512 *odd, int bits, int count) {
    const __m512i part = tq_512_codes(book, row, bytes, j, kind, bits);
    const int registers = 8 >> kind;
    TQ_UNROLL for (int i = 0; i < registers; i++) {
        const __m512 c = tq_512_centroid(book, part, i, bits);
        TQ_UNROLL for (int a = 0; a < count; a++) {
            const __m512 q = _mm512_loadu_ps(queries[a] + j + 16 * (size_t)i);
            if (i % 2 == 0) even[a] = _mm512_fmadd_ps(c, q, even[a]);
            else odd[a] = _mm512_fmadd_ps(c, q, odd[a]);
        }
    }
}

/* products[a][t] = centroids of row t times query a, scales left out; products hold 16 floats for each 16 rows begun. */
TQ_512 void tq_512_products_of(const tq_512_book *book, const uint8_t *codes, size_t stride, const uint32_t *slots, size_t bytes, size_t n,
                            const float *const *queries, float *const *products, size_t padded, int bits, int count) {
    for (size_t first = 0; first < n; first += 16) {
        __m512 sums[TQ_TOGETHER][16];
        const size_t rows = n - first < 16 ? n - first : 16;
        for (size_t t = 0; t < 16; t++) {
            /* rows past the last repeat it: their products are never looked at */
            const uint8_t *row = codes + slots[first + (t < rows ? t : rows - 1)] * stride;
            __m512 even[TQ_TOGETHER], odd[TQ_TOGETHER];
            TQ_UNROLL for (int a = 0; a < count; a++) even[a] = odd[a] = _mm512_setzero_ps();
            TQ_512_PARTS(tq_512_part_products(book, row, bytes, j, kind, queries, even, odd, bits, count));
            TQ_UNROLL for (int a = 0; a < count; a++) sums[a][t] = _mm512_add_ps(even[a], odd[a]);
        }
        for (int a = 0; a < count; a++) _mm512_storeu_ps(products[a] + first, tq_512_lane_sums(sums[a]));
    }
}

/* `registers` registers of a part from register `from` on: totals[a] += sum of weights[a][t] * row t. */
TQ_512 void tq_512_add_registers(const tq_512_book *book, const uint8_t *codes, size_t stride, const uint32_t *slots, size_t bytes, size_t n,
                            const float *const *weights, float *const *totals, size_t padded, size_t j, int kind,
                            int from, int registers, int bits, int count) {
    __m512 sums[TQ_TOGETHER][8];
    TQ_UNROLL for (int a = 0; a < count; a++)
        TQ_UNROLL for (int i = 0; i < registers; i++) sums[a][i] = _mm512_setzero_ps();
    for (size_t t = 0; t < n; t++) {
        const uint8_t *row = codes + slots[t] * stride;
        const __m512i part = tq_512_codes(book, row, bytes, j, kind, bits);
        __m512 weight[TQ_TOGETHER];
        TQ_UNROLL for (int a = 0; a < count; a++) weight[a] = _mm512_set1_ps(weights[a][t]);
        TQ_UNROLL for (int i = 0; i < registers; i++) {
            const __m512 c = tq_512_centroid(book, part, from + i, bits);
            TQ_UNROLL for (int a = 0; a < count; a++) sums[a][i] = _mm512_fmadd_ps(c, weight[a], sums[a][i]);
        }
    }
    TQ_UNROLL for (int a = 0; a < count; a++) {
        TQ_UNROLL for (int i = 0; i < registers; i++) { /* Kahan, as add_carefully */
            float *total = totals[a] + j + 16 * (size_t)(from + i), *lost = total + padded;
            const __m512 before = _mm512_loadu_ps(total), corrected = _mm512_sub_ps(sums[a][i], _mm512_loadu_ps(lost));
            const __m512 after = _mm512_add_ps(before, corrected);
            _mm512_storeu_ps(lost, _mm512_sub_ps(_mm512_sub_ps(after, before), corrected));
            _mm512_storeu_ps(total, after);
        }
    }
}

TQ_512 void tq_512_add_part(const tq_512_book *book, const uint8_t *codes, size_t stride, const uint32_t *slots, size_t bytes, size_t n,
                            const float *const *weights, float *const *totals, size_t padded, size_t j, int kind,
                            int bits, int count) {
    const int all = 8 >> kind, registers = count > 2 && all == 8 ? 4 : all; /* no more sums than there are registers */
    TQ_UNROLL for (int from = 0; from < all; from += registers)
        tq_512_add_registers(book, codes, stride, slots, bytes, n, weights, totals, padded, j, kind, from, registers, bits,
                             count);
}

TQ_512 void tq_512_add_rows_of(const tq_512_book *book, const uint8_t *codes, size_t stride, const uint32_t *slots, size_t bytes, size_t n,
                            const float *const *weights, float *const *totals, size_t padded, int bits, int count) {
    TQ_512_PARTS(tq_512_add_part(book, codes, stride, slots, bytes, n, weights, totals, padded, j, kind, bits, count));
}

/* Widths, the common lengths and numbers of queries are constants to the compiler. */
#define TQ_512_LENGTHS(of, count)                   \
    do {                                            \
        if (padded == 128) of(128, count);          \
        else if (padded == 64) of(64, count);       \
        else of(padded, count);                     \
    } while (0)
#define TQ_512_COUNTS(of)                           \
    do {                                            \
        if (count == 4) TQ_512_LENGTHS(of, 4);      \
        else if (count == 2) TQ_512_LENGTHS(of, 2); \
        else TQ_512_LENGTHS(of, 1);                 \
    } while (0)
#define TQ_512_WIDTH(width)                                                                                          \
    TQ_512_OUTER void tq_512_products_##width(const tq_512_book *book, const uint8_t *codes, size_t stride,          \
                                              const uint32_t *slots, size_t bytes, size_t n,                         \
                                              const float *const *queries, float *const *products, size_t padded,    \
                                              int count) {                                                           \
        TQ_512_COUNTS(TQ_PRODUCTS_##width);                                                                          \
    }                                                                                                                \
    TQ_512_OUTER void tq_512_add_rows_##width(const tq_512_book *book, const uint8_t *codes, size_t stride,          \
                                              const uint32_t *slots, size_t bytes, size_t n,                         \
                                              const float *const *weights, float *const *totals, size_t padded,      \
                                              int count) {                                                           \
        TQ_512_COUNTS(TQ_ROWS_##width);                                                                              \
    }
#define TQ_PRODUCTS(length, count, width) \
    tq_512_products_of(book, codes, stride, slots, bytes, n, queries, products, length, width, count)
#define TQ_ROWS(length, count, width) \
    tq_512_add_rows_of(book, codes, stride, slots, bytes, n, weights, totals, length, width, count)
#define TQ_PRODUCTS_1(length, count) TQ_PRODUCTS(length, count, 1)
#define TQ_PRODUCTS_2(length, count) TQ_PRODUCTS(length, count, 2)
#define TQ_PRODUCTS_3(length, count) TQ_PRODUCTS(length, count, 3)
#define TQ_PRODUCTS_4(length, count) TQ_PRODUCTS(length, count, 4)
#define TQ_ROWS_1(length, count) TQ_ROWS(length, count, 1)
#define TQ_ROWS_2(length, count) TQ_ROWS(length, count, 2)
#define TQ_ROWS_3(length, count) TQ_ROWS(length, count, 3)
#define TQ_ROWS_4(length, count) TQ_ROWS(length, count, 4)
TQ_512_WIDTH(1)
TQ_512_WIDTH(2)
TQ_512_WIDTH(3)
TQ_512_WIDTH(4)

static void (*const tq_512_products[])(const tq_512_book *, const uint8_t *, size_t, const uint32_t *, size_t, size_t,
                                       const float *const *, float *const *, size_t, int) = {
    tq_512_products_1, tq_512_products_2, tq_512_products_3, tq_512_products_4};
static void (*const tq_512_add_rows[])(const tq_512_book *, const uint8_t *, size_t, const uint32_t *, size_t, size_t,
                                       const float *const *, float *const *, size_t, int) = {
    tq_512_add_rows_1, tq_512_add_rows_2, tq_512_add_rows_3, tq_512_add_rows_4};

/* e^x for x <= 0, as `exponential` of the kernels. */
TQ_512 __m512 tq_512_exponential(__m512 x) {
    const __m512 magic = _mm512_set1_ps(12582912.0f);
    const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(1.44269504f), magic), n = _mm512_sub_ps(shifted, magic);
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x));
    const float terms[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
    __m512 p = _mm512_set1_ps(1.0f / 5040.0f);
    TQ_UNROLL for (int i = 0; i < 7; i++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(terms[i]));
    const __m512i scaled = _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23));
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ), _mm512_castsi512_ps(scaled));
}

/* `weigh` of the kernels with the keys' scales taken in before and the values' after: products of n tokens become the
 * weights of their values' centroids. */
TQ_512 void tq_512_weigh(const tq_query *query, size_t n, size_t padded, const float *key_scales,
                         const float *value_scales) {
    float *weights = query->weights;
    __m512 tops = _mm512_set1_ps(*query->most);
    for (size_t i = 0; i < n; i += 16) {
        const __mmask16 there = n - i >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (n - i)) - 1);
        const __m512 score = _mm512_mask_mul_ps(_mm512_set1_ps(-HUGE_VALF), there, _mm512_loadu_ps(weights + i),
                                                _mm512_loadu_ps(key_scales + i));
        _mm512_storeu_ps(weights + i, score);
        tops = _mm512_max_ps(tops, score);
    }
    const float most = _mm512_reduce_max_ps(tops);
    if (most > *query->most) {
        const float shrink = expf(*query->most - most);
        for (size_t j = 0; j < padded; j++) {
            query->total[j] *= shrink;
            query->lost[j] *= shrink;
        }
        *query->sum *= shrink;
        *query->sum_lost *= shrink;
        *query->most = most;
    }
    __m512 sum = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += 16) {
        const __m512 w = tq_512_exponential(_mm512_sub_ps(_mm512_loadu_ps(weights + i), _mm512_set1_ps(most)));
        sum = _mm512_add_ps(sum, w);
        _mm512_storeu_ps(weights + i, _mm512_mul_ps(w, _mm512_loadu_ps(value_scales + i)));
    }
    const float corrected = _mm512_reduce_add_ps(sum) - *query->sum_lost, after = *query->sum + corrected;
    *query->sum_lost = (after - *query->sum) - corrected;
    *query->sum = after;
}

/* A vector into the order of the registers, or back. */
TQ_512 void tq_512_reorder(float *vector, size_t padded, bool back) {
    float turned[FA_TQ_MAX_DIM];
    memcpy(turned, vector, padded * sizeof *vector);
    for (size_t j = 0; j < padded;) {
        const int kind = tq_512_kind(padded, j);
        const size_t registers = (size_t)8 >> kind;
        for (size_t i = 0; i < registers; i++)
            for (size_t l = 0; l < 16; l++) {
                const size_t own = j + 16 * i + l, place = j + tq_512_place(kind, i, l);
                if (back) vector[place] = turned[own];
                else vector[own] = turned[place];
            }
        j += 16 * registers;
    }
}

/* One side of a head's chunk: where its codes begin, and its scales, filled up to whole registers with zeros. */
typedef struct {
    const tq_side *side;
    const uint8_t *codes;
    size_t stride;
    bool decoded;                      /* exact tokens are among them: then all of them are in rows */
    float scales[TQ_MAX_CHUNK + 16];
} tq_512_chunk;

/* Tokens that are kept exactly stand in no code: a chunk that has one is decoded to rows, in the registers' order. */
TQ_512 void tq_512_load_chunk(const fa_tq_state *s, const tq_side *side, const fa_tq_packed *packed, size_t head,
                              const tq_walk *walk, tq_512_chunk *chunk, float *rows) {
    const size_t n = walk->count, head_scale = head * packed->scale_head_stride;
    chunk->side = side;
    chunk->codes = packed->codes + head * packed->code_head_stride;
    chunk->stride = packed->code_token_stride;
    chunk->decoded = false;
    for (size_t i = 0; i < n && packed->exact; i++)
        if (packed->exact->row_of[walk->slots[i]] >= 0) chunk->decoded = true;
    if (chunk->decoded) {
        tq_avx2_expand_chunk(s, side, packed, head, walk, rows, chunk->scales);
        for (size_t i = 0; i < n; i++) tq_512_reorder(rows + i * s->padded, s->padded, false);
    } else {
        tq_avx2_fetch_chunk(side, packed, head, walk->next, walk->next_count);
        for (size_t i = 0; i < n; i++)
            chunk->scales[i] =
                tq_scale_at(packed->scales, packed->meta, walk->slots[i] * packed->scale_token_stride + head_scale);
    }
    for (size_t i = n; i % 16 != 0; i++) chunk->scales[i] = 0.0f;
}

/* Products of `count` queries with the first n tokens of a chunk, and sums of them. */
TQ_512 void tq_512_chunk_products(const fa_tq_state *s, const tq_512_book *book, const tq_512_chunk *chunk,
                                  const tq_walk *walk, size_t n, const float *rows, const float *const *queries,
                                  float *const *products, int count) {
    if (!chunk->decoded) {
        tq_512_products[chunk->side->bits - 1](book, chunk->codes, chunk->stride, walk->slots, chunk->side->bytes, n,
                                               queries, products, s->padded, count);
        return;
    }
    for (int a = 0; a < count; a++)
        for (size_t t = 0; t < n; t += 4)
            tq_avx2_four_products(queries[a], rows + t * s->padded, s->padded, products[a] + t);
}

TQ_512 void tq_512_chunk_sums(const fa_tq_state *s, const tq_512_book *book, const tq_512_chunk *chunk,
                              const tq_walk *walk, size_t n, const float *rows, const float *const *weights,
                              float *const *totals, int count) {
    if (!chunk->decoded) {
        tq_512_add_rows[chunk->side->bits - 1](book, chunk->codes, chunk->stride, walk->slots, chunk->side->bytes, n,
                                               weights, totals, s->padded, count);
        return;
    }
    for (int a = 0; a < count; a++)
        tq_avx2_add_rows(weights[a], rows, n, totals[a], totals[a] + s->padded, s->padded);
}

/* One pass over the tokens, as `attend` of the kernels; wider codes go there, and many queries at a length that leaves
 * registers half empty (decoding to memory is 1.2 times as fast for seven queries at length 96). */
TQ_512_OUTER void tq_512_attend(const fa_tq_state *s, const fa_tq_attention *a, float *queries) {
    if (s->side[1].bits > 4 || s->side[0].bits > 4 || (a->group > 4 && s->padded % 64 != 0)) {
        tq_avx2_attend(s, a, queries);
        return;
    }
    const size_t padded = s->padded, together = a->choice.entries ? 1 : a->heads;
    const tq_512_book key_book = tq_512_load_book(&s->side[1]), value_book = tq_512_load_book(&s->side[0]);
    float key_rows[TQ_CHUNK_FLOATS], value_rows[TQ_CHUNK_FLOATS];
    tq_512_chunk keys, values;
    tq_walk walk;
    if (a->keys.exact || a->values.exact) { /* four rows are read at a time, past the last too */
        memset(key_rows, 0, sizeof key_rows);
        memset(value_rows, 0, sizeof value_rows);
    }
    for (size_t i = 0; i < a->heads * a->rows * a->group; i++)
        tq_512_reorder(tq_query_at(s, queries, i).rotated, padded, false);
    for (size_t from = 0; from < a->heads; from += together) {
        tq_start(&walk, a->tokens, &a->choice, from, tq_chunk(s));
        for (; walk.count > 0; tq_advance(&walk)) {
            for (size_t head = from; head < from + together; head++) {
                tq_512_load_chunk(s, &s->side[1], &a->keys, a->first_head + head, &walk, &keys, key_rows);
                tq_512_load_chunk(s, &s->side[0], &a->values, a->first_head + head, &walk, &values, value_rows);
                for (size_t i = 0; i < a->rows * a->group;) {
                    const size_t rest = a->group - i % a->group, seen = tq_seen(a, &walk, i / a->group);
                    const int count = rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
                    tq_query query[TQ_TOGETHER];
                    const float *rotated[TQ_TOGETHER], *weights[TQ_TOGETHER];
                    float *products[TQ_TOGETHER], *totals[TQ_TOGETHER];
                    for (int b = 0; b < count; b++) {
                        query[b] = tq_query_at(s, queries, tq_query_index(a, head, i + (size_t)b));
                        rotated[b] = query[b].rotated;
                        weights[b] = products[b] = query[b].weights;
                        totals[b] = query[b].total;
                    }
                    i += (size_t)count;
                    if (seen == 0) continue;
                    tq_512_chunk_products(s, &key_book, &keys, &walk, seen, key_rows, rotated, products, count);
                    for (int b = 0; b < count; b++) tq_512_weigh(&query[b], seen, padded, keys.scales, values.scales);
                    tq_512_chunk_sums(s, &value_book, &values, &walk, seen, value_rows, weights, totals, count);
                }
            }
        }
    }
    for (size_t i = 0; i < a->heads * a->rows * a->group; i++)
        tq_512_reorder(tq_query_at(s, queries, i).total, padded, true);
}

/* The two halves of attention alone, as `scores` and `mix` of the kernels: up to four queries to a pass. */
TQ_512_OUTER void tq_512_scores(const fa_tq_state *s, const fa_tq_packed *packed, size_t head, size_t tokens,
                                const float *queries, size_t count, float *scores) {
    if (s->side[1].bits > 4) {
        tq_avx2_scores(s, packed, head, tokens, queries, count, scores);
        return;
    }
    const size_t padded = s->padded;
    const tq_512_book book = tq_512_load_book(&s->side[1]);
    float turned[TQ_TOGETHER][FA_TQ_MAX_DIM], found[TQ_TOGETHER][TQ_MAX_CHUNK + 16], rows[TQ_CHUNK_FLOATS];
    const float *const rotated[TQ_TOGETHER] = {turned[0], turned[1], turned[2], turned[3]};
    float *const products[TQ_TOGETHER] = {found[0], found[1], found[2], found[3]};
    tq_512_chunk keys;
    tq_walk walk;
    memset(rows, 0, sizeof rows);
    for (size_t i = 0; i < count;) {
        const int together = count - i >= 4 ? 4 : count - i >= 2 ? 2 : 1;
        for (int a = 0; a < together; a++) {
            memcpy(turned[a], queries + (i + (size_t)a) * padded, padded * sizeof *queries);
            tq_512_reorder(turned[a], padded, false);
        }
        tq_start(&walk, tokens, NULL, 0, tq_chunk(s));
        for (size_t first = 0; walk.count > 0; first += walk.count, tq_advance(&walk)) {
            tq_512_load_chunk(s, &s->side[1], packed, head, &walk, &keys, rows);
            tq_512_chunk_products(s, &book, &keys, &walk, walk.count, rows, rotated, products, together);
            for (int a = 0; a < together; a++)
                for (size_t t = 0; t < walk.count; t++)
                    scores[(i + (size_t)a) * tokens + first + t] = found[a][t] * keys.scales[t];
        }
        i += (size_t)together;
    }
}

TQ_512_OUTER void tq_512_mix(const fa_tq_state *s, const fa_tq_packed *packed, size_t head, size_t tokens,
                             const float *weights, size_t count, float *sums) {
    if (s->side[0].bits > 4) {
        tq_avx2_mix(s, packed, head, tokens, weights, count, sums);
        return;
    }
    const size_t padded = s->padded;
    const tq_512_book book = tq_512_load_book(&s->side[0]);
    float scaled[TQ_TOGETHER][TQ_MAX_CHUNK], rows[TQ_CHUNK_FLOATS];
    const float *const own[TQ_TOGETHER] = {scaled[0], scaled[1], scaled[2], scaled[3]};
    tq_512_chunk values;
    tq_walk walk;
    for (size_t i = 0; i < count;) {
        const int together = count - i >= 4 ? 4 : count - i >= 2 ? 2 : 1;
        float *totals[TQ_TOGETHER];
        for (int a = 0; a < together; a++) totals[a] = sums + 2 * (i + (size_t)a) * padded;
        tq_start(&walk, tokens, NULL, 0, tq_chunk(s));
        for (size_t first = 0; walk.count > 0; first += walk.count, tq_advance(&walk)) {
            tq_512_load_chunk(s, &s->side[0], packed, head, &walk, &values, rows);
            for (int a = 0; a < together; a++)
                for (size_t t = 0; t < walk.count; t++)
                    scaled[a][t] = weights[(i + (size_t)a) * tokens + first + t] * values.scales[t];
            tq_512_chunk_sums(s, &book, &values, &walk, walk.count, rows, own, totals, together);
        }
        for (int a = 0; a < together; a++) tq_512_reorder(totals[a], padded, true);
        i += (size_t)together;
    }
}

/* The codec is AVX2's: there is nothing to gain for it where 512 bits go through the processor in halves, as on Zen 4. */
static const tq_kernels tq_512_kernels_table = {
    "avx512",       tq_avx2_norms, tq_avx2_encode, tq_avx2_decode, tq_avx2_rotate,
    tq_avx2_expand, tq_512_scores, tq_512_mix,     tq_512_attend,
};

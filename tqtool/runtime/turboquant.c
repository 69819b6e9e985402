/* turboquant.c - the implementation of turboquant.h. Compile it as it is; no flags are needed.
 *
 * The format, step by step (every implementation does exactly this, in this order):
 *   1. norm = sqrt(sum of x_j^2), in double, j ascending; a norm that is not finite or exceeds 2^120 is refused
 *   2. u_j = float(double(x_j) * (1 / (norm * sqrt d))), negated where the sign bit is set
 *   3. y = H u in float: butterflies of strides 1, 2, 4 ... on each run of 2^k, then the order-m matrix across the runs,
 *      each sum in index order; additions and subtractions only
 *   4. code_j = number of boundaries <= y_j; code j is bits [j * bits, (j + 1) * bits), least significant bit first
 *   5. scale: match norm / sqrt C; norm; lsq norm * S / C; unbiased norm / S, with S = sum of y_j c_j, j ascending, and
 *      C = sum of float(c_j^2), both in double; one rounding to float (bf16: a second one, to nearest even)
 *   decoding: y_j = c_j, transposed H, x_j = float(double(y_j) * (double(scale) / sqrt d)), negated by the sign bit.
 * Why every machine gets the same bits: products that feed a sum are float * float in double and hence exact, so fused
 * multiply-add changes nothing; an inexact product stands alone; sums have a fixed order; C is exact in any order.
 *
 * Arrangement: this file reads itself once per instruction set for section 7, the kernels. There a lane is a vector: a
 * tile of LANES vectors is transposed on loading, so every step runs over whole registers in the order above.
 *   1 guards and small tools   2 state   3 rotation and codec   4 attention   5 cache   6 self-test   7 kernels
 */
#ifndef TQ_KERNELS

#include "turboquant.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- 1. guards and small tools ---------------------------------------------------------------------------------- */

#ifdef __FAST_MATH__
#error "turboquant.c needs IEEE arithmetic: compile without -ffast-math"
#endif
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16
#error "turboquant.c needs float arithmetic in float: -msse2 -mfpmath=sse on 32-bit x86, -fexcess-precision=fast on s390x"
#endif

#ifndef FA_TQ_MALLOC
#define FA_TQ_MALLOC(size) malloc(size)
#define FA_TQ_FREE(pointer) free(pointer)
#endif

#ifdef __GNUC__
#define TQ_PREFETCH(address) __builtin_prefetch(address)
#define TQ_INLINE static inline __attribute__((always_inline))
#else
#define TQ_PREFETCH(address) ((void)(address))
#define TQ_INLINE static inline
#endif
#if defined(__GNUC__) && !defined(__clang__)
#define TQ_UNROLL _Pragma("GCC unroll 8") /* else arrays of registers live in memory below -O3 */
#else
#define TQ_UNROLL
#endif
#if defined(__GNUC__) && defined(__x86_64__) && !defined(FA_TQ_PLAIN)
#define TQ_HAVE_AVX2 1
#include <immintrin.h>
#endif

#define TQ_MAX_NORM 1329227995784915872903807060280344576.0 /* 2^120: beyond it a scale could overflow */
#define TQ_MAX_LEVELS 256
#define TQ_MAX_LANES 8
#define TQ_CHUNK_FLOATS 4096 /* decoded tokens that attention holds at a time: a third of a first-level cache */

static const float tq_zeros[FA_TQ_MAX_DIM] = {0}; /* stands in for the missing rows of the last tile */

TQ_INLINE uint32_t tq_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

TQ_INLINE float tq_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The float of a half: exact. */
TQ_INLINE float tq_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u) return tq_float_of(sign | 0x7f800000u | (rest - 0x7c00u) << 13);
    if (rest >= 0x0400u) return tq_float_of(sign | ((rest << 13) + 0x38000000u));
    return sign ? -(float)rest * (1.0f / 16777216.0f) : (float)rest * (1.0f / 16777216.0f);
}

/* The upper half of a float, rounded to nearest even; for finite values. */
TQ_INLINE uint16_t tq_to_bf16(float value) {
    const uint32_t bits = tq_float_bits(value);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

TQ_INLINE float tq_scale_at(const void *scales, bool bf16, size_t index) {
    return bf16 ? tq_float_of((uint32_t)((const uint16_t *)scales)[index] << 16) : ((const float *)scales)[index];
}

/* Coordinate j of a row of the given type. */
TQ_INLINE float tq_element(const void *row, int type, size_t j) {
    if (type == FA_TQ_F32) return ((const float *)row)[j];
    if (type == FA_TQ_F16) return tq_half(((const uint16_t *)row)[j]);
    return tq_float_of((uint32_t)((const uint16_t *)row)[j] << 16);
}

/* Up to four bytes as a little-endian word, missing ones 0. */
TQ_INLINE uint32_t tq_word(const uint8_t *bytes, size_t available) {
    if (available >= 4) /* one load, where the compiler sees it */
        return bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
    uint32_t word = bytes[0];
    if (available > 1) word |= (uint32_t)bytes[1] << 8;
    if (available > 2) word |= (uint32_t)bytes[2] << 16;
    return word;
}

TQ_INLINE void tq_put_word(uint8_t *bytes, size_t available, uint32_t word) {
    bytes[0] = (uint8_t)word;
    if (available > 1) bytes[1] = (uint8_t)(word >> 8);
    if (available > 2) bytes[2] = (uint8_t)(word >> 16);
    if (available > 3) bytes[3] = (uint8_t)(word >> 24);
}

static uint64_t tq_splitmix64(uint64_t *state) {
    uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* ---- 2. state --------------------------------------------------------------------------------------------------- */

/* One side's tables. Tails are padded with 0 so that kernels may load whole registers. */
typedef struct {
    fa_tq_table table; /* points to the arrays below */
    int bits;
    size_t bytes;                      /* of one vector's codes */
    float boundaries[TQ_MAX_LEVELS];   /* ascending */
    float tree[TQ_MAX_LEVELS];         /* the same as a search tree: children of node i are 2i and 2i + 1, root 1 */
    float centroids[TQ_MAX_LEVELS];
    float squares[TQ_MAX_LEVELS]; /* float(c^2) */
    float repeated[8];        /* up to 3 bits: the centroids again and again, so that higher bits need no mask */
    uint8_t planes[4][16];    /* 4 bits: byte p of each centroid */
} tq_side;

typedef struct tq_kernels tq_kernels;

struct fa_tq_state {
    size_t dim, run, order; /* dim = order * run, run a power of two */
    size_t padded;          /* dim rounded up to whole groups of eight */
    double root;            /* sqrt(dim) */
    uint64_t signs[FA_TQ_MAX_DIM / 64];
    const tq_kernels *kernels;
    tq_side side[2]; /* values, keys: the index is is_key */
    int8_t *matrix;  /* order * order entries +-1 where order > 1; allocated with the state */
};

struct tq_kernels {
    const char *name;
    int (*norms)(const fa_tq_state *, const float *rows, size_t count);
    int (*encode)(const fa_tq_state *, const tq_side *, const void *rows, int type, size_t count, uint8_t *codes,
                  void *scales, bool bf16, float *norms, size_t stride, size_t *bad);
    void (*decode)(const fa_tq_state *, const tq_side *, const uint8_t *codes, const void *scales, bool bf16,
                   size_t stride, size_t count, float *out);
    void (*rotate)(const fa_tq_state *, bool inverse, const float *in, size_t in_stride, size_t count, float *out,
                   size_t out_stride);
    void (*expand)(const fa_tq_state *, const tq_side *, const uint8_t *packed, size_t stride, size_t n, float *out);
    void (*scores)(const fa_tq_state *, const fa_tq_packed *keys, size_t head, size_t tokens, const float *queries,
                   size_t count, float *scores);
    void (*mix)(const fa_tq_state *, const fa_tq_packed *values, size_t head, size_t tokens, const float *weights,
                size_t count, float *totals);
    void (*attend)(const fa_tq_state *, const fa_tq_packed *keys, const fa_tq_packed *values, size_t tokens,
                   size_t first_head, size_t heads, size_t rows, size_t group, bool causal, float *queries);
};

static bool tq_is_prime(int n) {
    if (n < 2) return false;
    for (int divisor = 2; divisor * divisor <= n; divisor++)
        if (n % divisor == 0) return false;
    return true;
}

static bool tq_is_first_kind(int order) {
    return order % 4 == 0 && tq_is_prime(order - 1);
}

static bool tq_is_second_kind(int order) {
    return order % 4 == 0 && (order / 2 - 1) % 4 == 1 && tq_is_prime(order / 2 - 1);
}

/* m of dim = m * 2^k: 1 for a power of two, else the smallest Paley order from 12 on; 0 if there is none. */
static int tq_hadamard_order(int dim) {
    if (dim < FA_TQ_MIN_DIM || dim > FA_TQ_MAX_DIM) return 0;
    int order = dim;
    while (order % 2 == 0) order /= 2;
    if (order == 1) return 1;
    for (; order <= dim; order *= 2)
        if (order >= 12 && (tq_is_first_kind(order) || tq_is_second_kind(order))) return order;
    return 0;
}

/* Paley's matrix, row by row. first kind: q = order - 1; second kind: 2 x 2 blocks with q = order / 2 - 1. */
static void tq_paley(int order, int8_t *matrix) {
    const bool first = tq_is_first_kind(order);
    const int q = first ? order - 1 : order / 2 - 1;
    int8_t character[FA_TQ_MAX_DIM];
    memset(character, -1, sizeof character);
    for (int i = 1; i < q; i++) character[i * i % q] = 1;
    character[0] = 0;
    for (int i = 0; i < order; i++) {
        for (int j = 0; j < order; j++) {
            const int row = first ? i : i / 2, column = first ? j : j / 2;
            int entry = 1; /* of the bordered matrix: first row and column, then the quadratic character */
            if (row > 0 && column > 0) entry = character[(column - row + q) % q];
            if (first) {
                if (row > 0 && column == 0) entry = -1;
                if (row > 0 && row == column) entry = 1;
            } else if (row == column) {
                entry = i % 2 == 0 && j % 2 == 0 ? 1 : -1;
            } else if (i % 2 == 1 && j % 2 == 1) {
                entry = -entry;
            }
            matrix[i * order + j] = (int8_t)entry;
        }
    }
}

/* Copies the tables; false if they are not ascending, finite and free of the centroid 0. */
static bool tq_set_side(tq_side *side, const fa_tq_table *table, int dim) {
    if (!table || !table->boundaries || !table->centroids || table->bits < 1 || table->bits > FA_TQ_MAX_BITS ||
        table->scale_rule < FA_TQ_MATCH || table->scale_rule > FA_TQ_UNBIASED)
        return false;
    const size_t levels = (size_t)1 << table->bits;
    for (size_t k = 0; k < levels; k++) {
        const float c = table->centroids[k];
        if (!(c >= -1024.0f && c <= 1024.0f) || c == 0.0f || (k > 0 && !(table->centroids[k - 1] < c))) return false;
        side->centroids[k] = c;
        side->squares[k] = (float)((double)c * (double)c);
    }
    for (size_t k = 0; k + 1 < levels; k++) {
        const float b = table->boundaries[k];
        if (!(b >= -1024.0f && b <= 1024.0f) || (k > 0 && !(table->boundaries[k - 1] < b))) return false;
        side->boundaries[k] = b;
    }
    for (size_t width = 1; width < levels; width *= 2) /* the tree's level of that width */
        for (size_t node = 0; node < width; node++)
            side->tree[width + node] = side->boundaries[(2 * node + 1) * (levels / (2 * width)) - 1];
    for (size_t k = 0; k < 8; k++) side->repeated[k] = side->centroids[k % levels];
    for (size_t k = 0; k < 16; k++)
        for (int plane = 0; plane < 4; plane++)
            side->planes[plane][k] = (uint8_t)(tq_float_bits(side->centroids[k]) >> (8 * plane));
    side->bits = table->bits;
    side->bytes = fa_tq_packed_size(dim, table->bits);
    side->table.bits = table->bits;
    side->table.scale_rule = table->scale_rule;
    side->table.boundaries = side->boundaries;
    side->table.centroids = side->centroids;
    return true;
}

static const tq_kernels *tq_best_kernels(void);
static const tq_kernels *tq_plain_kernels(void);

fa_tq_state *fa_tq_init_with(int head_dim, const fa_tq_table *key, const fa_tq_table *value, uint64_t seed) {
    const int order = tq_hadamard_order(head_dim);
    if (order == 0) return NULL;
    const size_t size = sizeof(fa_tq_state) + (size_t)order * (size_t)order;
    fa_tq_state *state = (fa_tq_state *)FA_TQ_MALLOC(size);
    if (!state) return NULL;
    memset(state, 0, size);
    if (!tq_set_side(&state->side[1], key, head_dim) || !tq_set_side(&state->side[0], value, head_dim)) {
        fa_tq_free(state);
        return NULL;
    }
    state->dim = (size_t)head_dim;
    state->order = (size_t)order;
    state->run = state->dim / state->order;
    state->padded = (state->dim + 7) / 8 * 8;
    state->root = sqrt((double)head_dim);
    for (size_t word = 0; word < (state->dim + 63) / 64; word++) state->signs[word] = tq_splitmix64(&seed);
    state->matrix = (int8_t *)(state + 1);
    if (order > 1) tq_paley(order, state->matrix);
    state->kernels = tq_best_kernels();
    return state;
}

void fa_tq_free(fa_tq_state *state) {
    FA_TQ_FREE(state);
}

fa_tq_config fa_tq_config_default(void) {
    fa_tq_config config;
    config.key_bits = 4;
    config.value_bits = 2;
    return config;
}

#ifndef FA_TQ_NO_CODEBOOKS
#include "tq_codebooks.h"

fa_tq_state *fa_tq_init(int head_dim, fa_tq_config config, uint64_t seed) {
    const int bits[2] = {config.value_bits, config.key_bits};
    fa_tq_table tables[2];
    for (int i = 0; i < 2; i++) {
        const fa_tq_codebook *book = fa_tq_codebook_find_centered(head_dim, bits[i]);
        if (!book) return NULL;
        tables[i].bits = bits[i];
        tables[i].scale_rule = FA_TQ_MATCH;
        tables[i].boundaries = book->boundaries;
        tables[i].centroids = book->centroids;
    }
    return fa_tq_init_with(head_dim, &tables[1], &tables[0], seed);
}
#endif

int fa_tq_check_dim(int head_dim) {
    return tq_hadamard_order(head_dim) > 0 ? FA_TQ_OK : FA_TQ_ERR_DIM;
}

int fa_tq_head_dim(const fa_tq_state *state) {
    return (int)state->dim;
}

const fa_tq_table *fa_tq_get_codebook(const fa_tq_state *state, bool is_key) {
    return &state->side[is_key].table;
}

const uint64_t *fa_tq_get_signs(const fa_tq_state *state) {
    return state->signs;
}

size_t fa_tq_packed_size(int head_dim, int bits) {
    if (head_dim < 1 || head_dim > FA_TQ_MAX_DIM || bits < 1 || bits > FA_TQ_MAX_BITS) return 0;
    return ((size_t)head_dim * (size_t)bits + 7) / 8;
}

/* ---- 3. rotation and codec -------------------------------------------------------------------------------------- */

const char *fa_tq_instructions(const fa_tq_state *state) {
    return (state ? state->kernels : tq_best_kernels())->name;
}

void fa_tq_use_plain(fa_tq_state *state) {
    state->kernels = tq_plain_kernels();
}

void fa_tq_rotate(const fa_tq_state *state, const float *in, float *out) {
    state->kernels->rotate(state, false, in, state->dim, 1, out, state->dim);
}

void fa_tq_rotate_inverse(const fa_tq_state *state, const float *in, float *out) {
    state->kernels->rotate(state, true, in, state->dim, 1, out, state->dim);
}

int fa_tq_encode(const fa_tq_state *state, bool is_key, const void *rows, int type, size_t count, uint8_t *codes,
                 void *scales, bool bf16, float *norms, size_t stride, size_t *bad) {
    if (!state || (count > 0 && (!rows || !codes || !scales)) || type < FA_TQ_F32 || type > FA_TQ_BF16 || stride < 1)
        return FA_TQ_ERR_ARGUMENT;
    return state->kernels->encode(state, &state->side[is_key], rows, type, count, codes, scales, bf16, norms, stride,
                                  bad);
}

int fa_tq_decode(const fa_tq_state *state, bool is_key, const uint8_t *codes, const void *scales, bool bf16,
                 size_t stride, size_t count, float *out) {
    if (!state || (count > 0 && (!codes || !scales || !out)) || stride < 1) return FA_TQ_ERR_ARGUMENT;
    state->kernels->decode(state, &state->side[is_key], codes, scales, bf16, stride, count, out);
    return FA_TQ_OK;
}

int fa_tq_quantize_head(const fa_tq_state *state, const float *vec, bool is_key, uint8_t *packed, float range[2]) {
    if (!range) return FA_TQ_ERR_ARGUMENT;
    return fa_tq_encode(state, is_key, vec, FA_TQ_F32, 1, packed, range, false, range + 1, 2, NULL);
}

int fa_tq_dequantize_head(const fa_tq_state *state, const uint8_t *packed, const float range[2], bool is_key,
                          float *out) {
    return fa_tq_decode(state, is_key, packed, range, false, 2, 1, out);
}

/* ---- 4. attention ----------------------------------------------------------------------------------------------- */

/* All of it happens in rotated space: q . k = (R q) . (R k) and R k is scale * centroids, so queries are rotated once,
 * values are added up as they lie in the cache, and the result is rotated back once. */

float fa_tq_score_head(const fa_tq_state *state, const float *q_rot, const uint8_t *packed, const float range[2]) {
    float key[FA_TQ_MAX_DIM], partial[8] = {0};
    state->kernels->expand(state, &state->side[1], packed, 0, 1, key);
    for (size_t j = 0; j < state->dim; j++) partial[j % 8] += q_rot[j] * key[j];
    for (size_t width = 4; width > 0; width /= 2)
        for (size_t i = 0; i < width; i++) partial[i] += partial[i + width];
    return range[0] * partial[0];
}

void fa_tq_accum_head(const fa_tq_state *state, float weight, const uint8_t *packed, const float range[2],
                      double *acc_rot) {
    float value[FA_TQ_MAX_DIM];
    const double factor = (double)weight * (double)range[0];
    state->kernels->expand(state, &state->side[0], packed, 0, 1, value);
    for (size_t j = 0; j < state->dim; j++) acc_rot[j] += factor * (double)value[j];
}

/* Tokens that attention decodes at a time: a multiple of four. */
static size_t tq_chunk(const fa_tq_state *state) {
    return TQ_CHUNK_FLOATS / state->padded / 4 * 4;
}

/* What attention keeps of one query, as floats: [weights of a chunk][rotated query][total][what its roundings lost]
 * [most, sum, what sum lost]. The total is of exp(score - most) * value. */
static size_t tq_query_floats(const fa_tq_state *state) {
    return (tq_chunk(state) + 7) / 8 * 8 + 3 * state->padded + 8;
}

size_t fa_tq_attend_scratch(const fa_tq_state *state, size_t heads, size_t rows, size_t group) {
    return heads * rows * group * tq_query_floats(state);
}

int fa_tq_attend(const fa_tq_state *state, const fa_tq_packed *keys, const fa_tq_packed *values, size_t tokens,
                 size_t first_head, size_t heads, const float *q, size_t rows, size_t query_heads, size_t group,
                 float scale, bool causal, float *scratch, float *out) {
    if (!state || !keys || !values || !q || !scratch || !out || group < 1 || (first_head + heads) * group > query_heads)
        return FA_TQ_ERR_ARGUMENT;
    const size_t floats = tq_query_floats(state), padded = state->padded, dim = state->dim;
    const size_t weights = floats - 8 - 3 * padded;
    const size_t together = heads * group; /* queries that lie side by side in a row of q */
    for (size_t row = 0; row < rows; row++) {
        const float *own = q + (row * query_heads + first_head * group) * dim;
        float *query = scratch + row * together * floats;
        memset(query, 0, together * floats * sizeof *query);
        state->kernels->rotate(state, false, own, dim, together, query + weights, floats);
        for (size_t i = 0; i < together; i++, query += floats) {
            for (size_t j = 0; j < dim; j++) query[weights + j] *= scale;
            query[floats - 8] = -HUGE_VALF;
        }
    }
    state->kernels->attend(state, keys, values, tokens, first_head, heads, rows, group, causal, scratch);
    for (size_t row = 0; row < rows; row++) {
        float *query = scratch + row * together * floats, *totals = query + weights + padded;
        for (size_t i = 0; i < together; i++, query += floats) {
            const float sum = query[floats - 7], share = sum > 0.0f ? 1.0f / sum : 0.0f;
            for (size_t j = 0; j < dim; j++) query[weights + padded + j] *= share;
        }
        state->kernels->rotate(state, true, totals, floats, together,
                               out + (row * query_heads + first_head * group) * dim, dim);
    }
    return FA_TQ_OK;
}

int fa_tq_scores(const fa_tq_state *state, const fa_tq_packed *keys, size_t tokens, size_t head, const float *q,
                 size_t count, float *scratch, float *scores) {
    if (!state || !keys || !q || !scratch || !scores) return FA_TQ_ERR_ARGUMENT;
    memset(scratch, 0, count * state->padded * sizeof *scratch);
    state->kernels->rotate(state, false, q, state->dim, count, scratch, state->padded);
    state->kernels->scores(state, keys, head, tokens, scratch, count, scores);
    return FA_TQ_OK;
}

int fa_tq_mix(const fa_tq_state *state, const fa_tq_packed *values, size_t tokens, size_t head, const float *weights,
              size_t count, float *scratch, float *out) {
    if (!state || !values || !weights || !scratch || !out) return FA_TQ_ERR_ARGUMENT;
    memset(scratch, 0, count * 2 * state->padded * sizeof *scratch);
    state->kernels->mix(state, values, head, tokens, weights, count, scratch);
    state->kernels->rotate(state, true, scratch, 2 * state->padded, count, out, state->dim);
    return FA_TQ_OK;
}

/* ---- 5. cache --------------------------------------------------------------------------------------------------- */

struct fa_tq_cache {
    const fa_tq_state *state;
    size_t layers, heads, slots;
    void *memory;             /* one block; the arrays below lie in it, 64-byte aligned, layer after layer */
    uint8_t *codes[2];        /* values, keys: [layer][slot][head][bytes] */
    float *ranges[2];         /* [layer][slot][head][2] */
    size_t *lengths;          /* of each layer: 1 + highest slot whose key was written */
};

static uint8_t *tq_aligned(uint8_t *pointer) {
    return pointer + (64 - (uintptr_t)pointer % 64) % 64;
}

/* Elements of one slot of one layer. */
static size_t tq_slot_bytes(const fa_tq_cache *cache, int side) {
    return cache->heads * cache->state->side[side].bytes;
}

static uint8_t *tq_codes_at(const fa_tq_cache *cache, int side, size_t layer, size_t slot) {
    return cache->codes[side] + (layer * cache->slots + slot) * tq_slot_bytes(cache, side);
}

static float *tq_ranges_at(const fa_tq_cache *cache, int side, size_t layer, size_t slot) {
    return cache->ranges[side] + (layer * cache->slots + slot) * cache->heads * 2;
}

size_t fa_tq_cache_bytes(const fa_tq_cache *cache) {
    const size_t slot = tq_slot_bytes(cache, 0) + tq_slot_bytes(cache, 1) + cache->heads * 4 * sizeof(float);
    return cache->layers * cache->slots * slot;
}

fa_tq_cache *fa_tq_cache_new(fa_tq_state *state, int num_layers, int num_heads, int max_seq_len) {
    if (!state || num_layers < 1 || num_heads < 1 || max_seq_len < 1) return NULL;
    /* a vector takes at most 1024 + 8 bytes a side: refuse before a product can wrap around */
    const size_t most = SIZE_MAX / 4096 / (size_t)num_layers / (size_t)num_heads;
    if ((size_t)max_seq_len > most) return NULL;
    fa_tq_cache *cache = (fa_tq_cache *)FA_TQ_MALLOC(sizeof *cache);
    if (!cache) return NULL;
    cache->state = state;
    cache->layers = (size_t)num_layers;
    cache->heads = (size_t)num_heads;
    cache->slots = (size_t)max_seq_len;
    const size_t size = fa_tq_cache_bytes(cache) + cache->layers * sizeof(size_t) + 5 * 64;
    cache->memory = FA_TQ_MALLOC(size);
    if (!cache->memory) {
        FA_TQ_FREE(cache);
        return NULL;
    }
    memset(cache->memory, 0, size);
    uint8_t *next = tq_aligned((uint8_t *)cache->memory);
    cache->lengths = (size_t *)(void *)next;
    next = tq_aligned(next + cache->layers * sizeof(size_t));
    for (int side = 0; side < 2; side++) {
        cache->ranges[side] = (float *)(void *)next;
        next = tq_aligned(next + cache->layers * cache->slots * cache->heads * 2 * sizeof(float));
        cache->codes[side] = next;
        next = tq_aligned(next + cache->layers * cache->slots * tq_slot_bytes(cache, side));
    }
    return cache;
}

void fa_tq_cache_free(fa_tq_cache *cache) {
    if (!cache) return;
    FA_TQ_FREE(cache->memory);
    FA_TQ_FREE(cache);
}

void fa_tq_cache_clear(fa_tq_cache *cache) {
    for (int side = 0; side < 2; side++) {
        memset(cache->codes[side], 0, cache->layers * cache->slots * tq_slot_bytes(cache, side));
        memset(cache->ranges[side], 0, cache->layers * cache->slots * cache->heads * 2 * sizeof(float));
    }
    memset(cache->lengths, 0, cache->layers * sizeof(size_t));
}

int fa_tq_cache_seq_len(const fa_tq_cache *cache) {
    size_t longest = 0;
    for (size_t layer = 0; layer < cache->layers; layer++)
        if (cache->lengths[layer] > longest) longest = cache->lengths[layer];
    return (int)longest;
}

int fa_tq_cache_evict(fa_tq_cache *cache, int n_oldest) {
    if (!cache || n_oldest < 0 || n_oldest > fa_tq_cache_seq_len(cache)) return FA_TQ_ERR_ARGUMENT;
    const size_t gone = (size_t)n_oldest, kept = cache->slots - gone, range = cache->heads * 2 * sizeof(float);
    for (size_t layer = 0; layer < cache->layers; layer++) {
        for (int side = 0; side < 2; side++) {
            const size_t bytes = tq_slot_bytes(cache, side);
            uint8_t *codes = tq_codes_at(cache, side, layer, 0);
            float *ranges = tq_ranges_at(cache, side, layer, 0);
            memmove(codes, codes + gone * bytes, kept * bytes);
            memset(codes + kept * bytes, 0, gone * bytes);
            memmove(ranges, tq_ranges_at(cache, side, layer, gone), kept * range);
            memset(tq_ranges_at(cache, side, layer, kept), 0, gone * range);
        }
        cache->lengths[layer] = cache->lengths[layer] > gone ? cache->lengths[layer] - gone : 0;
    }
    return FA_TQ_OK;
}

static bool tq_has_slot(const fa_tq_cache *cache, int layer, int pos) {
    return layer >= 0 && (size_t)layer < cache->layers && pos >= 0 && (size_t)pos < cache->slots;
}

/* Stores checked vectors. */
static int tq_store(fa_tq_cache *cache, int layer, int pos, const float *vec, bool is_key) {
    const size_t at = (size_t)layer, slot = (size_t)pos;
    float *ranges = tq_ranges_at(cache, is_key, at, slot);
    const int error = fa_tq_encode(cache->state, is_key, vec, FA_TQ_F32, cache->heads,
                                   tq_codes_at(cache, is_key, at, slot), ranges, false, ranges + 1, 2, NULL);
    if (!error && is_key && slot >= cache->lengths[at]) cache->lengths[at] = slot + 1;
    return error;
}

int fa_tq_quantize(fa_tq_state *state, fa_tq_cache *cache, int layer, int pos, const float *vec, bool is_key) {
    if (!state || !cache || cache->state != state || !vec) return FA_TQ_ERR_ARGUMENT;
    if (!tq_has_slot(cache, layer, pos)) return FA_TQ_ERR_POSITION;
    const int error = state->kernels->norms(state, vec, cache->heads);
    return error ? error : tq_store(cache, layer, pos, vec, is_key);
}

float *fa_tq_dequantize(fa_tq_state *state, fa_tq_cache *cache, int layer, int start, int count, bool is_key,
                        float *out) {
    if (!state || !cache || cache->state != state || !out || count < 0) return NULL;
    if (count == 0) return out;
    if (!tq_has_slot(cache, layer, start) || (size_t)count > cache->slots - (size_t)start) return NULL;
    fa_tq_decode(state, is_key, tq_codes_at(cache, is_key, (size_t)layer, (size_t)start),
                 tq_ranges_at(cache, is_key, (size_t)layer, (size_t)start), false, 2, (size_t)count * cache->heads,
                 out);
    return out;
}

static fa_tq_packed tq_packed(const fa_tq_cache *cache, int side, size_t layer) {
    fa_tq_packed packed;
    packed.codes = tq_codes_at(cache, side, layer, 0);
    packed.code_token_stride = tq_slot_bytes(cache, side);
    packed.code_head_stride = cache->state->side[side].bytes;
    packed.scales = tq_ranges_at(cache, side, layer, 0);
    packed.scale_token_stride = cache->heads * 2;
    packed.scale_head_stride = 2;
    packed.bf16 = false;
    return packed;
}

size_t fa_tq_attention_scratch(const fa_tq_cache *cache, int num_q_heads) {
    if (num_q_heads < 1 || (size_t)num_q_heads % cache->heads != 0) return 0;
    return fa_tq_attend_scratch(cache->state, cache->heads, 1, (size_t)num_q_heads / cache->heads);
}

int fa_tq_attention_step(const fa_tq_state *state, fa_tq_cache *cache, int layer, int pos, const float *q,
                         const float *k, const float *v, int num_q_heads, float scale, float *scratch, float *out) {
    if (!state || !cache || cache->state != state || !q || !k || !v || !scratch || !out || num_q_heads < 1 ||
        (size_t)num_q_heads % cache->heads != 0)
        return FA_TQ_ERR_ARGUMENT;
    if (!tq_has_slot(cache, layer, pos)) return FA_TQ_ERR_POSITION;
    int error = state->kernels->norms(state, k, cache->heads);
    if (!error) error = state->kernels->norms(state, v, cache->heads);
    if (!error) error = tq_store(cache, layer, pos, k, true);
    if (!error) error = tq_store(cache, layer, pos, v, false);
    if (error) return error;
    const fa_tq_packed keys = tq_packed(cache, 1, (size_t)layer), values = tq_packed(cache, 0, (size_t)layer);
    const size_t query_heads = (size_t)num_q_heads;
    return fa_tq_attend(state, &keys, &values, cache->lengths[layer], 0, cache->heads, q, 1, query_heads,
                        query_heads / cache->heads, scale, false, scratch, out);
}

/* ---- the kernels, once per instruction set ---------------------------------------------------------------------- */

#define TQ_JOIN(a, b) a##b
#define TQ_NAME(a, b) TQ_JOIN(a, b)
#define FN(name) TQ_NAME(TQ_KERNELS, name)

/* Plain: four lanes where the compiler has vectors for them, else one. */
#define TQ_KERNELS tq_plain_
#define TQ_TARGET
#if defined(__GNUC__) && (defined(__SSE2__) || defined(__aarch64__)) && !defined(FA_TQ_PLAIN)
#define LANES 4
#else
#define LANES 1
#endif
#include "turboquant.c"
#undef TQ_KERNELS
#undef TQ_TARGET
#undef LANES

#ifdef TQ_HAVE_AVX2
#define TQ_KERNELS tq_avx2_
#define TQ_TARGET __attribute__((target("avx2,f16c"))) /* no fma: nothing can be contracted */
#define LANES 8
#include "turboquant.c"
#undef TQ_KERNELS
#undef TQ_TARGET
#undef LANES
#endif

static const tq_kernels *tq_plain_kernels(void) {
    return &tq_plain_kernels_table;
}

/* Every processor with AVX2 has F16C. */
static const tq_kernels *tq_best_kernels(void) {
#ifdef TQ_HAVE_AVX2
    if (__builtin_cpu_supports("avx2")) return &tq_avx2_kernels_table;
#endif
    return &tq_plain_kernels_table;
}

/* ---- 6. self-test ----------------------------------------------------------------------------------------------- */

const char *fa_tq_strerror(int error) {
    switch (error) {
        case FA_TQ_OK: return "no error";
        case FA_TQ_ERR_ARGUMENT: return "invalid argument";
        case FA_TQ_ERR_DIM: return "no Hadamard matrix of that order is built";
        case FA_TQ_ERR_VALUE: return "a vector holds NaN or infinity";
        case FA_TQ_ERR_NORM: return "a vector's norm exceeds 2^120";
        case FA_TQ_ERR_POSITION: return "layer or position outside the cache";
        case FA_TQ_ERR_SELFTEST: return "this build computes wrong bits, or its tables are damaged";
        default: return "unknown error";
    }
}

/* CRC-32 of zlib, continued over one little-endian word. */
static uint32_t tq_crc32(uint32_t crc, uint32_t word) {
    crc = ~crc;
    for (int byte = 0; byte < 4; byte++) {
        crc ^= word >> (8 * byte) & 0xffu;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1u ? 0xedb88320u : 0u);
    }
    return ~crc;
}

/* Encodes and decodes nine vectors of random integers with evenly spaced levels; checksum of all that comes out. */
static uint32_t tq_golden_crc32(int dim, int bits, int rule, bool plain) {
    float boundaries[TQ_MAX_LEVELS], centroids[TQ_MAX_LEVELS], rows[9 * 64], scales[9 * 2], decoded[9 * 64];
    uint8_t codes[9 * 64] = {0};
    const int levels = 1 << bits;
    for (int k = 0; k < levels; k++) {
        boundaries[k] = (float)(2 * k + 2 - levels) / (float)(2 * levels);
        centroids[k] = (float)(2 * k + 1 - levels) / (float)(2 * levels);
    }
    uint64_t random = 1;
    for (int i = 0; i < 9 * dim; i++) rows[i] = (float)((int)(tq_splitmix64(&random) >> 40) - (1 << 23));
    fa_tq_table table;
    table.bits = bits;
    table.scale_rule = rule;
    table.boundaries = boundaries;
    table.centroids = centroids;
    fa_tq_state *state = fa_tq_init_with(dim, &table, &table, 42);
    if (!state) return 0;
    if (plain) fa_tq_use_plain(state);
    fa_tq_encode(state, true, rows, FA_TQ_F32, 9, codes, scales, false, scales + 1, 2, NULL);
    fa_tq_decode(state, true, codes, scales, false, 2, 9, decoded);
    uint32_t crc = 0;
    for (size_t i = 0; i < 9 * fa_tq_packed_size(dim, bits); i++) crc = tq_crc32(crc, codes[i]);
    for (int i = 0; i < 9 * 2; i++) crc = tq_crc32(crc, tq_float_bits(scales[i]));
    for (int i = 0; i < 9 * dim; i++) crc = tq_crc32(crc, tq_float_bits(decoded[i]));
    fa_tq_free(state);
    return crc;
}

int fa_tq_selftest(void) {
    static const struct {
        int dim, bits, rule;
        uint32_t crc;
    } golden[] = { /* computed by the NumPy reference; the suite checks them */
        {64, 4, FA_TQ_MATCH, UINT32_C(0x48f9f1b5)},
        {64, 2, FA_TQ_UNBIASED, UINT32_C(0xb0d06b43)},
        {24, 3, FA_TQ_LSQ, UINT32_C(0x054c8d9d)},
        {56, 5, FA_TQ_NORM, UINT32_C(0xf4d77680)},
    };
    for (size_t i = 0; i < sizeof golden / sizeof golden[0]; i++)
        for (int plain = 0; plain < 2; plain++)
            if (tq_golden_crc32(golden[i].dim, golden[i].bits, golden[i].rule, plain == 1) != golden[i].crc)
                return FA_TQ_ERR_SELFTEST;
#ifndef FA_TQ_NO_CODEBOOKS
    if (fa_tq_codebooks_crc32(fa_tq_codebooks_centered) != FA_TQ_CODEBOOKS_CRC32_CENTERED ||
        fa_tq_codebooks_crc32(fa_tq_codebooks_unit) != FA_TQ_CODEBOOKS_CRC32_UNIT)
        return FA_TQ_ERR_SELFTEST;
#endif
    return FA_TQ_OK;
}

#else /* TQ_KERNELS */
/* ---- 7. kernels: read once per instruction set, with LANES vectors to a tile ------------------------------------ */

#define VF FN(vf) /* LANES floats */
#define VU FN(vu) /* LANES 32-bit words */
#define VD FN(vd) /* half as many doubles; HALVES of them go with one VF */
#define FN_INLINE TQ_INLINE TQ_TARGET
#if LANES == 1
#define HALVES 1
#define LANE(v, l) (v)
#define BITS_OF(v) tq_float_bits(v)
#define FLOATS_OF(u) tq_float_of(u)
#define AT_LEAST(a, b) ((uint32_t)0 - (uint32_t)((a) >= (b)))
typedef float VF;
typedef uint32_t VU;
typedef double VD;
#else
#define HALVES 2
#define LANE(v, l) ((v)[l])
#define BITS_OF(v) ((VU)(v))
#define FLOATS_OF(u) ((VF)(u))
#define AT_LEAST(a, b) ((VU)((a) >= (b))) /* all ones in a lane where it holds */
typedef float VF __attribute__((vector_size(4 * LANES)));
typedef uint32_t VU __attribute__((vector_size(4 * LANES)));
typedef double VD __attribute__((vector_size(4 * LANES)));
#endif

FN_INLINE VF FN(read)(const float *from) {
    VF v;
    memcpy(&v, from, sizeof v);
    return v;
}

FN_INLINE void FN(write)(float *to, VF v) {
    memcpy(to, &v, sizeof v);
}

FN_INLINE VF FN(broadcast)(float value) {
    VF v = {0};
    return v + value;
}

/* From and to memory: halves of registers would have to be moved about. */
FN_INLINE void FN(widen)(const VF *from, VD wide[HALVES]) {
#if LANES == 8
    wide[0] = _mm256_cvtps_pd(_mm_loadu_ps((const float *)from));
    wide[1] = _mm256_cvtps_pd(_mm_loadu_ps((const float *)from + 4));
#elif LANES == 4
    const VD lower = {(double)(*from)[0], (double)(*from)[1]}, upper = {(double)(*from)[2], (double)(*from)[3]};
    wide[0] = lower;
    wide[1] = upper;
#else
    wide[0] = (double)*from;
#endif
}

FN_INLINE void FN(narrow)(const VD wide[HALVES], VF *to) {
#if LANES == 8
    _mm_storeu_ps((float *)to, _mm256_cvtpd_ps(wide[0]));
    _mm_storeu_ps((float *)to + 4, _mm256_cvtpd_ps(wide[1]));
#elif LANES == 4
    const VF v = {(float)wide[0][0], (float)wide[0][1], (float)wide[1][0], (float)wide[1][1]};
    *to = v;
#else
    *to = (float)wide[0];
#endif
}

/* ---- tiles: LANES rows in memory <-> x[j] with one row a lane ---- */

#if LANES == 8
/* Transposes the 8 x 8 floats in r. */
FN_INLINE void FN(transpose)(VF r[8]) {
    VF a[8], b[8];
    TQ_UNROLL for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    TQ_UNROLL for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    TQ_UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

/* Coordinates j .. j + 7 of a row. */
FN_INLINE VF FN(read_row)(const void *row, int type, size_t j) {
    if (type == FA_TQ_F32) return FN(read)((const float *)row + j);
    const __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)row + j));
    if (type == FA_TQ_F16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
#endif

FN_INLINE void FN(load_tile)(const void *const row[LANES], int type, size_t dim, VF *x) {
    size_t j = 0;
#if LANES == 8
    for (; j + 8 <= dim; j += 8) {
        VF r[8];
        TQ_UNROLL for (size_t l = 0; l < 8; l++) r[l] = FN(read_row)(row[l], type, j);
        FN(transpose)(r);
        TQ_UNROLL for (size_t i = 0; i < 8; i++) x[j + i] = r[i];
    }
#endif
    for (; j < dim; j++)
        for (int l = 0; l < LANES; l++) LANE(x[j], l) = tq_element(row[l], type, j);
}

FN_INLINE void FN(store_tile)(const VF *x, size_t dim, float *out, size_t stride, size_t count) {
    size_t j = 0;
#if LANES == 8
    for (; j + 8 <= dim; j += 8) {
        VF r[8];
        TQ_UNROLL for (size_t i = 0; i < 8; i++) r[i] = x[j + i];
        FN(transpose)(r);
        TQ_UNROLL for (size_t l = 0; l < 8; l++)
            if (l < count) FN(write)(out + l * stride + j, r[l]);
    }
#endif
    for (; j < dim; j++)
        for (size_t l = 0; l < count; l++) out[l * stride + j] = LANE(x[j], l);
}

/* words[w] = 32-bit word w of each lane's packed row; rows of `bytes` bytes, the last word filled up with zeros. */
FN_INLINE void FN(load_words)(const uint8_t *codes, size_t bytes, size_t count, VU *words) {
    size_t w = 0;
#if LANES == 8
    for (; 4 * w + 32 <= bytes && count == 8; w += 8) {
        VF r[8];
        TQ_UNROLL for (size_t l = 0; l < 8; l++) memcpy(&r[l], codes + l * bytes + 4 * w, 32);
        FN(transpose)(r);
        TQ_UNROLL for (size_t i = 0; i < 8; i++) words[w + i] = BITS_OF(r[i]);
    }
#endif
    for (; 4 * w < bytes; w++)
        for (size_t l = 0; l < count; l++) LANE(words[w], l) = tq_word(codes + l * bytes + 4 * w, bytes - 4 * w);
}

FN_INLINE void FN(store_words)(const VU *words, size_t bytes, size_t count, uint8_t *codes) {
    size_t w = 0;
#if LANES == 8
    for (; 4 * w + 32 <= bytes && count == 8; w += 8) {
        VF r[8];
        TQ_UNROLL for (size_t i = 0; i < 8; i++) r[i] = FLOATS_OF(words[w + i]);
        FN(transpose)(r);
        TQ_UNROLL for (size_t l = 0; l < 8; l++) memcpy(codes + l * bytes + 4 * w, &r[l], 32);
    }
#endif
    for (; 4 * w < bytes; w++)
        for (size_t l = 0; l < count; l++) tq_put_word(codes + l * bytes + 4 * w, bytes - 4 * w, LANE(words[w], l));
}

/* Asks for memory that the next tile reads or writes: a tile is too short for processors to see a pattern. */
FN_INLINE void FN(fetch)(const void *from, size_t bytes) {
    for (size_t byte = 0; byte < bytes; byte += 64) TQ_PREFETCH((const uint8_t *)from + byte);
}

/* Norms of the lanes; 0, or the error of the first of `count` lanes that is refused, with its number in *lane. */
FN_INLINE int FN(tile_norms)(const VF *x, size_t dim, size_t count, double norms[LANES], size_t *lane) {
    VD zero = {0}, sum[HALVES], wide[HALVES];
    for (int h = 0; h < HALVES; h++) sum[h] = zero;
    for (size_t j = 0; j < dim; j++) {
        FN(widen)(x + j, wide);
        for (int h = 0; h < HALVES; h++) sum[h] += wide[h] * wide[h];
    }
    memcpy(norms, sum, sizeof sum);
    for (size_t l = 0; l < LANES; l++) norms[l] = sqrt(norms[l]);
    for (size_t l = 0; l < count; l++) {
        if (norms[l] <= TQ_MAX_NORM) continue;
        *lane = l;
        return norms[l] < HUGE_VAL ? FA_TQ_ERR_NORM : FA_TQ_ERR_VALUE;
    }
    return FA_TQ_OK;
}

/* ---- rotation ---- */

/* x_j = float(double(x_j) * factor), negated by the sign bit: negation is exact, so the factor may carry it. */
FN_INLINE void FN(scale_tile)(const fa_tq_state *s, VF *x, const double factors[LANES]) {
    VD signed_factors[2][HALVES], wide[HALVES];
    memcpy(signed_factors[0], factors, sizeof signed_factors[0]);
    for (int h = 0; h < HALVES; h++) signed_factors[1][h] = -signed_factors[0][h];
    for (size_t j = 0; j < s->dim; j++) {
        const VD *factor = signed_factors[s->signs[j / 64] >> (j % 64) & 1];
        FN(widen)(x + j, wide);
        for (int h = 0; h < HALVES; h++) wide[h] *= factor[h];
        FN(narrow)(wide, x + j);
    }
}

/* Butterflies of strides s, 2s and 4s; likewise s and 2s; and s alone. */
FN_INLINE void FN(radix8)(VF *x, size_t dim, size_t s) {
    for (size_t base = 0; base < dim; base += 8 * s) {
        for (VF *p = x + base; p < x + base + s; p++) {
            const VF a0 = p[0] + p[s], a1 = p[0] - p[s], a2 = p[2 * s] + p[3 * s], a3 = p[2 * s] - p[3 * s];
            const VF a4 = p[4 * s] + p[5 * s], a5 = p[4 * s] - p[5 * s], a6 = p[6 * s] + p[7 * s];
            const VF a7 = p[6 * s] - p[7 * s];
            const VF b0 = a0 + a2, b1 = a1 + a3, b2 = a0 - a2, b3 = a1 - a3;
            const VF b4 = a4 + a6, b5 = a5 + a7, b6 = a4 - a6, b7 = a5 - a7;
            p[0] = b0 + b4;
            p[s] = b1 + b5;
            p[2 * s] = b2 + b6;
            p[3 * s] = b3 + b7;
            p[4 * s] = b0 - b4;
            p[5 * s] = b1 - b5;
            p[6 * s] = b2 - b6;
            p[7 * s] = b3 - b7;
        }
    }
}

FN_INLINE void FN(radix4)(VF *x, size_t dim, size_t s) {
    for (size_t base = 0; base < dim; base += 4 * s) {
        for (VF *p = x + base; p < x + base + s; p++) {
            const VF a0 = p[0] + p[s], a1 = p[0] - p[s], a2 = p[2 * s] + p[3 * s], a3 = p[2 * s] - p[3 * s];
            p[0] = a0 + a2;
            p[s] = a1 + a3;
            p[2 * s] = a0 - a2;
            p[3 * s] = a1 - a3;
        }
    }
}

FN_INLINE void FN(radix2)(VF *x, size_t dim, size_t s) {
    for (size_t base = 0; base < dim; base += 2 * s) {
        for (VF *p = x + base; p < x + base + s; p++) {
            const VF a0 = p[0], a1 = p[s];
            p[0] = a0 + a1;
            p[s] = a0 - a1;
        }
    }
}

FN_INLINE void FN(butterflies)(VF *x, size_t dim, size_t run) {
    size_t s = 1;
    for (; 8 * s <= run; s *= 8) FN(radix8)(x, dim, s);
    if (4 * s == run) FN(radix4)(x, dim, s);
    if (2 * s == run) FN(radix2)(x, dim, s);
}

/* y = matrix (or its transpose) across the runs of x; four rows at a time, each summed in index order. */
FN_INLINE void FN(across_runs)(const fa_tq_state *s, bool transpose, const VF *x, VF *y) {
    const size_t order = s->order, run = s->run;
    float signs[FA_TQ_MAX_DIM][4];
    for (size_t k = 0; k < order; k += 4) {
        for (size_t i = 0; i < order; i++)
            for (size_t a = 0; a < 4; a++)
                signs[i][a] = (float)s->matrix[transpose ? i * order + k + a : (k + a) * order + i];
        for (size_t r = 0; r < run; r++) {
            VF sum[4];
            TQ_UNROLL for (int a = 0; a < 4; a++) sum[a] = x[r] * signs[0][a];
            for (size_t i = 1; i < order; i++) {
                TQ_UNROLL for (int a = 0; a < 4; a++) sum[a] += x[i * run + r] * signs[i][a];
            }
            TQ_UNROLL for (size_t a = 0; a < 4; a++) y[(k + a) * run + r] = sum[a];
        }
    }
}

/* Unscaled H, or its transpose, of x; returns where the result is: x or spare. */
FN_INLINE VF *FN(hadamard)(const fa_tq_state *s, bool inverse, VF *x, VF *spare) {
    if (s->order == 1) {
        FN(butterflies)(x, s->dim, s->run);
        return x;
    }
    if (!inverse) FN(butterflies)(x, s->dim, s->run);
    FN(across_runs)(s, inverse, x, spare);
    if (inverse) FN(butterflies)(spare, s->dim, s->run);
    return spare;
}

static TQ_TARGET void FN(rotate)(const fa_tq_state *s, bool inverse, const float *in, size_t in_stride, size_t count,
                                 float *out, size_t out_stride) {
    VF x[FA_TQ_MAX_DIM], spare[FA_TQ_MAX_DIM];
    double factors[LANES];
    for (int l = 0; l < LANES; l++) factors[l] = 1.0 / s->root;
    for (size_t first = 0; first < count; first += LANES) {
        const size_t n = count - first < LANES ? count - first : LANES;
        const void *row[LANES];
        for (size_t l = 0; l < LANES; l++) row[l] = l < n ? in + (first + l) * in_stride : tq_zeros;
        FN(load_tile)(row, FA_TQ_F32, s->dim, x);
        if (!inverse) FN(scale_tile)(s, x, factors);
        VF *y = FN(hadamard)(s, inverse, x, spare);
        if (inverse) FN(scale_tile)(s, y, factors);
        FN(store_tile)(y, s->dim, out + first * out_stride, out_stride, n);
    }
}

/* ---- quantizer ---- */

/* table[index] of each lane; lo and hi are the table's first two registers. */
FN_INLINE VF FN(lookup)(const float *table, VF lo, VF hi, VU index, int bits) {
#if LANES == 8
    if (bits <= 3) return _mm256_permutevar8x32_ps(lo, (__m256i)index);
    if (bits == 4)
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(lo, (__m256i)index),
                                _mm256_permutevar8x32_ps(hi, (__m256i)index), (VF)(index << 28));
    return _mm256_i32gather_ps(table, (__m256i)index, 4);
#else
    VF v = lo;
    for (int l = 0; l < LANES; l++) LANE(v, l) = table[LANE(index, l)];
    (void)hi;
    (void)bits;
    return v;
#endif
}

/* Number of boundaries <= y. levels: the first four levels of the search tree, a register each. */
FN_INLINE VU FN(search)(const tq_side *t, const VF levels[4], VF y, int bits) {
    VU index = {0};
#if LANES == 8
    for (int level = 0; level < bits; level++) {
        const float *nodes = t->tree + ((size_t)1 << level);
        VF b;
        if (level == 0) b = levels[0];
        else if (level < 4) b = _mm256_permutevar8x32_ps(levels[level], (__m256i)index);
        else b = _mm256_i32gather_ps(nodes, (__m256i)index, 4);
        index = index + index - AT_LEAST(y, b);
    }
#else
    (void)levels;
    if (bits <= 4) { /* counting keeps the lanes together */
        for (size_t k = 0; k + 1 < (size_t)1 << bits; k++) index -= AT_LEAST(y, FN(broadcast)(t->boundaries[k]));
    } else {
        for (int l = 0; l < LANES; l++) {
            size_t node = 1;
            for (int level = 0; level < bits; level++) node = 2 * node + (LANE(y, l) >= t->tree[node] ? 1 : 0);
            LANE(index, l) = (uint32_t)(node - ((size_t)1 << bits));
        }
    }
#endif
    return index;
}

/* Codes of y as words of the packed rows; energy = C and, with `products`, product = S of the format's step 5. */
FN_INLINE void FN(quantize_tile)(const tq_side *t, const VF *y, size_t dim, VU *words, VD energy[HALVES],
                                 VD product[HALVES], int bits, bool products) {
    const VF squares_lo = FN(read)(t->squares), squares_hi = FN(read)(t->squares + 8);
    const VF centroids_lo = FN(read)(t->centroids), centroids_hi = FN(read)(t->centroids + 8);
    const VF levels[4] = {FN(broadcast)(t->tree[1]), FN(read)(t->tree + 2), FN(read)(t->tree + 4),
                          FN(read)(t->tree + 8)};
    const VD zero = {0};
    VD wide[HALVES], wide_y[HALVES];
    VU word = {0};
    int used = 0; /* bits of word */
    for (int h = 0; h < HALVES; h++) energy[h] = product[h] = zero;
    for (size_t j = 0; j < dim; j += 4) { /* every length is a multiple of four */
        VU four = {0};
        TQ_UNROLL for (int i = 0; i < 4; i++, y++) {
            const VU index = FN(search)(t, levels, *y, bits);
            VF found = FN(lookup)(t->squares, squares_lo, squares_hi, index, bits);
            FN(widen)(&found, wide);
            for (int h = 0; h < HALVES; h++) energy[h] += wide[h];
            if (products) {
                found = FN(lookup)(t->centroids, centroids_lo, centroids_hi, index, bits);
                FN(widen)(&found, wide);
                FN(widen)(y, wide_y);
                for (int h = 0; h < HALVES; h++) product[h] += wide_y[h] * wide[h];
            }
            four |= index << (i * bits);
        }
        word |= four << used;
        used += 4 * bits;
        if (used >= 32) {
            *words++ = word;
            used -= 32;
            if (used > 0) word = four >> (4 * bits - used);
            else word ^= word;
        }
    }
    *words = word;
}

static TQ_TARGET void FN(quantize)(const tq_side *t, const VF *y, size_t dim, VU *words, VD energy[HALVES],
                                   VD product[HALVES]) {
    const bool products = t->table.scale_rule == FA_TQ_LSQ || t->table.scale_rule == FA_TQ_UNBIASED;
    if (t->bits == 2 && !products) FN(quantize_tile)(t, y, dim, words, energy, product, 2, false);
    else if (t->bits == 3 && !products) FN(quantize_tile)(t, y, dim, words, energy, product, 3, false);
    else if (t->bits == 4 && !products) FN(quantize_tile)(t, y, dim, words, energy, product, 4, false);
    else if (t->bits == 2) FN(quantize_tile)(t, y, dim, words, energy, product, 2, true);
    else if (t->bits == 3) FN(quantize_tile)(t, y, dim, words, energy, product, 3, true);
    else if (t->bits == 4) FN(quantize_tile)(t, y, dim, words, energy, product, 4, true);
    else FN(quantize_tile)(t, y, dim, words, energy, product, t->bits, products);
}

/* The float that decoding multiplies by. */
FN_INLINE float FN(scale_of)(int rule, double norm, double energy, double product) {
    if (norm == 0.0) return 0.0f;
    if (rule == FA_TQ_MATCH) return (float)(norm / sqrt(energy));
    if (rule == FA_TQ_LSQ) return (float)(norm * product / energy);
    if (rule == FA_TQ_UNBIASED) return (float)(norm / product);
    return (float)norm;
}

static TQ_TARGET int FN(encode)(const fa_tq_state *s, const tq_side *t, const void *rows, int type, size_t count,
                                uint8_t *codes, void *scales, bool bf16, float *norms, size_t stride, size_t *bad) {
    const size_t row_bytes = s->dim * (type == FA_TQ_F32 ? 4 : 2);
    VF x[FA_TQ_MAX_DIM], spare[FA_TQ_MAX_DIM];
    VU words[FA_TQ_MAX_DIM / 4 + 1];
    for (size_t first = 0; first < count; first += LANES) {
        const size_t n = count - first < LANES ? count - first : LANES;
        const uint8_t *own = (const uint8_t *)rows + first * row_bytes;
        const void *row[LANES];
        for (size_t l = 0; l < LANES; l++) row[l] = l < n ? own + l * row_bytes : (const uint8_t *)tq_zeros;
        if (first + 2 * LANES <= count) FN(fetch)(own + LANES * row_bytes, LANES * row_bytes);
        FN(load_tile)(row, type, s->dim, x);

        double norm[LANES], factors[LANES], energy[LANES], product[LANES];
        size_t lane = 0;
        const int error = FN(tile_norms)(x, s->dim, n, norm, &lane);
        if (error) {
            if (bad) *bad = first + lane;
            return error;
        }
        for (int l = 0; l < LANES; l++) factors[l] = norm[l] > 0.0 ? 1.0 / (norm[l] * s->root) : 0.0;
        FN(scale_tile)(s, x, factors);
        const VF *y = FN(hadamard)(s, false, x, spare);
        VD wide_energy[HALVES], wide_product[HALVES];
        FN(quantize)(t, y, s->dim, words, wide_energy, wide_product);
        memcpy(energy, wide_energy, sizeof energy);
        memcpy(product, wide_product, sizeof product);

        for (size_t l = 0; l < n; l++) {
            const size_t at = (first + l) * stride;
            const float scale = FN(scale_of)(t->table.scale_rule, norm[l], energy[l], product[l]);
            if (bf16) ((uint16_t *)scales)[at] = tq_to_bf16(scale);
            else ((float *)scales)[at] = scale;
            if (norms) norms[at] = (float)norm[l];
        }
        FN(store_words)(words, t->bytes, n, codes + first * t->bytes);
    }
    return FA_TQ_OK;
}

/* 0, or the error of the first row that encoding would refuse. */
static TQ_TARGET int FN(norms)(const fa_tq_state *s, const float *rows, size_t count) {
    VF x[FA_TQ_MAX_DIM];
    for (size_t first = 0; first < count; first += LANES) {
        const size_t n = count - first < LANES ? count - first : LANES;
        const void *row[LANES];
        double norm[LANES];
        size_t lane;
        for (size_t l = 0; l < LANES; l++) row[l] = l < n ? rows + (first + l) * s->dim : tq_zeros;
        FN(load_tile)(row, FA_TQ_F32, s->dim, x);
        const int error = FN(tile_norms)(x, s->dim, n, norm, &lane);
        if (error) return error;
    }
    return FA_TQ_OK;
}

FN_INLINE void FN(unpack_tile)(const tq_side *t, const VU *words, size_t dim, VF *x, int bits) {
    const VF lo = FN(read)(t->centroids), hi = FN(read)(t->centroids + 8);
    const uint32_t mask = (1u << bits) - 1;
    int used = 0;
    for (size_t j = 0; j < dim; j += 4) {
        VU four = words[0] >> used;
        used += 4 * bits;
        if (used >= 32) {
            words++;
            used -= 32;
            if (used > 0) four |= words[0] << (4 * bits - used);
        }
        TQ_UNROLL for (int i = 0; i < 4; i++, x++)
            *x = FN(lookup)(t->centroids, lo, hi, four >> (i * bits) & mask, bits);
    }
}

static TQ_TARGET void FN(decode)(const fa_tq_state *s, const tq_side *t, const uint8_t *codes, const void *scales,
                                 bool bf16, size_t stride, size_t count, float *out) {
    VF x[FA_TQ_MAX_DIM], spare[FA_TQ_MAX_DIM];
    VU words[FA_TQ_MAX_DIM / 4 + 1];
    memset(words, 0, sizeof words);
    for (size_t first = 0; first < count; first += LANES) {
        const size_t n = count - first < LANES ? count - first : LANES;
        double factors[LANES] = {0};
        float *own = out + first * s->dim;
        if (first + 2 * LANES <= count) FN(fetch)(own + LANES * s->dim, LANES * s->dim * sizeof(float));
        for (size_t l = 0; l < n; l++)
            factors[l] = (double)tq_scale_at(scales, bf16, (first + l) * stride) / s->root;
        FN(load_words)(codes + first * t->bytes, t->bytes, n, words);
        if (t->bits == 2) FN(unpack_tile)(t, words, s->dim, x, 2);
        else if (t->bits == 3) FN(unpack_tile)(t, words, s->dim, x, 3);
        else if (t->bits == 4) FN(unpack_tile)(t, words, s->dim, x, 4);
        else FN(unpack_tile)(t, words, s->dim, x, t->bits);
        VF *y = FN(hadamard)(s, true, x, spare);
        FN(scale_tile)(s, y, factors);
        FN(store_tile)(y, s->dim, own, s->dim, n);
    }
}

/* ---- attention: here a lane is a coordinate ---- */

#if LANES == 8
typedef struct {
    __m256i planes[4]; /* 4 bits: byte p of each centroid, in both halves */
    VF lo, hi;         /* the centroids; up to 3 bits again and again, so that an index needs no mask */
} tq_register_book;

FN_INLINE tq_register_book FN(load_book)(const tq_side *t, int bits) {
    tq_register_book book;
    TQ_UNROLL for (int p = 0; p < 4; p++)
        book.planes[p] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)t->planes[p]));
    book.lo = FN(read)(bits <= 3 ? t->repeated : t->centroids);
    book.hi = FN(read)(t->centroids + 8);
    return book;
}

/* Eight codes of up to 4 bits, the first at bit `shift` of the word. */
FN_INLINE VF FN(expand_8)(const tq_register_book *book, uint32_t word, uint32_t shift, int bits) {
    const uint32_t b = (uint32_t)bits;
    const VU none = {0}, shifts = {0, b, 2 * b, 3 * b, 4 * b, 5 * b, 6 * b, 7 * b};
    const VU index = (VU)_mm256_srlv_epi32((__m256i)(none + word), (__m256i)(shifts + shift));
    return FN(lookup)(NULL, book->lo, book->hi, index, bits);
}

/* 32 codes of up to 4 bits; reads their 4 * bits bytes and no more. */
FN_INLINE void FN(expand_32)(const tq_register_book *book, const uint8_t *packed, VF out[4], int bits) {
    if (bits < 4) {
        TQ_UNROLL for (int group = 0; group < 4; group++) {
            const int byte = group * bits, from = byte < 4 * bits - 4 ? byte : 4 * bits - 4;
            uint32_t word;
            memcpy(&word, packed + from, 4);
            out[group] = FN(expand_8)(book, word, (uint32_t)(8 * (byte - from)), bits);
        }
        return;
    }
    /* Centroids are looked up byte by byte and woven together. Place i of a half register takes code i % 4 of an even
     * (lower half) or odd group of four, which the weaving brings into order. */
    const __m256i source = _mm256_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13, 2, 2, 3, 3, 6, 6, 7, 7,
                                            10, 10, 11, 11, 14, 14, 15, 15);
    const __m256i pairs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)packed));
    const __m256i bytes = _mm256_shuffle_epi8(pairs, source);
    const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi16(0x000f));
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi16(0x0f00));
    const __m256i index = _mm256_or_si256(low, high);
    __m256i p[4];
    TQ_UNROLL for (int i = 0; i < 4; i++) p[i] = _mm256_shuffle_epi8(book->planes[i], index);
    const __m256i a = _mm256_unpacklo_epi8(p[0], p[1]), b = _mm256_unpackhi_epi8(p[0], p[1]);
    const __m256i c = _mm256_unpacklo_epi8(p[2], p[3]), d = _mm256_unpackhi_epi8(p[2], p[3]);
    out[0] = (VF)_mm256_unpacklo_epi16(a, c);
    out[1] = (VF)_mm256_unpackhi_epi16(a, c);
    out[2] = (VF)_mm256_unpacklo_epi16(b, d);
    out[3] = (VF)_mm256_unpackhi_epi16(b, d);
}
#endif

/* The centroids of n packed vectors, each padded to s->padded floats; what lies past dim is arbitrary but finite. */
FN_INLINE void FN(expand_bits)(const fa_tq_state *s, const tq_side *t, const uint8_t *packed, size_t stride, size_t n,
                               float *out, int bits) {
    const uint32_t mask = (1u << bits) - 1;
#if LANES == 8
    const tq_register_book book = FN(load_book)(t, bits);
#endif
    for (size_t i = 0; i < n; i++, packed += stride, out += s->padded) {
        size_t j = 0, byte = 0;
#if LANES == 8
        if (bits <= 4) {
            for (; j + 32 <= s->padded; j += 32, byte += 4 * (size_t)bits) {
                VF four[4];
                FN(expand_32)(&book, packed + byte, four, bits);
                TQ_UNROLL for (size_t k = 0; k < 4; k++) FN(write)(out + j + 8 * k, four[k]);
            }
            for (; j < s->padded; j += 8, byte += (size_t)bits)
                FN(write)(out + j, FN(expand_8)(&book, tq_word(packed + byte, t->bytes - byte), 0, bits));
        }
#endif
        for (; j < s->dim; j++) {
            byte = j * (size_t)bits / 8;
            out[j] = t->centroids[tq_word(packed + byte, t->bytes - byte) >> (j * (size_t)bits % 8) & mask];
        }
        for (; j < s->padded; j++) out[j] = 0.0f;
    }
}

static TQ_TARGET void FN(expand)(const fa_tq_state *s, const tq_side *t, const uint8_t *packed, size_t stride,
                                 size_t n, float *out) {
    if (t->bits == 2) FN(expand_bits)(s, t, packed, stride, n, out, 2);
    else if (t->bits == 3) FN(expand_bits)(s, t, packed, stride, n, out, 3);
    else if (t->bits == 4) FN(expand_bits)(s, t, packed, stride, n, out, 4);
    else FN(expand_bits)(s, t, packed, stride, n, out, t->bits);
}

/* Centroids and scales of n tokens of one head. Tokens lie a stride apart, which processors do not fetch ahead by
 * themselves: the next chunk is asked for here. */
FN_INLINE void FN(expand_chunk)(const fa_tq_state *s, const tq_side *t, const fa_tq_packed *packed, size_t head,
                                size_t first, size_t n, size_t tokens, float *rows, float *scales) {
    const uint8_t *codes = packed->codes + first * packed->code_token_stride + head * packed->code_head_stride;
    const size_t chunk = tq_chunk(s);
    for (size_t i = 0; i < n; i++) {
        const size_t scale = (first + i) * packed->scale_token_stride + head * packed->scale_head_stride;
        if (first + i + chunk < tokens) {
            for (size_t byte = 0; byte < t->bytes; byte += 64)
                TQ_PREFETCH(codes + (i + chunk) * packed->code_token_stride + byte);
            TQ_PREFETCH((const uint8_t *)packed->scales +
                        (scale + chunk * packed->scale_token_stride) * (packed->bf16 ? 2 : 4));
        }
        scales[i] = tq_scale_at(packed->scales, packed->bf16, scale);
    }
    FN(expand)(s, t, codes, packed->code_token_stride, n, rows);
}

/* Products of q with four rows. */
FN_INLINE void FN(four_products)(const float *q, const float *rows, size_t padded, float products[4]) {
    VF sum[4];
    TQ_UNROLL for (int a = 0; a < 4; a++) sum[a] = FN(broadcast)(0.0f);
    for (size_t j = 0; j < padded; j += LANES) {
        TQ_UNROLL for (size_t a = 0; a < 4; a++) sum[a] += FN(read)(q + j) * FN(read)(rows + a * padded + j);
    }
#if LANES == 8
    const VF pairs = _mm256_hadd_ps(_mm256_hadd_ps(sum[0], sum[1]), _mm256_hadd_ps(sum[2], sum[3]));
    _mm_storeu_ps(products, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    for (int a = 0; a < 4; a++) {
        products[a] = LANE(sum[a], 0);
        for (int l = 1; l < LANES; l++) products[a] += LANE(sum[a], l);
    }
#endif
}

/* e^x for x <= 0, within two units in the last place; 0 below -87. */
FN_INLINE VF FN(exponential)(VF x) {
    const VF magic = FN(broadcast)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const VF shifted = x * 1.44269504f + magic, n = shifted - magic;
    const VF r = x - n * 0.693145752f - n * 1.42860677e-6f; /* ln 2 in two parts */
    VF p = FN(broadcast)(1.0f / 5040.0f);
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return FLOATS_OF((BITS_OF(p) + (BITS_OF(shifted) << 23)) & AT_LEAST(x, FN(broadcast)(-87.0f)));
}

FN_INLINE VF FN(larger)(VF a, VF b) {
#if LANES == 8
    return _mm256_max_ps(a, b);
#else
    for (int l = 0; l < LANES; l++) LANE(a, l) = LANE(a, l) > LANE(b, l) ? LANE(a, l) : LANE(b, l);
    return a;
#endif
}

/* total += part, with what the rounding loses carried along (Kahan). */
FN_INLINE void FN(add_carefully)(VF part, float *total, float *lost) {
    const VF before = FN(read)(total), corrected = part - FN(read)(lost), after = before + corrected;
    FN(write)(lost, (after - before) - corrected);
    FN(write)(total, after);
}

/* Scores of n tokens become weights exp(score - most); a new maximum shrinks what was added up before. */
FN_INLINE void FN(weigh)(float *weights, size_t n, float *query, size_t padded) {
    float *total = query + padded, *end = query + 3 * padded; /* most, sum, lost */
    for (size_t i = n; i % 8 != 0; i++) weights[i] = -HUGE_VALF; /* fills up the last register */
    VF tops = FN(broadcast)(end[0]);
    for (size_t i = 0; i < n; i += LANES) tops = FN(larger)(tops, FN(read)(weights + i));
    float most = LANE(tops, 0);
    for (int l = 1; l < LANES; l++) most = LANE(tops, l) > most ? LANE(tops, l) : most;
    if (most > end[0]) {
        const float shrink = expf(end[0] - most);
        for (size_t j = 0; j < 2 * padded; j++) total[j] *= shrink;
        end[1] *= shrink;
        end[2] *= shrink;
        end[0] = most;
    }
    VF sum = FN(broadcast)(0.0f);
    for (size_t i = 0; i < n; i += LANES) {
        const VF w = FN(exponential)(FN(read)(weights + i) - most);
        FN(write)(weights + i, w);
        sum += w;
    }
    float part = 0.0f;
    for (int l = 0; l < LANES; l++) part += LANE(sum, l);
    const float corrected = part - end[2], after = end[1] + corrected;
    end[2] = (after - end[1]) - corrected;
    end[1] = after;
}

/* total += sum of w[i] * row i. */
FN_INLINE void FN(add_rows)(const float *w, const float *rows, size_t n, float *total, size_t padded) {
    float *lost = total + padded;
    size_t j = 0;
    for (; j + 4 * LANES <= padded; j += 4 * LANES) {
        VF part[4];
        TQ_UNROLL for (int a = 0; a < 4; a++) part[a] = FN(broadcast)(0.0f);
        for (size_t i = 0; i < n; i++) {
            TQ_UNROLL for (size_t a = 0; a < 4; a++) part[a] += FN(read)(rows + i * padded + j + a * LANES) * w[i];
        }
        TQ_UNROLL for (size_t a = 0; a < 4; a++)
            FN(add_carefully)(part[a], total + j + a * LANES, lost + j + a * LANES);
    }
    for (; j < padded; j += LANES) {
        VF part = FN(broadcast)(0.0f);
        for (size_t i = 0; i < n; i++) part += FN(read)(rows + i * padded + j) * w[i];
        FN(add_carefully)(part, total + j, lost + j);
    }
}

static TQ_TARGET void FN(scores)(const fa_tq_state *s, const fa_tq_packed *keys, size_t head, size_t tokens,
                                 const float *queries, size_t count, float *scores) {
    float decoded[TQ_CHUNK_FLOATS], scales[TQ_CHUNK_FLOATS / FA_TQ_MIN_DIM], four[4];
    const size_t chunk = tq_chunk(s), padded = s->padded;
    memset(decoded, 0, sizeof decoded);
    for (size_t first = 0; first < tokens; first += chunk) {
        const size_t n = tokens - first < chunk ? tokens - first : chunk;
        FN(expand_chunk)(s, &s->side[1], keys, head, first, n, tokens, decoded, scales);
        for (size_t i = 0; i < count; i++) {
            for (size_t t = 0; t < n; t++) {
                if (t % 4 == 0) FN(four_products)(queries + i * padded, decoded + t * padded, padded, four);
                scores[i * tokens + first + t] = four[t % 4] * scales[t];
            }
        }
    }
}

/* totals: of each query, its sum and what the roundings lost. */
static TQ_TARGET void FN(mix)(const fa_tq_state *s, const fa_tq_packed *values, size_t head, size_t tokens,
                              const float *weights, size_t count, float *totals) {
    float decoded[TQ_CHUNK_FLOATS], scales[TQ_CHUNK_FLOATS / FA_TQ_MIN_DIM], w[TQ_CHUNK_FLOATS / FA_TQ_MIN_DIM];
    const size_t chunk = tq_chunk(s), padded = s->padded;
    for (size_t first = 0; first < tokens; first += chunk) {
        const size_t n = tokens - first < chunk ? tokens - first : chunk;
        FN(expand_chunk)(s, &s->side[0], values, head, first, n, tokens, decoded, scales);
        for (size_t i = 0; i < count; i++) {
            for (size_t t = 0; t < n; t++) w[t] = weights[i * tokens + first + t] * scales[t];
            FN(add_rows)(w, decoded, n, totals + 2 * i * padded, padded);
        }
    }
}

/* How many of a chunk's n tokens a query sees that the newest `hidden` tokens are hidden from. */
FN_INLINE size_t FN(seen)(size_t tokens, size_t first, size_t n, size_t hidden) {
    if (tokens < first + hidden) return 0;
    return tokens - hidden - first < n ? tokens - hidden - first : n;
}

/* One pass over the tokens, chunk by chunk and head by head within a chunk, as they lie in memory. */
static TQ_TARGET void FN(attend)(const fa_tq_state *s, const fa_tq_packed *keys, const fa_tq_packed *values,
                                 size_t tokens, size_t first_head, size_t heads, size_t rows, size_t group,
                                 bool causal, float *queries) {
    float decoded[TQ_CHUNK_FLOATS], scales[TQ_CHUNK_FLOATS / FA_TQ_MIN_DIM];
    const size_t chunk = tq_chunk(s), padded = s->padded, floats = tq_query_floats(s);
    const size_t weights = floats - 8 - 3 * padded;
    memset(decoded, 0, sizeof decoded);
    for (size_t first = 0; first < tokens; first += chunk) {
        const size_t n = tokens - first < chunk ? tokens - first : chunk;
        for (size_t head = 0; head < heads; head++) {
            FN(expand_chunk)(s, &s->side[1], keys, first_head + head, first, n, tokens, decoded, scales);
            for (size_t i = 0; i < rows * group; i++) {
                float *w = queries + ((i / group * heads + head) * group + i % group) * floats;
                const size_t seen = FN(seen)(tokens, first, n, causal ? rows - 1 - i / group : 0);
                for (size_t t = 0; t < seen; t += 4) FN(four_products)(w + weights, decoded + t * padded, padded, w + t);
                for (size_t t = 0; t < seen; t++) w[t] *= scales[t];
                if (seen > 0) FN(weigh)(w, seen, w + weights, padded);
            }
            FN(expand_chunk)(s, &s->side[0], values, first_head + head, first, n, tokens, decoded, scales);
            for (size_t i = 0; i < rows * group; i++) {
                float *w = queries + ((i / group * heads + head) * group + i % group) * floats;
                const size_t seen = FN(seen)(tokens, first, n, causal ? rows - 1 - i / group : 0);
                for (size_t t = 0; t < seen; t++) w[t] *= scales[t];
                FN(add_rows)(w, decoded, seen, w + weights + padded, padded);
            }
        }
    }
}

static const tq_kernels FN(kernels_table) = {
#if LANES == 8
    "avx2",
#else
    "plain",
#endif
    FN(norms),  FN(encode), FN(decode), FN(rotate), FN(expand), FN(scores), FN(mix), FN(attend)};

#undef VF
#undef VU
#undef VD
#undef FN_INLINE
#undef HALVES
#undef LANE
#undef BITS_OF
#undef FLOATS_OF
#undef AT_LEAST
#endif /* TQ_KERNELS */

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
 * Sections: 1 guards and small tools   2 what the kernels share   3 kernels   4 state   5 rotation and codec
 *           6 attention   7 cache   8 diagnosis
 */
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

/* ---- 2. what the kernels share ---------------------------------------------------------------------------------- */

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

/* Tokens that attention decodes at a time: a multiple of four. */
static size_t tq_chunk(const fa_tq_state *state) {
    return TQ_CHUNK_FLOATS / state->padded / 4 * 4;
}

/* What attention keeps of one query, as floats: [weights of a chunk][rotated query][total][what its roundings lost]
 * [most, sum, what sum lost]. The total is of exp(score - most) * value. */
static size_t tq_query_floats(const fa_tq_state *state) {
    return (tq_chunk(state) + 7) / 8 * 8 + 3 * state->padded + 8;
}

/* ---- 3. kernels: one set an instruction set, and the choice among them ------------------------------------------ */

/* Plain: four lanes where the compiler has vectors for them, else one. */
#define TQ_KERNELS tq_plain_
#define TQ_TARGET
#if defined(__GNUC__) && (defined(__SSE2__) || defined(__aarch64__)) && !defined(FA_TQ_PLAIN)
#define LANES 4
#else
#define LANES 1
#endif
#include "turboquant_kernels.h"

#ifdef TQ_HAVE_AVX2
#define TQ_KERNELS tq_avx2_
#define TQ_TARGET __attribute__((target("avx2,f16c"))) /* no fma: nothing can be contracted */
#define LANES 8
#include "turboquant_kernels.h"
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

/* ---- 4. state --------------------------------------------------------------------------------------------------- */

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

const char *fa_tq_instructions(const fa_tq_state *state) {
    return (state ? state->kernels : tq_best_kernels())->name;
}

void fa_tq_use_plain(fa_tq_state *state) {
    state->kernels = tq_plain_kernels();
}

size_t fa_tq_packed_size(int head_dim, int bits) {
    if (head_dim < 1 || head_dim > FA_TQ_MAX_DIM || bits < 1 || bits > FA_TQ_MAX_BITS) return 0;
    return ((size_t)head_dim * (size_t)bits + 7) / 8;
}

/* ---- 5. rotation and codec -------------------------------------------------------------------------------------- */

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

/* ---- 6. attention ----------------------------------------------------------------------------------------------- */

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

/* ---- 7. cache --------------------------------------------------------------------------------------------------- */

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

/* ---- 8. diagnosis ----------------------------------------------------------------------------------------------- */

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

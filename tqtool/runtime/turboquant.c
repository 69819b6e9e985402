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
#include <limits.h>
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
#define TQ_MAX_DIGITS 6 /* 42 bits: sums of up to 1024 squares are then exact in double */
#define TQ_MAX_LANES 8
#define TQ_CHUNK_FLOATS 4096 /* decoded tokens that attention holds at a time: a third of a first-level cache */
#define TQ_MAX_CHUNK (TQ_CHUNK_FLOATS / FA_TQ_MIN_DIM)
#define TQ_BLOCK_ROWS 64 /* rows of a long step that are stored and attended with at a time */

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

/* The nearest half of a float, ties to even; infinite from 65520 on. */
static uint16_t tq_to_half(float value) {
    const uint32_t bits = tq_float_bits(value), rest = bits & 0x7fffffffu;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (rest >= 0x38800000u) return (uint16_t)(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13);
    /* subnormal: adding 0.5 rounds to its last bit, 2^-24 */
    return (uint16_t)(sign | (tq_float_bits(tq_float_of(rest) + 0.5f) - 0x3f000000u));
}

/* The upper half of a float, rounded to nearest even; for finite values. */
TQ_INLINE uint16_t tq_to_bf16(float value) {
    const uint32_t bits = tq_float_bits(value);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

TQ_INLINE float tq_scale_at(const void *scales, int meta, size_t index) {
    if (meta == FA_TQ_META_BF16) return tq_float_of((uint32_t)((const uint16_t *)scales)[index] << 16);
    return ((const float *)scales)[index];
}

TQ_INLINE void tq_put_scale(void *scales, int meta, size_t index, float scale, double norm) {
    if (meta == FA_TQ_META_BF16) {
        ((uint16_t *)scales)[index] = tq_to_bf16(scale);
    } else {
        ((float *)scales)[index] = scale;
        if (meta == FA_TQ_META_RANGE) ((float *)scales)[index + 1] = (float)norm;
    }
}

/* Elements of a vector's scale and norm, and the bytes of one. */
static size_t tq_meta_elements(int meta) {
    return meta == FA_TQ_META_RANGE ? 2 : 1;
}

static size_t tq_meta_bytes(int meta) {
    return meta == FA_TQ_META_BF16 ? 2 : 4;
}

static size_t tq_type_bytes(int type) {
    return type == FA_TQ_F32 ? 4 : 2;
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
    int digit_count;          /* 4 bits: digits of seven bits that squares have as multiples of digit_unit; 0: too many */
    double digit_unit;        /* a power of two */
    uint8_t digits[TQ_MAX_DIGITS][16];
} tq_side;

typedef struct tq_kernels tq_kernels;

struct fa_tq_state {
    size_t dim, run, order; /* dim = order * run, run a power of two */
    size_t padded;          /* dim rounded up to whole groups of sixteen */
    double root;            /* sqrt(dim) */
    uint64_t signs[FA_TQ_MAX_DIM / 64];
    const tq_kernels *kernels;
    tq_side side[2]; /* values, keys: the index is is_key */
    int8_t *matrix;  /* order * order entries +-1 where order > 1; allocated with the state */
};

/* Packed vectors at equal distances. */
typedef struct {
    uint8_t *codes;
    size_t code_stride; /* bytes */
    void *scales;
    size_t scale_stride; /* elements */
    int meta;
} tq_line;

struct tq_kernels {
    const char *name;
    int (*norms)(const fa_tq_state *, const float *rows, size_t count);
    int (*encode)(const fa_tq_state *, const tq_side *, const void *rows, int type, size_t count, const tq_line *to,
                  size_t *bad);
    void (*decode)(const fa_tq_state *, const tq_side *, const tq_line *from, size_t count, float *out);
    void (*rotate)(const fa_tq_state *, bool inverse, const float *in, size_t in_stride, size_t count, float *out,
                   size_t out_stride);
    void (*expand)(const fa_tq_state *, const tq_side *, const uint8_t *codes, size_t stride, const uint32_t *slots,
                   size_t n, float *out);
    void (*scores)(const fa_tq_state *, const fa_tq_packed *keys, size_t head, size_t tokens, const float *queries,
                   size_t count, float *scores);
    void (*mix)(const fa_tq_state *, const fa_tq_packed *values, size_t head, size_t tokens, const float *weights,
                size_t count, float *totals);
    void (*attend)(const fa_tq_state *, const fa_tq_attention *, float *queries);
};

/* Tokens that attention decodes at a time: a multiple of four. */
static size_t tq_chunk(const fa_tq_state *state) {
    return TQ_CHUNK_FLOATS / state->padded / 4 * 4;
}

static size_t tq_query_floats(const fa_tq_state *state) {
    return (tq_chunk(state) + 15) / 16 * 16 + 3 * state->padded + 8;
}

/* What attention keeps of one query, in tq_query_floats floats of the caller's scratch. */
typedef struct {
    float *weights;               /* of a chunk: scores, then exp(score - most), then times the values' scales */
    float *rotated;               /* the query */
    float *total, *lost;          /* of exp(score - most) * value, and what its roundings lost */
    float *most, *sum, *sum_lost; /* largest score; of exp(score - most), and what its roundings lost */
} tq_query;

TQ_INLINE tq_query tq_query_at(const fa_tq_state *state, float *scratch, size_t index) {
    float *end = scratch + (index + 1) * tq_query_floats(state) - 8;
    tq_query query;
    query.weights = scratch + index * tq_query_floats(state);
    query.rotated = end - 3 * state->padded;
    query.total = end - 2 * state->padded;
    query.lost = end - state->padded;
    query.most = end;
    query.sum = end + 1;
    query.sum_lost = end + 2;
    return query;
}

/* Queries lie in scratch as in q, without the heads that a call leaves out: [row][head][group]. i counts one head's. */
TQ_INLINE size_t tq_query_index(const fa_tq_attention *a, size_t head, size_t i) {
    return (i / a->group * a->heads + head) * a->group + i % a->group;
}

/* The tokens that attention reads, chunk by chunk; the next chunk is known before it is needed. */
typedef struct {
    size_t tokens, most; /* slots that hold tokens; slots of a chunk */
    const int32_t *entries; /* NULL: every slot, in order */
    size_t entries_left, block, within;
    size_t slot; /* the next one without entries */
    size_t count, next_count;
    uint32_t slots[TQ_MAX_CHUNK], next[TQ_MAX_CHUNK];
} tq_walk;

static size_t tq_next_chunk(tq_walk *walk, uint32_t *slots) {
    size_t n = 0;
    if (!walk->entries) {
        for (; n < walk->most && walk->slot < walk->tokens; n++) slots[n] = (uint32_t)walk->slot++;
        return n;
    }
    while (n < walk->most && walk->entries_left > 0) {
        const size_t slot = *walk->entries < 0 ? walk->tokens : (size_t)*walk->entries * walk->block + walk->within;
        if (slot < walk->tokens) slots[n++] = (uint32_t)slot;
        if (slot < walk->tokens && ++walk->within < walk->block) continue;
        walk->within = 0;
        walk->entries++;
        walk->entries_left--;
    }
    return n;
}

static void tq_advance(tq_walk *walk) {
    memcpy(walk->slots, walk->next, walk->next_count * sizeof *walk->slots);
    walk->count = walk->next_count;
    walk->next_count = tq_next_chunk(walk, walk->next);
}

static void tq_start(tq_walk *walk, size_t tokens, const fa_tq_choice *choice, size_t head, size_t most) {
    const bool chosen = choice && choice->entries;
    walk->tokens = tokens;
    walk->most = most;
    walk->entries = chosen ? choice->entries + head * choice->head_stride : NULL;
    walk->entries_left = chosen ? choice->count : 0;
    walk->block = chosen && choice->block > 0 ? choice->block : 1;
    walk->within = walk->slot = 0;
    walk->next_count = tq_next_chunk(walk, walk->next);
    tq_advance(walk);
}

/* How many of a chunk's tokens a row sees. Under causality slots ascend. */
TQ_INLINE size_t tq_seen(const fa_tq_attention *a, const tq_walk *walk, size_t row) {
    const size_t hidden = a->causal ? a->rows - 1 - row : 0; /* the newest tokens */
    const size_t end = a->tokens > hidden ? a->tokens - hidden : 0;
    if (hidden == 0) return walk->count;
    if (end <= walk->slots[0]) return 0;
    return end - walk->slots[0] < walk->count ? end - walk->slots[0] : walk->count;
}

/* ---- 3. kernels: one set an instruction set, and the choice among them ------------------------------------------ */

/* Plain: four lanes where the compiler has vectors for them, else one. */
#define TQ_KERNELS tq_plain_
#define TQ_TARGET
#define TQ_TARGET_ATTEND
#if defined(__GNUC__) && (defined(__SSE2__) || defined(__aarch64__)) && !defined(FA_TQ_PLAIN)
#define LANES 4
#else
#define LANES 1
#endif
#include "turboquant_kernels.h"

/* Functions begin on a line of the cache: decode was up to 1.5 times slower (Zen 4) where its loops did not. */
#ifdef TQ_HAVE_AVX2
#define TQ_KERNELS tq_avx2_
#define TQ_TARGET __attribute__((target("avx2,f16c"), aligned(64))) /* no fma: nothing of the format can be contracted */
#define TQ_TARGET_ATTEND __attribute__((target("avx2,f16c,fma"), aligned(64)))
#define LANES 8
#include "turboquant_kernels.h"
#include "turboquant_avx512.h"
#endif

/* The sets of this build, the fastest first, and whether the processor has what the i-th needs. */
static const tq_kernels *const tq_sets[] = {
#ifdef TQ_HAVE_AVX2
    &tq_512_kernels_table,
    &tq_avx2_kernels_table,
#endif
    &tq_plain_kernels_table,
};
enum { TQ_SETS = sizeof tq_sets / sizeof tq_sets[0] };

static bool tq_runs(size_t i) {
#ifdef TQ_HAVE_AVX2
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); /* and so has F16C */
    if (tq_sets[i] == &tq_512_kernels_table)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vbmi");
    if (tq_sets[i] == &tq_avx2_kernels_table) return avx2;
#endif
    return i < TQ_SETS;
}

static const tq_kernels *tq_best_kernels(void) {
    size_t i = 0;
    while (!tq_runs(i)) i++;
    return tq_sets[i];
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

/* The squares of 16 levels as integers, cut into digits. */
static void tq_set_digits(tq_side *side) {
    int least = INT_MAX, most = INT_MIN;
    side->digit_count = 0;
    for (size_t k = 0; k < 16; k++) {
        int exponent;
        if (side->squares[k] == 0.0f) return; /* underflow */
        (void)frexp((double)side->squares[k], &exponent);
        if (exponent < least) least = exponent;
        if (exponent > most) most = exponent;
    }
    const int count = (most - least + FLT_MANT_DIG + 6) / 7;
    if (count > TQ_MAX_DIGITS) return;
    side->digit_count = count;
    side->digit_unit = ldexp(1.0, least - FLT_MANT_DIG);
    for (size_t k = 0; k < 16; k++) {
        const uint64_t square = (uint64_t)ldexp((double)side->squares[k], FLT_MANT_DIG - least);
        for (int p = 0; p < count; p++) side->digits[p][k] = (uint8_t)(square >> (7 * p) & 0x7f);
    }
}

/* Copies the tables; false if they are not ascending, finite and free of the centroid 0. */
static bool tq_set_side(tq_side *side, const fa_tq_table *table, int dim) {
    if (!table || !table->boundaries || !table->centroids || table->bits < 1 || table->bits > FA_TQ_MAX_BITS ||
        table->scale_rule < FA_TQ_MATCH || table->scale_rule >= FA_TQ_SCALE_RULES)
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
    if (table->bits == 4) tq_set_digits(side);
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
    state->padded = (state->dim + 15) / 16 * 16;
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
#define FA_TQ_CODEBOOKS_NO_UNIT /* not read here */
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

const char *fa_tq_instruction_set(size_t index) {
    for (size_t i = 0; i < TQ_SETS; i++)
        if (tq_runs(i) && index-- == 0) return tq_sets[i]->name;
    return NULL;
}

int fa_tq_use(fa_tq_state *state, const char *instructions) {
    if (!state || !instructions) return FA_TQ_ERR_ARGUMENT;
    for (size_t i = 0; i < TQ_SETS; i++) {
        if (strcmp(tq_sets[i]->name, instructions) != 0 || !tq_runs(i)) continue;
        state->kernels = tq_sets[i];
        return FA_TQ_OK;
    }
    return FA_TQ_ERR_ARGUMENT;
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

static bool tq_is_packed(const fa_tq_packed *packed) {
    return packed && packed->codes && packed->scales && packed->meta >= 0 && packed->meta < FA_TQ_METAS;
}

/* Vectors from a token on, head after head. */
static tq_line tq_line_at(const fa_tq_packed *packed, size_t token) {
    tq_line line;
    line.codes = packed->codes + token * packed->code_token_stride;
    line.code_stride = packed->code_head_stride;
    line.scales = (uint8_t *)packed->scales + token * packed->scale_token_stride * tq_meta_bytes(packed->meta);
    line.scale_stride = packed->scale_head_stride;
    line.meta = packed->meta;
    return line;
}

/* Tokens that one line can hold, `tokens` if all distances are equal, else 1; a single head's are tokens' distances. */
static size_t tq_line_tokens(const fa_tq_packed *packed, size_t tokens, size_t heads, tq_line *line) {
    *line = tq_line_at(packed, 0);
    if (heads == 1) {
        line->code_stride = packed->code_token_stride;
        line->scale_stride = packed->scale_token_stride;
        return tokens;
    }
    return packed->code_token_stride == heads * packed->code_head_stride &&
                   packed->scale_token_stride == heads * packed->scale_head_stride
               ? tokens
               : 1;
}

int fa_tq_encode(const fa_tq_state *state, bool is_key, const void *rows, int type, size_t tokens, size_t heads,
                 const fa_tq_packed *to, size_t *bad) {
    if (!state || type < 0 || type >= FA_TQ_TYPES) return FA_TQ_ERR_ARGUMENT;
    if (tokens == 0 || heads == 0) return FA_TQ_OK;
    if (!rows || !tq_is_packed(to)) return FA_TQ_ERR_ARGUMENT;
    tq_line line;
    const size_t step = tq_line_tokens(to, tokens, heads, &line), row_bytes = heads * state->dim * tq_type_bytes(type);
    for (size_t token = 0; token < tokens; token += step) {
        if (token > 0) line = tq_line_at(to, token);
        const uint8_t *own = (const uint8_t *)rows + token * row_bytes;
        const int error = state->kernels->encode(state, &state->side[is_key], own, type, step * heads, &line, bad);
        if (error && bad) *bad += token * heads;
        if (error) return error;
    }
    return FA_TQ_OK;
}

int fa_tq_decode(const fa_tq_state *state, bool is_key, const fa_tq_packed *from, size_t tokens, size_t heads,
                 float *out) {
    if (!state) return FA_TQ_ERR_ARGUMENT;
    if (tokens == 0 || heads == 0) return FA_TQ_OK;
    if (!tq_is_packed(from) || !out) return FA_TQ_ERR_ARGUMENT;
    tq_line line;
    const size_t step = tq_line_tokens(from, tokens, heads, &line), row = heads * state->dim;
    for (size_t token = 0; token < tokens; token += step) {
        if (token > 0) line = tq_line_at(from, token);
        state->kernels->decode(state, &state->side[is_key], &line, step * heads, out + token * row);
    }
    const fa_tq_exact *exact = from->exact;
    for (size_t token = 0; exact && token < tokens; token++) {
        if (exact->row_of[token] < 0) continue;
        const size_t first = (size_t)exact->row_of[token] * exact->row_stride;
        for (size_t j = 0; j < row; j++) out[token * row + j] = tq_element(exact->rows, exact->type, first + j);
    }
    return FA_TQ_OK;
}

/* One vector as packed tokens. */
static fa_tq_packed tq_single(uint8_t *codes, int meta, void *scale) {
    fa_tq_packed packed;
    memset(&packed, 0, sizeof packed);
    packed.codes = codes;
    packed.scales = scale;
    packed.meta = meta;
    return packed;
}

int fa_tq_quantize_head(const fa_tq_state *state, const float *vec, bool is_key, uint8_t *codes, int meta,
                        void *scale) {
    const fa_tq_packed packed = tq_single(codes, meta, scale);
    return fa_tq_encode(state, is_key, vec, FA_TQ_F32, 1, 1, &packed, NULL);
}

int fa_tq_dequantize_head(const fa_tq_state *state, const uint8_t *codes, int meta, const void *scale, bool is_key,
                          float *out) {
    const fa_tq_packed packed = tq_single((uint8_t *)(uintptr_t)codes, meta, (void *)(uintptr_t)scale);
    return fa_tq_decode(state, is_key, &packed, 1, 1, out);
}

/* ---- 6. attention ----------------------------------------------------------------------------------------------- */

/* All of it happens in rotated space: q . k = (R q) . (R k) and R k is scale * centroids, so queries are rotated once,
 * values are added up as they lie in the cache, and the result is rotated back once. */

float fa_tq_score_head(const fa_tq_state *state, const float *q_rot, const uint8_t *codes, int meta,
                       const void *scale) {
    static const uint32_t first[1] = {0};
    float key[FA_TQ_MAX_DIM], partial[8] = {0};
    state->kernels->expand(state, &state->side[1], codes, 0, first, 1, key);
    for (size_t j = 0; j < state->dim; j++) partial[j % 8] += q_rot[j] * key[j];
    for (size_t width = 4; width > 0; width /= 2)
        for (size_t i = 0; i < width; i++) partial[i] += partial[i + width];
    return tq_scale_at(scale, meta, 0) * partial[0];
}

void fa_tq_accum_head(const fa_tq_state *state, float weight, const uint8_t *codes, int meta, const void *scale,
                      double *acc_rot) {
    static const uint32_t first[1] = {0};
    float value[FA_TQ_MAX_DIM];
    const double factor = (double)weight * (double)tq_scale_at(scale, meta, 0);
    state->kernels->expand(state, &state->side[0], codes, 0, first, 1, value);
    for (size_t j = 0; j < state->dim; j++) acc_rot[j] += factor * (double)value[j];
}

size_t fa_tq_attend_scratch(const fa_tq_state *state, size_t heads, size_t rows, size_t group) {
    return heads * rows * group * tq_query_floats(state);
}

/* Whether every entry of every head stands for slots that hold tokens, or for none. */
static bool tq_fits(const fa_tq_choice *choice, size_t heads, size_t tokens) {
    if (!choice->entries) return true;
    const size_t block = choice->block > 0 ? choice->block : 1, most = (tokens + block - 1) / block;
    for (size_t head = 0; head < (choice->head_stride > 0 ? heads : 1); head++)
        for (size_t i = 0; i < choice->count; i++) {
            const int32_t entry = choice->entries[head * choice->head_stride + i];
            if (entry < -1 || (entry >= 0 && (size_t)entry >= most)) return false;
        }
    return true;
}

int fa_tq_attend(const fa_tq_state *state, const fa_tq_attention *a, const float *q, float *scratch, float *out) {
    if (!state || !a || !tq_is_packed(&a->keys) || !tq_is_packed(&a->values) || !q || !scratch || !out ||
        a->group < 1 || (a->first_head + a->heads) * a->group > a->query_heads || a->tokens > UINT32_MAX ||
        (a->choice.entries && a->causal && a->rows > 1))
        return FA_TQ_ERR_ARGUMENT;
    if (!tq_fits(&a->choice, a->heads, a->tokens)) return FA_TQ_ERR_POSITION;
    const size_t floats = tq_query_floats(state), dim = state->dim;
    const size_t together = a->heads * a->group; /* queries that lie side by side in a row of q */
    if (together == 0) return FA_TQ_OK;
    for (size_t row = 0; row < a->rows; row++) {
        const float *own = q + (row * a->query_heads + a->first_head * a->group) * dim;
        memset(scratch + row * together * floats, 0, together * floats * sizeof *scratch);
        state->kernels->rotate(state, false, own, dim, together, tq_query_at(state, scratch, row * together).rotated,
                               floats);
        for (size_t i = 0; i < together; i++) {
            const tq_query query = tq_query_at(state, scratch, row * together + i);
            for (size_t j = 0; j < dim; j++) query.rotated[j] *= a->scale;
            *query.most = -HUGE_VALF;
        }
    }
    state->kernels->attend(state, a, scratch);
    for (size_t row = 0; row < a->rows; row++) {
        for (size_t i = 0; i < together; i++) {
            const tq_query query = tq_query_at(state, scratch, row * together + i);
            const float share = *query.sum > 0.0f ? 1.0f / *query.sum : 0.0f;
            for (size_t j = 0; j < dim; j++) query.total[j] *= share;
        }
        state->kernels->rotate(state, true, tq_query_at(state, scratch, row * together).total, floats, together,
                               out + (row * a->query_heads + a->first_head * a->group) * dim, dim);
    }
    return FA_TQ_OK;
}

int fa_tq_scores(const fa_tq_state *state, const fa_tq_packed *keys, size_t tokens, size_t head, const float *q,
                 size_t count, float *scratch, float *scores) {
    if (!state || !tq_is_packed(keys) || tokens > UINT32_MAX || !q || !scratch || !scores) return FA_TQ_ERR_ARGUMENT;
    memset(scratch, 0, count * state->padded * sizeof *scratch);
    state->kernels->rotate(state, false, q, state->dim, count, scratch, state->padded);
    state->kernels->scores(state, keys, head, tokens, scratch, count, scores);
    return FA_TQ_OK;
}

int fa_tq_mix(const fa_tq_state *state, const fa_tq_packed *values, size_t tokens, size_t head, const float *weights,
              size_t count, float *scratch, float *out) {
    if (!state || !tq_is_packed(values) || tokens > UINT32_MAX || !weights || !scratch || !out) return FA_TQ_ERR_ARGUMENT;
    memset(scratch, 0, count * 2 * state->padded * sizeof *scratch);
    state->kernels->mix(state, values, head, tokens, weights, count, scratch);
    state->kernels->rotate(state, true, scratch, 2 * state->padded, count, out, state->dim);
    return FA_TQ_OK;
}

/* ---- 7. cache --------------------------------------------------------------------------------------------------- */

/* Side 0 is values, side 1 keys, as everywhere: the index is is_key. */
struct fa_tq_cache {
    const fa_tq_state *state;
    fa_tq_cache_config config;
    size_t layers, heads, slots;
    size_t sinks, window; /* exact rows of a layer: the sinks, then a ring of the newest tokens */
    void *memory;         /* one block; the arrays below lie in it, 64-byte aligned, layer after layer */
    size_t *lengths;      /* [layer]: 1 + highest slot whose key was written */
    size_t *written[2];   /* [layer]: tokens */
    uint8_t *codes[2];    /* [layer][slot][head][bytes] */
    uint8_t *scales[2];   /* [layer][slot][head][meta] */
    uint8_t *rows[2];     /* [layer][row][head][dim] of exact_type */
    int32_t *row_of[2];   /* [layer][slot], -1 for none; absent without exact rows, as the next two */
    int32_t *slot_of[2];  /* [layer][row], -1 for none */
    fa_tq_exact *exact[2]; /* [layer] */
};

static size_t tq_code_bytes(const fa_tq_cache *cache, int side) { /* of a slot */
    return cache->heads * cache->state->side[side].bytes;
}

static size_t tq_scale_bytes(const fa_tq_cache *cache) {
    return cache->heads * tq_meta_elements(cache->config.meta) * tq_meta_bytes(cache->config.meta);
}

static size_t tq_row_bytes(const fa_tq_cache *cache) { /* of an exact token */
    return cache->heads * cache->state->dim * tq_type_bytes(cache->config.exact_type);
}

static uint8_t *tq_codes_at(const fa_tq_cache *cache, int side, size_t layer, size_t slot) {
    return cache->codes[side] + (layer * cache->slots + slot) * tq_code_bytes(cache, side);
}

static uint8_t *tq_scales_at(const fa_tq_cache *cache, int side, size_t layer, size_t slot) {
    return cache->scales[side] + (layer * cache->slots + slot) * tq_scale_bytes(cache);
}

static size_t tq_exact_rows(const fa_tq_cache *cache) {
    return cache->sinks + cache->window;
}

size_t fa_tq_cache_bytes(const fa_tq_cache *cache) {
    const size_t slot = tq_code_bytes(cache, 0) + tq_code_bytes(cache, 1) + 2 * tq_scale_bytes(cache);
    return cache->layers * (cache->slots * slot + 2 * tq_exact_rows(cache) * tq_row_bytes(cache));
}

/* Takes the next array of a block, 64-byte aligned; with `memory` NULL only the size is added up. */
static uint8_t *tq_take(uint8_t *memory, size_t *used, size_t bytes) {
    uint8_t *array = memory ? memory + *used : NULL;
    *used += (bytes + 63) / 64 * 64;
    return array;
}

/* Lays the arrays out and returns their bytes. */
static size_t tq_lay_out(fa_tq_cache *cache, uint8_t *memory) {
    size_t used = 0;
    const size_t layers = cache->layers, all = layers * cache->slots, rows = layers * tq_exact_rows(cache);
    cache->lengths = (size_t *)(void *)tq_take(memory, &used, layers * sizeof(size_t));
    for (int side = 0; side < 2; side++) {
        cache->written[side] = (size_t *)(void *)tq_take(memory, &used, layers * sizeof(size_t));
        cache->scales[side] = tq_take(memory, &used, all * tq_scale_bytes(cache));
        cache->codes[side] = tq_take(memory, &used, all * tq_code_bytes(cache, side));
        cache->rows[side] = tq_take(memory, &used, rows * tq_row_bytes(cache));
        cache->row_of[side] = (int32_t *)(void *)tq_take(memory, &used, rows > 0 ? all * sizeof(int32_t) : 0);
        cache->slot_of[side] = (int32_t *)(void *)tq_take(memory, &used, rows * sizeof(int32_t));
        cache->exact[side] = (fa_tq_exact *)(void *)tq_take(memory, &used, rows > 0 ? layers * sizeof(fa_tq_exact) : 0);
    }
    return used;
}

fa_tq_cache *fa_tq_cache_new_with(fa_tq_state *state, const fa_tq_cache_config *config) {
    if (!state || !config || config->layers < 1 || config->kv_heads < 1 || config->max_seq_len < 1 ||
        config->meta < 0 || config->meta >= FA_TQ_METAS || config->exact_type < 0 ||
        config->exact_type >= FA_TQ_TYPES || config->sink_tokens < 0 ||
        config->sink_tokens > config->max_seq_len || config->residual_window < 0)
        return NULL;
    /* a token of a head takes at most 1024 + 8 bytes a side, and 4096 exactly: refuse before a product can wrap around */
    const size_t most = SIZE_MAX / 16384 / (size_t)config->layers / (size_t)config->kv_heads;
    if ((size_t)config->max_seq_len > most || (size_t)config->residual_window > most) return NULL;
    fa_tq_cache *cache = (fa_tq_cache *)FA_TQ_MALLOC(sizeof *cache);
    if (!cache) return NULL;
    memset(cache, 0, sizeof *cache);
    cache->state = state;
    cache->config = *config;
    cache->layers = (size_t)config->layers;
    cache->heads = (size_t)config->kv_heads;
    cache->slots = (size_t)config->max_seq_len;
    cache->sinks = (size_t)config->sink_tokens;
    cache->window = (size_t)config->residual_window;
    cache->memory = FA_TQ_MALLOC(tq_lay_out(cache, NULL) + 63);
    if (!cache->memory) {
        FA_TQ_FREE(cache);
        return NULL;
    }
    uint8_t *start = (uint8_t *)cache->memory;
    tq_lay_out(cache, start + (64 - (uintptr_t)start % 64) % 64);
    for (int side = 0; side < 2 && tq_exact_rows(cache) > 0; side++) {
        for (size_t layer = 0; layer < cache->layers; layer++) {
            fa_tq_exact *exact = &cache->exact[side][layer];
            exact->rows = cache->rows[side] + layer * tq_exact_rows(cache) * tq_row_bytes(cache);
            exact->type = config->exact_type;
            exact->row_stride = cache->heads * state->dim;
            exact->row_of = cache->row_of[side] + layer * cache->slots;
        }
    }
    fa_tq_cache_clear(cache);
    return cache;
}

fa_tq_cache *fa_tq_cache_new(fa_tq_state *state, int num_layers, int num_heads, int max_seq_len) {
    fa_tq_cache_config config;
    memset(&config, 0, sizeof config);
    config.layers = num_layers;
    config.kv_heads = num_heads;
    config.max_seq_len = max_seq_len;
    return fa_tq_cache_new_with(state, &config);
}

void fa_tq_cache_free(fa_tq_cache *cache) {
    if (!cache) return;
    FA_TQ_FREE(cache->memory);
    FA_TQ_FREE(cache);
}

int fa_tq_cache_heads(const fa_tq_cache *cache) {
    return (int)cache->heads;
}

const fa_tq_state *fa_tq_cache_state(const fa_tq_cache *cache) {
    return cache->state;
}

void fa_tq_cache_clear(fa_tq_cache *cache) {
    const size_t all = cache->layers * cache->slots, rows = cache->layers * tq_exact_rows(cache);
    memset(cache->lengths, 0, cache->layers * sizeof *cache->lengths);
    for (int side = 0; side < 2; side++) {
        memset(cache->codes[side], 0, all * tq_code_bytes(cache, side));
        memset(cache->scales[side], 0, all * tq_scale_bytes(cache));
        memset(cache->rows[side], 0, rows * tq_row_bytes(cache));
        memset(cache->written[side], 0, cache->layers * sizeof *cache->written[side]);
        for (size_t i = 0; i < rows; i++) cache->slot_of[side][i] = -1;
        for (size_t i = 0; rows > 0 && i < all; i++) cache->row_of[side][i] = -1;
    }
}

static bool tq_has_slot(const fa_tq_cache *cache, int layer, int pos) {
    return layer >= 0 && (size_t)layer < cache->layers && pos >= 0 && (size_t)pos < cache->slots;
}

int fa_tq_cache_layer_len(const fa_tq_cache *cache, int layer) {
    return tq_has_slot(cache, layer, 0) ? (int)cache->lengths[layer] : FA_TQ_ERR_POSITION;
}

int fa_tq_cache_seq_len(const fa_tq_cache *cache) {
    size_t longest = 0;
    for (size_t layer = 0; layer < cache->layers; layer++)
        if (cache->lengths[layer] > longest) longest = cache->lengths[layer];
    return (int)longest;
}

/* ---- exact tokens ---- */

/* Notes which row keeps a slot, in place of what it kept. */
static void tq_keep(fa_tq_cache *cache, int side, size_t layer, size_t row, size_t slot) {
    int32_t *row_of = cache->row_of[side] + layer * cache->slots;
    int32_t *slot_of = cache->slot_of[side] + layer * tq_exact_rows(cache);
    if (slot_of[row] >= 0) row_of[slot_of[row]] = -1;
    if (row_of[slot] >= 0) slot_of[row_of[slot]] = -1;
    slot_of[row] = (int32_t)slot;
    row_of[slot] = (int32_t)row;
}

/* Keeps those of n new tokens that are sinks or the newest; forgets what was in the others' slots. */
static void tq_write_exact(fa_tq_cache *cache, int side, size_t layer, size_t slot, size_t n, const float *vectors) {
    const size_t size = tq_type_bytes(cache->config.exact_type), elements = cache->heads * cache->state->dim;
    int32_t *row_of = cache->row_of[side] + layer * cache->slots;
    int32_t *slot_of = cache->slot_of[side] + layer * tq_exact_rows(cache);
    if (tq_exact_rows(cache) == 0) return;
    for (size_t i = 0; i < n; i++) {
        if (row_of[slot + i] < 0) continue;
        slot_of[row_of[slot + i]] = -1;
        row_of[slot + i] = -1;
    }
    for (size_t i = 0; i < n; i++) {
        const bool sink = slot + i < cache->sinks;
        if (!sink && i + cache->window < n) continue;
        if (!sink && cache->window == 0) continue;
        const size_t row = sink ? slot + i : cache->sinks + (cache->written[side][layer] + i) % cache->window;
        uint8_t *to = cache->rows[side] + (layer * tq_exact_rows(cache) + row) * elements * size;
        tq_keep(cache, side, layer, row, slot + i);
        for (size_t j = 0; j < elements; j++) {
            const float x = vectors[i * elements + j];
            if (cache->config.exact_type == FA_TQ_F32) ((float *)(void *)to)[j] = x;
            else if (cache->config.exact_type == FA_TQ_F16) ((uint16_t *)(void *)to)[j] = tq_to_half(x);
            else ((uint16_t *)(void *)to)[j] = tq_to_bf16(x);
        }
    }
    cache->written[side][layer] += n;
}

/* Follows an eviction: rows stay where they are, the slots that they keep move down. */
static void tq_evict_exact(fa_tq_cache *cache, int side, size_t layer, size_t gone) {
    int32_t *row_of = cache->row_of[side] + layer * cache->slots;
    int32_t *slot_of = cache->slot_of[side] + layer * tq_exact_rows(cache);
    for (size_t row = 0; row < tq_exact_rows(cache); row++) {
        if (slot_of[row] < 0 || (size_t)slot_of[row] < cache->sinks) continue;
        row_of[slot_of[row]] = -1;
        slot_of[row] = (size_t)slot_of[row] < cache->sinks + gone ? -1 : slot_of[row] - (int32_t)gone;
    }
    for (size_t row = 0; row < tq_exact_rows(cache); row++)
        if (slot_of[row] >= 0) row_of[slot_of[row]] = (int32_t)row;
}

/* Whether float16, where exact tokens are kept in it, holds the vectors. */
static bool tq_exact_holds(const fa_tq_cache *cache, const float *vectors, size_t count) {
    if (tq_exact_rows(cache) == 0 || cache->config.exact_type != FA_TQ_F16) return true;
    for (size_t j = 0; j < count * cache->heads * cache->state->dim; j++)
        if ((tq_to_half(vectors[j]) & 0x7fffu) == 0x7c00u) return false;
    return true;
}

/* ---- eviction ---- */

/* Moves slots down over `gone` ones from `start` on, and empties those that become free. */
static void tq_move_down(uint8_t *slots, size_t bytes, size_t start, size_t gone, size_t count) {
    memmove(slots + start * bytes, slots + (start + gone) * bytes, (count - start - gone) * bytes);
    memset(slots + (count - gone) * bytes, 0, gone * bytes);
}

/* Tokens of a layer that an eviction can drop. */
static size_t tq_evictable(const fa_tq_cache *cache, size_t layer) {
    return cache->lengths[layer] > cache->sinks ? cache->lengths[layer] - cache->sinks : 0;
}

static void tq_evict(fa_tq_cache *cache, size_t layer, size_t gone) {
    for (int side = 0; side < 2; side++) {
        tq_move_down(tq_codes_at(cache, side, layer, 0), tq_code_bytes(cache, side), cache->sinks, gone, cache->slots);
        tq_move_down(tq_scales_at(cache, side, layer, 0), tq_scale_bytes(cache), cache->sinks, gone, cache->slots);
        if (tq_exact_rows(cache) > 0) tq_evict_exact(cache, side, layer, gone);
    }
    const size_t most = tq_evictable(cache, layer);
    cache->lengths[layer] -= gone < most ? gone : most;
}

int fa_tq_cache_evict(fa_tq_cache *cache, int n) {
    if (!cache || n < 0) return FA_TQ_ERR_ARGUMENT;
    size_t most = 0;
    for (size_t layer = 0; layer < cache->layers; layer++)
        if (tq_evictable(cache, layer) > most) most = tq_evictable(cache, layer);
    if ((size_t)n > most) return FA_TQ_ERR_ARGUMENT;
    for (size_t layer = 0; layer < cache->layers; layer++) tq_evict(cache, layer, (size_t)n);
    return FA_TQ_OK;
}

int fa_tq_cache_evict_layer(fa_tq_cache *cache, int layer, int n) {
    if (!cache || n < 0) return FA_TQ_ERR_ARGUMENT;
    if (!tq_has_slot(cache, layer, 0)) return FA_TQ_ERR_POSITION;
    if ((size_t)n > tq_evictable(cache, (size_t)layer)) return FA_TQ_ERR_ARGUMENT;
    tq_evict(cache, (size_t)layer, (size_t)n);
    return FA_TQ_OK;
}

/* ---- reading and writing ---- */

fa_tq_packed fa_tq_cache_packed(const fa_tq_cache *cache, int layer, bool is_key) {
    fa_tq_packed packed;
    memset(&packed, 0, sizeof packed);
    if (!cache || !tq_has_slot(cache, layer, 0)) return packed;
    packed.codes = tq_codes_at(cache, is_key, (size_t)layer, 0);
    packed.code_token_stride = tq_code_bytes(cache, is_key);
    packed.code_head_stride = cache->state->side[is_key].bytes;
    packed.scales = tq_scales_at(cache, is_key, (size_t)layer, 0);
    packed.scale_head_stride = tq_meta_elements(cache->config.meta);
    packed.scale_token_stride = cache->heads * packed.scale_head_stride;
    packed.meta = cache->config.meta;
    if (tq_exact_rows(cache) > 0) packed.exact = &cache->exact[is_key][layer];
    return packed;
}

/* The layer's packed tokens from a slot on; `exact` is room for what they point to. */
static fa_tq_packed tq_packed_from(const fa_tq_cache *cache, int side, size_t layer, size_t slot, fa_tq_exact *exact) {
    fa_tq_packed packed = fa_tq_cache_packed(cache, (int)layer, side);
    packed.codes = tq_codes_at(cache, side, layer, slot);
    packed.scales = tq_scales_at(cache, side, layer, slot);
    if (packed.exact) {
        *exact = *packed.exact;
        exact->row_of += slot;
        packed.exact = exact;
    }
    return packed;
}

/* Stores checked vectors. */
static void tq_store(fa_tq_cache *cache, size_t layer, size_t slot, size_t n, const float *vectors, bool is_key) {
    fa_tq_exact unused;
    const fa_tq_packed to = tq_packed_from(cache, is_key, layer, slot, &unused);
    fa_tq_encode(cache->state, is_key, vectors, FA_TQ_F32, n, cache->heads, &to, NULL);
    tq_write_exact(cache, is_key, layer, slot, n, vectors);
    if (is_key && slot + n > cache->lengths[layer]) cache->lengths[layer] = slot + n;
}

/* 0 if `count` tokens' vectors can be stored. */
static int tq_check_vectors(const fa_tq_cache *cache, const float *vectors, size_t count) {
    const int error = cache->state->kernels->norms(cache->state, vectors, count * cache->heads);
    if (error) return error;
    return tq_exact_holds(cache, vectors, count) ? FA_TQ_OK : FA_TQ_ERR_EXACT;
}

int fa_tq_quantize(fa_tq_state *state, fa_tq_cache *cache, int layer, int pos, const float *vec, bool is_key) {
    if (!state || !cache || cache->state != state || !vec) return FA_TQ_ERR_ARGUMENT;
    if (!tq_has_slot(cache, layer, pos)) return FA_TQ_ERR_POSITION;
    const int error = tq_check_vectors(cache, vec, 1);
    if (!error) tq_store(cache, (size_t)layer, (size_t)pos, 1, vec, is_key);
    return error;
}

float *fa_tq_dequantize(fa_tq_state *state, fa_tq_cache *cache, int layer, int start, int count, bool is_key,
                        float *out) {
    fa_tq_exact exact;
    if (!state || !cache || cache->state != state || !out || count < 0) return NULL;
    if (count == 0) return out;
    if (!tq_has_slot(cache, layer, start) || (size_t)count > cache->slots - (size_t)start) return NULL;
    const fa_tq_packed from = tq_packed_from(cache, is_key, (size_t)layer, (size_t)start, &exact);
    fa_tq_decode(state, is_key, &from, (size_t)count, cache->heads, out);
    return out;
}

int fa_tq_cache_check(const fa_tq_cache *cache, int layer, int pos, int rows, const float *k, const float *v) {
    if (!cache || rows < 1 || !k || !v) return FA_TQ_ERR_ARGUMENT;
    if (!tq_has_slot(cache, layer, pos) || (size_t)rows > cache->slots - (size_t)pos) return FA_TQ_ERR_POSITION;
    const int error = tq_check_vectors(cache, k, (size_t)rows);
    return error ? error : tq_check_vectors(cache, v, (size_t)rows);
}

int fa_tq_cache_write(fa_tq_cache *cache, int layer, int pos, int rows, const float *k, const float *v) {
    const int error = fa_tq_cache_check(cache, layer, pos, rows, k, v);
    if (error) return error;
    tq_store(cache, (size_t)layer, (size_t)pos, (size_t)rows, k, true);
    tq_store(cache, (size_t)layer, (size_t)pos, (size_t)rows, v, false);
    return FA_TQ_OK;
}

/* A single row attends with all heads in one pass; of many rows, each head takes a pass of its own. */
size_t fa_tq_attention_scratch(const fa_tq_cache *cache, int num_q_heads, int rows) {
    if (num_q_heads < 1 || (size_t)num_q_heads % cache->heads != 0 || rows < 1) return 0;
    const size_t group = (size_t)num_q_heads / cache->heads, block = rows < TQ_BLOCK_ROWS ? (size_t)rows : TQ_BLOCK_ROWS;
    return fa_tq_attend_scratch(cache->state, 1, block > cache->heads ? block : cache->heads, group);
}

int fa_tq_attention_step(fa_tq_cache *cache, const fa_tq_step *step, float *scratch, float *out) {
    if (!cache || !step || !step->q || !scratch || !out || step->num_q_heads < 1 ||
        (size_t)step->num_q_heads % cache->heads != 0 || (step->choice.entries && step->rows != 1))
        return FA_TQ_ERR_ARGUMENT;
    const int error = fa_tq_cache_check(cache, step->layer, step->pos, step->rows, step->k, step->v);
    if (error) return error;
    const size_t layer = (size_t)step->layer, rows = (size_t)step->rows, end = (size_t)step->pos + rows;
    const size_t length = cache->lengths[layer] > end ? cache->lengths[layer] : end;
    if (!tq_fits(&step->choice, cache->heads, length)) return FA_TQ_ERR_POSITION;
    /* in a ring that has come round, what a row sees is no longer the first slots: one after the other */
    const size_t block = length > end ? 1 : TQ_BLOCK_ROWS, vector = cache->heads * cache->state->dim;
    fa_tq_attention attention;
    memset(&attention, 0, sizeof attention);
    attention.keys = fa_tq_cache_packed(cache, step->layer, true);
    attention.values = fa_tq_cache_packed(cache, step->layer, false);
    attention.query_heads = (size_t)step->num_q_heads;
    attention.group = attention.query_heads / cache->heads;
    attention.scale = step->scale;
    attention.causal = true;
    attention.choice = step->choice;
    for (size_t row = 0; row < rows; row += attention.rows) {
        attention.rows = rows - row < block ? rows - row : block;
        tq_store(cache, layer, (size_t)step->pos + row, attention.rows, step->k + row * vector, true);
        tq_store(cache, layer, (size_t)step->pos + row, attention.rows, step->v + row * vector, false);
        attention.tokens = cache->lengths[layer];
        attention.heads = attention.rows == 1 ? cache->heads : 1;
        for (attention.first_head = 0; attention.first_head < cache->heads; attention.first_head += attention.heads) {
            const size_t first = row * attention.query_heads * cache->state->dim;
            fa_tq_attend(cache->state, &attention, step->q + first, scratch, out + first);
        }
    }
    return FA_TQ_OK;
}

/* ---- 8. diagnosis ----------------------------------------------------------------------------------------------- */

const char *fa_tq_strerror(int error) {
    switch (error) {
        case FA_TQ_OK: return "no error";
        case FA_TQ_ERR_ARGUMENT: return "invalid argument";
        case FA_TQ_ERR_DIM: return "no Hadamard matrix of that order is built";
        case FA_TQ_ERR_VALUE: return "a vector holds NaN or infinity";
        case FA_TQ_ERR_NORM: return "a vector's norm exceeds 2^120";
        case FA_TQ_ERR_POSITION: return "layer or slot outside the cache";
        case FA_TQ_ERR_MEMORY: return "no memory";
        case FA_TQ_ERR_EXACT: return "a value is too large for the type in which exact tokens are kept";
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

/* Sum of the squares of what two queries, the first rows, make of nine packed keys that are their values as well. */
static double tq_attention_energy(const fa_tq_state *state, const fa_tq_packed *packed, const float *rows) {
    float scratch[2 * 4096], out[2 * 64];
    fa_tq_attention attention;
    if (fa_tq_attend_scratch(state, 1, 1, 2) > sizeof scratch / sizeof scratch[0]) return -1.0;
    memset(&attention, 0, sizeof attention);
    attention.keys = attention.values = *packed;
    attention.tokens = 9;
    attention.heads = attention.rows = 1;
    attention.query_heads = attention.group = 2;
    attention.scale = 1e-13f; /* the rows are integers of seven digits */
    double energy = 0.0;
    if (fa_tq_attend(state, &attention, rows, scratch, out) != FA_TQ_OK) return -1.0;
    for (size_t j = 0; j < 2 * state->dim; j++) energy += (double)out[j] * (double)out[j];
    return energy;
}

/* Encodes and decodes nine vectors of random integers with evenly spaced levels; checksum of all that comes out. 0 also
 * where attention is not what the plain kernels make of it. */
static uint32_t tq_golden_crc32(int dim, int bits, int rule, const tq_kernels *kernels) {
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
    state->kernels = kernels;
    fa_tq_packed packed = tq_single(codes, FA_TQ_META_RANGE, scales);
    packed.code_token_stride = fa_tq_packed_size(dim, bits);
    packed.scale_token_stride = 2;
    fa_tq_encode(state, true, rows, FA_TQ_F32, 9, 1, &packed, NULL);
    fa_tq_decode(state, true, &packed, 9, 1, decoded);
    uint32_t crc = 0;
    for (size_t i = 0; i < 9 * fa_tq_packed_size(dim, bits); i++) crc = tq_crc32(crc, codes[i]);
    for (int i = 0; i < 9 * 2; i++) crc = tq_crc32(crc, tq_float_bits(scales[i]));
    for (int i = 0; i < 9 * dim; i++) crc = tq_crc32(crc, tq_float_bits(decoded[i]));
    const double energy = tq_attention_energy(state, &packed, rows);
    state->kernels = &tq_plain_kernels_table;
    const double plain = tq_attention_energy(state, &packed, rows);
    if (!(energy > 0.0 && fabs(energy - plain) <= 1e-5 * plain)) crc = 0;
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
        for (size_t set = 0; set < TQ_SETS; set++)
            if (tq_runs(set) &&
                tq_golden_crc32(golden[i].dim, golden[i].bits, golden[i].rule, tq_sets[set]) != golden[i].crc)
                return FA_TQ_ERR_SELFTEST;
#ifndef FA_TQ_NO_CODEBOOKS
    if (fa_tq_codebooks_crc32(fa_tq_codebooks_centered) != FA_TQ_CODEBOOKS_CRC32_CENTERED) return FA_TQ_ERR_SELFTEST;
#endif
    return FA_TQ_OK;
}

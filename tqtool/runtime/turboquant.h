/* turboquant.h - TurboQuant compression of key-value caches: rotate, quantize to 1-8 bits, pack; and attention on the
 * packed cache. C99 (and C++), standard headers only, no dependencies; see turboquant.c for the format.
 *
 * A vector of length d (one head, one token) becomes ceil(d * bits / 8) bytes and one or two floats:
 *     y = H D x / (|x| sqrt d)      D: random signs of the seed; H: Hadamard matrix of order d
 *     code_j = number of boundaries <= y_j, packed least significant bit first
 *     range[0] = the scale that decoding multiplies by, range[1] = |x|
 *     x ~ range[0] * D H^T c / sqrt d,   c_j = centroids[code_j]
 * The inverse is not "the same operation": the signs come first on the way in and last on the way out.
 *
 * Lengths: 16 <= d <= 1024 with d = 2^k or d = m 2^k for a Paley order m (12, 20, 28, 36, ...): 64, 80, 96, 128, 160 ...
 * Results are the same bits on every machine, with every compiler and with every instruction set.
 * A state never changes after it is made: any number of threads may share one. A cache has one writer at a time.
 * No function but the constructors allocates. Stack use stays below 128 KiB. Pointers need no alignment beyond their
 * type's. Functions that return int return 0 or a negative code of fa_tq_error.
 */
#ifndef FA_TURBOQUANT_H
#define FA_TURBOQUANT_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
/* [cdef: from here to the closing mark plain declarations, read by the Python binding as well] */

#define FA_TQ_API 1 /* raised when a declaration below changes: a program compiled for another does not fit */
#define FA_TQ_MIN_DIM 16
#define FA_TQ_MAX_DIM 1024
#define FA_TQ_MAX_BITS 8

enum fa_tq_error {
    FA_TQ_OK = 0,
    FA_TQ_ERR_ARGUMENT = -1, /* null pointer, or a number out of its range */
    FA_TQ_ERR_DIM = -2,      /* no Hadamard matrix of that order is built */
    FA_TQ_ERR_VALUE = -3,    /* a vector holds NaN or infinity */
    FA_TQ_ERR_NORM = -4,     /* a vector's norm exceeds 2^120 */
    FA_TQ_ERR_POSITION = -5, /* layer or position outside the cache */
    FA_TQ_ERR_SELFTEST = -6  /* this build computes wrong bits, or its tables are damaged */
};

enum fa_tq_scale_rule { FA_TQ_MATCH = 0, FA_TQ_NORM = 1, FA_TQ_LSQ = 2, FA_TQ_UNBIASED = 3 };
enum fa_tq_type { FA_TQ_F32 = 0, FA_TQ_F16 = 1, FA_TQ_BF16 = 2 };

typedef struct {
    int key_bits;   /* 2, 3 or 4; default 4 */
    int value_bits; /* 2, 3 or 4; default 2 */
} fa_tq_config;

typedef struct {
    int bits;                /* 1 to 8 */
    int scale_rule;          /* enum fa_tq_scale_rule */
    const float *boundaries; /* 2^bits - 1, ascending, centred: t in [-1, 1] */
    const float *centroids;  /* 2^bits, ascending, centred, none of them 0 */
} fa_tq_table;

/* Packed keys or values as [token][head]: codes bytewise, scales as float or (bf16) as upper halves of floats. */
typedef struct {
    const uint8_t *codes;
    size_t code_token_stride; /* bytes from one token to the next */
    size_t code_head_stride;  /* bytes from one head to the next */
    const void *scales;
    size_t scale_token_stride; /* in scales: floats, or 16-bit units with bf16 */
    size_t scale_head_stride;
    bool bf16;
} fa_tq_packed;

typedef struct fa_tq_state fa_tq_state; /* signs, Hadamard matrix, tables */
typedef struct fa_tq_cache fa_tq_cache;

/* ---- state ------------------------------------------------------------------------------------------------------ */

/* K4/V2. */
fa_tq_config fa_tq_config_default(void);

/* With the tables of tq_codebooks.h and rule FA_TQ_MATCH. NULL: no table for that length or width, or no memory.
 * Absent where turboquant.c was compiled with FA_TQ_NO_CODEBOOKS. */
fa_tq_state *fa_tq_init(int head_dim, fa_tq_config config, uint64_t seed);

/* With any tables, which are copied. NULL: unsupported length (see fa_tq_check_dim), invalid table, or no memory. */
fa_tq_state *fa_tq_init_with(int head_dim, const fa_tq_table *key, const fa_tq_table *value, uint64_t seed);
void fa_tq_free(fa_tq_state *state);

/* 0 where the length is supported. */
int fa_tq_check_dim(int head_dim);
int fa_tq_head_dim(const fa_tq_state *state);
const fa_tq_table *fa_tq_get_codebook(const fa_tq_state *state, bool is_key);
const uint64_t *fa_tq_get_signs(const fa_tq_state *state); /* bit j % 64 of word j / 64 negates coordinate j */

/* "avx2" or "plain": the instruction set in use (NULL: by a new state). fa_tq_use_plain picks "plain" before the state is shared: the bits
 * are the same, only slower. */
const char *fa_tq_instructions(const fa_tq_state *state);
void fa_tq_use_plain(fa_tq_state *state);

/* ---- one vector ------------------------------------------------------------------------------------------------- */

/* Bytes of one vector's codes; 0 if out of range. */
size_t fa_tq_packed_size(int head_dim, int bits);

/* in == out is allowed. rotate: H D x / sqrt d; rotate_inverse: D H^T y / sqrt d. */
void fa_tq_rotate(const fa_tq_state *state, const float *in, float *out);
void fa_tq_rotate_inverse(const fa_tq_state *state, const float *in, float *out);

/* On an error the outputs are untouched. */
int fa_tq_quantize_head(const fa_tq_state *state, const float *vec, bool is_key, uint8_t *packed, float range[2]);
int fa_tq_dequantize_head(const fa_tq_state *state, const uint8_t *packed, const float range[2], bool is_key,
                          float *out);

/* Product of a rotated query with a packed key; acc_rot += weight * packed value, still rotated. */
float fa_tq_score_head(const fa_tq_state *state, const float *q_rot, const uint8_t *packed, const float range[2]);
void fa_tq_accum_head(const fa_tq_state *state, float weight, const uint8_t *packed, const float range[2],
                      double *acc_rot);

/* ---- many vectors ----------------------------------------------------------------------------------------------- */

/* rows: count vectors one after the other, of fa_tq_type `type`. Vector i's scale goes to scales[i * stride] and its
 * norm to norms[i * stride] (norms may be NULL); stride 2 with norms = scales + 1 writes range pairs. With bf16, scales
 * are uint16_t (rounded to nearest even), else float. On FA_TQ_ERR_VALUE or FA_TQ_ERR_NORM *bad (may be NULL) is the
 * first refused vector's index; those before it may have been written. */
int fa_tq_encode(const fa_tq_state *state, bool is_key, const void *rows, int type, size_t count, uint8_t *codes,
                 void *scales, bool bf16, float *norms, size_t stride, size_t *bad);
int fa_tq_decode(const fa_tq_state *state, bool is_key, const uint8_t *codes, const void *scales, bool bf16,
                 size_t stride, size_t count, float *out);

/* Attention of `rows` queries on `tokens` packed tokens, for key-value heads first_head .. first_head + heads - 1.
 * q, out: [rows][query_heads][head_dim]; `group` query heads share a key-value head: query head h reads h / group.
 * With `causal` the rows are the newest `rows` tokens: row i sees the first tokens - rows + 1 + i. A row that sees
 * nothing gives zeros. scale multiplies the products (usually 1 / sqrt(head_dim)).
 * scratch: fa_tq_attend_scratch(state, heads, rows, group) floats, one area per thread. */
int fa_tq_attend(const fa_tq_state *state, const fa_tq_packed *keys, const fa_tq_packed *values, size_t tokens,
                 size_t first_head, size_t heads, const float *q, size_t rows, size_t query_heads, size_t group,
                 float scale, bool causal, float *scratch, float *out);
size_t fa_tq_attend_scratch(const fa_tq_state *state, size_t heads, size_t rows, size_t group);

/* Its two halves for one key-value head, for callers with a softmax of their own (masks, soft-cap, tokens kept apart).
 * q, out: [count][head_dim], not rotated; scores, weights: [count][tokens]. scratch: fa_tq_attend_scratch(state, 1,
 * count, 1) floats. */
int fa_tq_scores(const fa_tq_state *state, const fa_tq_packed *keys, size_t tokens, size_t head, const float *q,
                 size_t count, float *scratch, float *scores);
int fa_tq_mix(const fa_tq_state *state, const fa_tq_packed *values, size_t tokens, size_t head, const float *weights,
              size_t count, float *scratch, float *out);

/* ---- cache ------------------------------------------------------------------------------------------------------ */

/* num_heads counts key-value heads. Slots are [0, max_seq_len): a ring passes pos % max_seq_len. The state must
 * outlive the cache. NULL: an argument is out of range, or no memory. */
fa_tq_cache *fa_tq_cache_new(fa_tq_state *state, int num_layers, int num_heads, int max_seq_len);
void fa_tq_cache_free(fa_tq_cache *cache);
void fa_tq_cache_clear(fa_tq_cache *cache);
int fa_tq_cache_seq_len(const fa_tq_cache *cache); /* 1 + the highest slot whose key was written, over all layers */
size_t fa_tq_cache_bytes(const fa_tq_cache *cache); /* packed codes and ranges of all slots */
int fa_tq_cache_evict(fa_tq_cache *cache, int n_oldest); /* drops slots 0 .. n_oldest - 1, moves the others down */

/* vec: [num_heads][head_dim]. On an error the slot is untouched. */
int fa_tq_quantize(fa_tq_state *state, fa_tq_cache *cache, int layer, int pos, const float *vec, bool is_key);

/* out: [count][num_heads][head_dim]; returns out, or NULL on an error. For tests and tools: attention reads the
 * packed slots directly. */
float *fa_tq_dequantize(fa_tq_state *state, fa_tq_cache *cache, int layer, int start, int count, bool is_key,
                        float *out);

/* Stores k and v ([num_heads][head_dim]) at pos, then attends with q ([num_q_heads][head_dim], num_q_heads a multiple
 * of num_heads) to the layer's slots written so far. out: like q. scratch: fa_tq_attention_scratch floats. */
int fa_tq_attention_step(const fa_tq_state *state, fa_tq_cache *cache, int layer, int pos, const float *q,
                         const float *k, const float *v, int num_q_heads, float scale, float *scratch, float *out);
size_t fa_tq_attention_scratch(const fa_tq_cache *cache, int num_q_heads);

/* ---- diagnosis -------------------------------------------------------------------------------------------------- */

const char *fa_tq_strerror(int error);

/* 0 if every instruction set of this build gives the golden bits, and tq_codebooks.h (where used) has its checksum. */
int fa_tq_selftest(void);

/* [end of cdef] */
#ifdef __cplusplus
}
#endif
#endif

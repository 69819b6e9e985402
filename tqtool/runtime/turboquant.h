/* turboquant.h - TurboQuant compression of key-value caches: rotate, quantize to 1-8 bits, pack; and attention on the
 * packed cache. C99 (and C++), standard headers only, no dependencies; see turboquant.c for the format.
 *
 * A vector of length d (one head, one token) becomes ceil(d * bits / 8) bytes, its scale and, on request, its norm:
 *     y = H D x / (|x| sqrt d)      D: random signs of the seed; H: Hadamard matrix of order d
 *     code_j = number of boundaries <= y_j, packed least significant bit first
 *     x ~ scale * D H^T c / sqrt d,   c_j = centroids[code_j]
 * The inverse is not "the same operation": the signs come first on the way in and last on the way out.
 *
 * Lengths: 16 <= d <= 1024 with d = 2^k or d = m 2^k for a Paley order m (12, 20, 28, 36, ...): 64, 80, 96, 128, 160 ...
 * Results are the same bits on every machine, with every compiler and with every instruction set; those of attention
 * agree within float rounding.
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

#define FA_TQ_API 2 /* raised when a declaration below changes: a program compiled for another does not fit */
#define FA_TQ_MIN_DIM 16
#define FA_TQ_MAX_DIM 1024
#define FA_TQ_MAX_BITS 8

enum fa_tq_error {
    FA_TQ_OK = 0,
    FA_TQ_ERR_ARGUMENT = -1, /* null pointer, or a number out of its range */
    FA_TQ_ERR_DIM = -2,      /* no Hadamard matrix of that order is built */
    FA_TQ_ERR_VALUE = -3,    /* a vector holds NaN or infinity */
    FA_TQ_ERR_NORM = -4,     /* a vector's norm exceeds 2^120 */
    FA_TQ_ERR_POSITION = -5, /* layer or slot outside the cache */
    FA_TQ_ERR_SELFTEST = -6, /* this build computes wrong bits, or its tables are damaged */
    FA_TQ_ERR_EXACT = -7,    /* a value is too large for the type in which exact tokens are kept */
    FA_TQ_ERR_MEMORY = -8    /* no memory; of fa_tq_adapter.h */
};

enum fa_tq_scale_rule { FA_TQ_MATCH = 0, FA_TQ_NORM = 1, FA_TQ_LSQ = 2, FA_TQ_UNBIASED = 3, FA_TQ_SCALE_RULES = 4 };
enum fa_tq_type { FA_TQ_F32 = 0, FA_TQ_F16 = 1, FA_TQ_BF16 = 2, FA_TQ_TYPES = 3 };

/* What is stored beside the codes of a vector. */
enum fa_tq_meta {
    FA_TQ_META_RANGE = 0, /* two floats: scale, norm; 8 bytes */
    FA_TQ_META_F32 = 1,   /* the scale as a float; 4 bytes */
    FA_TQ_META_BF16 = 2,  /* the scale as the upper half of a float, rounded to nearest even; 2 bytes */
    FA_TQ_METAS = 3
};

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

/* Tokens whose vectors are kept as they came as well, and are read instead of their codes. */
typedef struct {
    const void *rows;      /* [row][head][head_dim] */
    int type;              /* enum fa_tq_type, of rows */
    size_t row_stride;     /* in elements, from one row to the next */
    const int32_t *row_of; /* of each token: its row, or -1 */
} fa_tq_exact;

/* Packed keys or values as [token][head]: written by fa_tq_encode, only read by everything else. */
typedef struct {
    uint8_t *codes;
    size_t code_token_stride; /* bytes from one token to the next */
    size_t code_head_stride;  /* bytes from one head to the next */
    void *scales;             /* float, or with FA_TQ_META_BF16 uint16_t; a norm follows its scale */
    size_t scale_token_stride; /* in elements of scales */
    size_t scale_head_stride;
    int meta;                 /* enum fa_tq_meta */
    const fa_tq_exact *exact; /* NULL: none */
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

/* Instruction sets: "avx512", "avx2", "plain". fa_tq_instructions: the one in use (NULL: by a new state, the fastest).
 * fa_tq_instruction_set: the index-th that this build has and this processor runs, the fastest first; NULL past the last.
 * fa_tq_use: picks one before the state is shared; codes, metadata and decoded vectors are the same bits in all. */
const char *fa_tq_instructions(const fa_tq_state *state);
const char *fa_tq_instruction_set(size_t index);
int fa_tq_use(fa_tq_state *state, const char *instructions);

/* ---- one vector ------------------------------------------------------------------------------------------------- */

/* Bytes of one vector's codes; 0 if out of range. */
size_t fa_tq_packed_size(int head_dim, int bits);

/* in == out is allowed. rotate: H D x / sqrt d; rotate_inverse: D H^T y / sqrt d. */
void fa_tq_rotate(const fa_tq_state *state, const float *in, float *out);
void fa_tq_rotate_inverse(const fa_tq_state *state, const float *in, float *out);

/* codes: fa_tq_packed_size bytes; scale: what `meta` (enum fa_tq_meta) says. On an error both are untouched. */
int fa_tq_quantize_head(const fa_tq_state *state, const float *vec, bool is_key, uint8_t *codes, int meta, void *scale);
int fa_tq_dequantize_head(const fa_tq_state *state, const uint8_t *codes, int meta, const void *scale, bool is_key,
                          float *out);

/* Product of a rotated query with a packed key; acc_rot += weight * packed value, still rotated. */
float fa_tq_score_head(const fa_tq_state *state, const float *q_rot, const uint8_t *codes, int meta,
                       const void *scale);
void fa_tq_accum_head(const fa_tq_state *state, float weight, const uint8_t *codes, int meta, const void *scale,
                      double *acc_rot);

/* ---- many vectors ----------------------------------------------------------------------------------------------- */

/* rows: [tokens][heads][head_dim] of fa_tq_type `type`. On FA_TQ_ERR_VALUE or FA_TQ_ERR_NORM *bad (may be NULL) is the
 * index of the first refused vector; those before it may have been written. */
int fa_tq_encode(const fa_tq_state *state, bool is_key, const void *rows, int type, size_t tokens, size_t heads,
                 const fa_tq_packed *to, size_t *bad);

/* out: [tokens][heads][head_dim]. */
int fa_tq_decode(const fa_tq_state *state, bool is_key, const fa_tq_packed *from, size_t tokens, size_t heads,
                 float *out);

/* Slots to read, chosen for each key-value head: entry e stands for slots e * block .. e * block + block - 1, as far as
 * they hold tokens, and -1 for none. */
typedef struct {
    const int32_t *entries; /* NULL: every slot is read */
    size_t count;           /* entries of a head */
    size_t head_stride;     /* from one head's entries to the next; 0: all heads read the same */
    size_t block;           /* slots that an entry stands for; 0 means 1 */
} fa_tq_choice;

/* One call of attention: `rows` queries on packed tokens, for key-value heads first_head .. first_head + heads - 1.
 * Query head h reads key-value head h / group. With `causal` the rows are the newest `rows` tokens: row i sees the
 * first tokens - rows + 1 + i. A row that sees nothing gives zeros. Set what is not needed to 0. */
typedef struct {
    fa_tq_packed keys, values;
    size_t tokens; /* slots 0 .. tokens - 1 of keys and values hold tokens */
    size_t first_head, heads;
    size_t rows, query_heads, group;
    float scale; /* multiplies the products; usually 1 / sqrt(head_dim) */
    bool causal;
    fa_tq_choice choice; /* by head from first_head on; not with several causal rows */
} fa_tq_attention;

/* q, out: [rows][query_heads][head_dim]. scratch: fa_tq_attend_scratch(state, heads, rows, group) floats, one area per
 * thread. */
int fa_tq_attend(const fa_tq_state *state, const fa_tq_attention *attention, const float *q, float *scratch, float *out);
size_t fa_tq_attend_scratch(const fa_tq_state *state, size_t heads, size_t rows, size_t group);

/* Its two halves for one key-value head, for callers with a softmax of their own (masks, soft-cap).
 * q, out: [count][head_dim], not rotated; scores, weights: [count][tokens]. scratch: fa_tq_attend_scratch(state, 1,
 * count, 1) floats. */
int fa_tq_scores(const fa_tq_state *state, const fa_tq_packed *keys, size_t tokens, size_t head, const float *q,
                 size_t count, float *scratch, float *scores);
int fa_tq_mix(const fa_tq_state *state, const fa_tq_packed *values, size_t tokens, size_t head, const float *weights,
              size_t count, float *scratch, float *out);

/* ---- cache ------------------------------------------------------------------------------------------------------ */

typedef struct {
    int layers;
    int kv_heads;
    int max_seq_len;     /* slots of a layer: a ring passes pos % max_seq_len */
    int meta;            /* enum fa_tq_meta, of keys and values */
    int sink_tokens;     /* the first slots: kept exactly as well, and spared by evictions */
    int residual_window; /* the newest tokens that are kept exactly as well */
    int exact_type;      /* enum fa_tq_type, of exact tokens */
} fa_tq_cache_config;

/* The first: FA_TQ_META_RANGE and no exact tokens; num_heads counts key-value heads. The state must outlive the cache.
 * NULL: an argument is out of range, or no memory. */
fa_tq_cache *fa_tq_cache_new(fa_tq_state *state, int num_layers, int num_heads, int max_seq_len);
fa_tq_cache *fa_tq_cache_new_with(fa_tq_state *state, const fa_tq_cache_config *config);
void fa_tq_cache_free(fa_tq_cache *cache);
void fa_tq_cache_clear(fa_tq_cache *cache);

/* 1 + the highest slot whose key was written: over all layers, and of one layer (negative: an error). */
int fa_tq_cache_seq_len(const fa_tq_cache *cache);
int fa_tq_cache_layer_len(const fa_tq_cache *cache, int layer);
size_t fa_tq_cache_bytes(const fa_tq_cache *cache); /* codes, scales and exact tokens of all slots */
int fa_tq_cache_heads(const fa_tq_cache *cache);    /* key-value heads */
const fa_tq_state *fa_tq_cache_state(const fa_tq_cache *cache);

/* Drop the n slots after the sinks (slots 0 .. n - 1 without sinks) and move the others down. The first does it in every
 * layer at once: for an engine that evicts once between two tokens. An engine that evicts inside each block, layer by
 * layer as it comes to it, calls the second; with the first it would lose n tokens of every layer as many times as
 * there are layers. A ring needs neither. FA_TQ_ERR_ARGUMENT: that many tokens are not there; nothing has changed. */
int fa_tq_cache_evict(fa_tq_cache *cache, int n);
int fa_tq_cache_evict_layer(fa_tq_cache *cache, int layer, int n);

/* One token. vec: [num_heads][head_dim]. On an error the slot is untouched. */
int fa_tq_quantize(fa_tq_state *state, fa_tq_cache *cache, int layer, int pos, const float *vec, bool is_key);

/* out: [count][num_heads][head_dim]; returns out, or NULL on an error. For tests and tools: attention reads the
 * packed slots directly. */
float *fa_tq_dequantize(fa_tq_state *state, fa_tq_cache *cache, int layer, int start, int count, bool is_key,
                        float *out);

/* Several tokens in slots pos, pos + 1 ... k, v: [rows][num_heads][head_dim]. On an error the cache is untouched. */
int fa_tq_cache_write(fa_tq_cache *cache, int layer, int pos, int rows, const float *k, const float *v);
/* What it would return, without writing. */
int fa_tq_cache_check(const fa_tq_cache *cache, int layer, int pos, int rows, const float *k, const float *v);

/* One layer's keys or values, slot by slot; for fa_tq_attend with threads of the caller's. Valid as long as the cache;
 * codes is NULL if there is no such layer. */
fa_tq_packed fa_tq_cache_packed(const fa_tq_cache *cache, int layer, bool is_key);

/* `rows` new tokens of one layer and their queries. Set what is not needed to 0. */
typedef struct {
    int layer;
    int pos;         /* slot of the first: pos + rows <= max_seq_len */
    int rows;        /* 1 while generating, many for a prompt */
    int num_q_heads; /* a multiple of the cache's heads */
    const float *q;  /* [rows][num_q_heads][head_dim], out likewise */
    const float *k, *v; /* [rows][num_heads][head_dim] */
    float scale;     /* multiplies the products; usually 1 / sqrt(head_dim) */
    fa_tq_choice choice; /* with one row: the new token counts, where it is chosen */
} fa_tq_step;

/* Stores the tokens, and attends with each to the layer's slots written so far, those of later rows excepted. Many rows
 * are cheaper than many calls, and take no more scratch than a few: fa_tq_attention_scratch floats. On an error nothing
 * has changed. */
int fa_tq_attention_step(fa_tq_cache *cache, const fa_tq_step *step, float *scratch, float *out);
size_t fa_tq_attention_scratch(const fa_tq_cache *cache, int num_q_heads, int rows);

/* ---- diagnosis -------------------------------------------------------------------------------------------------- */

const char *fa_tq_strerror(int error);

/* 0 if every instruction set of this build gives the golden bits, and tq_codebooks.h (where used) has its checksum. */
int fa_tq_selftest(void);

/* [end of cdef] */
#ifdef __cplusplus
}
#endif
#endif

/* fa_tq_adapter.h - fa_tq_attention_cached for engines with tensors of their own: batches, strides, masks.
 *
 * An engine describes its tensors and calls. With tensors of (batch, seq, heads, head_dim), closely packed:
 *
 *     fa_tq_tensor q = fa_tq_tensor_of(Q->data, Q->shape), k = fa_tq_tensor_of(K->data, K->shape);
 *     fa_tq_tensor v = fa_tq_tensor_of(V->data, V->shape), out = fa_tq_tensor_of(result->data, result->shape);
 *     int error = fa_tq_attention_cached(&q, &k, &v, caches, layer, pos, &options, &out);
 *
 * Queries stay in full precision; k and v are compressed into the caches, one cache a sequence of the batch.
 */
#ifndef FA_TQ_ADAPTER_H
#define FA_TQ_ADAPTER_H
#include "turboquant.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* float32; strides in floats. The coordinates of a vector lie side by side. */
typedef struct {
    float *data;
    size_t batch, seq, heads, head_dim;
    size_t batch_stride, seq_stride, head_stride;
} fa_tq_tensor;

typedef struct {
    bool causal;       /* row i sees no later row; else every row sees every token */
    float scale;       /* multiplies the products; 0 means 1 / sqrt(head_dim) */
    const float *mask; /* NULL, or added to the products: [batch][row][token], -INFINITY hides */
    size_t mask_batch_stride, mask_row_stride; /* in floats; a stride of 0 repeats */
} fa_tq_options;

static inline fa_tq_tensor fa_tq_tensor_of(float *data, const int shape[4]) {
    fa_tq_tensor x;
    x.data = data;
    x.batch = (size_t)shape[0];
    x.seq = (size_t)shape[1];
    x.heads = (size_t)shape[2];
    x.head_dim = (size_t)shape[3];
    x.head_stride = x.head_dim;
    x.seq_stride = x.heads * x.head_stride;
    x.batch_stride = x.seq * x.seq_stride;
    return x;
}

/* Between a sequence of a tensor and [seq][heads][head_dim]. */
static inline void fa_tq_gather(const fa_tq_tensor *x, size_t b, float *rows) {
    for (size_t i = 0; i < x->seq * x->heads; i++)
        memcpy(rows + i * x->head_dim,
               x->data + b * x->batch_stride + i / x->heads * x->seq_stride + i % x->heads * x->head_stride,
               x->head_dim * sizeof *rows);
}

static inline void fa_tq_scatter(const float *rows, const fa_tq_tensor *x, size_t b) {
    for (size_t i = 0; i < x->seq * x->heads; i++)
        memcpy(x->data + b * x->batch_stride + i / x->heads * x->seq_stride + i % x->heads * x->head_stride,
               rows + i * x->head_dim, x->head_dim * sizeof *rows);
}

/* One query of one head under a mask: scores, their softmax, and the mix. Tokens that are hidden weigh nothing; where
 * all are, the result is zero. */
static inline int fa_tq_masked(const fa_tq_state *state, const fa_tq_attention *a, const float *mask, const float *q,
                               float *weights, float *scratch, float *out) {
    float most = -HUGE_VALF, sum = 0.0f;
    int error = fa_tq_scores(state, &a->keys, a->tokens, a->first_head, q, 1, scratch, weights);
    for (size_t t = 0; t < a->tokens; t++) {
        weights[t] = weights[t] * a->scale + mask[t];
        if (weights[t] > most) most = weights[t];
    }
    for (size_t t = 0; t < a->tokens; t++) {
        weights[t] = most > -HUGE_VALF ? expf(weights[t] - most) : 0.0f;
        sum += weights[t];
    }
    for (size_t t = 0; t < a->tokens; t++) weights[t] = sum > 0.0f ? weights[t] / sum : 0.0f;
    return error ? error : fa_tq_mix(state, &a->values, a->tokens, a->first_head, weights, 1, scratch, out);
}

/* One sequence: q and out are [seq][heads][head_dim], mask is [row][token] or NULL; k and v are in the cache. */
static inline int fa_tq_attend_stored(const fa_tq_state *state, fa_tq_attention *a, const fa_tq_options *options,
                                      const float *mask, const float *q, float *scratch, float *out) {
    const size_t dim = (size_t)fa_tq_head_dim(state), rows = a->rows, heads = a->heads;
    float *weights = scratch + fa_tq_attend_scratch(state, 1, 1, a->group);
    int error = 0;
    for (size_t row = 0; row < rows && !error; row++) {
        const size_t hidden = options->causal ? rows - 1 - row : 0, all = a->tokens;
        const size_t first = row * a->query_heads * dim;
        a->rows = a->heads = 1;
        a->tokens = all - hidden; /* row by row: the newest of what it sees is itself */
        for (a->first_head = 0; a->first_head < heads && !error; a->first_head++) {
            if (!mask) error = fa_tq_attend(state, a, q + first, scratch, out + first);
            for (size_t h = a->first_head * a->group; mask && h < (a->first_head + 1) * a->group && !error; h++)
                error = fa_tq_masked(state, a, mask + row * options->mask_row_stride, q + first + h * dim, weights, scratch,
                                     out + first + h * dim);
        }
        a->tokens = all;
    }
    return error;
}

/* Stores k and v in slots pos, pos + 1 ... of `layer` of each sequence's cache and attends with q: (batch, seq, heads,
 * head_dim), heads a multiple of the cache's. On an error no cache has changed. Allocates while it runs. */
static inline int fa_tq_attention_cached(const fa_tq_tensor *q, const fa_tq_tensor *k, const fa_tq_tensor *v,
                                         fa_tq_cache *const *caches, int layer, int pos, const fa_tq_options *options,
                                         const fa_tq_tensor *out) {
    if (!q || !k || !v || !caches || !options || !out || q->batch != k->batch || q->batch != v->batch ||
        q->batch != out->batch || q->seq != k->seq || q->seq != v->seq || q->seq != out->seq || k->heads < 1 ||
        k->heads != v->heads || q->heads != out->heads || q->heads % k->heads != 0 || q->head_dim != k->head_dim ||
        q->head_dim != v->head_dim || q->head_dim != out->head_dim)
        return FA_TQ_ERR_ARGUMENT;
    for (size_t b = 0; b < q->batch; b++)
        if (!caches[b] || fa_tq_cache_heads(caches[b]) != (int)k->heads ||
            fa_tq_head_dim(fa_tq_cache_state(caches[b])) != (int)q->head_dim)
            return FA_TQ_ERR_ARGUMENT;
    if (q->batch == 0 || q->seq == 0) return FA_TQ_OK;
    const size_t small = k->seq * k->heads * k->head_dim, large = q->seq * q->heads * q->head_dim;
    const float scale = options->scale != 0.0f ? options->scale : 1.0f / sqrtf((float)q->head_dim);
    const int rows = (int)q->seq, heads = (int)q->heads;
    int error = 0, longest = pos + rows;
    for (size_t b = 0; b < q->batch; b++)
        if (fa_tq_cache_layer_len(caches[b], layer) > longest) longest = fa_tq_cache_layer_len(caches[b], layer);
    const size_t area = fa_tq_attention_scratch(caches[0], heads, rows) + (longest > 0 ? (size_t)longest : 0);
    float *memory = (float *)malloc((2 * q->batch * small + 2 * large + area) * sizeof *memory);
    if (!memory) return FA_TQ_ERR_MEMORY;
    float *own_q = memory + 2 * q->batch * small, *own_out = own_q + large, *scratch = own_out + large;
    for (size_t b = 0; b < q->batch && !error; b++) { /* all are checked before one is stored */
        fa_tq_gather(k, b, memory + 2 * b * small);
        fa_tq_gather(v, b, memory + (2 * b + 1) * small);
        if (options->mask && options->causal && rows > 1 && fa_tq_cache_layer_len(caches[b], layer) > pos + rows)
            error = FA_TQ_ERR_POSITION; /* round a ring, slots are not in order */
        else error = fa_tq_cache_check(caches[b], layer, pos, rows, memory + 2 * b * small, memory + (2 * b + 1) * small);
    }
    for (size_t b = 0; b < q->batch && !error; b++) {
        const float *own_k = memory + 2 * b * small, *own_v = own_k + small;
        fa_tq_gather(q, b, own_q);
        if (!options->mask && (options->causal || rows == 1)) {
            fa_tq_step step;
            memset(&step, 0, sizeof step);
            step.layer = layer;
            step.pos = pos;
            step.rows = rows;
            step.num_q_heads = heads;
            step.q = own_q;
            step.k = own_k;
            step.v = own_v;
            step.scale = scale;
            error = fa_tq_attention_step(caches[b], &step, scratch, own_out);
        } else {
            fa_tq_attention a;
            memset(&a, 0, sizeof a);
            error = fa_tq_cache_write(caches[b], layer, pos, rows, own_k, own_v);
            a.keys = fa_tq_cache_packed(caches[b], layer, true);
            a.values = fa_tq_cache_packed(caches[b], layer, false);
            a.tokens = (size_t)fa_tq_cache_layer_len(caches[b], layer);
            a.heads = k->heads;
            a.rows = q->seq;
            a.query_heads = q->heads;
            a.group = q->heads / k->heads;
            a.scale = scale;
            const float *mask = options->mask ? options->mask + b * options->mask_batch_stride : NULL;
            if (!error)
                error = fa_tq_attend_stored(fa_tq_cache_state(caches[b]), &a, options, mask, own_q, scratch, own_out);
        }
        if (!error) fa_tq_scatter(own_out, out, b);
    }
    free(memory);
    return error;
}
#endif

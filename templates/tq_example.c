/* tq_example.c - a tiny decoder that generates with its keys and values in float32, or compressed by TurboQuant.
 *
 *     ./tq_example                       the float32 cache
 *     ./tq_example --tq-cache            the compressed one beside it: tokens per second, bytes, agreement
 *     ./tq_example --tq-cache --window 64 --key-bits 4 --value-bits 2 --tokens 384
 *
 * The weights are random, so it shows how an engine uses the cache and what that costs in time and memory, not what a
 * trained model loses: for that, capture its activations and run `tqtool validate`. Agreement is measured with both
 * caches reading the same tokens, those that float32 chose.
 */
#include "tq_codebooks.h"
#include "turboquant.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LAYERS = 4, HEADS = 4, KV_HEADS = 2, VOCABULARY = 512, WIDTH = 256, PROMPT = 64, SLOTS = 256, GONE = 64 };

static int dim; /* of a head */

static float *floats(size_t count) {
    float *memory = (float *)calloc(count, sizeof(float));
    if (!memory) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    return memory;
}

static uint64_t random_bits(void) { /* splitmix64 */
    static uint64_t state = 1;
    uint64_t z = (state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* A rows x columns matrix of normal numbers that keeps the size of what it multiplies. */
static float *matrix(int rows, int columns) {
    float *weights = floats((size_t)rows * (size_t)columns);
    for (size_t i = 0; i < (size_t)rows * (size_t)columns; i++) {
        double sum = -6.0;
        for (int j = 0; j < 12; j++) sum += (double)(random_bits() >> 11) / 9007199254740992.0;
        weights[i] = (float)(sum / sqrt(columns));
    }
    return weights;
}

static void multiply(const float *weights, const float *x, int rows, int columns, float *out) {
    for (int i = 0; i < rows; i++) {
        float sum[8] = {0};
        for (int j = 0; j < columns; j++) sum[j % 8] += weights[(size_t)i * (size_t)columns + (size_t)j] * x[j];
        out[i] = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
    }
}

static void normalize(const float *x, float *out) { /* RMSNorm */
    float sum = 0.0f;
    for (int j = 0; j < WIDTH; j++) sum += x[j] * x[j];
    for (int j = 0; j < WIDTH; j++) out[j] = x[j] / sqrtf(sum / (float)WIDTH + 1e-6f);
}

static void turn(float *x, int heads, int position) { /* rotary embedding, halves paired */
    for (int h = 0; h < heads; h++, x += dim)
        for (int j = 0; j < dim / 2; j++) {
            const float angle = (float)position * powf(10000.0f, -2.0f * (float)j / (float)dim);
            const float a = x[j], b = x[j + dim / 2];
            x[j] = a * cosf(angle) - b * sinf(angle);
            x[j + dim / 2] = a * sinf(angle) + b * cosf(angle);
        }
}

static float *embedding, *output, *wq[LAYERS], *wk[LAYERS], *wv[LAYERS], *wo[LAYERS], *up[LAYERS], *down[LAYERS];

static void make_model(void) {
    embedding = matrix(VOCABULARY, WIDTH);
    for (int layer = 0; layer < LAYERS; layer++) {
        wq[layer] = matrix(HEADS * dim, WIDTH);
        wk[layer] = matrix(KV_HEADS * dim, WIDTH);
        wv[layer] = matrix(KV_HEADS * dim, WIDTH);
        wo[layer] = matrix(WIDTH, HEADS * dim);
        up[layer] = matrix(2 * WIDTH, WIDTH);
        down[layer] = matrix(WIDTH, 2 * WIDTH);
    }
    output = matrix(VOCABULARY, WIDTH);
    for (size_t i = 0; i < (size_t)VOCABULARY * (size_t)WIDTH; i++) embedding[i] *= sqrtf((float)WIDTH);
    for (int layer = 0; layer < LAYERS; layer++) /* attention that prefers some tokens, and counts */
        for (size_t i = 0; i < (size_t)HEADS * (size_t)dim * (size_t)WIDTH; i++) wq[layer][i] *= 2.0f, wo[layer][i] *= 2.0f;
}

/* The toggle: `tq` or, without it, `k` and `v`, [layer][slot][kv head][dim]. */
typedef struct {
    fa_tq_cache *tq;
    float *k, *v;
    int length[LAYERS]; /* the engine's own counters */
    int position;       /* of the next token */
    float *scratch;
} kv_cache;

static size_t slot_floats(void) { /* keys of a token */
    return (size_t)KV_HEADS * (size_t)dim;
}

static size_t row_floats(void) { /* its queries */
    return (size_t)HEADS * (size_t)dim;
}

/* Room for `rows` more tokens of a layer: called inside each block, hence the eviction of one layer. */
static void make_room(kv_cache *cache, int layer, int rows) {
    if (cache->length[layer] + rows <= SLOTS) return;
    cache->length[layer] -= GONE;
    if (cache->tq) {
        fa_tq_cache_evict_layer(cache->tq, layer, GONE);
    } else {
        const size_t first = (size_t)layer * SLOTS * slot_floats(), kept = (size_t)cache->length[layer] * slot_floats();
        memmove(cache->k + first, cache->k + first + GONE * slot_floats(), kept * sizeof(float));
        memmove(cache->v + first, cache->v + first + GONE * slot_floats(), kept * sizeof(float));
    }
}

static void attend_float32(kv_cache *cache, int layer, int rows, const float *q, const float *k, const float *v, float *out) {
    const size_t first = (size_t)layer * SLOTS * slot_floats(), end = (size_t)cache->length[layer];
    const float *keys = cache->k + first, *values = cache->v + first, scale = 1.0f / sqrtf((float)dim);
    memcpy(cache->k + first + end * slot_floats(), k, (size_t)rows * slot_floats() * sizeof(float));
    memcpy(cache->v + first + end * slot_floats(), v, (size_t)rows * slot_floats() * sizeof(float));
    float weights[SLOTS];
    for (int row = 0; row < rows; row++)
        for (int h = 0; h < HEADS; h++, q += dim, out += dim) {
            const int tokens = (int)end + row + 1, kv = h / (HEADS / KV_HEADS);
            float most = -HUGE_VALF, sum = 0.0f;
            for (int t = 0; t < tokens; t++) {
                multiply(keys + ((size_t)t * KV_HEADS + (size_t)kv) * (size_t)dim, q, 1, dim, weights + t);
                weights[t] *= scale;
                most = fmaxf(most, weights[t]);
            }
            for (int t = 0; t < tokens; t++) sum += weights[t] = expf(weights[t] - most);
            memset(out, 0, (size_t)dim * sizeof(float));
            for (int t = 0; t < tokens; t++)
                for (int j = 0; j < dim; j++)
                    out[j] += weights[t] / sum * values[((size_t)t * KV_HEADS + (size_t)kv) * (size_t)dim + (size_t)j];
        }
}

static void attend(kv_cache *cache, int layer, int rows, const float *q, const float *k, const float *v, float *out) {
    make_room(cache, layer, rows);
    if (cache->tq) {
        fa_tq_step step;
        memset(&step, 0, sizeof step);
        step.layer = layer;
        step.pos = cache->length[layer];
        step.rows = rows;
        step.num_q_heads = HEADS;
        step.q = q;
        step.k = k;
        step.v = v;
        step.scale = 1.0f / sqrtf((float)dim);
        const int error = fa_tq_attention_step(cache->tq, &step, cache->scratch, out);
        if (error) {
            fprintf(stderr, "attention: %s\n", fa_tq_strerror(error));
            exit(1);
        }
    } else {
        attend_float32(cache, layer, rows, q, k, v, out);
    }
    cache->length[layer] += rows;
}

/* Reads tokens and leaves the last one's logits. */
static void forward(kv_cache *cache, const int *tokens, int rows, float *logits) {
    float *h = floats((size_t)rows * (size_t)WIDTH), *x = floats(2 * (size_t)WIDTH), *y = floats(2 * (size_t)WIDTH);
    float *q = floats((size_t)rows * row_floats()), *out = floats((size_t)rows * row_floats());
    float *k = floats((size_t)rows * slot_floats()), *v = floats((size_t)rows * slot_floats());
    for (int row = 0; row < rows; row++)
        memcpy(h + (size_t)row * (size_t)WIDTH, embedding + (size_t)tokens[row] * (size_t)WIDTH, (size_t)WIDTH * sizeof(float));
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int row = 0; row < rows; row++) {
            float *own_q = q + (size_t)row * row_floats(), *own_k = k + (size_t)row * slot_floats();
            normalize(h + (size_t)row * (size_t)WIDTH, x);
            multiply(wq[layer], x, HEADS * dim, WIDTH, own_q);
            multiply(wk[layer], x, KV_HEADS * dim, WIDTH, own_k);
            multiply(wv[layer], x, KV_HEADS * dim, WIDTH, v + (size_t)row * slot_floats());
            turn(own_q, HEADS, cache->position + row);
            turn(own_k, KV_HEADS, cache->position + row);
        }
        attend(cache, layer, rows, q, k, v, out);
        for (int row = 0; row < rows; row++) {
            float *own = h + (size_t)row * (size_t)WIDTH;
            multiply(wo[layer], out + (size_t)row * row_floats(), WIDTH, HEADS * dim, x);
            for (int j = 0; j < WIDTH; j++) own[j] += x[j];
            normalize(own, x);
            multiply(up[layer], x, 2 * WIDTH, WIDTH, y);
            for (int j = 0; j < 2 * WIDTH; j++) y[j] = fmaxf(y[j], 0.0f);
            multiply(down[layer], y, WIDTH, 2 * WIDTH, x);
            for (int j = 0; j < WIDTH; j++) own[j] += x[j];
        }
    }
    cache->position += rows;
    normalize(h + (size_t)(rows - 1) * (size_t)WIDTH, x);
    multiply(output, x, VOCABULARY, WIDTH, logits);
    float *const arrays[] = {h, x, y, q, out, k, v};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
}

static int largest(const float *logits) {
    int best = 0;
    for (int i = 1; i < VOCABULARY; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* Reads the prompt and generates. choices[i] is the cache's own i-th token; what is read next is read[i], or with read
 * NULL the choice itself. Returns tokens per second of the generation. */
static double generate(kv_cache *cache, const int *prompt, const int *read, int count, int *choices) {
    float *logits = floats(VOCABULARY);
    forward(cache, prompt, PROMPT, logits);
    const clock_t begun = clock();
    for (int i = 0; i < count; i++) {
        choices[i] = largest(logits);
        const int next = read ? read[i] : choices[i];
        forward(cache, &next, 1, logits);
    }
    free(logits);
    return count / ((double)(clock() - begun) / CLOCKS_PER_SEC + 1e-9);
}

static int number(const char *text, const char *option, int least, int most) {
    char *end;
    const long value = strtol(text ? text : "", &end, 10);
    if (!text || *end || end == text || value < least || value > most) {
        fprintf(stderr, "%s takes a number from %d to %d\n", option, least, most);
        exit(2);
    }
    return (int)value;
}

int main(int argc, char **argv) {
    fa_tq_config config = fa_tq_config_default();
    bool compressed = false;
    int count = 384, window = 0;
    dim = fa_tq_codebook_dims[0];
    if (fa_tq_codebook_index(dim, config.key_bits) < 0 || fa_tq_codebook_index(dim, config.value_bits) < 0)
        for (int i = 0; i < FA_TQ_CODEBOOK_COUNT; i++) { /* tables of other widths: the widest and the narrowest */
            const int bits = fa_tq_codebooks_centered[i].bits;
            if (i == 0 || bits > config.key_bits) config.key_bits = bits;
            if (i == 0 || bits < config.value_bits) config.value_bits = bits;
        }
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--tq-cache") == 0) compressed = true;
        else if (strcmp(argv[i], "--tokens") == 0) count = number(value, argv[i++], 1, 100000);
        else if (strcmp(argv[i], "--window") == 0) window = number(value, argv[i++], 0, SLOTS);
        else if (strcmp(argv[i], "--head-dim") == 0) dim = number(value, argv[i++], FA_TQ_MIN_DIM, FA_TQ_MAX_DIM);
        else if (strcmp(argv[i], "--key-bits") == 0) config.key_bits = number(value, argv[i++], 1, 4);
        else if (strcmp(argv[i], "--value-bits") == 0) config.value_bits = number(value, argv[i++], 1, 4);
        else {
            fprintf(stderr, "%s: unknown; known are --tq-cache, --tokens, --window, --head-dim, --key-bits, --value-bits\n", argv[i]);
            return 2;
        }
    }
    make_model();
    int prompt[PROMPT];
    for (int i = 0; i < PROMPT; i++) prompt[i] = (int)(random_bits() % VOCABULARY);
    int *choices = (int *)calloc((size_t)count, sizeof(int)), *again = (int *)calloc((size_t)count, sizeof(int));
    if (!choices || !again) return 1;

    kv_cache plain;
    memset(&plain, 0, sizeof plain);
    plain.k = floats(LAYERS * SLOTS * slot_floats());
    plain.v = floats(LAYERS * SLOTS * slot_floats());
    const double float32_bytes = 2.0 * LAYERS * SLOTS * (double)slot_floats() * sizeof(float);
    printf("%d layers, %d heads on %d of %d, %d slots; prompt %d, %d tokens generated\n", LAYERS, HEADS, KV_HEADS, dim, SLOTS,
           PROMPT, count);
    printf("cache      tokens/s      bytes   ratio  agreement\n");
    printf("float32  %10.1f %10.0f %6.2fx\n", generate(&plain, prompt, NULL, count, choices), float32_bytes, 1.0);
    if (compressed) {
        fa_tq_state *state = fa_tq_init(dim, config, 0);
        if (!state) {
            fprintf(stderr, "tq_codebooks.h has no table for %d at K%d/V%d\n", dim, config.key_bits, config.value_bits);
            return 2;
        }
        fa_tq_cache_config sizes;
        memset(&sizes, 0, sizeof sizes);
        sizes.layers = LAYERS;
        sizes.kv_heads = KV_HEADS;
        sizes.max_seq_len = SLOTS;
        sizes.meta = FA_TQ_META_BF16;
        sizes.residual_window = window;
        sizes.exact_type = FA_TQ_F16;
        kv_cache tq;
        memset(&tq, 0, sizeof tq);
        tq.tq = fa_tq_cache_new_with(state, &sizes);
        if (!tq.tq) return 1;
        tq.scratch = floats(fa_tq_attention_scratch(tq.tq, HEADS, PROMPT));
        const double speed = generate(&tq, prompt, choices, count, again);
        int agreed = 0;
        for (int i = 0; i < count; i++) agreed += choices[i] == again[i];
        const double bytes = (double)fa_tq_cache_bytes(tq.tq);
        printf("K%d/V%d    %10.1f %10.0f %6.2fx %8.1f %%\n", config.key_bits, config.value_bits, speed, bytes, float32_bytes / bytes,
               100.0 * agreed / count);
        free(tq.scratch);
        fa_tq_cache_free(tq.tq);
        fa_tq_free(state);
    }
    float *const arrays[] = {embedding, output, plain.k, plain.v};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
    for (int layer = 0; layer < LAYERS; layer++) {
        float *const weights[] = {wq[layer], wk[layer], wv[layer], wo[layer], up[layer], down[layer]};
        for (size_t i = 0; i < sizeof weights / sizeof weights[0]; i++) free(weights[i]);
    }
    free(choices);
    free(again);
    return 0;
}

/* test_turboquant.c - tests of turboquant.{h,c} with the tables of tq_codebooks.h and the vectors of tq_golden.h.
 *
 *   test_turboquant              the unit tests; exit status 1 if one fails
 *   test_turboquant --validate   quality of the attention output per configuration; informational
 *
 * Every test runs for all lengths and widths of the header, with the best instruction set and with the plain one.
 */
#include "tq_codebooks.h"
#include "tq_golden.h"
#include "turboquant.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DIM FA_TQ_MAX_DIM

static int failures = 0;
static bool plain_only = false; /* the second round of all tests */

static void check(bool holds, const char *what, int dim, int bits, double value) {
    if (holds) return;
    failures++;
    if (failures <= 20) printf("    d = %d, %d bits%s: %s (%g)\n", dim, bits, plain_only ? ", plain" : "", what, value);
}

/* ---- data ------------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

static uint64_t random_bits(void) { /* splitmix64 */
    uint64_t z = (random_state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static float normal(void) { /* the sum of twelve uniform numbers: close enough, and no libm */
    double sum = -6.0;
    for (int i = 0; i < 12; i++) sum += (double)(random_bits() >> 11) / 9007199254740992.0;
    return (float)sum;
}

static void fill_normal(float *x, size_t count) {
    for (size_t i = 0; i < count; i++) x[i] = normal();
}

static double dot(const float *a, const float *b, int dim) {
    double sum = 0.0;
    for (int j = 0; j < dim; j++) sum += (double)a[j] * (double)b[j];
    return sum;
}

static double relative_error(const float *restored, const float *x, int dim) { /* squared */
    double error = 0.0;
    for (int j = 0; j < dim; j++) {
        const double difference = (double)restored[j] - (double)x[j];
        error += difference * difference;
    }
    return error / dot(x, x, dim);
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t crc32_of_floats(const float *values, int count) { /* zlib's CRC-32 of their little-endian bytes */
    uint32_t crc = 0xffffffffu;
    for (int i = 0; i < count; i++) {
        for (int bit = 0; bit < 32; bit++)
            crc = crc >> 1 ^ ((crc ^ bits_of(values[i]) >> bit) & 1u ? 0xedb88320u : 0u);
    }
    return ~crc;
}

static fa_tq_state *state_with(int dim, int key_bits, int value_bits, uint64_t seed) {
    fa_tq_config config;
    config.key_bits = key_bits;
    config.value_bits = value_bits;
    fa_tq_state *state = fa_tq_init(dim, config, seed);
    if (!state) {
        printf("fa_tq_init(%d, K%d/V%d) failed\n", dim, key_bits, value_bits);
        exit(1);
    }
    if (plain_only) fa_tq_use(state, "plain");
    return state;
}

static float *floats(size_t count) {
    float *memory = (float *)calloc(count, sizeof(float));
    if (!memory) {
        printf("no memory for %lu floats\n", (unsigned long)count);
        exit(1);
    }
    return memory;
}

/* ---- the tests: each for one length and width ------------------------------------------------------------------- */

/* Relative squared error of a vector: the normal law's (Max 1960), which shorter vectors fall short of by a few percent. */
static double expected_error(int bits) {
    static const double of_bits[] = {0.0, 0.3634, 0.1175, 0.03455, 0.009501};
    return of_bits[bits];
}

static void test_round_trip(int dim, int bits) {
    enum { COUNT = 200 };
    fa_tq_state *state = state_with(dim, bits, bits, 1);
    float x[MAX_DIM], restored[MAX_DIM], range[2];
    uint8_t packed[MAX_DIM];
    double sum = 0.0, norm_ratio = 0.0;
    for (int i = 0; i < COUNT; i++) {
        fill_normal(x, (size_t)dim);
        check(fa_tq_quantize_head(state, x, true, packed, FA_TQ_META_RANGE, range) == 0, "quantize fails", dim, bits, i);
        check(fa_tq_dequantize_head(state, packed, FA_TQ_META_RANGE, range, true, restored) == 0, "dequantize fails", dim, bits, i);
        sum += relative_error(restored, x, dim);
        norm_ratio += sqrt(dot(restored, restored, dim) / dot(x, x, dim));
    }
    const double ratio = sum / COUNT / expected_error(bits);
    check(ratio > 0.9 - 4.0 / dim && ratio < 1.12, "mean squared error off theory", dim, bits, sum / COUNT);
    check(fabs(norm_ratio / COUNT - 1.0) < 1e-4, "the norm is not kept", dim, bits, norm_ratio / COUNT);
    fa_tq_free(state);
}

static void larger(double *worst, double error) {
    if (fabs(error) > *worst) *worst = fabs(error);
}

/* The whole matrix R: R R^T = I, entries +-1/sqrt(d), the inverse is the transpose, and R is not its own inverse. */
static void test_orthogonality(int dim, int bits) {
    fa_tq_state *state = state_with(dim, bits, bits, 7);
    float *columns = floats((size_t)dim * (size_t)dim), x[MAX_DIM], back[MAX_DIM];
    double worst_entry = 0.0, worst_product = 0.0, worst_inverse = 0.0, twice = 0.0;
    for (int i = 0; i < dim; i++) {
        memset(x, 0, sizeof x);
        x[i] = 1.0f;
        fa_tq_rotate(state, x, columns + i * dim);
        fa_tq_rotate_inverse(state, columns + i * dim, back);
        for (int j = 0; j < dim; j++) {
            larger(&worst_entry, fabs((double)columns[i * dim + j]) * sqrt(dim) - 1.0);
            larger(&worst_inverse, (double)back[j] - (double)x[j]);
        }
        fa_tq_rotate(state, columns + i * dim, back);
        twice += fabs((double)back[i] - 1.0);
    }
    for (int i = 0; i < dim; i++)
        for (int j = 0; j <= i; j++)
            larger(&worst_product, dot(columns + i * dim, columns + j * dim, dim) - (i == j));
    check(worst_entry < 1e-6, "entries are not +-1/sqrt(d)", dim, bits, worst_entry);
    check(worst_product < 1e-5, "R R^T is not I", dim, bits, worst_product);
    check(worst_inverse < 1e-5, "the inverse does not invert", dim, bits, worst_inverse);
    check(twice > 1.0, "the rotation is its own inverse", dim, bits, twice);
    fill_normal(x, (size_t)dim);
    memcpy(back, x, sizeof back);
    fa_tq_rotate(state, back, back);
    fa_tq_rotate(state, x, columns);
    check(memcmp(back, columns, (size_t)dim * sizeof(float)) == 0, "rotating in place differs", dim, bits, 0);
    free(columns);
    fa_tq_free(state);
}

/* score_head is the product with the restored key, and close to the product with the key itself. */
static void test_dot_products(int dim, int bits) {
    enum { COUNT = 200 };
    fa_tq_state *state = state_with(dim, bits, bits, 2);
    float q[MAX_DIM], k[MAX_DIM], q_rot[MAX_DIM], restored[MAX_DIM], range[2];
    uint8_t packed[MAX_DIM];
    double error = 0.0, scale = 0.0;
    for (int i = 0; i < COUNT; i++) {
        fill_normal(q, (size_t)dim);
        fill_normal(k, (size_t)dim);
        fa_tq_rotate(state, q, q_rot);
        fa_tq_quantize_head(state, k, true, packed, FA_TQ_META_RANGE, range);
        fa_tq_dequantize_head(state, packed, FA_TQ_META_RANGE, range, true, restored);
        const double score = (double)fa_tq_score_head(state, q_rot, packed, FA_TQ_META_RANGE, range);
        const double size = sqrt(dot(q, q, dim) * dot(k, k, dim));
        check(fabs(score - dot(q, restored, dim)) < 1e-5 * size, "fused score differs", dim, bits, score);
        error += (score - dot(q, k, dim)) * (score - dot(q, k, dim));
        scale += size * size / dim;
    }
    check(error / scale < 1.5 * expected_error(bits), "products are not preserved", dim, bits, error / scale);
    fa_tq_free(state);
}

static void float_attention(const float *q, const float *k, const float *v, int tokens, int heads, int group, int dim,
                            double scale, float *out) {
    double *weights = (double *)malloc((size_t)tokens * sizeof(double));
    if (!weights) exit(1);
    for (int h = 0; h < heads * group; h++) {
        const int kv = h / group;
        double most = -1e300, sum = 0.0;
        for (int t = 0; t < tokens; t++) {
            weights[t] = dot(q + h * dim, k + (t * heads + kv) * dim, dim) * scale;
            most = fmax(most, weights[t]);
        }
        for (int t = 0; t < tokens; t++) sum += weights[t] = exp(weights[t] - most);
        for (int j = 0; j < dim; j++) {
            double total = 0.0;
            for (int t = 0; t < tokens; t++) total += weights[t] * (double)v[(t * heads + kv) * dim + j];
            out[h * dim + j] = (float)(total / sum);
        }
    }
    free(weights);
}

static double mean_cosine(const float *a, const float *b, int count, int dim) {
    double sum = 0.0;
    for (int i = 0; i < count; i++)
        sum += dot(a + i * dim, b + i * dim, dim) /
               sqrt(dot(a + i * dim, a + i * dim, dim) * dot(b + i * dim, b + i * dim, dim));
    return sum / count;
}

typedef struct {
    double to_exact; /* mean cosine of the fused output with exact float attention */
    double to_plain; /* largest relative difference from decoding first and attending then */
} attention_quality;

static attention_quality measure_attention(int dim, int key_bits, int value_bits, int tokens, int heads, int group,
                                           bool correlated) {
    const size_t row = (size_t)heads * (size_t)dim, all = (size_t)tokens * row, queries = row * (size_t)group;
    float *k = floats(all), *v = floats(all), *q = floats(queries), *exact = floats(queries), *fused = floats(queries);
    float *k_back = floats(all), *v_back = floats(all), *decoded = floats(queries);
    fill_normal(k, all);
    fill_normal(v, all);
    fill_normal(q, queries);
    if (correlated) { /* neighbours resemble each other, and a common part is in all of them */
        for (size_t i = row; i < all; i++) {
            k[i] = 0.9f * k[i - row] + 0.436f * k[i];
            v[i] = 0.9f * v[i - row] + 0.436f * v[i];
        }
    }
    fa_tq_state *state = state_with(dim, key_bits, value_bits, 3);
    fa_tq_cache *cache = fa_tq_cache_new(state, 1, heads, tokens);
    float *scratch = floats(fa_tq_attention_scratch(cache, heads * group, 1));
    const float scale = (float)(1.0 / sqrt(dim));
    int error = 0;
    for (int t = 0; t < tokens; t++) {
        if (t + 1 < tokens) {
            error |= fa_tq_quantize(state, cache, 0, t, k + (size_t)t * row, true);
            error |= fa_tq_quantize(state, cache, 0, t, v + (size_t)t * row, false);
        } else {
            const fa_tq_step step = {0, t, 1, heads * group, q, k + (size_t)t * row, v + (size_t)t * row, scale, {0}};
            error |= fa_tq_attention_step(cache, &step, scratch, fused);
        }
    }
    check(error == 0, "a cache call fails", dim, key_bits, error);
    fa_tq_dequantize(state, cache, 0, 0, tokens, true, k_back);
    fa_tq_dequantize(state, cache, 0, 0, tokens, false, v_back);
    float_attention(q, k, v, tokens, heads, group, dim, (double)scale, exact);
    float_attention(q, k_back, v_back, tokens, heads, group, dim, (double)scale, decoded);
    attention_quality quality = {mean_cosine(fused, exact, heads * group, dim), 0.0};
    for (int h = 0; h < heads * group; h++)
        quality.to_plain = fmax(quality.to_plain, sqrt(relative_error(fused + h * dim, decoded + h * dim, dim)));
    fa_tq_cache_free(cache);
    fa_tq_free(state);
    float *const arrays[] = {k, v, q, exact, fused, k_back, v_back, decoded, scratch};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
    return quality;
}

/* Fused attention equals decoding first; and its output keeps the direction that theory allows: D of the values caps
 * it, for independent data, at sqrt((1 - D) / (1 + D)). */
static void test_attention(int dim, int bits) {
    for (int group = 1; group <= 3; group += 2) {
        const attention_quality quality = measure_attention(dim, bits, bits, 150, 2, group, false);
        const double d = expected_error(bits);
        check(quality.to_plain < 2e-5, "fused attention differs from decoding first", dim, bits, quality.to_plain);
        check(quality.to_exact > sqrt((1.0 - d) / (1.0 + d)) - 0.45 * sqrt(d), "attention output is off", dim, bits,
              quality.to_exact);
    }
}

static void test_determinism(int dim, int bits) {
    enum { COUNT = 37 };
    fa_tq_state *first = state_with(dim, bits, bits, 11), *second = state_with(dim, bits, bits, 11);
    const size_t bytes = fa_tq_packed_size(dim, bits);
    float *x = floats((size_t)COUNT * (size_t)dim), scales[2 * COUNT], range[2];
    uint8_t *codes = (uint8_t *)calloc(COUNT, bytes), packed[MAX_DIM];
    if (!codes) exit(1);
    fill_normal(x, (size_t)COUNT * (size_t)dim);
    const fa_tq_packed to = {codes, bytes, 0, scales, 2, 0, FA_TQ_META_RANGE, NULL};
    check(fa_tq_encode(first, true, x, FA_TQ_F32, COUNT, 1, &to, NULL) == 0, "encode fails", dim, bits, 0);
    for (int i = 0; i < COUNT; i++) { /* one at a time, by another state: the same bytes */
        fa_tq_quantize_head(second, x + i * dim, true, packed, FA_TQ_META_RANGE, range);
        check(memcmp(packed, codes + (size_t)i * bytes, bytes) == 0, "codes differ", dim, bits, i);
        check(bits_of(range[0]) == bits_of(scales[2 * i]) && bits_of(range[1]) == bits_of(scales[2 * i + 1]),
              "ranges differ", dim, bits, i);
    }
    free(x);
    free(codes);
    fa_tq_free(first);
    fa_tq_free(second);
}

static void test_edge_cases(int dim, int bits) {
    static const float sizes[] = {1e-42f, 1e-30f, 1.0f, 1e30f};
    fa_tq_state *state = state_with(dim, bits, bits, 0);
    float x[MAX_DIM] = {0}, restored[MAX_DIM], range[2], unit[2];
    uint8_t packed[MAX_DIM], one[MAX_DIM];
    const size_t bytes = fa_tq_packed_size(dim, bits);
    check(fa_tq_quantize_head(state, x, true, packed, FA_TQ_META_RANGE, range) == 0, "zero is refused", dim, bits, 0);
    fa_tq_dequantize_head(state, packed, FA_TQ_META_RANGE, range, true, restored);
    for (int j = 0; j < dim; j++) check(restored[j] == 0.0f, "zero does not decode to zero", dim, bits, j);
    check(range[0] == 0.0f && range[1] == 0.0f, "zero has a scale", dim, bits, (double)range[0]);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) { /* all-same vectors of any size */
        for (int j = 0; j < dim; j++) x[j] = sizes[i];
        check(fa_tq_quantize_head(state, x, true, packed, FA_TQ_META_RANGE, range) == 0, "a constant is refused", dim, bits, (double)x[0]);
        fa_tq_dequantize_head(state, packed, FA_TQ_META_RANGE, range, true, restored);
        if (sizes[i] > 1e-35f)
            check(relative_error(restored, x, dim) < 0.75, "a constant is lost", dim, bits, (double)x[0]);
    }
    fill_normal(x, (size_t)dim);
    fa_tq_quantize_head(state, x, true, one, FA_TQ_META_RANGE, unit);
    for (int shift = -60; shift <= 60; shift += 20) { /* powers of two change the range only */
        float y[MAX_DIM];
        for (int j = 0; j < dim; j++) y[j] = (float)ldexp((double)x[j], shift);
        fa_tq_quantize_head(state, y, true, packed, FA_TQ_META_RANGE, range);
        check(memcmp(packed, one, bytes) == 0, "codes depend on the size", dim, bits, shift);
        check((double)range[0] == ldexp((double)unit[0], shift), "the scale does not follow", dim, bits, shift);
    }
    const float refused[] = {(float)NAN, (float)INFINITY, -(float)INFINITY, 2e36f};
    for (int i = 0; i < 4; i++) {
        memset(packed, 0xa5, sizeof packed);
        range[0] = range[1] = 42.0f;
        x[dim - 1] = refused[i];
        const int error = fa_tq_quantize_head(state, x, true, packed, FA_TQ_META_RANGE, range);
        check(error == (i < 3 ? FA_TQ_ERR_VALUE : FA_TQ_ERR_NORM), "not refused", dim, bits, error);
        check(range[0] == 42.0f && range[1] == 42.0f && packed[0] == 0xa5, "outputs are touched", dim, bits, i);
    }
    check(fa_tq_init_with(17, fa_tq_get_codebook(state, true), fa_tq_get_codebook(state, true), 0) == NULL,
          "17 is not a supported length", dim, bits, 0);
    check(fa_tq_check_dim(17) == FA_TQ_ERR_DIM && fa_tq_check_dim(dim) == 0, "check_dim", dim, bits, 0);
    fa_tq_free(state);
}

static void test_eviction(int dim, int bits) {
    enum { SLOTS = 12, HEADS = 3, LAYERS = 2, GONE = 5 };
    fa_tq_state *state = state_with(dim, bits, bits, 4);
    fa_tq_cache *cache = fa_tq_cache_new(state, LAYERS, HEADS, SLOTS);
    const size_t row = (size_t)HEADS * (size_t)dim;
    float *x = floats(row), *before = floats(2 * SLOTS * row), *after = floats(SLOTS * row);
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int t = 0; t < SLOTS; t++) {
            fill_normal(x, row);
            fa_tq_quantize(state, cache, layer, t, x, true);
            fill_normal(x, row);
            fa_tq_quantize(state, cache, layer, t, x, false);
        }
    }
    fa_tq_dequantize(state, cache, 1, 0, SLOTS, true, before);
    fa_tq_dequantize(state, cache, 1, 0, SLOTS, false, before + SLOTS * row);
    check(fa_tq_cache_evict(cache, GONE) == 0, "evict fails", dim, bits, 0);
    for (int side = 0; side < 2; side++) {
        fa_tq_dequantize(state, cache, 1, 0, SLOTS, side == 0, after);
        check(memcmp(after, before + ((size_t)side * SLOTS + GONE) * row, (SLOTS - GONE) * row * sizeof(float)) == 0,
              "kept tokens have changed", dim, bits, side);
        for (size_t i = (SLOTS - GONE) * row; i < SLOTS * row; i++)
            check(after[i] == 0.0f, "a freed slot is not empty", dim, bits, (double)i);
    }
    check(fa_tq_cache_seq_len(cache) == SLOTS - GONE, "wrong length", dim, bits, fa_tq_cache_seq_len(cache));
    check(fa_tq_cache_evict(cache, SLOTS) == FA_TQ_ERR_ARGUMENT, "more than there is was evicted", dim, bits, 0);
    free(x);
    free(before);
    free(after);
    fa_tq_cache_free(cache);
    fa_tq_free(state);
}

/* Every level value at every place of a row, packed here by a plain loop, is what decoding and
 * attention read. */
static void test_packing(int dim, int bits) {
    fa_tq_state *state = state_with(dim, bits, bits, 9);
    const fa_tq_table *table = fa_tq_get_codebook(state, true);
    const int levels = 1 << bits;
    const float one[2] = {1.0f, 1.0f};
    float restored[MAX_DIM], rotated[MAX_DIM], single[MAX_DIM] = {0};
    double accumulated[MAX_DIM];
    uint8_t packed[MAX_DIM];
    check(fa_tq_packed_size(dim, bits) == ((size_t)dim * (size_t)bits + 7) / 8, "packed size", dim, bits, 0);
    for (int first = 0; first < levels; first++) {
        memset(packed, 0, sizeof packed);
        memset(accumulated, 0, sizeof accumulated);
        for (int j = 0; j < dim; j++)
            for (int bit = 0; bit < bits; bit++)
                if ((first + j) % levels >> bit & 1) packed[(j * bits + bit) / 8] |= (uint8_t)(1 << (j * bits + bit) % 8);
        fa_tq_dequantize_head(state, packed, FA_TQ_META_RANGE, one, true, restored);
        fa_tq_rotate(state, restored, rotated);
        fa_tq_accum_head(state, 1.0f, packed, FA_TQ_META_RANGE, one, accumulated);
        for (int j = 0; j < dim; j++) {
            const float centroid = table->centroids[(first + j) % levels];
            check(fabs((double)rotated[j] - (double)centroid) < 1e-5, "decoding reads another level", dim, bits, j);
            check(accumulated[j] == (double)centroid, "accum_head reads another level", dim, bits, j);
            single[j] = 1.0f;
            check(fa_tq_score_head(state, single, packed, FA_TQ_META_RANGE, one) == centroid, "score_head reads another level", dim, bits, j);
            single[j] = 0.0f;
        }
    }
    fa_tq_free(state);
}

static void test_cache(int dim, int bits) {
    enum { SLOTS = 5, HEADS = 2, LAYERS = 3 };
    fa_tq_state *state = state_with(dim, bits, bits, 5);
    fa_tq_cache *cache = fa_tq_cache_new(state, LAYERS, HEADS, SLOTS);
    const size_t row = (size_t)HEADS * (size_t)dim, bytes = fa_tq_packed_size(dim, bits);
    float *x = floats(row), *out = floats(SLOTS * row), range[2], restored[MAX_DIM];
    uint8_t packed[MAX_DIM];
    check(fa_tq_cache_bytes(cache) == LAYERS * SLOTS * HEADS * (2 * bytes + 16), "bytes", dim, bits, 0);
    check(fa_tq_cache_seq_len(cache) == 0, "an empty cache has a length", dim, bits, 0);
    fill_normal(x, row);
    check(fa_tq_quantize(state, cache, 1, 3, x, true) == 0, "quantize fails", dim, bits, 0);
    check(fa_tq_cache_seq_len(cache) == 4, "length is 1 + the highest slot", dim, bits, fa_tq_cache_seq_len(cache));
    check(fa_tq_dequantize(state, cache, 1, 3, 1, true, out) == out, "dequantize fails", dim, bits, 0);
    for (int h = 0; h < HEADS; h++) { /* the cache holds what the head functions give */
        fa_tq_quantize_head(state, x + h * dim, true, packed, FA_TQ_META_RANGE, range);
        fa_tq_dequantize_head(state, packed, FA_TQ_META_RANGE, range, true, restored);
        check(memcmp(restored, out + h * dim, (size_t)dim * sizeof(float)) == 0, "another vector", dim, bits, h);
    }
    fa_tq_dequantize(state, cache, 0, 3, 1, true, out);
    check(dot(out, out, (int)row) == 0.0, "another layer was written", dim, bits, 0);
    fa_tq_dequantize(state, cache, 1, 3, 1, false, out);
    check(dot(out, out, (int)row) == 0.0, "the values were written", dim, bits, 0);
    fa_tq_dequantize(state, cache, 1, 3, 1, true, out);
    const float first = out[0];
    x[row - 1] = (float)NAN;
    check(fa_tq_quantize(state, cache, 1, 3, x, true) == FA_TQ_ERR_VALUE, "NaN is not refused", dim, bits, 0);
    fa_tq_dequantize(state, cache, 1, 3, 1, true, out);
    check(out[0] == first, "a refused vector touched the slot", dim, bits, 0);
    check(fa_tq_quantize(state, cache, 1, SLOTS, x, true) == FA_TQ_ERR_POSITION, "slot too high", dim, bits, 0);
    check(fa_tq_quantize(state, cache, LAYERS, 0, x, true) == FA_TQ_ERR_POSITION, "layer too high", dim, bits, 0);
    check(fa_tq_quantize(state, cache, 0, -1, x, true) == FA_TQ_ERR_POSITION, "negative slot", dim, bits, 0);
    check(fa_tq_dequantize(state, cache, 0, 3, 3, true, out) == NULL, "reads past the end", dim, bits, 0);
    fa_tq_cache_clear(cache);
    check(fa_tq_cache_seq_len(cache) == 0, "clear keeps a length", dim, bits, 0);
    check(fa_tq_cache_new(state, 0, 1, 1) == NULL, "a cache of no layers", dim, bits, 0);
    free(x);
    free(out);
    fa_tq_cache_free(cache);
    fa_tq_free(state);
}

static void test_codebook(int dim, int bits) {
    fa_tq_state *state = state_with(dim, bits, bits, 0);
    const fa_tq_codebook *unit = fa_tq_codebook_find(dim, bits), *book = fa_tq_codebook_find_centered(dim, bits);
    const fa_tq_table *table = fa_tq_get_codebook(state, false);
    const int levels = 1 << bits;
    check(book->levels == levels && table->bits == bits, "levels", dim, bits, book->levels);
    for (int k = 0; k < levels; k++) {
        const float c = book->centroids[k];
        check(c == -book->centroids[levels - 1 - k], "the table is not odd", dim, bits, k);
        check(fabs((double)(unit->centroids[k] - (1.0f + c) / 2.0f)) < 1e-7, "the domains differ", dim, bits, k);
        check(table->centroids[k] == c, "the state's table differs", dim, bits, k);
        if (k == 0) continue;
        const float b = book->boundaries[k - 1], middle = (book->centroids[k - 1] + c) / 2.0f;
        check(book->centroids[k - 1] < b && b < c, "a boundary lies outside its cells", dim, bits, k);
        check(fabs((double)(b - middle)) < 1e-7, "a boundary is not the middle of its centroids", dim, bits, k);
    }
    check(fa_tq_codebooks_crc32(fa_tq_codebooks_centered) == FA_TQ_CODEBOOKS_CRC32_CENTERED, "checksum", dim, bits, 0);
    check(fa_tq_codebook_find(dim + 1, bits) == NULL, "a table for a length that has none", dim, bits, 0);
    check(fa_tq_selftest() == 0, fa_tq_strerror(fa_tq_selftest()), dim, bits, 0);
    fa_tq_free(state);
}

static void test_seed(int dim, int bits) {
    static const uint64_t words[] = {UINT64_C(0xe220a8397b1dcdaf), UINT64_C(0xbdd732262feb6e95)}; /* of 0 and 42 */
    fa_tq_state *zero = state_with(dim, bits, bits, 0), *other = state_with(dim, bits, bits, 42);
    float x[MAX_DIM], a[MAX_DIM], b[MAX_DIM], range[2];
    uint8_t packed[MAX_DIM];
    const uint64_t mask = dim >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << dim) - 1;
    check(((fa_tq_get_signs(zero)[0] ^ words[0]) & mask) == 0, "signs of seed 0", dim, bits, 0);
    check(((fa_tq_get_signs(other)[0] ^ words[1]) & mask) == 0, "signs of seed 42", dim, bits, 42);
    fill_normal(x, (size_t)dim);
    fa_tq_rotate(zero, x, a);
    fa_tq_rotate(other, x, b);
    check(memcmp(a, b, (size_t)dim * sizeof(float)) != 0, "the seed changes nothing", dim, bits, 0);
    fa_tq_quantize_head(zero, x, true, packed, FA_TQ_META_RANGE, range);
    fa_tq_dequantize_head(other, packed, FA_TQ_META_RANGE, range, true, a);
    check(relative_error(a, x, dim) > 0.5, "another seed decodes", dim, bits, relative_error(a, x, dim));
    fa_tq_free(zero);
    fa_tq_free(other);
}

/* The vectors of tq_golden.h, computed by the NumPy reference: one at a time and all together. */
static void test_golden(int dim, int bits) {
    for (size_t g = 0; g < sizeof fa_tq_goldens / sizeof fa_tq_goldens[0]; g++) {
        const fa_tq_golden *golden = &fa_tq_goldens[g];
        if (golden->dim != dim || golden->bits != bits) continue;
        const size_t bytes = fa_tq_packed_size(dim, bits);
        float x[FA_TQ_GOLDEN_COUNT][MAX_DIM], restored[MAX_DIM], range[2];
        uint8_t packed[MAX_DIM];
        for (int rule = FA_TQ_MATCH; rule < FA_TQ_SCALE_RULES; rule++) {
            fa_tq_state *from_header = state_with(dim, bits, bits, FA_TQ_GOLDEN_SEED);
            fa_tq_table table = *fa_tq_get_codebook(from_header, true);
            table.scale_rule = rule;
            fa_tq_state *state = fa_tq_init_with(dim, &table, &table, FA_TQ_GOLDEN_SEED);
            if (!state) exit(1);
            if (plain_only) fa_tq_use(state, "plain");
            for (int i = 0; i < FA_TQ_GOLDEN_COUNT; i++) {
                const fa_tq_golden_result *expected = &golden->results[i];
                for (int j = 0; j < dim; j++) x[i][j] = float_of(golden->rows[i * dim + j]);
                check(fa_tq_quantize_head(state, x[i], true, packed, FA_TQ_META_RANGE, range) == 0, fa_tq_golden_names[i], dim, bits, rule);
                check(memcmp(packed, golden->codes + (size_t)i * bytes, bytes) == 0, fa_tq_golden_names[i], dim, bits, i);
                check(bits_of(range[0]) == expected->scales[rule], fa_tq_golden_names[i], dim, bits, rule);
                check(bits_of(range[1]) == expected->norm, fa_tq_golden_names[i], dim, bits, (double)range[1]);
                if (rule != FA_TQ_MATCH) continue;
                fa_tq_dequantize_head(state, packed, FA_TQ_META_RANGE, range, true, restored);
                check(crc32_of_floats(restored, dim) == expected->decoded_crc32, fa_tq_golden_names[i], dim, bits, i);
            }
            fa_tq_free(state);
            fa_tq_free(from_header);
        }
    }
}

/* ---- the two programs ------------------------------------------------------------------------------------------- */

static int run_tests(void) {
    static const struct {
        const char *name;
        void (*run)(int dim, int bits);
    } tests[] = {
        {"round trip", test_round_trip},
        {"rotation is orthogonal", test_orthogonality},
        {"dot products are preserved", test_dot_products},
        {"attention is preserved", test_attention},
        {"determinism", test_determinism},
        {"edge cases", test_edge_cases},
        {"cache eviction by memmove", test_eviction},
        {"bit packing of all level values", test_packing},
        {"cache", test_cache},
        {"codebook", test_codebook},
        {"seed", test_seed},
        {"golden vectors", test_golden},
    };
    const int widths = FA_TQ_CODEBOOK_COUNT / FA_TQ_CODEBOOK_DIM_COUNT;
    int passed = 0, failed = 0;
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
        failures = 0;
        for (int round = 0; round < 2; round++) {
            plain_only = round == 1;
            for (int row = 0; row < FA_TQ_CODEBOOK_COUNT; row++)
                tests[i].run(fa_tq_codebook_dims[row / widths], fa_tq_codebooks_centered[row].bits);
        }
        printf("%s %2d - %s\n", failures ? "not ok" : "ok    ", (int)i + 1, tests[i].name);
        if (failures) failed++;
        else passed++;
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}

static int run_validation(void) {
    const int widths = FA_TQ_CODEBOOK_COUNT / FA_TQ_CODEBOOK_DIM_COUNT;
    printf("Attention output of the compressed cache against float32: mean cosine, 1024 tokens, 4 heads.\n");
    printf("Synthetic data says little about a model: validate on its own activations (tqtool validate).\n\n");
    printf("   d  config  independent  correlated  bytes/float32\n");
    for (int d = 0; d < FA_TQ_CODEBOOK_DIM_COUNT; d++) {
        const int dim = fa_tq_codebook_dims[d];
        for (int k = widths - 1; k >= 0; k--) {
            for (int v = k; v >= 0; v--) {
                const int key_bits = fa_tq_codebooks_centered[k].bits, value_bits = fa_tq_codebooks_centered[v].bits;
                const double bytes = (double)(fa_tq_packed_size(dim, key_bits) + fa_tq_packed_size(dim, value_bits) + 16);
                random_state = 1;
                const double independent = measure_attention(dim, key_bits, value_bits, 1024, 4, 1, false).to_exact;
                const double correlated = measure_attention(dim, key_bits, value_bits, 1024, 4, 1, true).to_exact;
                printf("%4d  K%d/V%d   %11.4f  %10.4f  %12.2fx\n", dim, key_bits, value_bits, independent, correlated,
                       8.0 * dim / bytes);
            }
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--validate") == 0) return run_validation();
    return run_tests();
}

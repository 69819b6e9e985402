/* test_turboquant.c - tests of turboquant.{h,c} with the tables of tq_codebooks.h and the vectors of tq_golden.h.
 *
 *   test_turboquant              the unit tests; exit status 1 if one fails
 *   test_turboquant --validate   quality of the attention output per configuration; informational
 *
 * Every test runs for all lengths and widths of the header, with every instruction set that the processor has.
 */
#include "fa_tq_adapter.h"
#include "tq_codebooks.h"
#include "tq_golden.h"
#include "turboquant.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DIM FA_TQ_MAX_DIM

static int failures = 0;
static const char *instructions; /* the set in use: a round of all tests each */

static void check(bool holds, const char *what, int dim, int bits, double value) {
    if (holds) return;
    failures++;
    if (failures <= 20) printf("    d = %d, %d bits, %s: %s (%g)\n", dim, bits, instructions, what, value);
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
    fa_tq_use(state, instructions);
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
    if (correlated) { /* tqtool's set of that name: 12 % of the energy in one direction per head; queries 2 N(0, 1) */
        for (size_t i = 0; i < queries; i++) q[i] *= 2.0f;
        for (int side = 0; side < 2; side++) {
            float *x = side ? v : k, *towards = floats(row);
            fill_normal(towards, row);
            for (int h = 0; h < heads; h++) {
                const double size = sqrt(0.12 * dim / dot(towards + h * dim, towards + h * dim, dim));
                for (int j = 0; j < dim; j++) towards[h * dim + j] *= (float)size;
            }
            for (size_t i = 0; i < all; i++) x[i] = (float)sqrt(0.88) * x[i] + towards[i % row];
            free(towards);
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
    check(fa_tq_codebooks_crc32(fa_tq_codebooks_unit) == FA_TQ_CODEBOOKS_CRC32_UNIT, "checksum", dim, bits, 1);
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
            fa_tq_use(state, instructions);
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

/* ---- every metadata form, input type and layout ---- */

/* x with that many binary digits, ties to even, as long as its exponent is at least `least`: the rounding of the small
 * types, by a way of its own. */
static float rounded(float x, int digits, int least) {
    int exponent;
    frexp((double)x, &exponent);
    const double unit = ldexp(1.0, (exponent > least ? exponent : least) - digits);
    return (float)(nearbyint((double)x / unit) * unit);
}

static float as_type(float x, int type) {
    return type == FA_TQ_F32 ? x : type == FA_TQ_F16 ? rounded(x, 11, -13) : rounded(x, 8, -125);
}

static size_t meta_bytes(int meta) {
    return meta == FA_TQ_META_RANGE ? 8 : meta == FA_TQ_META_F32 ? 4 : 2;
}

/* One vector through the codec: the plain way to what any cache of that form holds. */
static void through_codec(const fa_tq_state *state, const float *x, bool is_key, int meta, float *restored) {
    uint8_t codes[MAX_DIM];
    float scale[2];
    fa_tq_quantize_head(state, x, is_key, codes, meta, scale);
    fa_tq_dequantize_head(state, codes, meta, scale, is_key, restored);
}

/* The forms differ in the scale's type alone; a bf16 scale is the rounded float; score_head and accum_head read each. */
static void test_metadata(int dim, int bits) {
    fa_tq_state *state = state_with(dim, bits, bits, 21);
    float x[MAX_DIM], q[MAX_DIM], back[MAX_DIM], sum[MAX_DIM], first[MAX_DIM], range[2], alone[2] = {0.0f, 42.0f};
    uint8_t codes[3][MAX_DIM];
    uint16_t half[2] = {0, 0xa5a5};
    void *const scales[FA_TQ_METAS] = {range, alone, half};
    for (int turn = 0; turn < 50; turn++) {
        fill_normal(x, (size_t)dim);
        fill_normal(q, (size_t)dim);
        for (int meta = 0; meta < FA_TQ_METAS; meta++) {
            double sums[MAX_DIM] = {0};
            fa_tq_quantize_head(state, x, turn % 2 == 0, codes[meta], meta, scales[meta]);
            fa_tq_dequantize_head(state, codes[meta], meta, scales[meta], turn % 2 == 0, back);
            if (meta == 0) memcpy(first, back, sizeof first);
            check(memcmp(codes[meta], codes[0], fa_tq_packed_size(dim, bits)) == 0, "codes depend on the form", dim, bits, meta);
            const float scale = meta == FA_TQ_META_BF16 ? float_of((uint32_t)half[0] << 16) : range[0];
            for (int j = 0; j < dim; j++)
                check(fabs((double)back[j] * (double)range[0] - (double)first[j] * (double)scale) < 1e-4 * (double)scale,
                      "decoding multiplies by another scale", dim, bits, meta);
            fa_tq_accum_head(state, 0.5f, codes[meta], meta, scales[meta], sums);
            for (int j = 0; j < dim; j++) sum[j] = (float)(2.0 * sums[j]);
            fa_tq_rotate_inverse(state, sum, sum);
            check(relative_error(sum, back, dim) < 1e-9, "accum_head reads another scale", dim, bits, meta);
            fa_tq_rotate(state, q, sum);
            const double score = (double)fa_tq_score_head(state, sum, codes[meta], meta, scales[meta]);
            check(fabs(score - dot(q, back, dim)) < 1e-3, "score_head reads another scale", dim, bits, meta);
        }
        check(bits_of(alone[0]) == bits_of(range[0]) && bits_of(alone[1]) == bits_of(42.0f), "scale alone", dim, bits, turn);
        check(bits_of(float_of((uint32_t)half[0] << 16)) == bits_of(rounded(range[0], 8, -125)) && half[1] == 0xa5a5,
              "a bf16 scale is not the nearest", dim, bits, (double)range[0]);
    }
    fa_tq_free(state);
}

/* Rows of halves and bfloat16, subnormal ones and signs included, give what their floats give; views of any strides. */
static void test_types_and_layouts(int dim, int bits) {
    enum { TOKENS = 3, HEADS = 5, ALL = TOKENS * HEADS };
    fa_tq_state *state = state_with(dim, bits, bits, 22);
    const size_t bytes = fa_tq_packed_size(dim, bits), all = (size_t)ALL * (size_t)dim;
    uint16_t *small = (uint16_t *)calloc(all, sizeof(uint16_t));
    uint8_t *codes = (uint8_t *)calloc(2 * ALL, bytes + 3);
    float *x = floats(all), *decoded = floats(all), scales[2 * ALL], *single = floats((size_t)dim);
    if (!small || !codes) exit(1);
    for (int type = 0; type < FA_TQ_TYPES; type++) {
        for (size_t i = 0; i < all; i++) {
            small[i] = (uint16_t)random_bits();
            if (type == FA_TQ_F16) { /* every other vector is subnormal throughout */
                if (i / (size_t)dim % 2 == 1) small[i] &= 0x83ffu;
                if ((small[i] & 0x7c00u) == 0x7c00u) small[i] &= 0xbfffu;
                const int exponent = small[i] >> 10 & 31, fraction = small[i] & 0x3ff;
                const double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
                x[i] = (float)(small[i] & 0x8000u ? -size : size);
            } else {
                small[i] = (uint16_t)((small[i] & 0x807fu) | (uint16_t)((100 + small[i] / 128 % 50) << 7));
                x[i] = type == FA_TQ_BF16 ? float_of((uint32_t)small[i] << 16) : normal();
            }
        }
        for (int layout = 0; layout < 3; layout++) { /* [token][head] closely, with gaps, and [head][token] */
            const size_t code = bytes + (layout == 1 ? 3 : 0), scale = layout == 1 ? 3 : 2;
            const fa_tq_packed view = {codes, layout < 2 ? HEADS * code : code, layout < 2 ? code : TOKENS * code, scales,
                                       layout == 1 ? 0 : layout < 2 ? HEADS * scale : scale,
                                       layout == 1 ? 0 : layout < 2 ? scale : TOKENS * scale, FA_TQ_META_RANGE, NULL};
            const fa_tq_packed near = {codes, view.code_token_stride, view.code_head_stride, scales,
                                       layout < 2 ? HEADS : 1, layout < 2 ? 1 : TOKENS, FA_TQ_META_F32, NULL};
            const fa_tq_packed *to = layout == 1 ? &near : &view;
            const void *rows = type == FA_TQ_F32 ? (const void *)x : small;
            check(fa_tq_encode(state, true, rows, type, TOKENS, HEADS, to, NULL) == 0, "encode fails", dim, bits, type);
            check(fa_tq_decode(state, true, to, TOKENS, HEADS, decoded) == 0, "decode fails", dim, bits, type);
            for (size_t i = 0; i < ALL; i++) {
                through_codec(state, x + i * (size_t)dim, true, to->meta, single);
                check(memcmp(single, decoded + i * (size_t)dim, (size_t)dim * sizeof(float)) == 0,
                      "another vector than by itself", dim, bits, type * 10 + layout);
            }
        }
    }
    size_t bad = 99;
    const fa_tq_packed view = {codes, HEADS * bytes, bytes, scales, 2 * HEADS, 2, FA_TQ_META_RANGE, NULL};
    x[7 * dim + 1] = (float)INFINITY;
    check(fa_tq_encode(state, true, x, FA_TQ_F32, TOKENS, HEADS, &view, &bad) == FA_TQ_ERR_VALUE && bad == 7,
          "the refused vector is not named", dim, bits, (double)bad);
    x[7 * dim + 1] = 2e36f;
    const fa_tq_packed apart = {codes, HEADS * bytes + 1, bytes, scales, 2 * HEADS, 2, FA_TQ_META_RANGE, NULL};
    check(fa_tq_encode(state, true, x, FA_TQ_F32, TOKENS, HEADS, &apart, &bad) == FA_TQ_ERR_NORM && bad == 7,
          "the refused vector is not named", dim, bits, (double)bad);
    check(fa_tq_encode(state, true, x, FA_TQ_TYPES, 1, 1, &view, NULL) == FA_TQ_ERR_ARGUMENT, "type", dim, bits, 0);
    const fa_tq_packed unknown = {codes, bytes, bytes, scales, 2, 2, FA_TQ_METAS, NULL};
    check(fa_tq_decode(state, true, &unknown, 1, 1, decoded) == FA_TQ_ERR_ARGUMENT, "metadata form", dim, bits, 0);
    free(small);
    free(codes);
    free(x);
    free(decoded);
    free(single);
    fa_tq_free(state);
}

/* ---- the cache against a plain model of it ---- */

enum { M_LAYERS = 2, M_HEADS = 2, M_SLOTS = 7, M_ROW = M_HEADS * MAX_DIM, M_WINDOW = 4 };

/* What each slot was given last, and when: number 0 is an empty slot. */
static struct {
    float vector[2][M_LAYERS][M_SLOTS][M_ROW];
    int number[2][M_LAYERS][M_SLOTS], written[2][M_LAYERS], place[2][M_LAYERS][M_WINDOW], length[M_LAYERS];
    fa_tq_cache_config config;
} model;

static void model_store(int side, int layer, int pos, const float *x, int dim) {
    const int number = ++model.written[side][layer];
    memcpy(model.vector[side][layer][pos], x, (size_t)(M_HEADS * dim) * sizeof(float));
    model.number[side][layer][pos] = number;
    if (pos >= model.config.sink_tokens && model.config.residual_window > 0)
        model.place[side][layer][(number - 1) % model.config.residual_window] = number;
    if (side == 1 && pos >= model.length[layer]) model.length[layer] = pos + 1;
}

static void model_evict(int layer, int gone) {
    const int sinks = model.config.sink_tokens;
    for (int side = 0; side < 2; side++)
        for (int slot = sinks; slot < M_SLOTS; slot++) {
            const bool filled = slot + gone < M_SLOTS;
            model.number[side][layer][slot] = filled ? model.number[side][layer][slot + gone] : 0;
            if (filled) memcpy(model.vector[side][layer][slot], model.vector[side][layer][slot + gone], sizeof(float) * M_ROW);
        }
    const int most = model.length[layer] > sinks ? model.length[layer] - sinks : 0;
    model.length[layer] -= gone < most ? gone : most;
}

static void model_compare(fa_tq_state *state, fa_tq_cache *cache, int dim, int bits, const char *after) {
    static float got[M_SLOTS * M_ROW], codes[M_SLOTS * M_ROW], expected[MAX_DIM];
    int longest = 0;
    for (int layer = 0; layer < M_LAYERS; layer++) {
        longest = model.length[layer] > longest ? model.length[layer] : longest;
        check(fa_tq_cache_layer_len(cache, layer) == model.length[layer], after, dim, bits, layer);
        for (int side = 0; side < 2; side++) {
            fa_tq_packed packed = fa_tq_cache_packed(cache, layer, side == 1);
            packed.exact = NULL; /* the codes of exact tokens are there as well */
            fa_tq_decode(state, side == 1, &packed, M_SLOTS, M_HEADS, codes);
            fa_tq_dequantize(state, cache, layer, 0, M_SLOTS, side == 1, got);
            for (int slot = 0; slot < M_SLOTS; slot++) {
                const int number = model.number[side][layer][slot], window = model.config.residual_window;
                const bool newest = number > 0 && window > 0 && model.place[side][layer][(number - 1) % window] == number;
                for (int head = 0; head < M_HEADS; head++) {
                    const float *x = model.vector[side][layer][slot] + head * dim;
                    memset(expected, 0, sizeof expected);
                    if (number > 0) through_codec(state, x, side == 1, model.config.meta, expected);
                    for (int j = 0; j < dim; j++)
                        check(codes[(slot * M_HEADS + head) * dim + j] == expected[j], "codes", dim, bits, slot);
                    if (number > 0 && (newest || slot < model.config.sink_tokens))
                        for (int j = 0; j < dim; j++) expected[j] = as_type(x[j], model.config.exact_type);
                    for (int j = 0; j < dim; j++)
                        check(got[(slot * M_HEADS + head) * dim + j] == expected[j], after, dim, bits, slot);
                }
            }
        }
    }
    check(fa_tq_cache_seq_len(cache) == longest, after, dim, bits, longest);
}

static void test_model(int dim, int bits) {
    static const fa_tq_cache_config configs[] = {
        {M_LAYERS, M_HEADS, M_SLOTS, FA_TQ_META_RANGE, 0, 0, FA_TQ_F32},
        {M_LAYERS, M_HEADS, M_SLOTS, FA_TQ_META_BF16, 1, 3, FA_TQ_F32},
        {M_LAYERS, M_HEADS, M_SLOTS, FA_TQ_META_F32, 2, 2, FA_TQ_F16},
        {M_LAYERS, M_HEADS, M_SLOTS, FA_TQ_META_BF16, 0, M_WINDOW, FA_TQ_BF16},
    };
    static float x[2][3 * M_ROW];
    fa_tq_state *state = state_with(dim, bits, fa_tq_codebooks_centered[0].bits, 23); /* sides of different widths */
    for (size_t c = 0; c < sizeof configs / sizeof configs[0]; c++) {
        memset(&model, 0, sizeof model);
        model.config = configs[c];
        fa_tq_cache *cache = fa_tq_cache_new_with(state, &configs[c]);
        const size_t exact = (size_t)(configs[c].sink_tokens + configs[c].residual_window) * (configs[c].exact_type ? 4 : 8);
        const size_t pair = fa_tq_packed_size(dim, bits) + fa_tq_packed_size(dim, fa_tq_codebooks_centered[0].bits);
        check(fa_tq_cache_bytes(cache) ==
                  M_LAYERS * M_HEADS * (M_SLOTS * (pair + 2 * meta_bytes(configs[c].meta)) + exact * (size_t)dim),
              "bytes", dim, bits, (double)c);
        for (int turn = 0; turn < 40; turn++) {
            const int layer = (int)(random_bits() % M_LAYERS), pos = (int)(random_bits() % M_SLOTS), what = (int)(random_bits() % 10);
            const int end = model.length[layer] < M_SLOTS ? model.length[layer] : pos;
            fill_normal(x[0], (size_t)(3 * M_HEADS * dim));
            fill_normal(x[1], (size_t)(3 * M_HEADS * dim));
            if (what < 6) { /* the next token, or round the ring, one side after the other */
                check(fa_tq_quantize(state, cache, layer, end, x[1], true) == 0, "quantize fails", dim, bits, turn);
                model_store(1, layer, end, x[1], dim);
                model_compare(state, cache, dim, bits, "after a key");
                check(fa_tq_quantize(state, cache, layer, end, x[0], false) == 0, "quantize fails", dim, bits, turn);
                model_store(0, layer, end, x[0], dim);
            } else if (what == 6) { /* a value alone, beyond the length: no token of the layer */
                check(fa_tq_quantize(state, cache, layer, pos, x[0], false) == 0, "quantize fails", dim, bits, turn);
                model_store(0, layer, pos, x[0], dim);
            } else if (what == 7 && end + 3 <= M_SLOTS) {
                check(fa_tq_cache_write(cache, layer, end, 3, x[1], x[0]) == 0, "write fails", dim, bits, turn);
                for (int i = 0; i < 3; i++)
                    for (int side = 0; side < 2; side++) model_store(side, layer, end + i, x[side] + i * M_HEADS * dim, dim);
            } else if (what == 8) {
                const int most = model.length[layer] - configs[c].sink_tokens, gone = most > 2 ? 2 : most > 0 ? most : 0;
                check(fa_tq_cache_evict_layer(cache, layer, gone) == 0, "evict_layer fails", dim, bits, turn);
                check(fa_tq_cache_evict_layer(cache, layer, (most > 0 ? most : 0) - gone + 1) == FA_TQ_ERR_ARGUMENT,
                      "more than there is was evicted", dim, bits, most);
                model_evict(layer, gone);
            } else if (fa_tq_cache_seq_len(cache) > configs[c].sink_tokens) {
                check(fa_tq_cache_evict(cache, 1) == 0, "evict fails", dim, bits, turn);
                for (int each = 0; each < M_LAYERS; each++) model_evict(each, 1);
            }
            model_compare(state, cache, dim, bits, "the cache is not its model");
        }
        fa_tq_cache_clear(cache);
        memset(&model, 0, sizeof model);
        model.config = configs[c];
        model_compare(state, cache, dim, bits, "after clear");
        const fa_tq_packed empty = fa_tq_cache_packed(cache, 0, true);
        for (size_t i = 0; i < M_SLOTS * empty.code_token_stride; i++)
            check(empty.codes[i] == 0, "codes are left after clear", dim, bits, (double)i);
        fa_tq_cache_free(cache);
    }
    fa_tq_free(state);
}

/* ---- attention in the cache ---- */

/* Attention of one row on slots listed for each head, from restored vectors, by plain loops. */
static double step_error(fa_tq_state *state, fa_tq_cache *cache, const float *q, const float *out, int heads, int group,
                         int dim, const int *slots, int stride, int count) {
    const int length = fa_tq_cache_layer_len(cache, 0);
    const size_t row = (size_t)heads * (size_t)dim;
    float *k = floats((size_t)length * row), *v = floats((size_t)length * row), *k_own = floats((size_t)count * (size_t)dim + 1);
    float *v_own = floats((size_t)count * (size_t)dim + 1), *expected = floats((size_t)(group * dim));
    double worst = 0.0;
    fa_tq_dequantize(state, cache, 0, 0, length, true, k);
    fa_tq_dequantize(state, cache, 0, 0, length, false, v);
    for (int head = 0; head < heads; head++) {
        for (int i = 0; i < count; i++) {
            const size_t from = ((size_t)slots[head * stride + i] * (size_t)heads + (size_t)head) * (size_t)dim;
            memcpy(k_own + i * dim, k + from, (size_t)dim * sizeof(float));
            memcpy(v_own + i * dim, v + from, (size_t)dim * sizeof(float));
        }
        float_attention(q + head * group * dim, k_own, v_own, count, 1, group, dim, 1.0 / sqrt(dim), expected);
        for (int h = 0; h < group; h++)
            larger(&worst, sqrt(relative_error(out + (head * group + h) * dim, expected + h * dim, dim)));
    }
    float *const arrays[] = {k, v, k_own, v_own, expected};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
    return worst;
}

/* Steps round a ring attend to every slot, k and v end up where they belong, and a refused step changes nothing. */
static void test_steps(int dim, int bits) {
    enum { SLOTS = 6, HEADS = 2, GROUP = 2, TURNS = 11 };
    static const int all[SLOTS] = {0, 1, 2, 3, 4, 5};
    fa_tq_state *state = state_with(dim, bits, bits, 24);
    for (int window = 0; window <= 3; window += 3) {
        const fa_tq_cache_config config = {1, HEADS, SLOTS, FA_TQ_META_BF16, window > 0, window, FA_TQ_F32};
        fa_tq_cache *cache = fa_tq_cache_new_with(state, &config);
        const size_t row = (size_t)HEADS * (size_t)dim;
        float *q = floats(GROUP * row), *k = floats(row), *v = floats(row), *out = floats(GROUP * row);
        float *restored = floats(row), *before = floats(2 * SLOTS * row), *after = floats(2 * SLOTS * row);
        float *scratch = floats(fa_tq_attention_scratch(cache, GROUP * HEADS, 1));
        fa_tq_step step = {0, 0, 1, GROUP * HEADS, q, k, v, (float)(1.0 / sqrt(dim)), {0}};
        for (int t = 0; t < TURNS; t++) {
            step.pos = t % SLOTS;
            fill_normal(q, GROUP * row);
            fill_normal(k, row);
            fill_normal(v, row);
            check(fa_tq_attention_step(cache, &step, scratch, out) == 0, "a step fails", dim, bits, t);
            const int length = t < SLOTS ? t + 1 : SLOTS;
            check(fa_tq_cache_layer_len(cache, 0) == length, "length of a ring", dim, bits, t);
            const double error = step_error(state, cache, q, out, HEADS, GROUP, dim, all, 0, length);
            check(error < 2e-5, "a step attends to something else", dim, bits, error);
            for (int side = 0; side < 2; side++) {
                const float *x = side ? k : v;
                fa_tq_dequantize(state, cache, 0, step.pos, 1, side == 1, restored);
                for (size_t j = 0; window > 0 && j < row; j++) check(restored[j] == x[j], "not exact", dim, bits, side);
                for (int h = 0; window == 0 && h < HEADS; h++) {
                    through_codec(state, x + h * dim, side == 1, config.meta, after);
                    check(memcmp(after, restored + h * dim, (size_t)dim * sizeof(float)) == 0,
                          "a step stores something else", dim, bits, side);
                }
            }
        }
        fa_tq_dequantize(state, cache, 0, 0, SLOTS, true, before);
        fa_tq_dequantize(state, cache, 0, 0, SLOTS, false, before + SLOTS * row);
        for (int fault = 0; fault < 8; fault++) {
            float *const at = (fault % 2 ? v : k) + (fault < 4 ? (size_t)0 : row) - (fault < 4 ? 0 : 1);
            const float kept = *at;
            *at = fault % 4 < 2 ? (float)NAN : 2e36f;
            const int expected = fault % 4 < 2 ? FA_TQ_ERR_VALUE : FA_TQ_ERR_NORM;
            check(fa_tq_attention_step(cache, &step, scratch, out) == expected, "a bad step is not refused", dim, bits, fault);
            check(fa_tq_cache_write(cache, 0, 1, 1, k, v) == expected, "a bad write is not refused", dim, bits, fault);
            check(fa_tq_cache_check(cache, 0, 1, 1, k, v) == expected, "a bad vector is not found", dim, bits, fault);
            check(fa_tq_quantize(state, cache, 0, 2, fault % 2 ? v : k, fault % 2 == 0) == expected,
                  "a bad vector is not refused", dim, bits, fault);
            *at = kept;
            fa_tq_dequantize(state, cache, 0, 0, SLOTS, true, after);
            fa_tq_dequantize(state, cache, 0, 0, SLOTS, false, after + SLOTS * row);
            check(memcmp(before, after, 2 * SLOTS * row * sizeof(float)) == 0, "a refused call has written", dim, bits, fault);
        }
        step.num_q_heads = GROUP * HEADS - 1;
        check(fa_tq_attention_step(cache, &step, scratch, out) == FA_TQ_ERR_ARGUMENT, "query heads", dim, bits, 0);
        step.num_q_heads++;
        step.pos = SLOTS;
        check(fa_tq_attention_step(cache, &step, scratch, out) == FA_TQ_ERR_POSITION, "slot too high", dim, bits, 0);
        step.pos = 0;
        step.layer = 1;
        check(fa_tq_attention_step(cache, &step, scratch, out) == FA_TQ_ERR_POSITION, "layer too high", dim, bits, 0);
        check(fa_tq_cache_packed(cache, 1, true).codes == NULL, "a layer too many", dim, bits, 0);
        float *const arrays[] = {q, k, v, out, restored, before, after, scratch};
        for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
        fa_tq_cache_free(cache);
    }
    const fa_tq_cache_config half = {1, 1, 2, FA_TQ_META_RANGE, 0, 1, FA_TQ_F16};
    fa_tq_cache *cache = fa_tq_cache_new_with(state, &half);
    float x[MAX_DIM] = {0};
    x[dim - 1] = -65520.0f;
    check(fa_tq_quantize(state, cache, 0, 0, x, true) == FA_TQ_ERR_EXACT, "beyond float16", dim, bits, 0);
    check(fa_tq_cache_layer_len(cache, 0) == 0, "beyond float16, and stored", dim, bits, 0);
    check(fa_tq_cache_heads(cache) == 1 && fa_tq_cache_state(cache) == state, "what the cache is for", dim, bits, 0);
    x[dim - 1] = -65519.0f;
    check(fa_tq_quantize(state, cache, 0, 0, x, true) == 0, "float16's largest is refused", dim, bits, 0);
    fa_tq_cache_free(cache);
    fa_tq_free(state);
}

/* A prompt in one step, in parts, and row by row: the same bits, by causality; and fa_tq_attend on the cache's arrays. */
static void test_prompts(int dim, int bits) {
    enum { TOKENS = 70, HEADS = 2, GROUP = 3 };
    fa_tq_state *state = state_with(dim, bits, bits, 25);
    fa_tq_cache *whole = fa_tq_cache_new(state, 2, HEADS, TOKENS), *single = fa_tq_cache_new(state, 2, HEADS, TOKENS);
    const size_t row = (size_t)HEADS * (size_t)dim, queries = GROUP * row;
    float *q = floats(TOKENS * queries), *k = floats(TOKENS * row), *v = floats(TOKENS * row);
    float *out = floats(TOKENS * queries), *again = floats(TOKENS * queries);
    float *scratch = floats(fa_tq_attention_scratch(whole, GROUP * HEADS, TOKENS));
    fill_normal(q, TOKENS * queries);
    fill_normal(k, TOKENS * row);
    fill_normal(v, TOKENS * row);
    fa_tq_step step = {1, 0, TOKENS, GROUP * HEADS, q, k, v, (float)(1.0 / sqrt(dim)), {0}};
    check(fa_tq_attention_scratch(whole, GROUP * HEADS, 64) == fa_tq_attention_scratch(whole, GROUP * HEADS, 9999),
          "scratch grows with the prompt", dim, bits, 0);
    check(fa_tq_attention_scratch(whole, GROUP * HEADS + 1, 1) == 0, "scratch of no group", dim, bits, 0);
    step.rows = TOKENS + 1;
    check(fa_tq_attention_step(whole, &step, scratch, out) == FA_TQ_ERR_POSITION, "too many rows", dim, bits, 0);
    step.rows = TOKENS;
    check(fa_tq_attention_step(whole, &step, scratch, out) == 0, "a prompt fails", dim, bits, 0);
    step.rows = 1;
    for (int t = 0; t < TOKENS; t++, step.pos++, step.q += queries, step.k += row, step.v += row)
        fa_tq_attention_step(single, &step, scratch, again + (size_t)t * queries);
    check(memcmp(out, again, TOKENS * queries * sizeof(float)) == 0, "a prompt is not its rows", dim, bits, 0);
    check(fa_tq_cache_layer_len(whole, 0) == 0 && fa_tq_cache_layer_len(whole, 1) == TOKENS, "another layer", dim, bits, 0);
    const int length = fa_tq_cache_layer_len(whole, 1); /* round a ring: a row sees what later rows have not overwritten */
    step = (fa_tq_step){1, 5, 4, GROUP * HEADS, q, k, v, step.scale, {0}};
    fa_tq_attention_step(whole, &step, scratch, out);
    step.rows = 1;
    for (int t = 0; t < 4; t++, step.pos++, step.q += queries, step.k += row, step.v += row)
        fa_tq_attention_step(single, &step, scratch, again + (size_t)t * queries);
    check(memcmp(out, again, 4 * queries * sizeof(float)) == 0, "rows round a ring are not steps", dim, bits, 0);
    check(fa_tq_cache_layer_len(whole, 1) == length, "a ring changes the length", dim, bits, length);
    step = (fa_tq_step){1, 0, TOKENS, GROUP * HEADS, q, k, v, step.scale, {0}};
    fa_tq_cache_clear(whole);
    fa_tq_attention_step(whole, &step, scratch, out);
    fa_tq_attention attention = {fa_tq_cache_packed(whole, 1, true), fa_tq_cache_packed(whole, 1, false), TOKENS, 0, 1,
                                 TOKENS, GROUP * HEADS, GROUP, step.scale, true, {0}};
    float *area = floats(fa_tq_attend_scratch(state, 1, TOKENS, GROUP));
    memset(again, 0, TOKENS * queries * sizeof(float));
    for (; attention.first_head < HEADS; attention.first_head++)
        check(fa_tq_attend(state, &attention, q, area, again) == 0, "attend fails", dim, bits, 0);
    check(memcmp(out, again, TOKENS * queries * sizeof(float)) == 0, "attend is not the step", dim, bits, 0);
    check(fa_tq_attend(state, &attention, q, area, again) == FA_TQ_ERR_ARGUMENT, "a head too many", dim, bits, 0);
    float scores[2 * TOKENS], weights[2 * TOKENS] = {0};
    double most = 0.0;
    for (int head = 0; head < HEADS; head++) { /* the two halves, with a softmax of one's own */
        const float *own = q + head * GROUP * dim;
        fa_tq_scores(state, &attention.keys, TOKENS, (size_t)head, own, 2, area, scores);
        for (int i = 0; i < 2; i++) {
            float rotated[MAX_DIM];
            fa_tq_rotate(state, own + i * dim, rotated);
            for (int t = 0; t < TOKENS; t++) {
                const uint8_t *codes = attention.keys.codes + (size_t)t * attention.keys.code_token_stride +
                                       (size_t)head * attention.keys.code_head_stride;
                const float *range = (const float *)attention.keys.scales + (size_t)t * attention.keys.scale_token_stride +
                                     (size_t)head * attention.keys.scale_head_stride;
                const float score = fa_tq_score_head(state, rotated, codes, FA_TQ_META_RANGE, range);
                larger(&most, (double)score - (double)scores[i * TOKENS + t]);
                weights[i * TOKENS + t] = (float)(t % 5) * 0.25f - (float)i;
            }
        }
        check(most < 1e-3, "scores differ from score_head", dim, bits, most);
        fa_tq_mix(state, &attention.values, TOKENS, (size_t)head, weights, 2, area, again);
        fa_tq_dequantize(state, whole, 1, 0, TOKENS, false, v);
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < dim; j++) {
                double sum = 0.0;
                for (int t = 0; t < TOKENS; t++)
                    sum += (double)weights[i * TOKENS + t] * (double)v[(size_t)t * row + (size_t)(head * dim + j)];
                larger(&most, sum - (double)again[i * dim + j]);
            }
        }
        check(most < 1e-3, "mix differs from a plain sum", dim, bits, most);
    }
    float *const arrays[] = {q, k, v, out, again, scratch, area};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
    fa_tq_cache_free(whole);
    fa_tq_cache_free(single);
    fa_tq_free(state);
}

/* Slots and blocks of slots by key-value head; -1 is nothing, and what cannot be is refused. */
static void test_choice(int dim, int bits) {
    enum { SLOTS = 20, HEADS = 2, GROUP = 2, FILLED = 18 };
    static const struct {
        int32_t entries[2][3];
        size_t stride, block;
        int slots[2][9], count;
    } cases[] = {
        {{{0, 7, 17}, {0, 0, 0}}, 0, 0, {{0, 7, 17}, {0, 7, 17}}, 3},
        {{{5, -1, 5}, {16, 2, -1}}, 3, 1, {{5, 5}, {16, 2}}, 2},
        {{{0, 4, -1}, {-1, 1, 4}}, 3, 4, {{0, 1, 2, 3, 16, 17}, {4, 5, 6, 7, 16, 17}}, 6},
    };
    static const int32_t refused[][2] = {{18, 1}, {-2, 1}, {5, 4}, {3, 6}};
    fa_tq_state *state = state_with(dim, bits, bits, 26);
    for (int window = 0; window <= 3; window += 3) {
        const fa_tq_cache_config config = {1, HEADS, SLOTS, FA_TQ_META_F32, 0, window, FA_TQ_F32};
        fa_tq_cache *cache = fa_tq_cache_new_with(state, &config);
        const size_t row = (size_t)HEADS * (size_t)dim;
        float *q = floats(GROUP * row), *k = floats(FILLED * row), *v = floats(FILLED * row), *out = floats(GROUP * row);
        float *scratch = floats(fa_tq_attention_scratch(cache, GROUP * HEADS, 1));
        fill_normal(q, GROUP * row);
        fill_normal(k, FILLED * row);
        fill_normal(v, FILLED * row);
        fa_tq_cache_write(cache, 0, 0, FILLED - 1, k, v);
        const float *last_k = k + (FILLED - 1) * row, *last_v = v + (FILLED - 1) * row;
        fa_tq_step step = {0, FILLED - 1, 1, GROUP * HEADS, q, last_k, last_v, (float)(1.0 / sqrt(dim)), {0}};
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            const fa_tq_choice choice = {cases[i].entries[0], 3, cases[i].stride, cases[i].block};
            step.choice = choice;
            check(fa_tq_attention_step(cache, &step, scratch, out) == 0, "a choice fails", dim, bits, (double)i);
            const double error = step_error(state, cache, q, out, HEADS, GROUP, dim, cases[i].slots[0], 9, cases[i].count);
            check(error < 2e-5, "other slots were read", dim, bits, error);
        }
        const int32_t none[3] = {-1, -1, -1};
        step.choice.entries = none;
        step.choice.head_stride = 0;
        fa_tq_attention_step(cache, &step, scratch, out);
        check(dot(out, out, (int)(GROUP * row)) == 0.0, "nothing chosen is not zero", dim, bits, 0);
        step.choice.count = 1;
        for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
            step.choice.entries = refused[i];
            step.choice.block = (size_t)refused[i][1];
            check(fa_tq_attention_step(cache, &step, scratch, out) == FA_TQ_ERR_POSITION, "a slot that is empty", dim, bits, (double)i);
        }
        step.pos = 0;
        step.rows = 2;
        step.choice.entries = none;
        check(fa_tq_attention_step(cache, &step, scratch, out) == FA_TQ_ERR_ARGUMENT, "a choice for two rows", dim, bits, 0);
        float *const arrays[] = {q, k, v, out, scratch};
        for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
        fa_tq_cache_free(cache);
    }
    fa_tq_free(state);
}

/* What can be asked of a state, the defaults, all widths, and what constructors refuse. */
static void test_states(int dim, int bits) {
    const fa_tq_config config = fa_tq_config_default();
    check(config.key_bits == 4 && config.value_bits == 2, "the default is K4/V2", dim, bits, config.key_bits);
    fa_tq_state *state = state_with(dim, bits, bits, 27);
    check(fa_tq_head_dim(state) == dim, "head_dim", dim, bits, fa_tq_head_dim(state));
    check(strcmp(fa_tq_instructions(state), instructions) == 0, "instructions", dim, bits, 0);
    check(strcmp(fa_tq_instructions(NULL), fa_tq_instruction_set(0)) == 0, "the fastest is not the first", dim, bits, 0);
    check(fa_tq_use(state, "no such set") != 0, "an unknown instruction set", dim, bits, 0);
    for (int error = FA_TQ_ERR_MEMORY; error < 0; error++)
        check(strcmp(fa_tq_strerror(error), fa_tq_strerror(error + 1)) != 0 &&
                  strcmp(fa_tq_strerror(error), fa_tq_strerror(-99)) != 0,
              "an error without words", dim, bits, error);
    const fa_tq_cache_config wrong[] = {{0, 1, 1, 0, 0, 0, 0}, {1, 0, 1, 0, 0, 0, 0},  {1, 1, 0, 0, 0, 0, 0},
                                        {1, 1, 2, 3, 0, 0, 0}, {1, 1, 2, -1, 0, 0, 0}, {1, 1, 2, 0, 3, 0, 0},
                                        {1, 1, 2, 0, -1, 0, 0}, {1, 1, 2, 0, 0, -1, 0}, {1, 1, 2, 0, 0, 0, 3}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        check(fa_tq_cache_new_with(state, &wrong[i]) == NULL, "a cache that cannot be", dim, bits, (double)i);
    fa_tq_free(state);
    float boundaries[255], centroids[256], x[MAX_DIM], rotated[MAX_DIM], sums[MAX_DIM], scale;
    double values[MAX_DIM];
    uint8_t codes[MAX_DIM];
    for (int width = 1; width <= FA_TQ_MAX_BITS; width++) { /* every code is the cell that its coordinate lies in */
        const int levels = 1 << width;
        const float size = (float)(1.0 / sqrt(dim)), step = size * 8.0f / (float)levels; /* exact but for the first */
        for (int k = 0; k < levels; k++) centroids[k] = ((float)k - 0.5f * (float)(levels - 1)) * step;
        for (int k = 1; k < levels; k++) boundaries[k - 1] = ((float)k - 0.5f * (float)levels) * step;
        fa_tq_table table = {width, FA_TQ_NORM, boundaries, centroids};
        fa_tq_state *any = fa_tq_init_with(dim, &table, &table, 5);
        if (!any) exit(1);
        fa_tq_use(any, instructions);
        fill_normal(x, (size_t)dim);
        fa_tq_quantize_head(any, x, true, codes, FA_TQ_META_F32, &scale);
        fa_tq_rotate(any, x, rotated);
        memset(values, 0, sizeof values);
        fa_tq_accum_head(any, 1.0f, codes, FA_TQ_META_F32, &scale, values);
        const double norm = sqrt(dot(x, x, dim));
        check(fabs((double)scale / norm - 1.0) < 1e-6, "the norm is not the scale", dim, width, (double)scale);
        for (int j = 0; j < dim; j++) {
            const double y = (double)rotated[j] / norm, off = fabs(values[j] / norm - y);
            const double outside = fabs(y) - 0.5 * levels * (double)step; /* beyond the last cell */
            check(off < 0.5001 * (double)step + (outside > 0.0 ? outside : 0.0), "another cell", dim, width, off);
            sums[j] = (float)values[j];
        }
        fa_tq_dequantize_head(any, codes, FA_TQ_META_F32, &scale, true, x);
        fa_tq_rotate_inverse(any, sums, rotated);
        check(relative_error(rotated, x, dim) < 1e-9, "decoding is another vector", dim, width, 0);
        memset(x, 0, sizeof x); /* a unit vector: every coordinate lies on a boundary, and belongs above it */
        x[0] = 1.0f;
        fa_tq_quantize_head(any, x, true, codes, FA_TQ_META_F32, &scale);
        fa_tq_rotate(any, x, rotated);
        memset(values, 0, sizeof values);
        fa_tq_accum_head(any, 1.0f, codes, FA_TQ_META_F32, &scale, values);
        for (int j = 0; width >= 3 && j < dim; j++)
            check(fabs(values[j] - (double)rotated[j] - 0.5 * (double)step) < 1e-6, "a boundary belongs to the cell above", dim,
                  width, j);
        fa_tq_free(any);
        table.scale_rule = FA_TQ_SCALE_RULES;
        check(fa_tq_init_with(dim, &table, &table, 5) == NULL, "an unknown rule", dim, width, 0);
        table.scale_rule = FA_TQ_MATCH;
        centroids[levels - 1] = centroids[0];
        check(fa_tq_init_with(dim, &table, &table, 5) == NULL, "centroids that do not ascend", dim, width, 0);
        centroids[levels - 1] = 0.0f;
        check(fa_tq_init_with(dim, &table, &table, 5) == NULL, "a centroid of 0", dim, width, 0);
    }
    check(fa_tq_packed_size(dim, 0) == 0 && fa_tq_packed_size(dim, 9) == 0 && fa_tq_packed_size(0, 4) == 0 &&
              fa_tq_packed_size(FA_TQ_MAX_DIM + 1, 4) == 0,
          "a size out of range", dim, bits, 0);
}

/* fa_tq_adapter.h: batches of strided tensors; causal, not causal, and under a mask; against plain loops. */
static void test_adapter(int dim, int bits) {
    enum { BATCH = 2, SEQ = 3, HEADS = 2, GROUP = 2, BEFORE = 4, ALL = BEFORE + SEQ };
    fa_tq_state *state = state_with(dim, bits, bits, 28);
    fa_tq_cache *caches[BATCH] = {fa_tq_cache_new(state, 2, HEADS, ALL), fa_tq_cache_new(state, 2, HEADS, ALL)};
    const size_t d = (size_t)dim, row = HEADS * d, large = (size_t)BATCH * SEQ * GROUP * row, small = (size_t)BATCH * SEQ * row;
    float *q_data = floats(large), *out_data = floats(large), *k_data = floats(small), *v_data = floats(small);
    float *k = floats(ALL * row), *v = floats(ALL * row), *seen_k = floats(ALL * d), *seen_v = floats(ALL * d), expected[MAX_DIM];
    float mask[BATCH * SEQ * ALL];
    const int shape[4] = {BATCH, SEQ, HEADS, dim};
    fa_tq_tensor new_k = fa_tq_tensor_of(k_data, shape), new_v = fa_tq_tensor_of(v_data, shape);
    fa_tq_tensor q = {q_data, BATCH, SEQ, GROUP * HEADS, d, SEQ * GROUP * row, d, SEQ * d}, out = q; /* (batch, heads, seq, dim) */
    out.data = out_data;
    for (int form = 0; form < 4; form++) { /* causal, not, mask, causal and mask */
        const fa_tq_options options = {form % 2 == 0 ? form == 0 : form == 3, form == 1 ? 0.25f : 0.0f, form >= 2 ? mask : NULL,
                                       SEQ * ALL, ALL};
        const double scale = form == 1 ? 0.25 : 1.0 / sqrt(dim);
        fill_normal(q_data, large);
        fill_normal(k_data, small);
        fill_normal(v_data, small);
        for (int i = 0; i < BATCH * SEQ * ALL; i++) mask[i] = random_bits() % 3 == 0 ? -(float)INFINITY : 0.0f;
        for (int t = 0; t < ALL; t++) mask[t] = -(float)INFINITY; /* a row that sees nothing */
        for (int b = 0; b < BATCH; b++) {
            fa_tq_cache_clear(caches[b]);
            fill_normal(k, BEFORE * row);
            fa_tq_cache_write(caches[b], 1, 0, BEFORE, k, k);
        }
        v_data[small - 1] = (float)NAN;
        check(fa_tq_attention_cached(&q, &new_k, &new_v, caches, 1, BEFORE, &options, &out) == FA_TQ_ERR_VALUE &&
                  fa_tq_cache_layer_len(caches[0], 1) == BEFORE,
              "a sequence was stored before another was refused", dim, bits, form);
        v_data[small - 1] = 0.0f;
        check(fa_tq_attention_cached(&q, &new_k, &new_v, caches, 1, BEFORE, &options, &out) == 0, "adapter", dim, bits, form);
        for (int b = 0; b < BATCH; b++) {
            fa_tq_dequantize(state, caches[b], 1, 0, ALL, true, k);
            fa_tq_dequantize(state, caches[b], 1, 0, ALL, false, v);
            for (int i = 0; i < SEQ; i++)
                for (int h = 0; h < GROUP * HEADS; h++) {
                    int count = 0;
                    for (int t = 0; t < (options.causal ? BEFORE + i + 1 : ALL); t++) {
                        if (form >= 2 && mask[(b * SEQ + i) * ALL + t] < 0.0f) continue;
                        memcpy(seen_k + count * dim, k + (size_t)t * row + (size_t)(h / GROUP) * d, d * sizeof(float));
                        memcpy(seen_v + count++ * dim, v + (size_t)t * row + (size_t)(h / GROUP) * d, d * sizeof(float));
                    }
                    const size_t at = (((size_t)b * GROUP * HEADS + (size_t)h) * SEQ + (size_t)i) * d;
                    if (count > 0) float_attention(q_data + at, seen_k, seen_v, count, 1, 1, dim, scale, expected);
                    const double error = count > 0 ? sqrt(relative_error(out_data + at, expected, dim)) : dot(out_data + at, out_data + at, dim);
                    check(error < 2e-5, "another attention", dim, bits, form);
                }
        }
    }
    const fa_tq_options options = {true, 0.0f, NULL, 0, 0};
    check(fa_tq_attention_cached(&q, &new_k, &new_v, caches, 1, BEFORE + 1, &options, &out) == FA_TQ_ERR_POSITION, "full", dim, bits, 0);
    check(fa_tq_attention_cached(&q, &new_k, &new_v, caches, 2, 0, &options, &out) == FA_TQ_ERR_POSITION, "layer", dim, bits, 0);
    q.heads--;
    check(fa_tq_attention_cached(&q, &new_k, &new_v, caches, 1, 0, &options, &out) == FA_TQ_ERR_ARGUMENT, "heads", dim, bits, 0);
    q.heads++;
    new_k.head_dim--;
    check(fa_tq_attention_cached(&q, &new_k, &new_v, caches, 1, 0, &options, &out) == FA_TQ_ERR_ARGUMENT, "dim", dim, bits, 0);
    float *const arrays[] = {q_data, out_data, k_data, v_data, k, v, seen_k, seen_v};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
    for (int b = 0; b < BATCH; b++) fa_tq_cache_free(caches[b]);
    fa_tq_free(state);
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
        {"metadata forms", test_metadata},
        {"input types and layouts", test_types_and_layouts},
        {"the cache is its plain model", test_model},
        {"steps, rings and refusals", test_steps},
        {"prompts", test_prompts},
        {"chosen slots", test_choice},
        {"states", test_states},
        {"adapter", test_adapter},
    };
    const int widths = FA_TQ_CODEBOOK_COUNT / FA_TQ_CODEBOOK_DIM_COUNT;
    int passed = 0, failed = 0;
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
        failures = 0;
        for (size_t set = 0; (instructions = fa_tq_instruction_set(set)) != NULL; set++)
            for (int row = 0; row < FA_TQ_CODEBOOK_COUNT; row++)
                tests[i].run(fa_tq_codebook_dims[row / widths], fa_tq_codebooks_centered[row].bits);
        printf("%s %2d - %s\n", failures ? "not ok" : "ok    ", (int)i + 1, tests[i].name);
        if (failures) failed++;
        else passed++;
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : 0;
}

static int run_validation(void) {
    instructions = fa_tq_instruction_set(0);
    const int widths = FA_TQ_CODEBOOK_COUNT / FA_TQ_CODEBOOK_DIM_COUNT;
    printf("Attention output of the compressed cache against float32: mean cosine, 8 heads of 256 tokens,\n");
    printf("8 queries each: the sets `gaussian` and `correlated` of tqtool validate, with numbers of this program's own.\n");
    printf("Synthetic data says little about a model: validate on its own activations (tqtool validate).\n\n");
    printf("   d  config     gaussian  correlated  bytes/float32\n");
    for (int d = 0; d < FA_TQ_CODEBOOK_DIM_COUNT; d++) {
        const int dim = fa_tq_codebook_dims[d];
        for (int k = widths - 1; k >= 0; k--) {
            for (int v = k; v >= 0; v--) {
                const int key_bits = fa_tq_codebooks_centered[k].bits, value_bits = fa_tq_codebooks_centered[v].bits;
                const double bytes = (double)(fa_tq_packed_size(dim, key_bits) + fa_tq_packed_size(dim, value_bits) + 16);
                random_state = 1;
                const double gaussian = measure_attention(dim, key_bits, value_bits, 256, 8, 8, false).to_exact;
                const double correlated = measure_attention(dim, key_bits, value_bits, 256, 8, 8, true).to_exact;
                printf("%4d  K%d/V%d   %11.4f  %10.4f  %12.2fx\n", dim, key_bits, value_bits, gaussian, correlated,
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

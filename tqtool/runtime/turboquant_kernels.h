/* turboquant_kernels.h - a template: turboquant.c includes it once per instruction set, and nothing else does.
 *
 * A lane is a vector: a tile of LANES vectors is transposed on loading, so every step of the format runs over whole
 * registers in the order that turboquant.c states. In attention a lane is a coordinate.
 *
 * Parameters, defined before each inclusion and undefined at the end of this file:
 *   TQ_KERNELS  prefix of every name defined here
 *   TQ_TARGET   attribute of every function: the instruction set, or nothing
 *   LANES       floats in a register: 1, 4, or 8 (with AVX2 and F16C)
 * Result: <prefix>kernels_table, a tq_kernels. From turboquant.c come its sections 1 and 2.
 */
#if !defined(TQ_KERNELS) || !defined(TQ_TARGET) || !defined(LANES)
#error "turboquant_kernels.h is part of turboquant.c: compile that file"
#endif

#define TQ_JOIN(a, b) a##b
#define TQ_NAME(a, b) TQ_JOIN(a, b)
#define FN(name) TQ_NAME(TQ_KERNELS, name)
#define VF FN(vf) /* LANES floats */
#define VU FN(vu) /* LANES 32-bit words */
#define VD FN(vd) /* half as many doubles; HALVES of them go with one VF */
#define FN_INLINE TQ_INLINE TQ_TARGET
#define FN_ATTEND TQ_INLINE TQ_TARGET_ATTEND
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
FN_INLINE void FN(load_words)(const uint8_t *codes, size_t stride, size_t bytes, size_t count, VU *words) {
    size_t w = 0;
#if LANES == 8
    for (; 4 * w + 32 <= bytes && count == 8; w += 8) {
        VF r[8];
        TQ_UNROLL for (size_t l = 0; l < 8; l++) memcpy(&r[l], codes + l * stride + 4 * w, 32);
        FN(transpose)(r);
        TQ_UNROLL for (size_t i = 0; i < 8; i++) words[w + i] = BITS_OF(r[i]);
    }
#endif
    for (; 4 * w < bytes; w++)
        for (size_t l = 0; l < count; l++) LANE(words[w], l) = tq_word(codes + l * stride + 4 * w, bytes - 4 * w);
}

FN_INLINE void FN(store_words)(const VU *words, size_t bytes, size_t count, uint8_t *codes, size_t stride) {
    size_t w = 0;
#if LANES == 8
    for (; 4 * w + 32 <= bytes && count == 8; w += 8) {
        VF r[8];
        TQ_UNROLL for (size_t i = 0; i < 8; i++) r[i] = FLOATS_OF(words[w + i]);
        FN(transpose)(r);
        TQ_UNROLL for (size_t l = 0; l < 8; l++) memcpy(codes + l * stride + 4 * w, &r[l], 32);
    }
#endif
    for (; 4 * w < bytes; w++)
        for (size_t l = 0; l < count; l++) tq_put_word(codes + l * stride + 4 * w, bytes - 4 * w, LANE(words[w], l));
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
                                 VD product[HALVES], int bits, bool products, bool squares) {
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
            VF found;
            if (squares) {
                found = FN(lookup)(t->squares, squares_lo, squares_hi, index, bits);
                FN(widen)(&found, wide);
                for (int h = 0; h < HALVES; h++) energy[h] += wide[h];
            }
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

#if LANES == 8
/* C from words of eight 4-bit codes: the squares' digits, bytes of seven bits, are summed as integers. */
FN_INLINE void FN(energy_of_words)(const tq_side *t, const VU *words, size_t count, VD energy[HALVES], int digits) {
    const __m256i low = _mm256_set1_epi8(0x0f), ones = _mm256_set1_epi8(1), pairs = _mm256_set1_epi16(1);
    __m256i sums[TQ_MAX_DIGITS], digit[TQ_MAX_DIGITS];
    TQ_UNROLL for (int p = 0; p < TQ_MAX_DIGITS; p++) {
        sums[p] = _mm256_setzero_si256();
        digit[p] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)t->digits[p]));
    }
    for (size_t from = 0; from < count; from += 64) { /* so many sums of four digits fit 16 bits */
        const size_t end = count - from < 64 ? count : from + 64;
        __m256i part[TQ_MAX_DIGITS];
        TQ_UNROLL for (int p = 0; p < TQ_MAX_DIGITS; p++) part[p] = _mm256_setzero_si256();
        for (size_t w = from; w < end; w++) {
            const __m256i even = _mm256_and_si256((__m256i)words[w], low);
            const __m256i odd = _mm256_and_si256(_mm256_srli_epi16((__m256i)words[w], 4), low);
            TQ_UNROLL for (int p = 0; p < digits; p++) {
                const __m256i two = _mm256_add_epi8(_mm256_shuffle_epi8(digit[p], even), _mm256_shuffle_epi8(digit[p], odd));
                part[p] = _mm256_add_epi16(part[p], _mm256_maddubs_epi16(two, ones));
            }
        }
        TQ_UNROLL for (int p = 0; p < digits; p++)
            sums[p] = _mm256_add_epi32(sums[p], _mm256_madd_epi16(part[p], pairs));
    }
    double weight = t->digit_unit;
    for (int h = 0; h < HALVES; h++) energy[h] = _mm256_setzero_pd();
    for (int p = 0; p < digits; p++, weight *= 128.0) {
        const __m256d factor = _mm256_set1_pd(weight);
        energy[0] += _mm256_cvtepi32_pd(_mm256_castsi256_si128(sums[p])) * factor;
        energy[1] += _mm256_cvtepi32_pd(_mm256_extracti128_si256(sums[p], 1)) * factor;
    }
}
#endif

static TQ_TARGET void FN(quantize)(const tq_side *t, const VF *y, size_t dim, VU *words, VD energy[HALVES],
                                   VD product[HALVES]) {
    const bool products = t->table.scale_rule == FA_TQ_LSQ || t->table.scale_rule == FA_TQ_UNBIASED;
    if (t->bits == 2 && !products) FN(quantize_tile)(t, y, dim, words, energy, product, 2, false, true);
    else if (t->bits == 3 && !products) FN(quantize_tile)(t, y, dim, words, energy, product, 3, false, true);
#if LANES == 8
    else if (t->bits == 4 && !products && dim % 8 == 0 && t->digit_count > 0) {
        FN(quantize_tile)(t, y, dim, words, energy, product, 4, false, false);
        if (t->digit_count == 5) FN(energy_of_words)(t, words, dim / 8, energy, 5);
        else FN(energy_of_words)(t, words, dim / 8, energy, t->digit_count);
    }
#endif
    else if (t->bits == 4 && !products) FN(quantize_tile)(t, y, dim, words, energy, product, 4, false, true);
    else if (t->bits == 2) FN(quantize_tile)(t, y, dim, words, energy, product, 2, true, true);
    else if (t->bits == 3) FN(quantize_tile)(t, y, dim, words, energy, product, 3, true, true);
    else if (t->bits == 4) FN(quantize_tile)(t, y, dim, words, energy, product, 4, true, true);
    else FN(quantize_tile)(t, y, dim, words, energy, product, t->bits, products, true);
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
                                const tq_line *to, size_t *bad) {
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
            const float scale = FN(scale_of)(t->table.scale_rule, norm[l], energy[l], product[l]);
            tq_put_scale(to->scales, to->meta, (first + l) * to->scale_stride, scale, norm[l]);
        }
        FN(store_words)(words, t->bytes, n, to->codes + first * to->code_stride, to->code_stride);
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

static TQ_TARGET void FN(decode)(const fa_tq_state *s, const tq_side *t, const tq_line *from, size_t count,
                                 float *out) {
    VF x[FA_TQ_MAX_DIM], spare[FA_TQ_MAX_DIM];
    VU words[FA_TQ_MAX_DIM / 4 + 1];
    memset(words, 0, sizeof words);
    for (size_t first = 0; first < count; first += LANES) {
        const size_t n = count - first < LANES ? count - first : LANES;
        double factors[LANES] = {0};
        float *own = out + first * s->dim;
        if (first + 2 * LANES <= count) FN(fetch)(own + LANES * s->dim, LANES * s->dim * sizeof(float));
        for (size_t l = 0; l < n; l++)
            factors[l] = (double)tq_scale_at(from->scales, from->meta, (first + l) * from->scale_stride) / s->root;
        FN(load_words)(from->codes + first * from->code_stride, from->code_stride, t->bytes, n, words);
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

/* The centroids of vectors slots[0 .. n - 1], each padded to s->padded floats; past dim they are arbitrary but finite. */
FN_INLINE void FN(expand_bits)(const fa_tq_state *s, const tq_side *t, const uint8_t *codes, size_t stride,
                               const uint32_t *slots, size_t n, float *out, int bits) {
    const uint32_t mask = (1u << bits) - 1;
#if LANES == 8
    const tq_register_book book = FN(load_book)(t, bits);
#endif
    for (size_t i = 0; i < n; i++, out += s->padded) {
        const uint8_t *packed = codes + slots[i] * stride;
        size_t j = 0, byte = 0;
#if LANES == 8
        if (bits <= 4) {
            for (; j + 32 <= s->dim; j += 32, byte += 4 * (size_t)bits) {
                VF four[4];
                FN(expand_32)(&book, packed + byte, four, bits);
                TQ_UNROLL for (size_t k = 0; k < 4; k++) FN(write)(out + j + 8 * k, four[k]);
            }
            for (; j < (s->dim + 7) / 8 * 8; j += 8, byte += (size_t)bits)
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

static TQ_TARGET void FN(expand)(const fa_tq_state *s, const tq_side *t, const uint8_t *codes, size_t stride,
                                 const uint32_t *slots, size_t n, float *out) {
    if (t->bits == 2) FN(expand_bits)(s, t, codes, stride, slots, n, out, 2);
    else if (t->bits == 3) FN(expand_bits)(s, t, codes, stride, slots, n, out, 3);
    else if (t->bits == 4) FN(expand_bits)(s, t, codes, stride, slots, n, out, 4);
    else FN(expand_bits)(s, t, codes, stride, slots, n, out, t->bits);
}

/* Exact tokens among slots[0 .. n - 1]: their rows, rotated, in place of centroids, with scale 1. */
static TQ_TARGET void FN(expand_exact)(const fa_tq_state *s, const fa_tq_exact *exact, size_t head,
                                       const uint32_t *slots, size_t n, float *rows, float *scales) {
    VF x[FA_TQ_MAX_DIM], spare[FA_TQ_MAX_DIM];
    const size_t size = tq_type_bytes(exact->type);
    double factors[LANES];
    for (int l = 0; l < LANES; l++) factors[l] = 1.0 / s->root;
    for (size_t i = 0; i < n;) {
        const void *row[LANES];
        size_t at[LANES] = {0}, found = 0;
        for (; i < n && found < LANES; i++) {
            if (exact->row_of[slots[i]] < 0) continue;
            const size_t first = (size_t)exact->row_of[slots[i]] * exact->row_stride + head * s->dim;
            row[found] = (const uint8_t *)exact->rows + first * size;
            at[found++] = i;
        }
        if (found == 0) return;
        for (size_t l = found; l < LANES; l++) row[l] = row[0];
        FN(load_tile)(row, exact->type, s->dim, x);
        FN(scale_tile)(s, x, factors);
        const VF *y = FN(hadamard)(s, false, x, spare);
        float *tile = (float *)(y == x ? spare : x);
        FN(store_tile)(y, s->dim, tile, s->dim, found);
        for (size_t l = 0; l < found; l++) {
            memcpy(rows + at[l] * s->padded, tile + l * s->dim, s->dim * sizeof *rows);
            scales[at[l]] = 1.0f;
        }
    }
}

/* Asks for a head's next n tokens: they lie a stride apart, which processors do not fetch ahead by themselves. */
FN_INLINE void FN(fetch_chunk)(const tq_side *t, const fa_tq_packed *packed, size_t head, const uint32_t *slots,
                               size_t n) {
    const uint8_t *codes = packed->codes + head * packed->code_head_stride;
    const size_t size = packed->meta == FA_TQ_META_BF16 ? 2 : 4;
    for (size_t i = 0; i < n; i++) {
        for (size_t byte = 0; byte < t->bytes; byte += 64)
            TQ_PREFETCH(codes + slots[i] * packed->code_token_stride + byte);
        TQ_PREFETCH((const uint8_t *)packed->scales +
                    (slots[i] * packed->scale_token_stride + head * packed->scale_head_stride) * size);
    }
}

/* One head's tokens of a chunk: rotated vectors without their scales, and the scales. */
FN_INLINE void FN(expand_chunk)(const fa_tq_state *s, const tq_side *t, const fa_tq_packed *packed, size_t head,
                                const tq_walk *walk, float *rows, float *scales) {
    const size_t head_scale = head * packed->scale_head_stride;
    FN(fetch_chunk)(t, packed, head, walk->next, walk->next_count);
    for (size_t i = 0; i < walk->count; i++)
        scales[i] = tq_scale_at(packed->scales, packed->meta, walk->slots[i] * packed->scale_token_stride + head_scale);
    FN(expand)(s, t, packed->codes + head * packed->code_head_stride, packed->code_token_stride, walk->slots,
               walk->count, rows);
    if (packed->exact) FN(expand_exact)(s, packed->exact, head, walk->slots, walk->count, rows, scales);
}

/* a * b + c, in one rounding where the instruction set has it: attention is not part of the bit-exact format. */
FN_ATTEND VF FN(fused)(VF a, VF b, VF c) {
#if LANES == 8
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

/* Products of q with four rows. */
FN_ATTEND void FN(four_products)(const float *q, const float *rows, size_t padded, float products[4]) {
    VF sum[4];
    TQ_UNROLL for (int a = 0; a < 4; a++) sum[a] = FN(broadcast)(0.0f);
    for (size_t j = 0; j < padded; j += LANES) {
        TQ_UNROLL for (size_t a = 0; a < 4; a++) sum[a] = FN(fused)(FN(read)(q + j), FN(read)(rows + a * padded + j), sum[a]);
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
FN_ATTEND VF FN(exponential)(VF x) {
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
FN_ATTEND void FN(add_carefully)(VF part, float *total, float *lost) {
    const VF before = FN(read)(total), corrected = part - FN(read)(lost), after = before + corrected;
    FN(write)(lost, (after - before) - corrected);
    FN(write)(total, after);
}

/* Scores of n tokens become weights exp(score - most); a new maximum shrinks what was added up before. */
FN_ATTEND void FN(weigh)(const tq_query *query, size_t n, size_t padded) {
    float *weights = query->weights;
    for (size_t i = n; i % 16 != 0; i++) weights[i] = -HUGE_VALF; /* fills up the last register */
    VF tops = FN(broadcast)(*query->most);
    for (size_t i = 0; i < n; i += LANES) tops = FN(larger)(tops, FN(read)(weights + i));
    float most = LANE(tops, 0);
    for (int l = 1; l < LANES; l++) most = LANE(tops, l) > most ? LANE(tops, l) : most;
    if (most > *query->most) {
        const float shrink = expf(*query->most - most);
        for (size_t j = 0; j < padded; j++) query->total[j] *= shrink;
        for (size_t j = 0; j < padded; j++) query->lost[j] *= shrink;
        *query->sum *= shrink;
        *query->sum_lost *= shrink;
        *query->most = most;
    }
    VF sum = FN(broadcast)(0.0f);
    for (size_t i = 0; i < n; i += LANES) {
        const VF w = FN(exponential)(FN(read)(weights + i) - most);
        FN(write)(weights + i, w);
        sum += w;
    }
    float part = 0.0f;
    for (int l = 0; l < LANES; l++) part += LANE(sum, l);
    const float corrected = part - *query->sum_lost, after = *query->sum + corrected;
    *query->sum_lost = (after - *query->sum) - corrected;
    *query->sum = after;
}

/* total += sum of w[i] * row i. */
FN_ATTEND void FN(add_rows)(const float *w, const float *rows, size_t n, float *total, float *lost, size_t padded) {
    size_t j = 0;
    for (; j + 4 * LANES <= padded; j += 4 * LANES) {
        VF part[4];
        TQ_UNROLL for (int a = 0; a < 4; a++) part[a] = FN(broadcast)(0.0f);
        for (size_t i = 0; i < n; i++) {
            TQ_UNROLL for (size_t a = 0; a < 4; a++) part[a] = FN(fused)(FN(read)(rows + i * padded + j + a * LANES), FN(broadcast)(w[i]), part[a]);
        }
        TQ_UNROLL for (size_t a = 0; a < 4; a++)
            FN(add_carefully)(part[a], total + j + a * LANES, lost + j + a * LANES);
    }
    for (; j < padded; j += LANES) {
        VF part = FN(broadcast)(0.0f);
        for (size_t i = 0; i < n; i++) part = FN(fused)(FN(read)(rows + i * padded + j), FN(broadcast)(w[i]), part);
        FN(add_carefully)(part, total + j, lost + j);
    }
}

static TQ_TARGET_ATTEND void FN(scores)(const fa_tq_state *s, const fa_tq_packed *keys, size_t head, size_t tokens,
                                 const float *queries, size_t count, float *scores) {
    float decoded[TQ_CHUNK_FLOATS], scales[TQ_MAX_CHUNK], four[4];
    const size_t padded = s->padded;
    tq_walk walk;
    memset(decoded, 0, sizeof decoded);
    tq_start(&walk, tokens, NULL, 0, tq_chunk(s));
    for (size_t first = 0; walk.count > 0; first += walk.count, tq_advance(&walk)) {
        FN(expand_chunk)(s, &s->side[1], keys, head, &walk, decoded, scales);
        for (size_t i = 0; i < count; i++) {
            for (size_t t = 0; t < walk.count; t++) {
                if (t % 4 == 0) FN(four_products)(queries + i * padded, decoded + t * padded, padded, four);
                scores[i * tokens + first + t] = four[t % 4] * scales[t];
            }
        }
    }
}

/* totals: of each query, its sum and what the roundings lost. */
static TQ_TARGET_ATTEND void FN(mix)(const fa_tq_state *s, const fa_tq_packed *values, size_t head, size_t tokens,
                              const float *weights, size_t count, float *totals) {
    float decoded[TQ_CHUNK_FLOATS], scales[TQ_MAX_CHUNK], w[TQ_MAX_CHUNK];
    const size_t padded = s->padded;
    tq_walk walk;
    tq_start(&walk, tokens, NULL, 0, tq_chunk(s));
    for (size_t first = 0; walk.count > 0; first += walk.count, tq_advance(&walk)) {
        FN(expand_chunk)(s, &s->side[0], values, head, &walk, decoded, scales);
        for (size_t i = 0; i < count; i++) {
            for (size_t t = 0; t < walk.count; t++) w[t] = weights[i * tokens + first + t] * scales[t];
            FN(add_rows)(w, decoded, walk.count, totals + 2 * i * padded, totals + (2 * i + 1) * padded, padded);
        }
    }
}

#if LANES == 8
/* Products of one query with n rows of packed codes, and sums of such rows, without a buffer of decoded ones: what is
 * read once need not be stored. Lengths that are a multiple of 32. */
FN_ATTEND void FN(products_direct)(const tq_register_book *book, const uint8_t *codes, size_t stride,
                                   const uint32_t *slots, size_t n, const float *q, float *products, size_t padded,
                                   int bits) {
    for (size_t t = 0; t < n; t += 4) {
        VF sum[4];
        TQ_UNROLL for (size_t a = 0; a < 4; a++) {
            const uint8_t *row = codes + slots[t + a < n ? t + a : n - 1] * stride;
            sum[a] = FN(broadcast)(0.0f);
            for (size_t j = 0; j < padded; j += 32) {
                VF four[4];
                FN(expand_32)(book, row + j * (size_t)bits / 8, four, bits);
                TQ_UNROLL for (size_t i = 0; i < 4; i++) sum[a] = FN(fused)(four[i], FN(read)(q + j + 8 * i), sum[a]);
            }
        }
        const VF pairs = _mm256_hadd_ps(_mm256_hadd_ps(sum[0], sum[1]), _mm256_hadd_ps(sum[2], sum[3]));
        _mm_storeu_ps(products + t, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
    }
}

FN_ATTEND void FN(add_rows_direct)(const tq_register_book *book, const uint8_t *codes, size_t stride,
                                   const uint32_t *slots, size_t n, const float *w, const tq_query *query,
                                   size_t padded, int bits) {
    for (size_t j = 0; j < padded; j += 32) {
        VF part[4];
        TQ_UNROLL for (int i = 0; i < 4; i++) part[i] = FN(broadcast)(0.0f);
        for (size_t t = 0; t < n; t++) {
            VF four[4];
            FN(expand_32)(book, codes + slots[t] * stride + j * (size_t)bits / 8, four, bits);
            TQ_UNROLL for (int i = 0; i < 4; i++) part[i] = FN(fused)(four[i], FN(broadcast)(w[t]), part[i]);
        }
        TQ_UNROLL for (size_t i = 0; i < 4; i++)
            FN(add_carefully)(part[i], query->total + j + 8 * i, query->lost + j + 8 * i);
    }
}

/* Widths, and the commonest length, are constants to the compiler. */
#define TQ_WIDTHS(call)                                    \
    do {                                                   \
        if (padded == 128 && t->bits == 4) call(128, 4);   \
        else if (padded == 128 && t->bits == 2) call(128, 2); \
        else if (t->bits == 4) call(padded, 4);            \
        else if (t->bits == 3) call(padded, 3);            \
        else call(padded, 2);                              \
    } while (0)

/* One head's chunk of tokens for one query. */
static TQ_TARGET_ATTEND void FN(attend_direct)(const fa_tq_state *s, const fa_tq_attention *a, size_t head,
                                               const tq_walk *walk, const tq_query *query) {
    const size_t padded = s->padded, n = walk->count;
    for (int side = 1; side >= 0; side--) {
        const tq_side *t = &s->side[side];
        const fa_tq_packed *packed = side == 1 ? &a->keys : &a->values;
        const uint8_t *codes = packed->codes + head * packed->code_head_stride;
        const tq_register_book book = FN(load_book)(t, t->bits);
        const size_t head_scale = head * packed->scale_head_stride;
        FN(fetch_chunk)(t, packed, head, walk->next, walk->next_count);
#define TQ_PRODUCTS(length, width) \
    FN(products_direct)(&book, codes, packed->code_token_stride, walk->slots, n, query->rotated, query->weights, length, width)
#define TQ_ROWS(length, width) \
    FN(add_rows_direct)(&book, codes, packed->code_token_stride, walk->slots, n, query->weights, query, length, width)
        if (side == 1) TQ_WIDTHS(TQ_PRODUCTS);
        for (size_t i = 0; i < n; i++)
            query->weights[i] *= tq_scale_at(packed->scales, packed->meta, walk->slots[i] * packed->scale_token_stride + head_scale);
        if (side == 1) FN(weigh)(query, n, padded);
        else TQ_WIDTHS(TQ_ROWS);
#undef TQ_PRODUCTS
#undef TQ_ROWS
    }
}
#undef TQ_WIDTHS

/* Decoding to memory pays off where more than one query reads what was decoded. */
FN_INLINE bool FN(is_direct)(const fa_tq_state *s, const fa_tq_attention *a) {
    const int key_bits = s->side[1].bits, value_bits = s->side[0].bits;
    return a->group * a->rows == 1 && s->dim % 32 == 0 && key_bits >= 2 && key_bits <= 4 && value_bits >= 2 &&
           value_bits <= 4 && !a->keys.exact && !a->values.exact;
}
#endif

/* One pass over the tokens, chunk by chunk. Heads that read the same tokens take turns within a chunk, as their vectors
 * lie in memory. */
static TQ_TARGET_ATTEND void FN(attend)(const fa_tq_state *s, const fa_tq_attention *a, float *queries) {
    float decoded[TQ_CHUNK_FLOATS], scales[TQ_MAX_CHUNK];
    const size_t padded = s->padded, together = a->choice.entries ? 1 : a->heads;
    tq_walk walk;
    memset(decoded, 0, sizeof decoded);
    for (size_t from = 0; from < a->heads; from += together) {
        tq_start(&walk, a->tokens, &a->choice, from, tq_chunk(s));
        for (; walk.count > 0; tq_advance(&walk)) {
            for (size_t head = from; head < from + together; head++) {
#if LANES == 8
                if (FN(is_direct)(s, a)) {
                    const tq_query query = tq_query_at(s, queries, tq_query_index(a, head, 0));
                    FN(attend_direct)(s, a, a->first_head + head, &walk, &query);
                    continue;
                }
#endif
                FN(expand_chunk)(s, &s->side[1], &a->keys, a->first_head + head, &walk, decoded, scales);
                for (size_t i = 0; i < a->rows * a->group; i++) {
                    const tq_query query = tq_query_at(s, queries, tq_query_index(a, head, i));
                    const size_t seen = tq_seen(a, &walk, i / a->group);
                    float *w = query.weights;
                    for (size_t t = 0; t < seen; t += 4)
                        FN(four_products)(query.rotated, decoded + t * padded, padded, w + t);
                    for (size_t t = 0; t < seen; t++) w[t] *= scales[t];
                    if (seen > 0) FN(weigh)(&query, seen, padded);
                }
                FN(expand_chunk)(s, &s->side[0], &a->values, a->first_head + head, &walk, decoded, scales);
                for (size_t i = 0; i < a->rows * a->group; i++) {
                    const tq_query query = tq_query_at(s, queries, tq_query_index(a, head, i));
                    const size_t seen = tq_seen(a, &walk, i / a->group);
                    if (seen == 0) continue; /* adding nothing would move what was lost */
                    for (size_t t = 0; t < seen; t++) query.weights[t] *= scales[t];
                    FN(add_rows)(query.weights, decoded, seen, query.total, query.lost, padded);
                }
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

#undef TQ_KERNELS
#undef TQ_TARGET
#undef TQ_TARGET_ATTEND
#undef LANES
#undef TQ_JOIN
#undef TQ_NAME
#undef FN
#undef VF
#undef VU
#undef VD
#undef FN_INLINE
#undef FN_ATTEND
#undef HALVES
#undef LANE
#undef BITS_OF
#undef FLOATS_OF
#undef AT_LEAST

/* What a drafter's pass is made of: products of few rows, norms, rotation, attention. Included by native.c once for each
 * instruction set, which it sees through the macros defined there: vectors of LANES floats (VF) or int32 (VI).
 *
 * A row is computed by itself and in the same order whatever stands beside it, so its bits do not depend on the pass.
 */

#include "native_wide.h"

enum { NAME(PARTS) = PANEL / LANES };

INLINE TARGET VF NAME(exponential)(VF x) {
    /* exp by a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2] (coefficients of Cephes' expf), within 2 ulp. */
    x = F_MAX(F_MIN(x, F_SET(88.3f)), F_SET(-87.3f));
    VI power = F_TO_I(F_MUL(x, F_SET(1.44269504f)));
    VF whole = I_TO_F(power);
    VF r = F_FMA(whole, F_SET(-0.693359375f), x);
    r = F_FMA(whole, F_SET(2.12194440e-4f), r);
    VF p = F_SET(1.9875691500e-4f);
    p = F_FMA(p, r, F_SET(1.3981999507e-3f));
    p = F_FMA(p, r, F_SET(8.3334519073e-3f));
    p = F_FMA(p, r, F_SET(4.1665795894e-2f));
    p = F_FMA(p, r, F_SET(1.6666665459e-1f));
    p = F_FMA(p, r, F_SET(5.0000001201e-1f));
    return F_MUL(F_ADD(F_FMA(p, F_MUL(r, r), r), F_SET(1.0f)), F_POWER(power));
}

/* One row of activations to bytes, symmetric, and their sums by groups. */
TARGET static void NAME(quantize)(const float *x, const Given *to, int row) {
    int count = to->inputs, padded = to->padded, i = 0;
    int8_t *bytes = to->bytes + (int64_t)row * padded;
    VF most = F_SET(0.0f);
    for (; i + LANES <= count; i += LANES) most = F_MAX(most, F_ABS(F_LOAD(x + i)));
    float largest = F_LARGEST(most);
    for (; i < count; i++) largest = fmaxf(largest, fabsf(x[i]));
    float scale = fmaxf(largest, 1e-30f) / 127.0f, inverse = 1.0f / scale;
    for (i = 0; i + LANES <= count; i += LANES) I_STORE_BYTES(bytes + i, F_TO_I(F_MUL(F_LOAD(x + i), F_SET(inverse))));
    for (; i < count; i++) bytes[i] = (int8_t)fmaxf(-127.0f, fminf(127.0f, rintf(x[i] * inverse)));
    memset(bytes + count, 0, (size_t)(padded - count));
    int32_t *sums = to->sums + (int64_t)row * (padded / GROUP), total = 0;
    for (int group = 0; group < padded / GROUP; group++) {
        int32_t sum = 0;
        for (int k = 0; k < GROUP; k++) sum += bytes[group * GROUP + k];
        sums[group] = sum;
        total += sum;
    }
    to->totals[row] = total;
    to->scales[row] = scale;
}

/* ---- products: `count` rows, a constant where this is inlined, times one panel of outputs ---- */

#if LANES == 16
INLINE TARGET void NAME(finish_tile)(
    const Given *x, int first, const float *bias, float *out, int64_t stride, VF sums[][NAME(PARTS)], const int count) {
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
        VF scale = F_SET(x->scales[first + r]);
#pragma GCC unroll 4
        for (int part = 0; part < NAME(PARTS); part++) {
            VF found = F_MUL(sums[r][part], scale);
            if (bias) found = F_ADD(found, F_LOAD(bias + part * LANES));
            F_STORE(out + r * stride + part * LANES, found);
        }
    }
}

INLINE TARGET void NAME(tile_of_bytes)(
    const uint8_t *panel, const Given *x, int first, const float *bias, float *out, int64_t stride, const int count) {
    VI sums[TILE_BYTES][NAME(PARTS)];
    const float *scales = (const float *)panel;
    const uint8_t *weights = panel + sizeof(float) * PANEL;
    const int8_t *rows = x->bytes + (int64_t)first * x->padded;
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
        for (int part = 0; part < NAME(PARTS); part++) sums[r][part] = I_SET(-ZERO_OF_BYTES * x->totals[first + r]);
    }
    for (int k = 0; k < x->padded; k += 4, weights += 4 * PANEL) {
        VI weight[NAME(PARTS)];
        fetch_ahead(weights, 2, count, 0);
#pragma GCC unroll 4
        for (int part = 0; part < NAME(PARTS); part++) weight[part] = I_LOAD(weights + part * 4 * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            VI given = I_SET(four_of(rows + (int64_t)r * x->padded + k));
#pragma GCC unroll 4
            for (int part = 0; part < NAME(PARTS); part++) sums[r][part] = MM(dpbusd_epi32)(sums[r][part], weight[part], given);
        }
    }
    VF found[TILE_BYTES][NAME(PARTS)];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
        for (int part = 0; part < NAME(PARTS); part++)
            found[r][part] = F_MUL(I_TO_F(sums[r][part]), F_LOAD(scales + part * LANES));
    }
    NAME(finish_tile)(x, first, bias, out, stride, found, count);
}

INLINE TARGET void NAME(tile_of_nibbles)(
    const uint8_t *panel, const Given *x, int first, const float *bias, float *out, int64_t stride, const int count) {
    VF found[TILE_NIBBLES][NAME(PARTS)];
    const int8_t *rows = x->bytes + (int64_t)first * x->padded;
    const int groups = x->padded / GROUP;
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
        for (int part = 0; part < NAME(PARTS); part++) found[r][part] = F_SET(0.0f);
    }
    for (int group = 0; group < groups; group++, panel += GROUP_OF_NIBBLES) {
        VI sums[TILE_NIBBLES][NAME(PARTS)];
        const uint8_t *weights = panel + 2 * sizeof(uint16_t) * PANEL;
        fetch_ahead(panel, 2, count, 1);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
            for (int part = 0; part < NAME(PARTS); part++) sums[r][part] = I_SET(0);
        }
#pragma GCC unroll 2
        for (int k = 0; k < GROUP; k += 4, weights += 2 * PANEL) {
            VI weight[NAME(PARTS)];
            fetch_ahead(weights, 1, count, 1);
#pragma GCC unroll 2
            for (int half = 0; half < NAME(PARTS) / 2; half++) {
                VI pair = I_LOAD(weights + half * 4 * LANES);
                weight[half] = I_AND(pair, I_SET(0x0f0f0f0f));
                weight[NAME(PARTS) / 2 + half] = I_AND(I_SHIFT4(pair), I_SET(0x0f0f0f0f));
            }
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) {
                VI given = I_SET(four_of(rows + (int64_t)r * x->padded + group * GROUP + k));
#pragma GCC unroll 4
                for (int part = 0; part < NAME(PARTS); part++)
                    sums[r][part] = MM(dpbusd_epi32)(sums[r][part], weight[part], given);
            }
        }
#pragma GCC unroll 4
        for (int part = 0; part < NAME(PARTS); part++) {
            const uint16_t *own = (const uint16_t *)panel + part * LANES;
            VF scale = F_OF_BFLOAT16(own), least = F_OF_BFLOAT16(own + PANEL);
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) {
                VF total = F_SET((float)x->sums[(int64_t)(first + r) * groups + group]);
                found[r][part] = F_FMA(total, least, F_FMA(I_TO_F(sums[r][part]), scale, found[r][part]));
            }
        }
    }
    NAME(finish_tile)(x, first, bias, out, stride, found, count);
}

/* Panel number `panel` of the outputs, of all rows; `out` points to the first row's first output of the matrix. */
TARGET static void NAME(product)(const Matrix *matrix, const Given *x, int rows, int panel, float *out, int64_t stride) {
    const uint8_t *weights = matrix->panels + (int64_t)panel * panel_bytes(matrix);
    const int begin = panel * PANEL, left = matrix->outputs - begin;
    const int most = matrix->bits == 8 ? TILE_BYTES : TILE_NIBBLES;
    const float *bias = matrix->bias ? matrix->bias + begin : NULL;
    float cut[MOST_TILE * PANEL], padded_bias[PANEL] = {0};
    if (bias && left < PANEL) bias = memcpy(padded_bias, bias, sizeof(float) * (size_t)left);
    for (int first = 0, count; first < rows; first += count) {
        const int tiles = (rows - first + most - 1) / most;
        count = (rows - first + tiles - 1) / tiles;
        float *to = left < PANEL ? cut : out + first * stride + begin;
        const int64_t step = left < PANEL ? PANEL : stride;
#define TILE(n)                                                                                     \
    case 16 * 8 + n:                                                                                \
        NAME(tile_of_bytes)(weights, x, first, bias, to, step, n);                                  \
        break;                                                                                      \
    case 16 * 4 + n:                                                                                \
        NAME(tile_of_nibbles)(weights, x, first, bias, to, step, n <= TILE_NIBBLES ? n : 1);        \
        break;
        switch (16 * matrix->bits + count) {
            TILE(1) TILE(2)
            TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8)
        }
#undef TILE
        if (left < PANEL)
            for (int r = 0; r < count; r++)
                memcpy(out + (first + r) * stride + begin, cut + r * PANEL, sizeof(float) * (size_t)left);
    }
}

#else /* fewer sums fit in registers: all rows are multiplied with a part of a panel before its next part */

/* Integer sums of inputs `from` to `end` are added to those in `totals`, in both [count, PANEL]. */
INLINE TARGET void NAME(tile_of_bytes)(
    const uint8_t *panel, const Given *x, int first, int from, int end, int32_t *totals, const int count) {
    const int parts = count > 2 ? 2 : NAME(PARTS);
    const int8_t *rows = x->bytes + (int64_t)first * x->padded;
    for (int lane = 0; lane < PANEL; lane += parts * LANES, totals += parts * LANES) {
        const uint8_t *weights = panel + sizeof(float) * PANEL + (int64_t)from * PANEL + 4 * lane;
        VI sums[TILE_BYTES][NAME(PARTS)];
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) sums[r][part] = I_LOAD(totals + r * PANEL + part * LANES);
        }
        for (int k = from; k < end; k += 4, weights += 4 * PANEL) {
            VI weight[NAME(PARTS)];
            if (!lane) fetch_ahead(weights, 2, count, 0);
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) weight[part] = I_LOAD(weights + part * 4 * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) {
                VI given = I_SET(four_of(rows + (int64_t)r * x->padded + k));
#pragma GCC unroll 4
                for (int part = 0; part < parts; part++) sums[r][part] = NAME(dot_bytes)(sums[r][part], weight[part], given);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) I_STORE(totals + r * PANEL + part * LANES, sums[r][part]);
        }
    }
}

/* The same in numbers. */
INLINE TARGET void NAME(tile_of_nibbles)(
    const uint8_t *panel, const Given *x, int first, int from, int end, float *totals, const int count) {
    VF found[TILE_NIBBLES][NAME(PARTS)];
    const int8_t *rows = x->bytes + (int64_t)first * x->padded;
    const int groups = x->padded / GROUP;
    panel += (int64_t)from / GROUP * GROUP_OF_NIBBLES;
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
        for (int part = 0; part < NAME(PARTS); part++) found[r][part] = F_LOAD(totals + r * PANEL + part * LANES);
    }
    for (int group = from / GROUP; group < end / GROUP; group++, panel += GROUP_OF_NIBBLES) {
        fetch_ahead(panel, 2, count, 1);
#pragma GCC unroll 2
        for (int half = 0; half < NAME(PARTS) / 2; half++) {
            const uint8_t *weights = panel + 2 * sizeof(uint16_t) * PANEL + half * 4 * LANES;
            VI sums[TILE_NIBBLES][2];
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = I_SET(0);
#pragma GCC unroll 1
            for (int k = 0; k < GROUP; k += 4, weights += 2 * PANEL) {
                if (!half) fetch_ahead(weights, 1, count, 1);
                const VI both = I_LOAD(weights), low = I_AND(both, I_SET(0x0f0f0f0f));
                const VI high = I_AND(I_SHIFT4(both), I_SET(0x0f0f0f0f));
#pragma GCC unroll 8
                for (int r = 0; r < count; r++) {
                    const VI given = I_SET(four_of(rows + (int64_t)r * x->padded + group * GROUP + k));
                    sums[r][0] = NAME(dot_nibbles)(sums[r][0], low, given);
                    sums[r][1] = NAME(dot_nibbles)(sums[r][1], high, given);
                }
            }
#pragma GCC unroll 2
            for (int upper = 0; upper < 2; upper++) {
                const int part = half + upper * NAME(PARTS) / 2;
                const uint16_t *own = (const uint16_t *)panel + part * LANES;
                VF scale = F_OF_BFLOAT16(own), least = F_OF_BFLOAT16(own + PANEL);
#pragma GCC unroll 8
                for (int r = 0; r < count; r++) {
                    VF total = F_SET((float)x->sums[(int64_t)(first + r) * groups + group]);
                    VF sum = I_TO_F(HAS_VNNI ? sums[r][upper] : MM(madd_epi16)(sums[r][upper], MM(set1_epi16)(1)));
                    found[r][part] = F_FMA(total, least, F_FMA(sum, scale, found[r][part]));
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
        for (int part = 0; part < NAME(PARTS); part++) F_STORE(totals + r * PANEL + part * LANES, found[r][part]);
    }
}

/* Panel number `panel` of the outputs, of all rows; `out` points to the first row's first output of the matrix. */
TARGET static void NAME(product)(const Matrix *matrix, const Given *x, int rows, int panel, float *out, int64_t stride) {
    const uint8_t *weights = matrix->panels + (int64_t)panel * panel_bytes(matrix);
    const int begin = panel * PANEL, left = matrix->outputs - begin < PANEL ? matrix->outputs - begin : PANEL;
    const int in_bytes = matrix->bits == 8, most = in_bytes ? TILE_BYTES : TILE_NIBBLES;
    float bias[PANEL] = {0};
    if (matrix->bias) memcpy(bias, matrix->bias + begin, sizeof(float) * (size_t)left);
    for (int from = 0, some; from < rows; from += some) {
        const int turns = (rows - from + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
        some = (rows - from + turns - 1) / turns;
        _Alignas(64) int32_t totals[ROWS_TOGETHER * PANEL];
        const int tiles = (some + most - 1) / most;
        for (int r = 0; r < some; r++)
            for (int i = 0; i < PANEL; i += LANES)
                I_STORE(totals + r * PANEL + i, I_SET(in_bytes ? -ZERO_OF_BYTES * x->totals[from + r] : 0));
        for (int k = 0, end; k < x->padded; k = end) {
            end = x->padded - k < INPUTS_TOGETHER ? x->padded : k + INPUTS_TOGETHER;
            for (int number = 0, first = 0, count; number < tiles; number++, first += count) {
                int32_t *to = totals + first * PANEL;
                count = (some - first + tiles - number - 1) / (tiles - number);
#define TILE(n)                                                                                                       \
    case n:                                                                                                           \
        if (in_bytes)                                                                                                 \
            NAME(tile_of_bytes)(weights, x, from + first, k, end, to, n <= TILE_BYTES ? n : 1);                       \
        else                                                                                                          \
            NAME(tile_of_nibbles)(weights, x, from + first, k, end, (float *)to, n <= TILE_NIBBLES ? n : 1);          \
        break;
                switch (count) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) }
#undef TILE
            }
        }
        for (int r = 0; r < some; r++) {
            float *sums = (float *)totals + r * PANEL, *own = out + (from + r) * stride + begin;
            for (int i = 0; i < PANEL; i += LANES) {
                VF sum = F_LOAD(sums + i);
                if (in_bytes) sum = F_MUL(I_TO_F(I_LOAD(totals + r * PANEL + i)), F_LOAD((const float *)weights + i));
                sum = F_MUL(sum, F_SET(x->scales[from + r]));
                F_STORE((left < PANEL ? sums : own) + i, matrix->bias ? F_ADD(sum, F_LOAD(bias + i)) : sum);
            }
            if (left < PANEL) memcpy(own, sums, sizeof(float) * (size_t)left);
        }
    }
}
#endif

/* ---- between the products ---- */

/* x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019); `count` is a multiple of 16. */
TARGET static void NAME(norm)(const float *x, const float *weight, float epsilon, int count, float *out) {
    VF squares = F_SET(0.0f);
    for (int i = 0; i < count; i += LANES) squares = F_FMA(F_LOAD(x + i), F_LOAD(x + i), squares);
    VF scale = F_SET(1.0f / sqrtf(F_SUM(squares) / (float)count + epsilon));
    for (int i = 0; i < count; i += LANES) F_STORE(out + i, F_MUL(F_MUL(F_LOAD(x + i), scale), F_LOAD(weight + i)));
}

TARGET static void NAME(add)(float *x, const float *more, float times, int count) {
    for (int i = 0; i < count; i += LANES) F_STORE(x + i, F_FMA(F_LOAD(more + i), F_SET(times), F_LOAD(x + i)));
}

/* silu(gates), or gelu(gates) by tanh, times gates of the other half, in place of the first. Both are x / (1 + exp(-y)):
 * y is x in silu, and sqrt(8 / pi) (x + 0.044715 x^3) in gelu (Hendrycks and Gimpel 2016). */
TARGET static void NAME(gate)(float *gates, const float *up, int count, int gelu) {
    for (int i = 0; i < count; i += LANES) {
        VF x = F_LOAD(gates + i), y = x;
        if (gelu) y = F_MUL(F_MUL(x, F_SET(1.59576912f)), F_FMA(F_MUL(x, x), F_SET(0.044715f), F_SET(1.0f)));
        VF below = F_ADD(F_SET(1.0f), NAME(exponential)(F_SUB(F_SET(0.0f), y)));
        F_STORE(gates + i, F_MUL(F_DIV(x, below), F_LOAD(up + i)));
    }
}

/* One head, the two halves of which are turned as pairs (Su et al. 2021). */
TARGET static void NAME(rotate)(float *x, const float *cosines, const float *sines, int size) {
    const int half = size / 2;
    for (int i = 0; i < half; i += 8) {
        float low[8], high[8];
        for (int j = 0; j < 8; j++) {
            const int at = i + j;
            low[j] = x[at] * cosines[at] - x[at + half] * sines[at];
            high[j] = x[at + half] * cosines[at + half] + x[at] * sines[at + half];
        }
        memcpy(x + i, low, sizeof low);
        memcpy(x + half + i, high, sizeof high);
    }
}

INLINE TARGET VF NAME(load)(const void *states, int64_t at, const int is_bfloat16) {
    return is_bfloat16 ? F_OF_BFLOAT16((const uint16_t *)states + at) : F_LOAD((const float *)states + at);
}

/* The keys and values of a position are on their way: behind a pass over all weights they are in memory alone. */
INLINE void NAME(fetch)(const Attention *a, const void *states, int position) {
    const int64_t bytes = (int64_t)a->size * (a->is_bfloat16 ? 2 : 4);
    const char *from = (const char *)states + place_of(a->places, position) * bytes;
    for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(from + at, _MM_HINT_T0);
}

/* Scores of LANES keys, of which there are `count`; those missing stand for others. */
INLINE TARGET void NAME(score)(
    const Attention *a, int first, int count, int last, const float **queries, int heads, float scores[][KEYS], int at,
    const int is_bfloat16) {
    const int size = a->size;
    _Alignas(64) float keys[LANES * MOST_SIZE]; /* vectors of all keys side by side, at constant distances */
    for (int j = 0; j < LANES; j++) {
        const int64_t from = place_of(a->places, first + (j < count ? j : count - 1)) * size;
        if (a->is_first && j < count) NAME(fetch)(a, a->values, first + j);
        if (a->is_first && first + j + KEYS_AHEAD < last) NAME(fetch)(a, a->keys, first + j + KEYS_AHEAD);
        for (int i = 0; i < size; i += LANES) F_STORE(keys + (i + j) * LANES, NAME(load)(a->keys, from + i, is_bfloat16));
    }
    for (int g = 0; g < heads; g++) {
        const float *query = queries[g];
        VF products[LANES];
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) products[j] = F_SET(0.0f);
        for (int i = 0; i < size; i += LANES) {
            VF part = F_LOAD(query + i);
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) products[j] = F_FMA(part, F_LOAD(keys + (i + j) * LANES), products[j]);
        }
        F_STORE(scores[g] + at, F_MUL(F_SUMS(products), F_SET(a->scaling)));
    }
}

/* Vectors of values from number `i` on, times what every head gives them, are added up. There are constant numbers of
 * vectors and heads where this is inlined, and sums enough of both that additions do not wait for each other. */
INLINE TARGET void NAME(weigh_some)(
    const Attention *a, int first, int count, const uint8_t *mask, float scores[][KEYS], float sums[][SUMS_APART], int i,
    const int vectors, const int heads, const int is_bfloat16) {
    VF found[4][HEADS_AT_ONCE];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 8
        for (int g = 0; g < heads; g++) found[v][g] = F_LOAD(sums[g] + i + v * LANES);
    for (int j = 0; j < count; j++) {
        if (mask && !mask[j]) continue;
        const int64_t from = place_of(a->places, first + j) * a->size + i;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            VF value = NAME(load)(a->values, from + v * LANES, is_bfloat16);
#pragma GCC unroll 8
            for (int g = 0; g < heads; g++) found[v][g] = F_FMA(F_SET(scores[g][j]), value, found[v][g]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 8
        for (int g = 0; g < heads; g++) F_STORE(sums[g] + i + v * LANES, found[v][g]);
}

INLINE TARGET void NAME(weigh)(
    const Attention *a, int first, int count, const uint8_t *mask, float scores[][KEYS], float sums[][SUMS_APART],
    const int heads, const int is_bfloat16) {
    const int vectors = 4 * heads <= LANES ? 4 : 2 * heads <= LANES ? 2 : 1; /* LANES sums at once, at most */
    int i = 0;
    for (; i + vectors * LANES <= a->size; i += vectors * LANES)
        NAME(weigh_some)(a, first, count, mask, scores, sums, i, vectors, heads, is_bfloat16);
    for (; i < a->size; i += LANES) NAME(weigh_some)(a, first, count, mask, scores, sums, i, 1, heads, is_bfloat16);
}

/* Scores of a row's head become weights; with a higher score than before, what it has found so far counts less. */
INLINE TARGET void NAME(give_weights)(
    const Attention *a, int first, int count, int row, float *scores, float *sums, float *most, float *weight) {
    const int own = seen_by(a, row) - first;
    const uint8_t *mask = a->mask ? a->mask + row * a->mask_stride + first : NULL;
    for (int j = 0; mask && j < count; j++)
        if (!mask[j]) scores[j] = -INFINITY;
    for (int j = own < 0 ? 0 : own; j < KEYS; j++) scores[j] = -INFINITY;
    VF top = F_LOAD(scores), total = F_SET(0.0f);
    for (int j = LANES; j < KEYS; j += LANES) top = F_MAX(top, F_LOAD(scores + j));
    const float largest = F_LARGEST(top), highest = largest > *most ? largest : *most;
    const float faded = highest == *most ? 1.0f : expf(*most - highest);
    for (int j = 0; j < KEYS; j += LANES) {
        VF score = F_LOAD(scores + j), power = NAME(exponential)(F_SUB(score, F_SET(highest)));
        power = F_WHERE_FINITE(score, power);
        total = F_ADD(total, power);
        F_STORE(scores + j, power);
    }
    *weight = *weight * faded + F_SUM(total);
    *most = highest;
    if (faded != 1.0f)
        for (int i = 0; i < a->size; i += LANES) F_STORE(sums + i, F_MUL(F_LOAD(sums + i), F_SET(faded)));
}

/* Query heads of some rows that share a key/value head attend to it, KEYS keys at a time with a running maximum
 * (Milakov and Gimelshein 2018). Blocks begin at the same keys in every pass, with a window at the first that it sees. */
INLINE TARGET void NAME(attend)(const Attention *a, const int is_bfloat16) {
    const int size = a->size, all = a->rows * a->groups, last = seen_by(a, a->rows - 1);
    _Alignas(64) float scores[HEADS_TOGETHER][KEYS], sums[HEADS_TOGETHER][SUMS_APART];
    for (int j = a->first; a->is_first && j < a->first + KEYS_AHEAD && j < last; j++) NAME(fetch)(a, a->keys, j);
    for (int begin = 0; begin < all; begin += HEADS_TOGETHER) {
        const int heads = all - begin < HEADS_TOGETHER ? all - begin : HEADS_TOGETHER;
        const float *queries[HEADS_TOGETHER];
        float most[HEADS_TOGETHER], weight[HEADS_TOGETHER];
        int rows[HEADS_TOGETHER];
        for (int g = 0; g < heads; g++) {
            rows[g] = (begin + g) / a->groups;
            queries[g] = a->query + rows[g] * a->stride + (int64_t)((begin + g) % a->groups) * size;
            most[g] = -INFINITY;
            weight[g] = 0.0f;
            memset(sums[g], 0, sizeof(float) * (size_t)size);
        }
        for (int first = a->first; first < last; first += KEYS) {
            const int count = last - first < KEYS ? last - first : KEYS;
            uint8_t seen[KEYS]; /* by any row: what nobody sees may never have been written */
            const uint8_t *some = a->mask ? seen_by_any(a, first, count, seen) : NULL;
            if (some && !memchr(some, 1, (size_t)count)) continue;
            for (int j = 0; j < count; j += LANES)
                NAME(score)(a, first + j, count - j, last, queries, heads, scores, j, is_bfloat16);
            for (int g = 0; g < heads; g++)
                NAME(give_weights)(a, first, count, rows[g], scores[g], sums[g], &most[g], &weight[g]);
            for (int g = 0; g < heads; g += HEADS_AT_ONCE) switch (heads - g) {
#define WEIGH(n)                                                                  \
    case n:                                                                       \
        NAME(weigh)(a, first, count, some, scores + g, sums + g, n, is_bfloat16); \
        break;
                    WEIGH(1) WEIGH(2) WEIGH(3) WEIGH(4) WEIGH(5) WEIGH(6) WEIGH(7)
                default:
                    NAME(weigh)(a, first, count, some, scores + g, sums + g, HEADS_AT_ONCE, is_bfloat16);
#undef WEIGH
                }
        }
        for (int g = 0; g < heads; g++) {
            const int head = (begin + g) % a->groups;
            float *part = a->part ? a->part + rows[g] * a->part_stride : NULL;
            float *out = (part ? part : a->out + rows[g] * a->stride) + (int64_t)head * size;
            VF scale = F_SET(part ? 1.0f : 1.0f / weight[g]);
            for (int i = 0; i < size; i += LANES) F_STORE(out + i, F_MUL(F_LOAD(sums[g] + i), scale));
            if (!part) continue;
            part[a->groups * size + head] = most[g];
            part[a->groups * (size + 1) + head] = weight[g];
        }
    }
}

/* What heads found in a part of the positions is added to what they found in those before: of every head the sums of
 * values, then of all heads the highest score, then their weight. */
TARGET static void NAME(join)(const Attention *a, const float *part, float *all) {
    const int size = a->size, scores = a->groups * size, weights = scores + a->groups;
    for (int g = 0; g < a->groups; g++) {
        if (part[weights + g] == 0.0f) continue; /* all masked */
        const float *found = part + g * size, highest = fmaxf(all[scores + g], part[scores + g]);
        const float faded = expf(all[scores + g] - highest), own = expf(part[scores + g] - highest);
        float *sums = all + g * size;
        for (int i = 0; i < size; i += LANES)
            F_STORE(sums + i, F_FMA(F_SET(own), F_LOAD(found + i), F_MUL(F_LOAD(sums + i), F_SET(faded))));
        all[scores + g] = highest;
        all[weights + g] = all[weights + g] * faded + own * part[weights + g];
    }
}

/* The mean of values, by their weight, of what heads found in all parts. */
TARGET static void NAME(average)(const Attention *a, const float *all, float *out) {
    const int size = a->size;
    for (int g = 0; g < a->groups; g++) {
        VF scale = F_SET(1.0f / all[a->groups * (size + 1) + g]);
        for (int i = g * size; i < (g + 1) * size; i += LANES) F_STORE(out + i, F_MUL(F_LOAD(all + i), scale));
    }
}

TARGET static void NAME(attend_one)(const Attention *a) {
    if (a->is_bfloat16)
        NAME(attend)(a, 1);
    else
        NAME(attend)(a, 0);
}

/* Scores of a row of a prompt become weights, for the keys at hand from `begin` to `end`, of `padded`; with a higher score
 * than before, what the row has found so far counts less (Milakov and Gimelshein 2018). */
TARGET static void NAME(softmax)(
    PromptRows *rows, int row, int begin, int end, int padded, int size, float scaling) {
    float *scores = rows->scores + row * KEYS_OF_PROMPT, *sums = rows->sums + row * size;
    for (int j = 0; j < begin; j++) scores[j] = -INFINITY;
    for (int j = end; j < padded; j++) scores[j] = -INFINITY;
    VF top = F_SET(rows->most[row]), total = F_SET(0.0f);
    for (int j = 0; j < padded; j += LANES) {
        F_STORE(scores + j, F_MUL(F_LOAD(scores + j), F_SET(scaling)));
        top = F_MAX(top, F_LOAD(scores + j));
    }
    const float highest = F_LARGEST(top), faded = expf(rows->most[row] - highest);
    for (int j = 0; j < padded; j += LANES) {
        VF score = F_LOAD(scores + j), power = NAME(exponential)(F_SUB(score, F_SET(highest)));
        power = F_WHERE_FINITE(score, power);
        total = F_ADD(total, power);
        F_STORE(scores + j, power);
    }
    rows->total[row] = rows->total[row] * faded + F_SUM(total);
    rows->most[row] = highest;
    if (faded != 1.0f)
        for (int i = 0; i < size; i += LANES) F_STORE(sums + i, F_MUL(F_LOAD(sums + i), F_SET(faded)));
}

/* ---- packing ---- */

/* How a group is told in 4 bits: as least + scale * code, both numbers to be stored in 16 bits, and codes 0 to 15. Of
 * several lines the one with the least squared error: from the group's lowest number to its highest in 15 steps and in
 * fewer, for what was in 4 bits before need not use all codes, and in 15 steps over a part of that range. */
TARGET static Line NAME(round_group)(const float *w, uint8_t *codes) {
    float low = w[0], high = w[0], least = INFINITY;
    for (int k = 1; k < GROUP; k++) {
        low = fminf(low, w[k]);
        high = fmaxf(high, w[k]);
    }
    Line chosen = {.scale = 0.0f, .least = rounded_bfloat16(low)};
    for (int candidate = 0; candidate < 16; candidate++) {
        const float steps = candidate < 8 ? (float)(15 - candidate) : 15.0f, range = high - low;
        const float cut = candidate < 8 ? 0.0f : 0.02f * (float)(candidate - 7);
        const Line line = {
            .scale = rounded_bfloat16(range * (1.0f - 2.0f * cut) / steps),
            .least = rounded_bfloat16(low + cut * range),
        };
        if (!(line.scale > 1e-30f)) continue;
        const float inverse = 1.0f / line.scale;
        VF error = F_SET(0.0f);
        for (int k = 0; k < GROUP; k += LANES) {
            VF x = F_SUB(F_LOAD(w + k), F_SET(line.least)), q = I_TO_F(F_TO_I(F_MUL(x, F_SET(inverse))));
            q = F_MAX(F_MIN(q, F_SET(15.0f)), F_SET(0.0f));
            VF off = F_SUB(x, F_MUL(q, F_SET(line.scale)));
            error = F_FMA(off, off, error);
        }
        const float sum = F_SUM(error);
        if (sum < least) {
            least = sum;
            chosen = line;
        }
    }
    for (int k = 0; k < GROUP; k++)
        codes[k] = chosen.scale == 0.0f
                       ? 0
                       : (uint8_t)fmaxf(0.0f, fminf(15.0f, rintf((w[k] - chosen.least) / chosen.scale)));
    return chosen;
}

/* Numbers of a block, without their signs, that do not have one of eight upper bytes up to the highest, or 0 in place of
 * the lowest of these; they get codes, and others none. */
INLINE TARGET int NAME(give_codes)(const uint16_t *numbers, int count, int highest, int with_zero, uint8_t *codes) {
    const int lowest = highest - CODES + 1 + with_zero;
    int missed = 0;
    for (int i = 0; i < count; i++) {
        const int upper = numbers[i] >> 8 & 0x7f, code = upper - lowest + with_zero;
        const int is_missed = with_zero ? upper && code <= 0 : code < 0;
        codes[i] = (uint8_t)(is_missed ? 0xff : with_zero && !upper ? 0 : code);
        missed += is_missed;
    }
    return missed;
}

/* Codes by the eight most frequent upper bytes, which are returned in `upper`. */
static void NAME(give_frequent_codes)(const uint16_t *numbers, int count, uint8_t *upper, uint8_t *codes) {
    int found[128] = {0};
    uint8_t code_of[128];
    memset(code_of, 0xff, sizeof code_of);
    for (int i = 0; i < count; i++) found[numbers[i] >> 8 & 0x7f]++;
    for (int code = 0; code < CODES; code++) {
        int most = 0;
        for (int i = 1; i < 128; i++) most = found[i] > found[most] ? i : most;
        upper[code] = (uint8_t)most;
        if (found[most] >= 0) code_of[most] = (uint8_t)code;
        found[most] = -1;
    }
    for (int i = 0; i < count; i++) codes[i] = code_of[numbers[i] >> 8 & 0x7f];
}

/* A panel in 12 bits: rows in bfloat16. */
TARGET static void NAME(pack_in_12_bits)(const Packing *given, int panel) {
    const int columns = given->columns, steps = padded_to_groups(columns) / 2, begin = panel * MOST_WIDTH;
    const int rows = given->rows - begin < MOST_WIDTH ? given->rows - begin : MOST_WIDTH;
    uint8_t *to = given->panels + panel * bytes_in_12_bits(steps);
    uint32_t *exceptions = given->exceptions + (int64_t)panel * given->capacity;
    int found = 0;
    for (int step = 0; step < steps; step += STRETCH) {
        const int count = steps - step < STRETCH ? steps - step : STRETCH, all = count * MOST_WIDTH * 2;
        const int left = columns - 2 * step < 2 * count ? columns - 2 * step : 2 * count;
        uint32_t pairs[STRETCH * MOST_WIDTH];
        uint16_t *numbers = (uint16_t *)pairs, highest = 0;
        uint8_t codes[STRETCH * MOST_WIDTH * 2];
        if (rows < MOST_WIDTH) memset(pairs, 0, sizeof pairs);
        for (int r = 0; r < rows; r++) {
            uint32_t row[STRETCH] = {0};
            memcpy(row, given->halves + (int64_t)(begin + r) * columns + 2 * step, sizeof(uint16_t) * (size_t)left);
            for (int i = 0; i < count; i++) pairs[i * MOST_WIDTH + r] = row[i];
        }
        Block *block = (Block *)to;
        *block = (Block){.first = found};
        int zeros = 0;
        for (int i = 0; i < all; i++) {
            const uint16_t upper = numbers[i] >> 8 & 0x7f;
            highest = upper > highest ? upper : highest;
            zeros += !upper;
        }
        const int with_zero = zeros > all / 512 || highest < CODES;
        int missed = with_zero ? NAME(give_codes)(numbers, all, highest, 1, codes) : NAME(give_codes)(numbers, all, highest, 0, codes);
        for (int code = 0; code < CODES; code++)
            block->upper[code] = (uint8_t)(with_zero && !code ? 0 : highest - CODES + 1 + code);
        if (missed > all / 256) NAME(give_frequent_codes)(numbers, all, block->upper, codes);
        for (int code = 0; code < CODES; code++) block->upper[CODES + code] = block->upper[code] | 0x80;
        to += sizeof *block;
        for (int i = 0; i < count; i++, to += STEP_IN_12_BITS) {
            const uint16_t *own = numbers + i * 2 * MOST_WIDTH;
            uint8_t *code = codes + i * 2 * MOST_WIDTH, none = 0;
            for (int j = 0; j < 2 * MOST_WIDTH; j++) none |= code[j];
            for (int j = 0; none == 0xff && j < 2 * MOST_WIDTH; j++) {
                if (code[j] != 0xff) continue;
                if (found < given->capacity) exceptions[found] = (uint32_t)(i * 2 * MOST_WIDTH + j) << 16 | own[j];
                found++;
                code[j] = 0;
            }
            for (int j = 0; j < 2 * MOST_WIDTH; j++) code[j] |= (uint8_t)(own[j] >> 15 << 3);
            for (int j = 0; j < 2 * MOST_WIDTH; j += 8)
                for (int k = 0; k < 8; k++) to[place_in_step(j) + k] = (uint8_t)own[j + k];
            for (int j = 0; j < MOST_WIDTH; j += 8)
                for (int k = 0; k < 8; k++)
                    to[2 * MOST_WIDTH + place_in_step(j) + k] = (uint8_t)(code[j + k] | code[MOST_WIDTH + j + k] << 4);
        }
        block->count = found - block->first;
    }
    given->found[panel] = found;
}

/* 32 rows of a weight to one panel; rows and columns that are missing count as zeros. */
TARGET static void NAME(pack)(const Packing *given, int panel) {
    const int columns = given->columns, padded = padded_to_groups(columns), begin = panel * PANEL;
    const int rows = given->rows - begin < PANEL ? given->rows - begin : PANEL;
    const Matrix matrix = {.bits = given->bits, .width = PANEL, .depth = padded};
    if (given->bits == 12) {
        NAME(pack_in_12_bits)(given, panel);
        return;
    }
    uint8_t *to = given->panels + panel * panel_bytes(&matrix);
    if (given->bits == 16) {
        uint16_t *halves = (uint16_t *)to;
        memset(halves, 0, sizeof *halves * (size_t)padded * PANEL);
        for (int r = 0; r < rows; r++) {
            const uint16_t *row = given->halves + (int64_t)(begin + r) * columns;
            for (int k = 0; k < columns; k++) halves[k / 2 * 2 * PANEL + 2 * r + k % 2] = row[k];
        }
        return;
    }
    if (given->bits == 8) {
        uint8_t *bytes = to + sizeof(float) * PANEL;
        memset(to, 0, sizeof(float) * PANEL);
        memset(bytes, 128, (size_t)padded * PANEL);
        memcpy(to, given->scales + begin, sizeof(float) * (size_t)rows);
        for (int r = 0; r < rows; r++) {
            const int8_t *row = given->bytes + (int64_t)(begin + r) * columns;
            for (int k = 0; k < columns; k++) bytes[k / 4 * 4 * PANEL + 4 * r + k % 4] = (uint8_t)(row[k] + 128);
        }
        return;
    }
    for (int group = 0; group < padded / GROUP; group++) {
        uint8_t *block = to + (int64_t)group * GROUP_OF_NIBBLES, *nibbles = block + 2 * sizeof(uint16_t) * PANEL;
        const int left = columns - group * GROUP < GROUP ? columns - group * GROUP : GROUP;
        memset(block, 0, GROUP_OF_NIBBLES);
        for (int r = 0; r < PANEL; r++) {
            float held[GROUP] = {0};
            uint8_t codes[GROUP];
            if (r < rows)
                memcpy(held, given->weight + (int64_t)(begin + r) * columns + group * GROUP, sizeof(float) * (size_t)left);
            for (int k = left; k < GROUP; k++) held[k] = held[0];
            const Line line = NAME(round_group)(held, codes);
            const uint16_t scale = to_bfloat16(line.scale), least = to_bfloat16(line.least);
            memcpy(block + sizeof scale * (size_t)r, &scale, sizeof scale);
            memcpy(block + sizeof least * (size_t)(PANEL + r), &least, sizeof least);
            for (int k = 0; k < GROUP; k++) {
                const int value = codes[k], place = k / 4 * 2 * PANEL + 4 * (r % (PANEL / 2)) + k % 4;
                nibbles[place] |= (uint8_t)(r < PANEL / 2 ? value : value << 4);
            }
        }
    }
}

/* ---- gated delta rules ---- */

/* `parts` vectors of the values of one head, a constant where this is inlined, for one row. */
INLINE TARGET void NAME(recur_values)(
    const float *before, float *after, const float *query, const float *key, const float *decay, const float *value,
    const float beta, float *out, const int keys, const int values, const int adds, const int parts) {
    VF found[4], delta[4];
    for (int part = 0; part < parts; part++) found[part] = F_SET(0.0f);
    for (int i = 0; i < (adds ? 0 : keys); i++) {
        const VF read = F_SET(key[i] * decay[i]);
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++)
            found[part] = F_FMA(F_LOAD(before + (int64_t)i * values + part * LANES), read, found[part]);
    }
    for (int part = 0; part < parts; part++) {
        delta[part] = F_MUL(F_SUB(F_LOAD(value + part * LANES), found[part]), F_SET(beta));
        found[part] = F_SET(0.0f);
    }
    for (int i = 0; i < keys; i++) {
        const VF faded = F_SET(decay[i]), written = F_SET(key[i]), asked = F_SET(query[i]);
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            const int64_t place = (int64_t)i * values + part * LANES;
            const VF now = F_FMA(written, delta[part], F_MUL(faded, F_LOAD(before + place)));
            F_STORE(after + place, now);
            found[part] = F_FMA(asked, now, found[part]);
        }
    }
    for (int part = 0; part < parts; part++) F_STORE(out + part * LANES, found[part]);
}

/* 1 over the length of a vector, as `transformers` computes it, or 1. */
INLINE float NAME(inverse_length)(const float *x, int count, int normalizes) {
    float sum = 0.0f;
    if (!normalizes) return 1.0f;
    for (int i = 0; i < count; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum + 1e-6f);
}

/* All rows of one head of one request. */
TARGET static void NAME(recur)(const DeltaRule *rule, int piece) {
    const int keys = rule->keys, values = rule->values, heads = rule->heads, request = piece / heads, head = piece % heads;
    const int64_t place = (int64_t)piece * keys * values;
    const float *before = rule->before + place;
    float query[MOST_SIZE], key[MOST_SIZE], decay[MOST_SIZE];
    for (int row = 0; row < rule->rows; row++) {
        const int64_t number = (int64_t)request * rule->rows + row, own = number * heads + head;
        const int64_t given = (number * rule->shared + head / (heads / rule->shared)) * keys;
        const float *x = rule->query + given, *k = rule->key + given, *value = rule->value + own * values;
        const float asked = rule->adds ? 1.0f : NAME(inverse_length)(x, keys, rule->normalizes) / sqrtf((float)keys);
        const float written = NAME(inverse_length)(k, keys, rule->normalizes), beta = rule->beta[own];
        float *after = rule->after[row] + place, *out = rule->out + own * values;
        int j = 0;
        for (int i = 0; i < keys; i++) {
            query[i] = x[i] * asked;
            key[i] = k[i] * written;
            decay[i] = rule->decay[own * rule->decays + (rule->decays > 1 ? i : 0)];
        }
        for (; j + 4 * LANES <= values; j += 4 * LANES)
            NAME(recur_values)(before + j, after + j, query, key, decay, value + j, beta, out + j, keys, values, rule->adds, 4);
        for (; j + LANES <= values; j += LANES)
            NAME(recur_values)(before + j, after + j, query, key, decay, value + j, beta, out + j, keys, values, rule->adds, 1);
        for (; j < values; j++) {
            float found = 0.0f, delta;
            for (int i = 0; i < (rule->adds ? 0 : keys); i++) found += key[i] * (decay[i] * before[i * values + j]);
            delta = (value[j] - found) * beta;
            found = 0.0f;
            for (int i = 0; i < keys; i++) {
                after[i * values + j] = decay[i] * before[i * values + j] + key[i] * delta;
                found += query[i] * after[i * values + j];
            }
            out[j] = found;
        }
        before = after;
    }
}

static const Ways NAME(ways) = {
    .quantize = NAME(quantize), .norm = NAME(norm), .add = NAME(add), .gate = NAME(gate), .rotate = NAME(rotate),
    .products = {NAME(product), LANES == 16 ? product_of_numbers_bfloat16 : NULL, NAME(product_of_numbers)},
    .halve = LANES == 16 ? halve_bfloat16 : NULL, .attend = NAME(attend_one), .join = NAME(join),
    .average = NAME(average), .softmax = NAME(softmax), .pack = NAME(pack), .unpack = UNPACK, .recur = NAME(recur),
};

#undef NAME
#undef HAS_VNNI

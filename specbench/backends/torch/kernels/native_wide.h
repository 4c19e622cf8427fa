/* Products of weights in bfloat16 or float32. Included by native.c once for each way to multiply, with its macros; for
 * ONLY_HALVES both weights and rows are in bfloat16.
 *
 * A step is what a panel holds of an input in float32, or of two in bfloat16. Sums begin anew after every STRETCH steps
 * and are then added up, so that their error hardly grows with the number of inputs; so many steps of a panel stay in the
 * nearest cache, too, while all rows are multiplied by them.
 */

#if ONLY_HALVES
/* Rounded to nearest, with ties to even. */
TARGET static void NAME(halve)(const float *x, uint16_t *to, int count) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) F_STORE_HALVES(to + i, F_LOAD(x + i));
    for (; i < count; i++) to[i] = to_bfloat16(x[i]);
}
#endif

/* `count` rows times `parts` vectors of outputs: they, and whether weights are in bfloat16, are constants where this is
 * inlined. What is read next is fetched on the way, `further` bytes ahead after every step. */
INLINE TARGET void NAME(tile_of_numbers)(
    const char *weights, const int64_t apart, const int steps, const char *x, const int64_t row, const char *fetch,
    const int64_t further, float *totals, const int width, const int halves, const int parts, const int count) {
    VF sums[TILE_NUMBERS][MOST_PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) sums[r][part] = F_SET(0.0f);
    }
    for (int step = 0; step < steps; step++, weights += apart, fetch += further) {
#pragma GCC unroll 4
        for (int bytes = 0; bytes < 4 * MOST_WIDTH; bytes += 64) _mm_prefetch(fetch + bytes, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            VI weight = I_LOAD(weights + part * LANES * 4);
#if ONLY_HALVES
            (void)halves;
#pragma GCC unroll 8
            for (int r = 0; r < count; r++)
                sums[r][part] = DOT_HALVES(sums[r][part], weight, I_SET(four_of(x + r * row + 4 * step)));
#else
            if (halves) {
                VF low = F_OF_I(I_SHIFT_UP16(weight)), high = F_OF_I(I_AND(weight, I_SET((int)0xffff0000)));
#pragma GCC unroll 8
                for (int r = 0; r < count; r++) {
                    const float *pair = (const float *)(x + r * row) + 2 * step;
                    sums[r][part] = F_FMA(low, F_SET(pair[0]), sums[r][part]);
                    sums[r][part] = F_FMA(high, F_SET(pair[1]), sums[r][part]);
                }
            } else {
#pragma GCC unroll 8
                for (int r = 0; r < count; r++)
                    sums[r][part] = F_FMA(F_OF_I(weight), F_SET(((const float *)(x + r * row))[step]), sums[r][part]);
            }
#endif
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            float *total = totals + r * width + part * LANES;
            F_STORE(total, F_ADD(F_LOAD(total), sums[r][part]));
        }
    }
}

/* Panel number `panel` of the outputs, of all rows; `out` points to the first row's first output of the matrix. */
TARGET static void NAME(product_of_numbers)(
    const Matrix *matrix, const Given *x, int rows, int panel, float *out, int64_t stride) {
    const int width = matrix->width, begin = panel * width, halves = ONLY_HALVES || matrix->bits == 16;
    const int left = matrix->outputs - begin < width ? matrix->outputs - begin : width;
    const int steps = halves ? matrix->depth / 2 : matrix->depth;
    const int64_t apart = (int64_t)sizeof(float) * width, row = (int64_t)x->padded * number_bytes(x->form);
    const int most = halves ? TILE_WIDENED : TILE_NUMBERS, step_bytes = number_bytes(x->form) * (halves ? 2 : 1);
    const char *weights = (const char *)matrix->panels + panel * steps * apart;
    _Alignas(64) float totals[ROWS_TOGETHER * MOST_WIDTH];
    for (int from = 0; from < rows; from += ROWS_TOGETHER) {
        const int some = rows - from < ROWS_TOGETHER ? rows - from : ROWS_TOGETHER, tiles = (some + most - 1) / most;
        memset(totals, 0, sizeof(float) * (size_t)(some * width));
        for (int r = 0; matrix->bias && r < some; r++)
            memcpy(totals + r * width, matrix->bias + begin, sizeof(float) * (size_t)left);
        for (int step = 0; step < steps; step += STRETCH) {
            const int count = steps - step < STRETCH ? steps - step : STRETCH;
            const char *here = weights + step * apart, *next = here + count * apart;
            for (int lane = 0, parts; lane < width; lane += parts * LANES) {
                const int vectors = (width - lane) / LANES;
                parts = vectors >= 4 ? 4 : vectors >= 2 ? 2 : 1;
                for (int tile = 0, first = 0, taken; tile < tiles; tile++, first += taken) {
                    taken = (some - first + tiles - tile - 1) / (tiles - tile);
                    /* Behind the first tile, weights are in the nearest cache: the others fetch what comes later. */
                    const char *fetch = tile ? next + AHEAD + (tile - 1) * (count / 4) * apart : here + AHEAD;
                    const int64_t further = tile ? apart / 4 : apart;
                    const char *given = x->numbers + (from + first) * row + (int64_t)step * step_bytes;
                    float *to = totals + first * width + lane;
#define TILE(p, n)                                                                                                   \
    case 8 * p + n:                                                                                                  \
        if (n <= TILE_NUMBERS && !halves)                                                                            \
            NAME(tile_of_numbers)(here + 4 * lane, apart, count, given, row, fetch, further, to, width, 0, p,        \
                                  n <= TILE_NUMBERS ? n : 1);                                                        \
        else if (n <= TILE_WIDENED)                                                                                  \
            NAME(tile_of_numbers)(here + 4 * lane, apart, count, given, row, fetch, further, to, width, 1, p,        \
                                  n <= TILE_WIDENED ? n : 1);                                                        \
        break;
#define TILES(n) TILE(4, n) TILE(2, n) TILE(1, n)
                    switch (8 * parts + taken) {
                        TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
                    }
#undef TILES
#undef TILE
                }
            }
        }
        for (int r = 0; r < some; r++)
            memcpy(out + (from + r) * stride + begin, totals + r * width, sizeof(float) * (size_t)left);
    }
}

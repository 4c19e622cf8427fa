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

/* What a tile of rows is multiplied by, from step to step of one stretch of a panel. */
typedef struct {
    const char *weights, *fetch; /* `apart` bytes from one step to the next; what is fetched for later, `further` bytes */
    int64_t apart, further;
    int fetched; /* bytes in every step: whole lines, so that some may be fetched again; may be 0 */
    int nearer;  /* bytes in every step in 12 bits fetched from the second cache into the first; may be 0 */
    const char *x; /* `row` bytes from one row to the next */
    int64_t row;
    float *totals; /* `width` numbers from one row to the next */
    int width, steps;
    const Block *block; /* in 12 bits, where its weights are not unpacked before */
    const uint32_t *exceptions;
} NAME(Tile);

/* `count` rows times `parts` vectors of outputs: they, and whether weights are in bfloat16 or in 12 bits, are constants
 * where this is inlined. */
INLINE TARGET void NAME(multiply_tile)(
    const NAME(Tile) *tile, const int halves, const int in_12_bits, const int parts, const int count) {
    const char *weights = tile->weights, *fetch = tile->fetch, *x = tile->x;
    const int64_t row = tile->row;
    VF sums[TILE_NUMBERS][MOST_PARTS];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) {
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) sums[r][part] = F_SET(0.0f);
    }
#if UNPACKS_STEPS
    const VI upper = in_12_bits ? upper_of(tile->block) : I_SET(0);
    const uint32_t *exception = in_12_bits ? tile->exceptions + tile->block->first : NULL;
    const uint32_t *end = in_12_bits ? exception + tile->block->count : NULL;
#endif
    for (int step = 0; step < tile->steps; step++, weights += tile->apart, fetch += tile->further) {
        VI loaded[MOST_PARTS];
        if (in_12_bits) {
            for (int bytes = 0; bytes < tile->fetched; bytes += 64) _mm_prefetch(fetch + bytes, _MM_HINT_T1);
            for (int bytes = 0; bytes < tile->nearer; bytes += 64)
                _mm_prefetch(weights + NEARER + bytes, _MM_HINT_T0);
#if UNPACKS_STEPS
            unpack_step(weights, upper, loaded);
            for (; __builtin_expect(exception < end && step_of(*exception) == step, 0); exception++)
                put_exception(loaded, *exception);
#endif
        } else {
#pragma GCC unroll 4
            for (int bytes = 0; bytes < tile->fetched; bytes += 64) _mm_prefetch(fetch + bytes, _MM_HINT_T0);
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) loaded[part] = I_LOAD(weights + part * LANES * 4);
        }
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            const VI weight = loaded[part];
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
            float *total = tile->totals + r * tile->width + part * LANES;
            F_STORE(total, F_ADD(F_LOAD(total), sums[r][part]));
        }
    }
}

/* The same with what are constants there. */
TARGET static void NAME(multiply_rows)(const NAME(Tile) *tile, int halves, int parts, int count) {
#define TILE(p, n)                                                                         \
    case 8 * p + n:                                                                        \
        if (n <= TILE_NUMBERS && !halves)                                                  \
            NAME(multiply_tile)(tile, 0, 0, p, n <= TILE_NUMBERS ? n : 1);                 \
        else if (n <= TILE_WIDENED && UNPACKS_STEPS && p == 4 && tile->block)              \
            NAME(multiply_tile)(tile, 1, UNPACKS_STEPS, p, n <= TILE_WIDENED ? n : 1);     \
        else if (n <= TILE_WIDENED)                                                        \
            NAME(multiply_tile)(tile, 1, 0, p, n <= TILE_WIDENED ? n : 1);                 \
        break;
#define TILES(n) TILE(4, n) TILE(2, n) TILE(1, n)
    switch (8 * parts + count) {
        TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
    }
#undef TILES
#undef TILE
}

/* Panel number `panel` of the outputs, of all rows; `out` points to the first row's first output of the matrix. */
TARGET static void NAME(product_of_numbers)(
    const Matrix *matrix, const Given *x, int rows, int panel, float *out, int64_t stride) {
    const int width = matrix->width, begin = panel * width, is_short = matrix->bits == 12;
    const int halves = ONLY_HALVES || matrix->bits <= 16;
    const int left = matrix->outputs - begin < width ? matrix->outputs - begin : width;
    const int steps = halves ? matrix->depth / 2 : matrix->depth;
    const int64_t apart = (int64_t)sizeof(float) * width, row = (int64_t)x->padded * number_bytes(x->form);
    const int64_t read = is_short ? STEP_IN_12_BITS : apart; /* bytes of a step */
    const int most = halves ? TILE_WIDENED : TILE_NUMBERS, step_bytes = number_bytes(x->form) * (halves ? 2 : 1);
    const char *weights = (const char *)matrix->panels + panel * panel_bytes(matrix);
    _Alignas(64) float totals[ROWS_TOGETHER * MOST_WIDTH];
    _Alignas(64) uint16_t unpacked[2 * STRETCH * MOST_WIDTH];
    for (int from = 0; from < rows; from += ROWS_TOGETHER) {
        const int some = rows - from < ROWS_TOGETHER ? rows - from : ROWS_TOGETHER, tiles = (some + most - 1) / most;
        memset(totals, 0, sizeof(float) * (size_t)(some * width));
        for (int r = 0; matrix->bias && r < some; r++)
            memcpy(totals + r * width, matrix->bias + begin, sizeof(float) * (size_t)left);
        for (int step = 0; step < steps; step += STRETCH) {
            const int count = steps - step < STRETCH ? steps - step : STRETCH;
            const char *here = weights + (is_short ? bytes_in_12_bits(step) : step * apart);
            const char *next = here + (is_short ? bytes_in_12_bits(count) : count * apart);
            NAME(Tile) tile = {.weights = here, .apart = apart, .row = row, .width = width, .steps = count};
            if (is_short && UNPACKS_STEPS && tiles <= TILES_UNPACKING) {
                tile.block = (const Block *)here;
                tile.exceptions = matrix->exceptions;
                tile.weights = here + sizeof(Block);
                tile.apart = read;
            } else if (is_short) {
                UNPACK((const Block *)here, matrix->exceptions, count, unpacked);
                tile.weights = (const char *)unpacked;
            }
            const char *of_lanes = tile.weights;
            for (int lane = 0, parts; lane < width; lane += parts * LANES) {
                const int vectors = (width - lane) / LANES;
                parts = vectors >= 4 ? 4 : vectors >= 2 ? 2 : 1;
                tile.weights = of_lanes + 4 * lane;
                for (int number = 0, first = 0, taken; number < tiles; number++, first += taken) {
                    taken = (some - first + tiles - number - 1) / (tiles - number);
                    tile.x = x->numbers + (from + first) * row + (int64_t)step * step_bytes;
                    tile.totals = totals + first * width + lane;
                    /* Behind the first tile, weights are in the nearest cache: the others fetch what comes later. Tiles in
                     * 12 bits fetch the next block, a part each. */
                    if (is_short) {
                        tile.fetch = next + number * (bytes_in_12_bits(count) / tiles);
                        tile.further = read / tiles;
                        tile.fetched = tiles == 1 ? is_intel * STEP_IN_12_BITS : tiles == 2 ? 128 : 64;
                        tile.nearer = tiles > 1 || !tile.block ? 0 : is_intel * STEP_IN_12_BITS;
                    } else {
                        tile.fetch = number ? next + AHEAD + (number - 1) * (count / 4) * read : here + AHEAD;
                        tile.further = number ? read / 4 : read;
                        tile.fetched = 4 * MOST_WIDTH;
                    }
                    NAME(multiply_rows)(&tile, halves, parts, taken);
                }
            }
        }
        for (int r = 0; r < some; r++)
            memcpy(out + (from + r) * stride + begin, totals + r * width, sizeof(float) * (size_t)left);
    }
}

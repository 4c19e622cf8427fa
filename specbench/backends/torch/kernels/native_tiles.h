/* Products of weights in 8 and 4 bits by tiles (AMX): up to 16 rows times 16 outputs, of 64 inputs at once, or 32 where these
 * share a scale. Panels are read as they are, 4 bits unpacked before. Sums of bytes are exact, and what follows them in
 * float32 has the order of native.h, so results have the same bits as those of vectors. Included by native.h, whose macros
 * it uses, for AVX-512.
 *
 * A compiler does not know what tiles read: `settle` has it write to memory what is there for them.
 */

enum {
    TILE_ROWS = 16,
    ROW_OF_TILE = 64,     /* bytes */
    INPUTS_AT_ONCE = 512, /* of bytes with scales of outputs: 16 KiB of a panel stay in the nearest cache */
    GROUPS_AT_ONCE = 8,
};

INLINE void settle(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

typedef struct {
    uint8_t palette, first_row, unused[14];
    uint16_t bytes[16]; /* of a row of each tile */
    uint8_t rows[16];
} TileShapes;

static _Thread_local int shaped; /* how tiles of this thread are shaped, 0 if they are not */

/* Tiles 0 to 3 take sums, 4 and 5 rows, and 6 and 7 weights; 4 inputs of a row are multiplied by a row of weights. */
static WITH_TILES void shape_tiles(int rows, int inputs) {
    const int shape = rows << 8 | inputs;
    if (shaped == shape) return;
    _Alignas(64) TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.rows[i] = (uint8_t)(i < 6 ? rows : inputs / 4);
        shapes.bytes[i] = (uint16_t)(i == 4 || i == 5 ? inputs : ROW_OF_TILE);
    }
    settle(&shapes);
    _tile_loadconfig(&shapes);
    shaped = shape;
}

/* To be called before a thread goes back to others, who may use tiles too. */
static WITH_TILES void leave_tiles(void) {
    if (shaped) _tile_release();
    shaped = 0;
}

/* Rows in blocks of one size. The last block begins earlier where rows are missing, and has some of the one before again. */
typedef struct {
    int first, rows, count, size;
} Blocks;

INLINE Blocks blocks_of(int first, int rows) {
    const int count = (rows + TILE_ROWS - 1) / TILE_ROWS;
    return (Blocks){.first = first, .rows = rows, .count = count, .size = (rows + count - 1) / count};
}

INLINE int row_of(const Blocks *blocks, int block) {
    const int begin = block * blocks->size, last = blocks->rows - blocks->size;
    return blocks->first + (begin < last ? begin : last);
}

/* 64 inputs of one block or two, whose rows are `apart` bytes from each other, times both halves of a panel. */
INLINE WITH_TILES void add_to_tiles(const uint8_t *weights, const int8_t *const *rows, int64_t apart, int both) {
    _tile_loadd(6, weights, 4 * PANEL);
    _tile_loadd(4, rows[0], apart);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, weights + ROW_OF_TILE, 4 * PANEL);
    _tile_dpbsud(1, 4, 7);
    if (!both) return;
    _tile_loadd(5, rows[1], apart);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
}

/* The last 32 inputs, filled up to 64. */
static WITH_TILES void add_rest_to_tiles(const uint8_t *weights, const int8_t *const *rows, int64_t apart, int size, int both) {
    _Alignas(64) uint8_t filled[16 * 4 * PANEL] = {0};
    _Alignas(64) int8_t given[2][TILE_ROWS * ROW_OF_TILE] = {{0}};
    memcpy(filled, weights, PANEL * GROUP);
    for (int block = 0; block <= both; block++)
        for (int r = 0; r < size; r++) memcpy(given[block] + r * ROW_OF_TILE, rows[block] + r * apart, GROUP);
    settle(filled);
    settle(given);
    add_to_tiles(filled, (const int8_t *const[]){given[0], given[1]}, ROW_OF_TILE, both);
}

/* Sums of bytes with a scale for each output; of row r of a block they are at TILE_ROWS * block + r. */
static WITH_TILES void sum_bytes(const uint8_t *panel, const Given *x, const Blocks *blocks, VF sums[][NAME(PARTS)]) {
    const float *scales = (const float *)panel;
    const uint8_t *weights = panel + sizeof(float) * PANEL;
    const int64_t padded = x->padded, apart = sizeof(*sums);
    for (int k = 0; k < padded; k += INPUTS_AT_ONCE) {
        const int end = padded - k < INPUTS_AT_ONCE ? (int)padded : k + INPUTS_AT_ONCE;
        for (int block = 0; block < blocks->count; block += 2) {
            const int both = block + 1 < blocks->count;
            const int8_t *rows[] = {
                x->bytes + row_of(blocks, block) * padded + k, x->bytes + row_of(blocks, block + both) * padded + k};
            VF *to = sums[TILE_ROWS * block], *next = sums[TILE_ROWS * (block + both)];
            if (k) {
                _tile_loadd(0, to, apart);
                _tile_loadd(1, to + 1, apart);
                _tile_loadd(2, next, apart);
                _tile_loadd(3, next + 1, apart);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int at = k; at < end; at += ROW_OF_TILE, rows[0] += ROW_OF_TILE, rows[1] += ROW_OF_TILE) {
                const uint8_t *own = weights + (int64_t)at * PANEL;
                if (!blocks->first && !block) fetch_ahead(own, ROW_OF_TILE * PANEL / 64, blocks->rows, 0);
                if (end - at < ROW_OF_TILE)
                    add_rest_to_tiles(own, rows, padded, blocks->size, both);
                else
                    add_to_tiles(own, rows, padded, both);
            }
            _tile_stored(0, to, apart);
            _tile_stored(1, to + 1, apart);
            if (!both) continue;
            _tile_stored(2, next, apart);
            _tile_stored(3, next + 1, apart);
        }
    }
    for (int block = 0; block < blocks->count; block++)
        for (int r = 0; r < blocks->size; r++)
            for (int part = 0; part < NAME(PARTS); part++) {
                VF *sum = &sums[TILE_ROWS * block + r][part];
                VI zero = I_SET(ZERO_OF_BYTES * x->totals[row_of(blocks, block) + r]);
                *sum = F_MUL(I_TO_F(_mm512_sub_epi32(I_LOAD(sum), zero)), F_LOAD(scales + part * LANES));
            }
}

/* What some groups of a panel have in common, and where their weights are, in 4 bits unpacked. */
typedef struct {
    VF scales[GROUPS_AT_ONCE][NAME(PARTS)], least[GROUPS_AT_ONCE][NAME(PARTS)];
    const uint8_t *weights[GROUPS_AT_ONCE];
    _Alignas(64) uint8_t unpacked[GROUPS_AT_ONCE][PANEL * GROUP];
} Groups;

INLINE WITH_TILES void take_groups(
    Groups *groups, const uint8_t *panel, int count, int rows, const int are_nibbles, const int float16, int fetches) {
    const int bytes = are_nibbles ? GROUP_OF_NIBBLES : GROUP_OF_BYTES;
    for (int g = 0; g < count; g++, panel += bytes) {
        const uint8_t *weights = panel + (are_nibbles ? 2 : 1) * sizeof(uint16_t) * PANEL;
        if (fetches) fetch_ahead(panel, bytes / 64, rows, are_nibbles);
        for (int part = 0; part < NAME(PARTS); part++) {
            const uint16_t *own = (const uint16_t *)panel + part * LANES;
            groups->scales[g][part] = float16 ? F_OF_FLOAT16(own) : F_OF_BFLOAT16(own);
            if (are_nibbles) groups->least[g][part] = float16 ? F_OF_FLOAT16(own + PANEL) : F_OF_BFLOAT16(own + PANEL);
        }
        groups->weights[g] = are_nibbles ? groups->unpacked[g] : weights;
        for (int at = 0; are_nibbles && at < PANEL * GROUP / 2; at += 4 * LANES) {
            const VI pair = I_LOAD(weights + at), half = I_SET(0x0f0f0f0f);
            _mm512_store_si512(groups->unpacked[g] + 2 * at, I_AND(pair, half));
            _mm512_store_si512(groups->unpacked[g] + 2 * at + 4 * LANES, I_AND(I_SHIFT4(pair), half));
        }
    }
    settle(groups);
}

/* Sums of one group, by tiles whose numbers are constants. */
#define SUM_GROUP(low, high, own, weights, rows, apart, to) \
    _tile_zero(low);                                        \
    _tile_zero(high);                                       \
    _tile_loadd(own, rows, apart);                          \
    _tile_loadd(6, weights, 4 * PANEL);                     \
    _tile_dpbsud(low, own, 6);                              \
    _tile_loadd(7, (weights) + ROW_OF_TILE, 4 * PANEL);     \
    _tile_dpbsud(high, own, 7);                             \
    _tile_stored(low, to, sizeof(int32_t) * PANEL);         \
    _tile_stored(high, (to) + LANES, sizeof(int32_t) * PANEL)

/* The same in groups, times their scales. */
INLINE WITH_TILES void sum_groups(
    const uint8_t *panel, const Given *x, const Blocks *blocks, VF sums[][NAME(PARTS)], const int are_nibbles,
    const int float16) {
    const int all = x->padded / GROUP, bytes = are_nibbles ? GROUP_OF_NIBBLES : GROUP_OF_BYTES;
    Groups groups;
    _Alignas(64) int32_t found[GROUPS_AT_ONCE][TILE_ROWS * PANEL];
    memset(sums, 0, sizeof(*sums) * (size_t)(TILE_ROWS * blocks->count));
    for (int first = 0; first < all; first += GROUPS_AT_ONCE, panel += GROUPS_AT_ONCE * bytes) {
        const int count = all - first < GROUPS_AT_ONCE ? all - first : GROUPS_AT_ONCE;
        take_groups(&groups, panel, count, blocks->rows, are_nibbles, float16, !blocks->first);
        for (int block = 0; block < blocks->count; block++) {
            const int begin = row_of(blocks, block);
            const int8_t *rows = x->bytes + (int64_t)begin * x->padded + first * GROUP;
            for (int g = 0; g < count; g++, rows += GROUP) {
                if (g % 2) {
                    SUM_GROUP(2, 3, 5, groups.weights[g], rows, x->padded, found[g]);
                } else {
                    SUM_GROUP(0, 1, 4, groups.weights[g], rows, x->padded, found[g]);
                }
            }
            for (int r = 0; r < blocks->size; r++) {
                const int32_t *totals = x->sums + (int64_t)(begin + r) * all + first;
                VF *own = sums[TILE_ROWS * block + r], sum[NAME(PARTS)] = {own[0], own[1]};
                for (int g = 0; g < count; g++)
#pragma GCC unroll 2
                    for (int part = 0; part < NAME(PARTS); part++) {
                        VI bytes_ = I_LOAD(found[g] + r * PANEL + part * LANES);
                        if (!are_nibbles) bytes_ = _mm512_sub_epi32(bytes_, I_SET(ZERO_OF_BYTES * totals[g]));
                        sum[part] = F_FMA(I_TO_F(bytes_), groups.scales[g][part], sum[part]);
                        if (are_nibbles) sum[part] = F_FMA(F_SET((float)totals[g]), groups.least[g][part], sum[part]);
                    }
                own[0] = sum[0];
                own[1] = sum[1];
            }
        }
    }
}

/* One panel, with `left` outputs, of all rows; `form` is the number of bits, one more with scales in float16. */
static WITH_TILES void product_of_tiles(
    const uint8_t *panel, int form, const Given *x, int rows, const float *bias, float *out, int64_t stride, int left) {
    VF sums[ROWS_TOGETHER][NAME(PARTS)];
    for (int first = 0; first < rows; first += ROWS_TOGETHER) {
        const Blocks blocks = blocks_of(first, rows - first < ROWS_TOGETHER ? rows - first : ROWS_TOGETHER);
        shape_tiles(blocks.size, form == 8 ? ROW_OF_TILE : GROUP);
        switch (form) {
        case 4:
            sum_groups(panel, x, &blocks, sums, 1, 0);
            break;
        case 5:
            sum_groups(panel, x, &blocks, sums, 1, 1);
            break;
        case 8:
            sum_bytes(panel, x, &blocks, sums);
            break;
        default:
            sum_groups(panel, x, &blocks, sums, 0, 1);
        }
        for (int block = 0; block < blocks.count; block++)
            for (int r = 0; r < blocks.size; r++) {
                const int row = row_of(&blocks, block) + r;
                float cut[PANEL], *to = out + row * stride;
                NAME(finish_tile)(x, row, bias, left < PANEL ? cut : to, stride, sums + TILE_ROWS * block + r, 1);
                if (left < PANEL) memcpy(to, cut, sizeof(float) * (size_t)left);
            }
    }
}

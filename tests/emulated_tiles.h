/* Tiles in plain C, as Intel's manual describes the instructions, for processors without them. native.c includes it in
 * place of the instructions if SPECBENCH_EMULATE_TILES names it. What a processor would refuse ends the program. Tiles
 * always pay in the trial, so that every product of more than one row takes them.
 */
#include <stdio.h>

#define WITH_TILES __attribute__((target(AVX512)))
#define TILES_PAY(tiles, vectors) 1
#define TILES_TRIAL_OUTPUTS 75

static int may_use_tiles(void) { return 1; }

static _Thread_local struct {
    int palette;
    uint16_t bytes[8];
    uint8_t rows[8], data[8][16][64];
} tiles;

static void demand(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "tiles: %s\n", what);
    abort();
}

static void emulated_config(const void *given) {
    const uint8_t *config = given;
    memset(&tiles, 0, sizeof tiles);
    demand(config[0] == 1 && config[1] == 0, "another palette, or a first row");
    for (int i = 2; i < 16; i++) demand(config[i] == 0, "reserved bytes");
    for (int i = 0; i < 16; i++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * i, sizeof bytes);
        const uint8_t rows = config[48 + i];
        demand(i < 8 ? bytes <= 64 && rows <= 16 && !bytes == !rows : !bytes && !rows, "the shape of a tile");
        if (i >= 8) continue;
        tiles.bytes[i] = bytes;
        tiles.rows[i] = rows;
    }
    tiles.palette = 1;
}

static void emulated_release(void) { memset(&tiles, 0, sizeof tiles); }

static void check_tile(int tile) {
    demand(tiles.palette && tile >= 0 && tile < 8 && tiles.rows[tile] && tiles.bytes[tile], "a tile that has no shape");
}

static void emulated_zero(int tile) {
    check_tile(tile);
    memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

static void emulated_load(int tile, const void *from, int64_t stride) {
    emulated_zero(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy(tiles.data[tile][row], (const char *)from + row * stride, tiles.bytes[tile]);
}

static void emulated_store(int tile, void *to, int64_t stride) {
    check_tile(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy((char *)to + row * stride, tiles.data[tile][row], tiles.bytes[tile]);
}

/* c[m][n] += a[m][4 k + i] * b[k][4 n + i], a with signs and b without. */
static void emulated_dpbsud(int c, int a, int b) {
    check_tile(c);
    check_tile(a);
    check_tile(b);
    demand(a != b && a != c && b != c, "one tile for two operands");
    demand(tiles.bytes[c] % 4 == 0 && tiles.bytes[a] % 4 == 0, "parts of four bytes");
    demand(tiles.rows[a] == tiles.rows[c] && tiles.bytes[b] == tiles.bytes[c], "sums of another shape");
    demand(tiles.bytes[a] / 4 == tiles.rows[b], "operands that do not fit together");
    for (int m = 0; m < tiles.rows[c]; m++) {
        uint32_t sums[16];
        memcpy(sums, tiles.data[c][m], sizeof sums);
        for (int k = 0; k < tiles.rows[b]; k++)
            for (int n = 0; n < tiles.bytes[c] / 4; n++)
                for (int i = 0; i < 4; i++)
                    sums[n] += (uint32_t)((int8_t)tiles.data[a][m][4 * k + i] * (int)tiles.data[b][k][4 * n + i]);
        memset(tiles.data[c][m], 0, sizeof sums);
        memcpy(tiles.data[c][m], sums, tiles.bytes[c]);
    }
    for (int m = tiles.rows[c]; m < 16; m++) memset(tiles.data[c][m], 0, 64);
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#define _tile_loadconfig emulated_config
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbsud emulated_dpbsud

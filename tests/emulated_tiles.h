/* Tiles in plain C, as Intel's manual describes the instructions, for processors without them: native.c includes this if
 * SPECBENCH_EMULATE_TILES names it. What a processor would refuse ends the program. Every product of more than one row takes
 * tiles. With TRAP_TILES the instructions stay in the program, and each is emulated when the processor refuses it.
 */
#include <stdio.h>
#ifdef TRAP_TILES
#include <signal.h>
#include <ucontext.h>
#define WITH_TILES __attribute__((target(AVX512 ",amx-tile,amx-int8")))
#else
#define WITH_TILES __attribute__((target(AVX512)))
#endif
#define TILES_PAY(tiles, vectors) 1
#define TILES_TRIAL_OUTPUTS 75

int wrong_tiles; /* set to have products differ */

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
        sums[0] += (uint32_t)wrong_tiles;
        for (int k = 0; k < tiles.rows[b]; k++)
            for (int n = 0; n < tiles.bytes[c] / 4; n++)
                for (int i = 0; i < 4; i++)
                    sums[n] += (uint32_t)((int8_t)tiles.data[a][m][4 * k + i] * (int)tiles.data[b][k][4 * n + i]);
        memset(tiles.data[c][m], 0, sizeof sums);
        memcpy(tiles.data[c][m], sums, tiles.bytes[c]);
    }
    for (int m = tiles.rows[c]; m < 16; m++) memset(tiles.data[c][m], 0, 64);
}

#ifdef TRAP_TILES
/* Instructions with a VEX prefix of three bytes, such as compilers make of tiles. */
static void emulate(int signal, siginfo_t *info, void *context) {
    static const int NAMES[] = {
        REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
        REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
    };
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *at = (const uint8_t *)registers[REG_RIP];
    const int prefix = at[2] & 3, what = at[3], mode = at[4] >> 6, reg = at[4] >> 3 & 7, rm = at[4] & 7, third = ~at[2] >> 3 & 15;
    const int upper_index = at[1] & 0x40 ? 0 : 8, upper_base = at[1] & 0x20 ? 0 : 8;
    (void)signal, (void)info;
    demand(at[0] == 0xc4 && (at[1] & 31) == 2 && !(at[2] & 0x84), "an instruction that is none of tiles");
    if (mode == 3) {
        if (what == 0x49 && prefix == 0 && at[4] == 0xc0) emulated_release();
        else if (what == 0x49 && prefix == 3 && rm == 0) emulated_zero(reg);
        else if (what == 0x5e && prefix == 2) emulated_dpbsud(reg, rm, third);
        else demand(0, "an instruction without memory");
        registers[REG_RIP] += 5;
        return;
    }
    const int with_index = rm == 4, index = at[5] >> 3 & 7 | upper_index, base = (with_index ? at[5] & 7 : rm) | upper_base;
    const uint8_t *rest = at + 5 + with_index;
    demand(mode || base % 8 != 5, "an address without a register");
    int32_t offset = mode == 1 ? (int8_t)*rest : 0;
    if (mode == 2) memcpy(&offset, rest, sizeof offset);
    char *address = (char *)registers[NAMES[base]] + offset;
    const int64_t stride = with_index && index != 4 ? (int64_t)registers[NAMES[index]] << (at[5] >> 6) : 0;
    if (what == 0x49 && prefix == 0 && reg == 0) emulated_config(address + stride);
    else if (what == 0x4b && prefix == 3 && with_index) emulated_load(reg, address, stride);
    else if (what == 0x4b && prefix == 2 && with_index) emulated_store(reg, address, stride);
    else demand(0, "an instruction with memory");
    registers[REG_RIP] = (greg_t)(rest + (mode == 1 ? 1 : mode == 2 ? 4 : 0));
}

__attribute__((constructor)) static void trap(void) {
    const struct sigaction action = {.sa_sigaction = emulate, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, NULL);
}
#else
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
#endif

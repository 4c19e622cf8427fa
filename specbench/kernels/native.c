/* Short passes of decoders like Llama, each in one call, over weights in 8 or 4 bits, in bfloat16 or in float32.
 *
 * Weights lie in panels of some outputs, in the order in which they are read. In float32 for every input one number of
 * each output, in bfloat16 for every two inputs two of each: so oneDNN packs them too, whose memory is read in place.
 * bfloat16 in 12 bits is the same to the bit: see below. In 8 and 4 bits a panel has 32 outputs. 8 bits: 32 scales (float32),
 * then for every four inputs 32 x 4 bytes, 128 added to each. 4 bits: for every group of 32 inputs 32 scales and 32 least
 * numbers (bfloat16), then codes for every four inputs, 16 x 4 bytes, outputs 0 to 15 in the low halves and 16 to 31 in the
 * high ones: a number is least + scale * code.
 * Beside these activations are rounded to bytes, with one scale for a row; products of bytes add up exactly in 32 bits.
 * Beside bfloat16 they are rounded to it where the processor multiplies it, and otherwise both are in float32.
 *
 * Work is cut into pieces, so that a thread that is held up costs its piece. A thread takes pieces that lie one behind the
 * other, for memory is read faster straight on, and then helps others with theirs. Whoever ends the last piece of a stage
 * does what has to be done once between two stages. Threads are lent by the function `Parallel` (GOMP_parallel of torch's
 * own OpenMP).
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define INLINE static inline __attribute__((always_inline))

enum {
    VERSION = 16,       /* of what Python hands over */
    PANEL = 32,         /* outputs */
    GROUP = 32,         /* inputs that share a scale, in 4 bits */
    GROUP_OF_NIBBLES = 4 * PANEL + PANEL * GROUP / 2, /* bytes */
    MOST_TILE = 8,      /* rows taken together */
    AHEAD = 4096,       /* bytes fetched ahead: the processor itself stops at every 4 KiB */
    NEARER = 768,       /* bytes ahead, fetched from the second cache into the first */
    PIECE = 1 << 14,    /* bytes of weights to a piece, at least */
    PIECE_OF_GATES = 1 << 16, /* the same, of each half */
    ROWS_AT_ONCE = 256, /* of long inputs */
    ROWS_TOGETHER = 128, /* of those, beside numbers: weights in 12 bits are read once for them */
    ROWS_OF_PROMPT = 48, /* in attention: what they find stays in the nearest caches */
    INPUTS_TOGETHER = 256, /* of bytes and nibbles, in short vectors: 8 KiB of a panel, which is read twice */
    STRETCH = 64,       /* steps of numbers: 16 KiB of a panel */
    TILES_UNPACKING = 2, /* of rows, that each take weights in 12 bits apart; for more this is done once */
    MOST_WIDTH = 64,    /* of a panel of numbers */
    MOST_PARTS = 4,     /* vectors of outputs of numbers at once */
    DEPTH = 64,         /* rows of numbers are filled up with zeros to a multiple */
    SHARES = 16,        /* of a stage */
    SPINS = 400,        /* looks at a stage before the core is given away */
    YIELDS = 100,       /* so many times, before the thread sleeps */
    KEYS = 64,
    KEYS_OF_PART = 256, /* whose sums are joined with those of others */
    PIECES_FOR_A_THREAD = 4, /* of attention */
    KEYS_AHEAD = 16,    /* fetched before they are multiplied */
    HEADS_AT_ONCE = 8,
    HEADS_TOGETHER = 96, /* of all rows that take the same keys at once */
    MOST_FOUND = 1 << 24, /* bytes of what more rows than FEW_ROWS find in parts that threads share */
    FEW_ROWS = 32,
    MOST_SIZE = 256,    /* of a head */
    SUMS_APART = MOST_SIZE + 16, /* of values, that not all are in the same places of a cache */
    KEYS_OF_PROMPT = 256, /* at once: four panels */
};

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    const uint8_t *panels;
    const float *bias; /* NULL for none */
    const uint32_t *exceptions; /* in 12 bits */
    int32_t outputs, inputs, bits;
    int32_t width, depth; /* outputs of a panel, and inputs with the zeros behind them */
} Matrix;

/* Norms are NULL where a layer has none. */
typedef struct {
    Matrix projections, output, gates, down;
    const float *attention_norm, *mlp_norm;         /* of what goes into attention and MLP */
    const float *query_norm, *key_norm;             /* of every head, or of all heads together */
    const float *attention_out_norm, *mlp_out_norm; /* of what they add to x */
    int32_t window;   /* positions that a row attends to, its own among them; 0 for all */
    int32_t rotation; /* which of the rotations of a pass turns its heads; -1 for none */
} Layer;

typedef struct {
    const Layer *layers;
    Matrix head;
    const float *norm;
    const float *embedding_norm; /* of a head, whose first layer reads embeddings beside x; NULL for a model */
    int32_t count, hidden, heads, shared, size, middle;
    float epsilon, scaling;
    int32_t adds_to_normed; /* whether the first layer of a head adds to x behind its norm */
    int32_t turned;         /* first numbers of a head, which rotation turns */
    int32_t joint_norms;    /* whether queries and keys have one norm for all heads */
    int32_t gelu;           /* whether gates are GELU, by tanh, in place of SiLU */
    float added;            /* what the numbers that a part adds to x are multiplied by */
    int32_t unused;
} Model;

/* Rows of a pass, up to the first of the next, that belong to one request and attend to what it holds: `past` positions
 * before them, and themselves. */
typedef struct {
    const int32_t *places;  /* where all these are among keys and values; NULL for one behind the other, from 0 on */
    const uint8_t *mask;    /* [its rows, mask_stride], 0 where a row does not attend; NULL for all up to itself */
    int64_t mask_stride;
    int32_t first, past;
    void *const *keys, *const *values; /* of its own, in each layer; NULL for those of the pass */
    const int64_t *strides;            /* of these */
} Request;

/* A pass: rows of x [rows, hidden] become logits [wanted, outputs of the head], of those wanted. Keys and values,
 * [shared, stride / size, size] in each layer, hold what requests have read and get what their rows bring. */
typedef struct {
    const Model *model;
    float *x; /* in the end what the last layer puts out */
    const float *embedded; /* [rows, hidden], for a head */
    const float *cosines, *sines; /* [rotations, rows, turned] */
    void *const *keys, *const *values;
    const int64_t *strides; /* from one head to the next, for keys and values of each layer, in numbers */
    const int32_t *dropped; /* positions before the first that keys and values of each layer hold; NULL for none */
    const Request *requests;
    const int32_t *which; /* the rows wanted */
    float *logits;
    float *const *states; /* [rows, states_stride], what goes into each layer and comes out of the final norm; or NULL */
    int64_t states_stride;
    int32_t rows, wanted, count, is_bfloat16; /* count of requests */
    Parallel parallel; /* NULL for the calling thread alone */
    int32_t threads, level;
} Pass;

/* A weight [rows, columns] to be laid in panels: bytes with a scale for each row, float32 to be rounded to 4 bits, or
 * bfloat16. */
typedef struct {
    const int8_t *bytes;
    const float *scales, *weight;
    const uint16_t *halves;
    uint8_t *panels;
    uint32_t *exceptions; /* in 12 bits: [panels, capacity] */
    int32_t *found;       /* exceptions of each panel; there may be more than `capacity`, which are lost */
    int32_t rows, columns, bits, width, capacity, unused;
} Packing;

enum { IN_BYTES, IN_HALVES, IN_NUMBERS, FORMS };

/* Numbers in bfloat16, in 12 bits without loss: the lower byte as it is, and a code of 4 bits for the upper one, which has
 * the sign and all but the last bit of the exponent; of these bits most numbers of a block have one of eight values, and
 * the exceptions, one number in some thousands, are listed. A block is STRETCH steps of a panel of MOST_WIDTH outputs behind
 * its head. A step is four vectors of 32 numbers: two bytes rows of 64 for their lower bytes, of two vectors each, in turns
 * of eight, and one of codes, in lower halves those of the first two vectors. (Zhang et al. 2025 code exponents by their
 * frequency, in 11 bits, which takes longer to read.) */
typedef struct {
    int32_t first, count; /* of the block's exceptions among those of its weight: place << 16 | number */
    uint8_t upper[16];    /* bytes by code */
    uint8_t unused[40];
} Block;

enum { STEP_IN_12_BITS = 3 * MOST_WIDTH, CODES = 8 };

INLINE int64_t bytes_in_12_bits(int steps) {
    return (int64_t)(steps + STRETCH - 1) / STRETCH * (int64_t)sizeof(Block) + (int64_t)steps * STEP_IN_12_BITS;
}

/* What the numbers of a group have in common, in 4 bits. */
typedef struct {
    float scale, least;
} Line;

/* Rows of activations as products take them. */
typedef struct {
    int8_t *bytes; /* [rows, padded] */
    float *scales;
    int32_t *totals, *sums; /* of a row, and of each of its groups */
    char *numbers;          /* [rows, padded] in bfloat16 or float32, in place of bytes */
    int inputs, padded, form;
} Given;

typedef struct {
    const float *query;
    const void *keys, *values;
    const int32_t *places; /* of keys and values; NULL for one behind the other */
    const uint8_t *mask;
    float *out, scaling;
    float *part; /* takes sums, highest scores and weights of all heads in place of `out`; NULL where these are all keys */
    int64_t stride, mask_stride, part_stride; /* between rows: of queries and `out`, in numbers, and of the others */
    int rows;       /* of one request: without a mask each sees one more position than the one before */
    int first, end; /* positions at hand */
    int count;      /* positions up to which the first row sees */
    int groups, size, is_bfloat16;
    int is_first; /* of the rows that attend to the same: it has their keys and values fetched */
} Attention;

/* Positions up to which a row sees, of those at hand. */
INLINE int seen_by(const Attention *a, int row) {
    const int count = a->mask ? a->count : a->count + row;
    return count < a->end ? count : a->end;
}

/* Which of some positions any row sees; NULL for all. */
static const uint8_t *seen_by_any(const Attention *a, int first, int count, uint8_t *seen) {
    memcpy(seen, a->mask + first, (size_t)count);
    for (int row = 1; row < a->rows; row++)
        for (int j = 0; j < count; j++) seen[j] |= a->mask[row * a->mask_stride + first + j];
    return memchr(seen, 0, (size_t)count) ? seen : NULL;
}

/* Causal attention of many rows of one request, which are the last of `count` positions. Queries [heads, rows, size], keys
 * and values [shared, count, size] and what is found, [rows, heads, size], are all in bfloat16 or all in float32. */
typedef struct {
    const void *query, *keys, *values;
    void *out;
    int64_t query_strides[2], keys_stride, values_stride; /* in numbers: of a head and a row, and of heads */
    float scaling;
    int32_t rows, count, heads, shared, size, is_bfloat16;
    int32_t window; /* positions that a row attends to, its own among them; 0 for all */
    int32_t unused;
} Prompt;

/* Some of these rows, of one head: what they attend to in the block of keys at hand, and have found up to it. */
typedef struct {
    float scores[ROWS_OF_PROMPT * KEYS_OF_PROMPT];
    float found[ROWS_OF_PROMPT * MOST_SIZE], sums[ROWS_OF_PROMPT * MOST_SIZE]; /* of values: in this block, and in all */
    float most[ROWS_OF_PROMPT], total[ROWS_OF_PROMPT]; /* highest score, and sum of the weights */
    char query[4 * ROWS_OF_PROMPT * MOST_SIZE], weights[4 * ROWS_OF_PROMPT * KEYS_OF_PROMPT]; /* as products take them */
} PromptRows;

/* A gated delta rule over the rows of a short pass: every head has a state [keys, values], and a row's output is what its
 * query reads from the state after it. The states after all rows are kept. */
typedef struct {
    const float *query, *key; /* [batch, rows, shared, keys] */
    const float *value;       /* [batch, rows, heads, values] */
    const float *decay;       /* [batch, rows, heads, decays] */
    const float *beta;        /* [batch, rows, heads] */
    const float *before;      /* [batch, heads, keys, values] */
    float *const *after;      /* of each row, like `before` */
    float *out;               /* [batch, rows, heads, values] */
    int32_t batch, rows, heads, shared, keys, values;
    int32_t decays;     /* 1, or one for each key */
    int32_t normalizes; /* whether queries and keys are scaled to length 1 */
    int32_t adds;       /* whether values are added as they are (Mamba 2), and queries not scaled by their size */
} DeltaRule;

typedef struct {
    void (*quantize)(const float *, const Given *, int);
    void (*products[FORMS])(const Matrix *, const Given *, int, int, float *, int64_t);
    void (*halve)(const float *, uint16_t *, int); /* where products take halves */
    void (*norm)(const float *, const float *, float, int, float *);
    void (*add)(float *, const float *, float, int);
    void (*gate)(float *, const float *, int, int);
    void (*rotate)(float *, const float *, const float *, int);
    void (*attend)(const Attention *);
    void (*join)(const Attention *, const float *, float *);
    void (*average)(const Attention *, const float *, float *);
    void (*softmax)(PromptRows *, int, int, int, int, int, float);
    void (*pack)(const Packing *, int);
    void (*unpack)(const Block *, const uint32_t *, int, uint16_t *);
    void (*recur)(const DeltaRule *, int);
} Ways;

INLINE int padded_to_groups(int count) { return (count + GROUP - 1) / GROUP * GROUP; }

INLINE int64_t panel_bytes(const Matrix *matrix) {
    if (matrix->bits == 12) return bytes_in_12_bits(matrix->depth / 2);
    if (matrix->bits > 8) return (int64_t)matrix->bits / 8 * matrix->width * matrix->depth;
    if (matrix->bits == 4) return (int64_t)matrix->depth / GROUP * GROUP_OF_NIBBLES;
    return (int64_t)sizeof(float) * PANEL + (int64_t)PANEL * matrix->depth;
}

INLINE int panels_of(const Matrix *matrix) { return (matrix->outputs + matrix->width - 1) / matrix->width; }

INLINE int form_of(int bits, int level) { return bits <= 8 ? IN_BYTES : bits <= 16 && level >= 4 ? IN_HALVES : IN_NUMBERS; }

INLINE int number_bytes(int form) { return form == IN_HALVES ? 2 : 4; }

INLINE int padded_for(int form, int inputs) {
    return form == IN_BYTES ? padded_to_groups(inputs) : (inputs + DEPTH - 1) / DEPTH * DEPTH;
}

INLINE int32_t four_of(const void *bytes) {
    int32_t four;
    memcpy(&four, bytes, sizeof four);
    return four;
}

/* Intel's processors read weights fastest if they are fetched into the second cache, and from there, a few steps ahead, into
 * the first. AMD's fetch what one tile of rows is multiplied by themselves, and have it sooner. */
static int is_intel;

/* Cache lines of a panel, for some rows. Several rows of nibbles take so long that lines fetched into the first cache would
 * push out what is used. */
INLINE void fetch_ahead(const uint8_t *weights, int lines, int rows, int are_nibbles) {
    if (rows == 1 && !is_intel) return;
    for (int line = 0; line < lines; line++, weights += 64) {
        if (is_intel || (are_nibbles && rows > 2))
            _mm_prefetch((const char *)weights + 2 * AHEAD, _MM_HINT_T1);
        else
            _mm_prefetch((const char *)weights + AHEAD, _MM_HINT_T0);
        if (is_intel) _mm_prefetch((const char *)weights + NEARER, _MM_HINT_T0);
    }
}

INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float rounded_bfloat16(float x) {
    const uint32_t bits = (uint32_t)to_bfloat16(x) << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE int64_t place_of(const int32_t *places, int position) { return places ? places[position] : position; }

/* ---- instruction sets ---- */

#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma"

/* The sum of each of sixteen vectors. */
INLINE __attribute__((target(AVX512))) __m512 sums_of_512(const __m512 *x) {
    __m512 fours[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 *own = x + 4 * i;
        __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(own[0], own[1]), _mm512_unpackhi_ps(own[0], own[1]));
        __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(own[2], own[3]), _mm512_unpackhi_ps(own[2], own[3]));
        fours[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    __m512 low = _mm512_add_ps(
        _mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
    __m512 high = _mm512_add_ps(
        _mm512_shuffle_f32x4(fours[2], fours[3], 0x88), _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

/* Where the lower byte of number `i` of a step is, or its code, of which the lower half is for i < 64. */
INLINE int place_in_step(int i) { return i / 64 * 64 + i % 32 / 8 * 16 + i / 32 % 2 * 8 + i % 8; }

/* A block in 12 bits to as many steps in bfloat16; exceptions are those of its weight. */
INLINE void put_exceptions(const Block *block, const uint32_t *exceptions, uint16_t *to) {
    for (int i = block->first; i < block->first + block->count; i++) to[exceptions[i] >> 16] = (uint16_t)exceptions[i];
}

static void unpack_256(const Block *block, const uint32_t *exceptions, int steps, uint16_t *to) {
    const uint8_t *from = (const uint8_t *)(block + 1);
    for (int step = 0; step < steps; step++, from += STEP_IN_12_BITS)
        for (int i = 0; i < 2 * MOST_WIDTH; i++) {
            const int place = place_in_step(i), codes = from[2 * MOST_WIDTH + place % 64];
            to[step * 2 * MOST_WIDTH + i] = (uint16_t)(block->upper[i < 64 ? codes & 15 : codes >> 4] << 8 | from[place]);
        }
    put_exceptions(block, exceptions, to);
}

INLINE __attribute__((target(AVX512))) __m512i upper_of(const Block *block) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)block->upper));
}

INLINE __attribute__((target(AVX512))) void unpack_step(const void *given, const __m512i upper, __m512i *to) {
    const char *from = given;
    const __m512i half = _mm512_set1_epi8(15), codes = _mm512_loadu_si512(from + 128);
    const __m512i low[] = {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 64)};
    const __m512i high[] = {
        _mm512_shuffle_epi8(upper, _mm512_and_si512(codes, half)),
        _mm512_shuffle_epi8(upper, _mm512_and_si512(_mm512_srli_epi16(codes, 4), half)),
    };
    for (int i = 0; i < 2; i++) {
        to[2 * i] = _mm512_unpacklo_epi8(low[i], high[i]);
        to[2 * i + 1] = _mm512_unpackhi_epi8(low[i], high[i]);
    }
}

INLINE int step_of(uint32_t exception) { return (int)(exception >> 16) / (2 * MOST_WIDTH); }

INLINE __attribute__((target(AVX512))) void put_exception(__m512i *step, uint32_t exception) {
    const int place = (int)(exception >> 16) % (2 * MOST_WIDTH);
    for (int i = 0; i < 4; i++)
        step[i] = _mm512_mask_set1_epi16(step[i], place / 32 == i ? 1u << place % 32 : 0, (short)exception);
}

static __attribute__((target(AVX512))) void unpack_512(
    const Block *block, const uint32_t *exceptions, int steps, uint16_t *to) {
    const char *from = (const char *)(block + 1);
    const __m512i upper = upper_of(block);
    for (int step = 0; step < steps; step++, from += STEP_IN_12_BITS) {
        __m512i found[4];
        unpack_step(from, upper, found);
        for (int i = 0; i < 4; i++) _mm512_storeu_si512(to + 128 * step + 32 * i, found[i]);
    }
    put_exceptions(block, exceptions, to);
}

/* Vectors of BITS bits, and what native.h does with them. */
#define WITH_BITS(before, bits, after) before##bits##after
#define JOINED(before, bits, after) WITH_BITS(before, bits, after)
#define MM(name) JOINED(_mm, BITS, _##name)
#define LANES (BITS / 32)
#define VF JOINED(__m, BITS, )
#define VI JOINED(__m, BITS, i)
#define F_LOAD MM(loadu_ps)
#define F_STORE MM(storeu_ps)
#define F_SET MM(set1_ps)
#define F_ADD MM(add_ps)
#define F_SUB MM(sub_ps)
#define F_MUL MM(mul_ps)
#define F_DIV MM(div_ps)
#define F_FMA MM(fmadd_ps)
#define F_MAX MM(max_ps)
#define F_MIN MM(min_ps)
#define F_SUMS JOINED(sums_of_, BITS, )
#define F_TO_I MM(cvtps_epi32)
#define F_OF_I(i) ((VF)(i))
#define F_POWER(i) F_OF_I(MM(slli_epi32)(MM(add_epi32)(i, I_SET(127)), 23))
#define F_OF_BFLOAT16(p) F_OF_I(I_SHIFT_UP16(MM(cvtepu16_epi32)(LOAD_HALF(p))))
#define I_TO_F MM(cvtepi32_ps)
#define I_SET MM(set1_epi32)
#define I_LOAD(p) JOINED(MM(loadu_si), BITS, )((const VI *)(p))
#define I_STORE(p, i) JOINED(MM(storeu_si), BITS, )((VI *)(p), i)
#define I_AND JOINED(MM(and_si), BITS, )
#define I_SHIFT4(v) MM(srli_epi16)(v, 4)
#define I_SHIFT_UP16(v) MM(slli_epi32)(v, 16)
#define UNPACK JOINED(unpack_, BITS, )
#define UNPACKS_STEPS (BITS == 512)
#define ZERO_OF_BYTES (HAS_VNNI ? 128 : 0)
#define TILE_BYTES (BITS == 512 ? 8 : HAS_VNNI ? 6 : 2)
#define TILE_NIBBLES 6
#define TILE_NUMBERS (BITS == 512 ? 6 : 3)
#define TILE_WIDENED (BITS == 512 ? 6 : 2)

#define BITS 512
#define LOAD_HALF(p) _mm256_loadu_si256((const __m256i *)(p))
#define F_ABS _mm512_abs_ps
#define F_SUM _mm512_reduce_add_ps
#define F_LARGEST _mm512_reduce_max_ps
#define F_WHERE_FINITE(x, y) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ), y)
#define I_STORE_BYTES(p, i) _mm_storeu_si128((__m128i *)(p), _mm512_cvtepi32_epi8(i))

#define NAME(name) name##_bfloat16
#define TARGET __attribute__((target(AVX512 ",avx512bf16")))
#define ONLY_HALVES 1
#define DOT_HALVES(sum, weights, x) _mm512_dpbf16_ps(sum, (__m512bh)(weights), (__m512bh)(x))
#define F_STORE_HALVES(p, x) _mm256_storeu_si256((__m256i *)(p), (__m256i)_mm512_cvtneps_pbh(x))
#include "native_wide.h"
#undef NAME
#undef TARGET
#undef ONLY_HALVES

#define NAME(name) name##_avx512
#define TARGET __attribute__((target(AVX512)))
#define ONLY_HALVES 0
#define HAS_VNNI 1
#include "native.h"
#undef TARGET
#undef BITS
#undef LOAD_HALF
#undef F_ABS
#undef F_SUM
#undef F_LARGEST
#undef F_WHERE_FINITE
#undef I_STORE_BYTES

#define AVX2 __attribute__((target("avx2,fma")))

INLINE AVX2 float sum_avx2(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

/* The sum of each of eight vectors. */
INLINE AVX2 __m256 sums_of_256(const __m256 *x) {
    __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

INLINE AVX2 float largest_avx2(__m256 x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

INLINE AVX2 void store_bytes_avx2(int8_t *to, __m256i x) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(words, words));
}

/* Pairs of products of bytes are added in 16 bits: with one of them in 7 bits and a sign, none overflows. */
INLINE AVX2 __m256i dot_bytes_avx2(__m256i sum, __m256i weights, __m256i x) {
    weights = _mm256_xor_si256(weights, _mm256_set1_epi8((char)0x80));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(weights, x));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* Sums of a group fit in 16 bits: they are of 16 products of a code up to 15 and a number up to 127. */
INLINE AVX2 __m256i dot_nibbles_avx2(__m256i sum, __m256i weights, __m256i x) {
    __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16(weights, x)));
    return sum;
}

/* GCC copies sums from register to register unless they are added up where they are. */
#define DOT_VNNI(name, operation)                                              \
    INLINE AVX2 __m256i name(__m256i sum, __m256i weights, __m256i x) {        \
        __asm__(operation " %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));   \
        return sum;                                                            \
    }
DOT_VNNI(dot_bytes_vnni, "%{vex%} vpdpbusd")
DOT_VNNI(dot_nibbles_vnni, "%{vex%} vpdpbusd")
DOT_VNNI(dot_bytes_vnni_of_avx512, "%{evex%} vpdpbusd")
DOT_VNNI(dot_nibbles_vnni_of_avx512, "%{evex%} vpdpbusd")

#define BITS 256
#define TARGET AVX2
#define LOAD_HALF(p) _mm_loadu_si128((const __m128i *)(p))
#define F_ABS(x) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)
#define F_SUM sum_avx2
#define F_LARGEST largest_avx2
#define F_WHERE_FINITE(x, y) _mm256_and_ps(y, _mm256_cmp_ps(x, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ))
#define I_STORE_BYTES store_bytes_avx2

#define NAME(name) name##_avx2
#define HAS_VNNI 0
#include "native.h"

#define NAME(name) name##_vnni
#define HAS_VNNI 1
#include "native.h"

/* The same on processors that have these instructions as a part of AVX-512. */
#define NAME(name) name##_vnni_of_avx512
#define HAS_VNNI 1
#include "native.h"

static const Ways *WAYS[] = {NULL, &ways_avx2, &ways_vnni, &ways_avx512, &ways_avx512};

static int highest_level(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    is_intel = __builtin_cpu_is("intel");
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    const int avx_vnni = __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512vnni"))
        return avx_vnni ? 2 : 1;
    if (!avx_vnni) WAYS[2] = &ways_vnni_of_avx512;
    return __builtin_cpu_supports("avx512bf16") ? 4 : 3;
}

/* The highest level this processor has: 0 none, 1 AVX2 and FMA, 2 VNNI of 256 bits, 3 AVX-512 with VNNI, 4 with bfloat16 as
 * well. Asking the processor takes as long as a small product on virtual machines. */
int specbench_level(void) {
    static int level = -1;
    if (level < 0) level = highest_level();
    return level;
}

/* Whether this processor multiplies pairs in bfloat16 at half the rate of numbers in float32, as Intel's do. To be asked
 * behind `specbench_level`. */
int specbench_halves_are_slow(void) { return is_intel; }

int specbench_version(void) { return VERSION; }

int64_t specbench_packed_bytes(int outputs, int inputs, int bits, int width) {
    const Matrix matrix = {.outputs = outputs, .bits = bits, .width = width, .depth = padded_to_groups(inputs)};
    return panels_of(&matrix) * panel_bytes(&matrix);
}

/* ---- stages ---- */

/* Pieces are divided into shares of pieces one behind the other. A thread takes its own share piece by piece, so that it
 * reads memory straight on, and then what others have left. */
typedef struct {
    _Alignas(64) atomic_int taken[SHARES]; /* pieces of each share, and of those beyond its end */
    _Alignas(64) atomic_int done;          /* pieces done, and one more once what follows them is done */
    atomic_int asleep;                     /* threads that wait to be woken */
} Stage;

static void begin_stage(Stage *stage) {
    for (int share = 0; share < SHARES; share++) atomic_init(&stage->taken[share], 0);
    atomic_init(&stage->done, 0);
    atomic_init(&stage->asleep, 0);
}

/* The next piece for a thread, -1 if all are taken. */
static int next_piece(Stage *stage, int pieces, int shares, int thread) {
    for (int turn = 0; turn < shares; turn++) {
        const int share = (thread + turn) % shares, first = (int)((int64_t)pieces * share / shares);
        const int count = (int)((int64_t)pieces * (share + 1) / shares) - first;
        if (atomic_load_explicit(&stage->taken[share], memory_order_relaxed) >= count) continue;
        const int taken = atomic_fetch_add_explicit(&stage->taken[share], 1, memory_order_relaxed);
        if (taken < count) return first + taken;
    }
    return -1;
}

INLINE int shares_for(Parallel parallel, int threads) {
    if (!parallel || threads < 1) return 1;
    return threads < SHARES ? threads : SHARES;
}

/* Wait until so much is done: look for a while, then let others have the core, then sleep. Only a core that nobody uses
 * is given to a thread that is held up with its piece beside another program. */
static void wait_for(Stage *stage, int enough) {
    for (int looks = 0; looks < SPINS + YIELDS; looks++) {
        if (atomic_load_explicit(&stage->done, memory_order_acquire) >= enough) return;
        if (looks < SPINS)
            _mm_pause();
        else
            sched_yield();
    }
    atomic_fetch_add(&stage->asleep, 1);
    for (int done; (done = atomic_load(&stage->done)) < enough;)
        syscall(SYS_futex, &stage->done, FUTEX_WAIT_PRIVATE, done, NULL, NULL, 0);
}

/* Say that all is done, and wake who sleeps. */
static void finish(Stage *stage, int done) {
    atomic_store(&stage->done, done);
    if (atomic_load(&stage->asleep)) syscall(SYS_futex, &stage->done, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* What the rows of a pass attend to is taken in parts of KEYS_OF_PART positions, which are joined in their order. A row has
 * the same bits whether one thread takes all its parts, or, with few rows, threads share them. */
typedef struct {
    int most, largest; /* parts of a row that threads share at most, 1 if they share none; numbers of what is found in one */
    int together;      /* rows to a piece */
    int kept;          /* what is found in so many parts is kept: in those that are shared, or 2 of more heads than fit */
    float *found;      /* [rows, shared, kept, largest] unless kept is 1 */
    atomic_int *done;  /* [rows, shared], parts */
} Parts;

typedef struct Work Work;
typedef void (*Step)(const Work *, const Layer *, int piece);

struct Work {
    const Pass *pass;
    const Ways *ways;
    Stage *stages;
    Given wide, narrow; /* what goes into the down product, and into all others */
    float *row, *more;  /* [rows, stride]: what comes out of products, and of attention */
    int64_t stride;
    Parts parts;
    int shares;
    atomic_int joined; /* threads that take part */
};

/* Take pieces of a stage until there are no more, and do what is to be done behind them if the last one done is one's own.
 * Whether it was. */
static int take_pieces(
    Stage *stage, int pieces, int thread, const Work *work, const Layer *layer, Step step, Step behind) {
    for (int piece; (piece = next_piece(stage, pieces, work->shares, thread)) >= 0;) {
        step(work, layer, piece);
        if (atomic_fetch_add_explicit(&stage->done, 1, memory_order_acq_rel) + 1 == pieces) {
            if (behind) behind(work, layer, 0);
            finish(stage, pieces + 1);
            return 1;
        }
    }
    return 0;
}

/* Take part in a stage until all its pieces, and what is to be done behind them, are done. */
static void take_part(
    Stage *stage, int pieces, int thread, const Work *work, const Layer *layer, Step step, Step behind) {
    if (!take_pieces(stage, pieces, thread, work, layer, step, behind)) wait_for(stage, pieces + 1);
}

/* Panels to a piece of so many bytes at least. */
INLINE int panels_at_once(const Matrix *matrix, int least) {
    const int64_t bytes = panel_bytes(matrix);
    return bytes >= least ? 1 : (int)((least + bytes - 1) / bytes);
}

INLINE int pieces_of(const Matrix *matrix) {
    const int some = panels_at_once(matrix, PIECE);
    return (panels_of(matrix) + some - 1) / some;
}

static void multiply(
    const Work *work, const Matrix *matrix, const Given *x, int rows, int piece, float *out, int64_t stride) {
    const int some = panels_at_once(matrix, PIECE), all = panels_of(matrix), end = (piece + 1) * some;
    for (int panel = piece * some; panel < end && panel < all; panel++)
        work->ways->products[x->form](matrix, x, rows, panel, out, stride);
}

/* ---- what products take ---- */

/* `count` numbers of a row, from `first` on; behind its last number it is filled up. Not for bytes. */
static void put(const Ways *ways, const float *x, const Given *to, int row, int first, int count) {
    const size_t size = (size_t)number_bytes(to->form), left = first + count == to->inputs ? (size_t)(to->padded - to->inputs) : 0;
    char *at = to->numbers + ((int64_t)row * to->padded + first) * (int64_t)size;
    if (to->form == IN_HALVES)
        ways->halve(x, (uint16_t *)at, count);
    else
        memcpy(at, x, size * (size_t)count);
    memset(at + size * (size_t)count, 0, size * left);
}

static void give(const Ways *ways, const float *x, const Given *to, int row) {
    if (to->form == IN_BYTES)
        ways->quantize(x, to, row);
    else
        put(ways, x, to, row, 0, to->inputs);
}

/* ---- the parts of a layer ---- */

/* Hidden states in front of layer number `index`, or behind the last one, for who wants them. */
static void tell_states(const Work *work, int index, const float *x, int64_t stride) {
    const Pass *pass = work->pass;
    if (!pass->states || !pass->states[index]) return;
    for (int r = 0; r < pass->rows; r++)
        memcpy(pass->states[index] + r * pass->states_stride, x + r * stride, sizeof(float) * (size_t)pass->model->hidden);
}

static void normed(const Work *work, const float *weight) {
    const Pass *pass = work->pass;
    const Model *model = pass->model;
    for (int r = 0; r < pass->rows; r++) {
        float *to = work->more + r * work->stride;
        work->ways->norm(pass->x + (int64_t)r * model->hidden, weight, model->epsilon, model->hidden, to);
    }
}

static void give_normed(const Work *work, const float *weight) {
    const Pass *pass = work->pass;
    if (weight) normed(work, weight);
    for (int r = 0; r < pass->rows; r++) {
        const float *x = weight ? work->more + r * work->stride : pass->x + (int64_t)r * pass->model->hidden;
        give(work->ways, x, &work->narrow, r);
    }
}

static const Request *whose(const Pass *pass, int row) {
    const Request *found = pass->requests + pass->count - 1;
    while (found->first > row) found--;
    return found;
}

/* What a product other than down takes; only a head's first projections and the output of attention may have other
 * inputs than the hidden size. */
static Given given_to(const Work *work, const Matrix *matrix) {
    Given given = work->narrow;
    given.inputs = matrix->inputs;
    given.padded = padded_for(given.form, given.inputs);
    return given;
}

/* A head's first layer reads embeddings and x, each behind its norm, side by side. */
static void give_joined(const Work *work, const Layer *layer) {
    const Pass *pass = work->pass;
    const Model *model = pass->model;
    const Given given = given_to(work, &layer->projections);
    const int hidden = model->hidden;
    for (int r = 0; r < pass->rows; r++) {
        float *to = work->more + r * work->stride, *x = pass->x + (int64_t)r * hidden;
        work->ways->norm(pass->embedded + (int64_t)r * hidden, model->embedding_norm, model->epsilon, hidden, to);
        work->ways->norm(x, layer->attention_norm, model->epsilon, hidden, to + hidden);
        if (model->adds_to_normed) memcpy(x, to + hidden, sizeof(float) * (size_t)hidden);
        give(work->ways, to, &given, r);
    }
}

static void begin(const Work *work, const Layer *layer, int piece) {
    (void)piece;
    tell_states(work, 0, work->pass->x, work->pass->model->hidden);
    if (work->pass->model->embedding_norm)
        give_joined(work, layer);
    else
        give_normed(work, layer->attention_norm);
}

static void project(const Work *work, const Layer *layer, int piece) {
    const Given given = given_to(work, &layer->projections);
    multiply(work, &layer->projections, &given, work->pass->rows, piece, work->row, work->stride);
}

/* Keys and values of a layer. */
typedef struct {
    char *keys, *values;
    int64_t keys_stride, values_stride; /* from one head to the next, in numbers */
} Kept;

static Kept kept_for(const Pass *pass, const Request *request, int place) {
    const int64_t *strides = (request->keys ? request->strides : pass->strides) + 2 * place;
    return (Kept){
        .keys = (request->keys ? request->keys : pass->keys)[place],
        .values = (request->keys ? request->values : pass->values)[place],
        .keys_stride = strides[0],
        .values_stride = strides[1],
    };
}

/* Positions of a layer that its keys and values do not hold any more. */
INLINE int dropped_of(const Pass *pass, int place) { return pass->dropped ? pass->dropped[place] : 0; }

/* Norms and rotation of the queries and keys of a row. */
static void turn(const Work *work, const Layer *layer, int r) {
    const Pass *pass = work->pass;
    const Model *model = pass->model;
    const int size = model->size, turned = model->turned, queries = model->heads * size, keys = model->shared * size;
    const int64_t at = ((int64_t)layer->rotation * pass->rows + r) * turned;
    float *row = work->row + r * work->stride;
    if (model->joint_norms) {
        work->ways->norm(row, layer->query_norm, model->epsilon, queries, row);
        work->ways->norm(row + queries, layer->key_norm, model->epsilon, keys, row + queries);
    }
    for (int head = 0; head < model->heads + model->shared; head++) {
        float *x = row + (int64_t)head * size;
        const float *norm = head < model->heads ? layer->query_norm : layer->key_norm;
        if (norm && !model->joint_norms) work->ways->norm(x, norm, model->epsilon, size, x);
        if (layer->rotation >= 0) work->ways->rotate(x, pass->cosines + at, pass->sines + at, turned);
    }
}

/* Head norms, rotation, and keys and values to where they are kept. */
static void rotate(const Work *work, const Layer *layer, int piece) {
    (void)piece;
    const Pass *pass = work->pass;
    const Model *model = pass->model;
    const int size = model->size, place = (int)(layer - model->layers), dropped = dropped_of(pass, place);
    for (int r = 0; r < pass->rows; r++) {
        const Request *request = whose(pass, r);
        const Kept kept = kept_for(pass, request, place);
        const int64_t at = (place_of(request->places, request->past + r - request->first) - dropped) * size;
        const float *row = work->row + r * work->stride;
        turn(work, layer, r);
        for (int head = 0; head < model->shared; head++) {
            const float *key = row + (int64_t)(model->heads + head) * size;
            const float *value = key + (int64_t)model->shared * size;
            if (pass->is_bfloat16) {
                uint16_t *keys = (uint16_t *)kept.keys + head * kept.keys_stride + at;
                uint16_t *values = (uint16_t *)kept.values + head * kept.values_stride + at;
                for (int i = 0; i < size; i++) keys[i] = to_bfloat16(key[i]);
                for (int i = 0; i < size; i++) values[i] = to_bfloat16(value[i]);
            } else {
                memcpy((float *)kept.keys + head * kept.keys_stride + at, key, sizeof(float) * (size_t)size);
                memcpy((float *)kept.values + head * kept.values_stride + at, value, sizeof(float) * (size_t)size);
            }
        }
    }
}

/* What the query heads of a row that share a head of keys and values attend to; `query` and `out` are theirs. */
static Attention attention_of(
    const Pass *pass, int place, int window, int row, int head, const float *query, float *out) {
    const Model *model = pass->model;
    const size_t number = pass->is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
    const Request *request = whose(pass, row);
    const Kept kept = kept_for(pass, request, place);
    const int own = row - request->first, after = request + 1 < pass->requests + pass->count ? request[1].first : pass->rows;
    const int count = request->past + (request->mask ? after - request->first : own + 1);
    const int unseen = window && count > window ? count - window : 0, dropped = dropped_of(pass, place);
    return (Attention){
        .query = query,
        .keys = kept.keys + (size_t)(head * kept.keys_stride) * number,
        .values = kept.values + (size_t)(head * kept.values_stride) * number,
        .places = request->places,
        .mask = request->mask ? request->mask + own * request->mask_stride : NULL,
        .mask_stride = request->mask_stride,
        .out = out,
        .scaling = model->scaling,
        .rows = 1,
        .first = unseen - dropped,
        .end = INT_MAX,
        .count = count - dropped,
        .groups = model->heads / model->shared,
        .size = model->size,
        .is_bfloat16 = pass->is_bfloat16,
        .is_first = own == 0,
    };
}

INLINE int pieces_of_attention(const Pass *pass, const Parts *parts) {
    return (pass->rows + parts->together - 1) / parts->together * pass->model->shared * parts->most;
}

INLINE int parts_of(const Attention *a) { return (a->count - a->first + KEYS_OF_PART - 1) / KEYS_OF_PART; }

INLINE void take_part_of(Attention *some, const Attention *all, int part) {
    some->first = all->first + part * KEYS_OF_PART;
    some->end = some->first + KEYS_OF_PART;
}

/* Rows attend to all parts, one after the other; `place` has space for two of them unless it is NULL. */
static void attend_to_all(const Ways *ways, const Attention *rows, int parts, int largest, float *place) {
    float own[2][HEADS_TOGETHER * (MOST_SIZE + 2 + PANEL)];
    float *all = place ? place : own[0], *found = place ? place + largest : own[1];
    Attention some = *rows;
    some.part_stride = largest;
    for (int part = 0; part < parts; part++) {
        some.part = part ? found : all;
        take_part_of(&some, rows, part);
        ways->attend(&some);
        for (int r = 0; part && r < rows->rows; r++) ways->join(rows, found + r * largest, all + r * largest);
    }
    for (int r = 0; r < rows->rows; r++) ways->average(rows, all + r * largest, rows->out + r * rows->stride);
}

/* Some rows attend to a part of the positions, or to all, with the heads that share keys and values. Rows of a request that
 * have the same parts do so at once; of shared parts, who does the last one of a row joins them. Rows of `query` and `out`
 * are `stride` numbers apart; what rows find is also put into `given`, unless that is NULL. */
static void attend_to(
    const Pass *pass, const Ways *ways, const Parts *parts, int place, int window, int piece, const float *query,
    float *out, int64_t stride, const Given *given) {
    const Model *model = pass->model;
    const int chunks = (pass->rows + parts->together - 1) / parts->together, begin = piece % chunks * parts->together;
    const int end = begin + parts->together < pass->rows ? begin + parts->together : pass->rows;
    const int head = piece / chunks / parts->most, part = piece / chunks % parts->most;
    const int groups = model->heads / model->shared, own = groups * model->size;
    for (int row = begin, rows; row < end; row += rows) {
        const int64_t at = row * stride + (int64_t)head * own;
        Attention some = attention_of(pass, place, window, row, head, query + at, out + at);
        const int all = parts_of(&some), shared = parts->most > 1 && all > 1;
        for (rows = 1; row + rows < end && (rows + 1) * groups <= HEADS_TOGETHER; rows++) {
            const Attention next = attention_of(pass, place, window, row + rows, head, query, out);
            if (whose(pass, row + rows) != whose(pass, row) || next.first != some.first || parts_of(&next) != all) break;
        }
        if (part >= all) continue;
        const int64_t pairs = model->shared, largest = parts->kept * parts->largest;
        float *found = parts->found + (row * pairs + head) * largest;
        some.rows = rows;
        some.stride = stride;
        if (shared) {
            Attention its_own = some;
            its_own.part = found + (int64_t)part * parts->largest;
            its_own.part_stride = pairs * largest;
            take_part_of(&its_own, &some, part);
            ways->attend(&its_own);
        } else if (all > 1) {
            attend_to_all(ways, &some, all, parts->largest, groups > HEADS_TOGETHER ? found : NULL);
        } else {
            ways->attend(&some);
        }
        for (int r = 0; r < rows; r++) {
            if (shared) {
                atomic_int *done = &parts->done[(row + r) * pairs + head];
                if (atomic_fetch_add_explicit(done, 1, memory_order_acq_rel) + 1 < all) continue;
                atomic_store_explicit(done, 0, memory_order_relaxed); /* for the next layer */
                float *first = found + r * pairs * largest;
                for (int p = 1; p < all; p++) ways->join(&some, first + p * parts->largest, first);
                ways->average(&some, first, some.out + r * stride);
            }
            if (given) put(ways, some.out + r * stride, given, row + r, head * own, own);
        }
    }
}

static void attend(const Work *work, const Layer *layer, int piece) {
    const Given given = given_to(work, &layer->output);
    attend_to(
        work->pass, work->ways, &work->parts, (int)(layer - work->pass->model->layers), layer->window, piece, work->row,
        work->more, work->stride, given.form == IN_BYTES ? NULL : &given);
}

static void attended(const Work *work, const Layer *layer, int piece) {
    (void)piece;
    const Given given = given_to(work, &layer->output);
    if (given.form != IN_BYTES) return;
    for (int r = 0; r < work->pass->rows; r++) give(work->ways, work->more + r * work->stride, &given, r);
}

static void put_out(const Work *work, const Layer *layer, int piece) {
    const Given given = given_to(work, &layer->output);
    multiply(work, &layer->output, &given, work->pass->rows, piece, work->row, work->stride);
}

/* What attention or MLP puts out, behind its norm if it has one, is added to x. */
static void added(const Work *work, const float *norm) {
    const Pass *pass = work->pass;
    const Model *model = pass->model;
    for (int r = 0; r < pass->rows; r++) {
        float *more = work->row + r * work->stride;
        if (norm) work->ways->norm(more, norm, model->epsilon, model->hidden, more);
        work->ways->add(pass->x + (int64_t)r * model->hidden, more, model->added, model->hidden);
    }
}

static void after_attention(const Work *work, const Layer *layer, int piece) {
    (void)piece;
    added(work, layer->attention_out_norm);
    give_normed(work, layer->mlp_norm);
}

/* Gates of some panels and what they let through: the second half of the same product. */
static void gate(const Work *work, const Layer *layer, int piece) {
    const Matrix *gates = &layer->gates;
    const Model *model = work->pass->model;
    const int middle = model->middle, gelu = model->gelu, width = gates->width, half = middle / width;
    const int rows = work->pass->rows, some = panels_at_once(gates, PIECE_OF_GATES), first = piece * some;
    const int end = first + some < half ? first + some : half;
    for (int which = 0; which < 2; which++)
        for (int panel = first; panel < end; panel++)
            work->ways->products[work->narrow.form](gates, &work->narrow, rows, which * half + panel, work->row, work->stride);
    for (int r = 0; r < rows; r++) {
        float *x = work->row + r * work->stride + (int64_t)first * width;
        work->ways->gate(x, x + middle, (end - first) * width, gelu);
        if (work->wide.form != IN_BYTES) put(work->ways, x, &work->wide, r, first * width, (end - first) * width);
    }
}

static void gated(const Work *work, const Layer *layer, int piece) {
    (void)layer;
    (void)piece;
    if (work->wide.form != IN_BYTES) return;
    for (int r = 0; r < work->pass->rows; r++) give(work->ways, work->row + r * work->stride, &work->wide, r);
}

static void bring_down(const Work *work, const Layer *layer, int piece) {
    multiply(work, &layer->down, &work->wide, work->pass->rows, piece, work->row, work->stride);
}

static void after_layer(const Work *work, const Layer *layer, int piece) {
    (void)piece;
    const Pass *pass = work->pass;
    const Model *model = pass->model;
    const int index = (int)(layer - model->layers) + 1;
    added(work, layer->mlp_out_norm);
    if (index < model->count) {
        tell_states(work, index, pass->x, model->hidden);
        give_normed(work, layer[1].attention_norm);
        return;
    }
    normed(work, model->norm);
    tell_states(work, index, work->more, work->stride);
    for (int i = 0; i < pass->wanted; i++)
        give(work->ways, work->more + pass->which[i] * work->stride, &work->narrow, i);
}

static void tell(const Work *work, const Layer *layer, int piece) {
    (void)layer;
    const Pass *pass = work->pass;
    const Matrix *head = &pass->model->head;
    multiply(work, head, &work->narrow, pass->wanted, piece, pass->logits, head->outputs);
}

enum { STAGES_OF_LAYER = 5 };

static void run(void *given) {
    Work *joining = given;
    const Work *work = joining;
    const Model *model = work->pass->model;
    const int attending = pieces_of_attention(work->pass, &work->parts), own = atomic_fetch_add(&joining->joined, 1);
    Stage *stage = work->stages;
    take_part(stage++, 1, own, work, model->layers, begin, NULL);
    for (const Layer *layer = model->layers; layer < model->layers + model->count; layer++) {
        const int some = panels_at_once(&layer->gates, PIECE_OF_GATES), half = model->middle / layer->gates.width;
        take_part(stage++, pieces_of(&layer->projections), own, work, layer, project, rotate);
        take_part(stage++, attending, own, work, layer, attend, attended);
        take_part(stage++, pieces_of(&layer->output), own, work, layer, put_out, after_attention);
        take_part(stage++, (half + some - 1) / some, own, work, layer, gate, gated);
        take_part(stage++, pieces_of(&layer->down), own, work, layer, bring_down, after_layer);
    }
    take_pieces(stage, pieces_of(&model->head), own, work, NULL, tell, NULL); /* who lent the threads waits for all */
}

/* ---- memory ---- */

typedef struct {
    char *next;
    size_t used;
} Arena;

/* Called once without memory, to count, and once with it. */
static void *some(Arena *arena, size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    void *found = arena->next;
    if (arena->next) arena->next += bytes;
    arena->used += bytes;
    return found;
}

static Given some_given(Arena *arena, int rows, int inputs, int form) {
    const size_t padded = (size_t)padded_for(form, inputs), count = (size_t)rows;
    Given found = {.inputs = inputs, .padded = (int)padded, .form = form};
    if (form != IN_BYTES) {
        found.numbers = some(arena, count * padded * (size_t)number_bytes(form));
        return found;
    }
    found.bytes = some(arena, count * padded);
    found.scales = some(arena, count * sizeof(float));
    found.totals = some(arena, count * sizeof(int32_t));
    found.sums = some(arena, count * padded / GROUP * sizeof(int32_t));
    return found;
}

INLINE int larger(int a, int b) { return a > b ? a : b; }

static Parts some_parts(Arena *arena, const Pass *pass) {
    const Model *model = pass->model;
    const int groups = model->heads / model->shared, pairs = pass->rows * model->shared;
    const int shares = shares_for(pass->parallel, pass->threads), at_once = larger(1, HEADS_TOGETHER / groups);
    const int alone = (pass->rows + at_once - 1) / at_once * model->shared; /* pieces, if threads share no parts */
    Parts found = {.most = 1, .largest = (groups * (model->size + 2) + PANEL - 1) / PANEL * PANEL};
    const size_t bytes = (size_t)pairs * (size_t)found.largest * sizeof(float);
    int most = 1;
    for (const Request *request = pass->requests; request < pass->requests + pass->count; request++) {
        const int after = request + 1 < pass->requests + pass->count ? request[1].first : pass->rows;
        most = larger(most, (request->past + after - request->first + KEYS_OF_PART - 1) / KEYS_OF_PART);
    }
    /* Few pieces would each read the whole context again. */
    const int fits = pass->rows <= FEW_ROWS || bytes * (size_t)most <= MOST_FOUND;
    if (fits && alone < 2 * PIECES_FOR_A_THREAD * shares) found.most = most;
    found.kept = larger(found.most, groups > HEADS_TOGETHER && most > 1 ? 2 : 1);
    found.together = pairs * found.most / (PIECES_FOR_A_THREAD * shares);
    found.together = larger(1, found.together < pass->rows ? found.together : pass->rows);
    if (found.kept == 1) return found;
    found.found = some(arena, bytes * (size_t)found.kept);
    found.done = some(arena, (size_t)pairs * sizeof(atomic_int));
    for (int i = 0; arena->next && i < pairs; i++) atomic_init(&found.done[i], 0);
    return found;
}

static void lay_out(Work *work, Arena *arena) {
    const Pass *pass = work->pass;
    const Model *model = pass->model;
    const int all = (model->heads + 2 * model->shared) * model->size, stages = 2 + STAGES_OF_LAYER * model->count;
    const int most = model->layers->projections.inputs; /* of a head twice the hidden size */
    work->stride = (larger(larger(all, 2 * model->middle), most) + PANEL - 1) / PANEL * PANEL;
    work->stages = some(arena, (size_t)stages * sizeof(Stage));
    const int form = form_of(model->head.bits, pass->level);
    work->narrow = some_given(arena, pass->rows, larger(most, model->heads * model->size), form);
    work->narrow.inputs = model->hidden;
    work->narrow.padded = padded_for(form, model->hidden);
    work->wide = some_given(arena, pass->rows, model->middle, form);
    work->row = some(arena, (size_t)pass->rows * (size_t)work->stride * sizeof(float));
    work->more = some(arena, (size_t)pass->rows * (size_t)work->stride * sizeof(float));
    work->parts = some_parts(arena, pass);
}

static void all_threads(Parallel parallel, int threads, void (*each)(void *), void *given) {
    if (parallel && threads > 1)
        parallel(each, given, (unsigned)threads, 0);
    else
        each(given);
}

/* Make a pass. 0, or 1 where memory or this processor's instructions are missing. */
int specbench_pass(const Pass *pass) {
    if (pass->level < 1 || pass->level > specbench_level()) return 1;
    Work work = {.pass = pass, .ways = WAYS[pass->level], .shares = shares_for(pass->parallel, pass->threads)};
    Arena arena = {0};
    lay_out(&work, &arena);
    char *memory = aligned_alloc(64, arena.used);
    if (!memory) return 1;
    arena.next = memory;
    lay_out(&work, &arena);
    const int stages = 2 + STAGES_OF_LAYER * pass->model->count;
    for (int i = 0; i < stages; i++) begin_stage(&work.stages[i]);
    all_threads(pass->parallel, pass->threads, run, &work);
    free(memory);
    return 0;
}

/* ---- one product, attention alone, and packing ---- */

/* A prompt's keys and values in panels like those of weights, in blocks of KEYS_OF_PROMPT. */
typedef struct {
    const Prompt *prompt;
    int form, bits, step, blocks, first; /* numbers to a step; blocks, and the first of them that a row sees */
    int64_t key_bytes, value_bytes;      /* of a block */
    char *keys, *values;                 /* [shared, blocks] */
} PromptPanels;

typedef struct Single Single;
typedef void (*SingleStep)(const Single *, int piece);

struct Single {
    const Matrix *matrix;
    const Packing *packing;
    const Pass *pass;
    const PromptPanels *panels;
    const DeltaRule *rule;
    const Ways *ways;
    const void *x;
    void *out;
    Given given;
    Parts parts; /* of attention */
    int rows, shares, is_bfloat16; /* x and out */
    SingleStep step; /* where there is one stage */
    int pieces;
    atomic_int joined[2];
    Stage stages[2];
};

/* A row of x in bfloat16, as products of numbers take it. */
static void give_halves(const uint16_t *x, const Given *to, int row) {
    const int count = to->inputs;
    char *at = to->numbers + (int64_t)row * to->padded * number_bytes(to->form);
    if (to->form == IN_HALVES)
        memcpy(at, x, sizeof *x * (size_t)count);
    else
        for (int i = 0; i < count; i++) ((uint32_t *)at)[i] = (uint32_t)x[i] << 16;
    memset(at + (int64_t)count * number_bytes(to->form), 0, (size_t)((to->padded - count) * number_bytes(to->form)));
}

static void give_rows(const Single *work, int piece) {
    const int inputs = work->matrix->inputs;
    for (int r = piece * MOST_TILE; r < (piece + 1) * MOST_TILE && r < work->rows; r++) {
        if (work->is_bfloat16)
            give_halves((const uint16_t *)work->x + (int64_t)r * inputs, &work->given, r);
        else
            give(work->ways, (const float *)work->x + (int64_t)r * inputs, &work->given, r);
    }
}

static void multiply_panel(const Single *work, int piece) {
    const Given *given = &work->given;
    const int64_t outputs = work->matrix->outputs;
    if (!work->is_bfloat16) {
        work->ways->products[given->form](work->matrix, given, work->rows, piece, work->out, outputs);
        return;
    }
    Matrix panel = *work->matrix;
    const int begin = piece * panel.width;
    _Alignas(64) float found[ROWS_AT_ONCE * MOST_WIDTH];
    panel.panels += piece * panel_bytes(&panel);
    panel.outputs = panel.outputs - begin < panel.width ? panel.outputs - begin : panel.width;
    if (panel.bias) panel.bias += begin;
    work->ways->products[given->form](&panel, given, work->rows, 0, found, MOST_WIDTH);
    for (int r = 0; r < work->rows; r++) {
        const float *from = found + r * MOST_WIDTH;
        uint16_t *to = (uint16_t *)work->out + r * outputs + begin;
        if (given->form == IN_HALVES)
            work->ways->halve(from, to, panel.outputs);
        else
            for (int i = 0; i < panel.outputs; i++) to[i] = to_bfloat16(from[i]);
    }
}

static void attend_alone(const Single *work, int piece) {
    const Pass *pass = work->pass;
    const int64_t stride = (int64_t)pass->model->heads * pass->model->size;
    attend_to(pass, work->ways, &work->parts, 0, 0, piece, pass->x, pass->logits, stride, NULL);
}

static void pack_panel(const Single *work, int piece) { work->ways->pack(work->packing, piece); }

/* A panel in 12 bits to one in bfloat16. */
static void unpack_panel(const Single *work, int number) {
    const Matrix *matrix = work->matrix;
    const int steps = matrix->depth / 2;
    const uint8_t *panel = matrix->panels + number * panel_bytes(matrix);
    uint16_t *out = (uint16_t *)work->out + (int64_t)number * steps * 2 * MOST_WIDTH;
    for (int step = 0; step < steps; step += STRETCH) {
        const Block *block = (const Block *)(panel + bytes_in_12_bits(step));
        const int count = steps - step < STRETCH ? steps - step : STRETCH;
        work->ways->unpack(block, matrix->exceptions, count, out + step * 2 * MOST_WIDTH);
    }
}

static void recur_head(const Single *work, int piece) { work->ways->recur(work->rule, piece); }

static void take_singly(Single *work, int number, int pieces, SingleStep step) {
    Stage *stage = &work->stages[number];
    const int own = atomic_fetch_add(&work->joined[number], 1);
    for (int piece; (piece = next_piece(stage, pieces, work->shares, own)) >= 0;) {
        step(work, piece);
        if (atomic_fetch_add_explicit(&stage->done, 1, memory_order_acq_rel) + 1 == pieces) finish(stage, pieces);
    }
    wait_for(stage, pieces);
}

static void run_product(void *given) {
    Single *work = given;
    take_singly(work, 0, (work->rows + MOST_TILE - 1) / MOST_TILE, give_rows);
    take_singly(work, 1, panels_of(work->matrix), multiply_panel);
}

static void run_step(void *given) {
    Single *work = given;
    take_singly(work, 0, work->pieces, work->step);
}

static void share_with(Single *work, Parallel parallel, int threads, void (*each)(void *)) {
    work->shares = shares_for(parallel, threads);
    for (int i = 0; i < 2; i++) {
        atomic_init(&work->joined[i], 0);
        begin_stage(&work->stages[i]);
    }
    all_threads(parallel, threads, each, work);
}

/* x [rows, inputs] -> out [rows, outputs], both in float32 or, beside numbers, in bfloat16. */
int specbench_product(
    const Matrix *matrix, const void *x, int64_t rows, void *out, int is_bfloat16, Parallel parallel, int threads,
    int level) {
    if (level < 1 || level > specbench_level()) return 1;
    Single work = {.matrix = matrix, .ways = WAYS[level], .is_bfloat16 = is_bfloat16};
    Arena arena = {0};
    const int most = rows < ROWS_AT_ONCE ? (int)rows : ROWS_AT_ONCE, form = form_of(matrix->bits, level);
    const int64_t number = is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
    some_given(&arena, most, matrix->inputs, form);
    char *memory = aligned_alloc(64, arena.used + 64);
    if (!memory) return 1;
    arena.next = memory;
    work.given = some_given(&arena, most, matrix->inputs, form);
    for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
        work.x = (const char *)x + first * matrix->inputs * number;
        work.out = (char *)out + first * matrix->outputs * number;
        work.rows = rows - first < ROWS_AT_ONCE ? (int)(rows - first) : ROWS_AT_ONCE;
        share_with(&work, parallel, threads, run_product);
    }
    free(memory);
    return 0;
}

/* Attention alone, where something else makes the rest of a pass: rows of x, [rows, heads, size], are rotated queries, and
 * `logits`, the same, becomes what they find. Keys and values, of one layer, have what the rows bring already. */
int specbench_attend(const Pass *pass) {
    if (pass->level < 1 || pass->level > specbench_level()) return 1;
    Single work = {.pass = pass, .ways = WAYS[pass->level], .step = attend_alone};
    Arena arena = {0};
    some_parts(&arena, pass);
    char *memory = aligned_alloc(64, arena.used + 64);
    if (!memory) return 1;
    arena.next = memory;
    work.parts = some_parts(&arena, pass);
    work.pieces = pieces_of_attention(pass, &work.parts);
    share_with(&work, pass->parallel, pass->threads, run_step);
    free(memory);
    return 0;
}

/* ---- attention of prompts: rows of one head times blocks of keys, and of values, as if these were weights ---- */

/* A number of keys or values, or the pair of which the second is `apart` numbers behind the first, as panels hold it. */
INLINE uint32_t word_of(const void *numbers, int64_t at, int64_t apart, int step) {
    uint32_t word;
    if (step == 1) {
        memcpy(&word, (const float *)numbers + at, sizeof word);
        return word;
    }
    const uint16_t *pair = (const uint16_t *)numbers + at;
    return pair[0] | (uint32_t)pair[apart] << 16;
}

/* A block of keys to panels of MOST_WIDTH keys, and one of values to panels of MOST_WIDTH of their numbers. */
static void pack_block(const Single *work, int piece) {
    const PromptPanels *panels = work->panels;
    const Prompt *prompt = panels->prompt;
    const int size = prompt->size, step = panels->step, head = piece / panels->blocks, block = piece % panels->blocks;
    const int begin = block * KEYS_OF_PROMPT;
    const int count = prompt->count - begin < KEYS_OF_PROMPT ? prompt->count - begin : KEYS_OF_PROMPT;
    const int64_t first_key = head * prompt->keys_stride + (int64_t)begin * size;
    const int64_t first_value = head * prompt->values_stride + (int64_t)begin * size;
    uint32_t *keys = (uint32_t *)(panels->keys + piece * panels->key_bytes);
    uint32_t *values = (uint32_t *)(panels->values + piece * panels->value_bytes);
    if (block < panels->first) return;
    memset(keys, 0, (size_t)panels->key_bytes);
    memset(values, 0, (size_t)panels->value_bytes);
    for (int j = 0; j < count; j++) {
        uint32_t *to = keys + (int64_t)(j / MOST_WIDTH) * (size / step) * MOST_WIDTH + j % MOST_WIDTH;
        for (int i = 0; i < size / step; i++)
            to[(int64_t)i * MOST_WIDTH] = word_of(prompt->keys, first_key + (int64_t)j * size + i * step, 1, step);
    }
    for (int j = 0; j < count; j += step) {
        const int64_t at = first_value + (int64_t)j * size;
        for (int i = 0; i < size; i++) {
            uint32_t *to = values + ((int64_t)(i / MOST_WIDTH) * (KEYS_OF_PROMPT / step) + j / step) * MOST_WIDTH;
            to[i % MOST_WIDTH] = j + 1 < count || step == 1 ? word_of(prompt->values, at + i, size, step)
                                                            : ((const uint16_t *)prompt->values)[at + i];
        }
    }
}

/* Rows, [rows, padded], times one panel, of which `inputs` count. */
static void multiply_prompt(
    const Single *work, const char *panel, int outputs, int inputs, char *x, int padded, int rows, float *out,
    int stride) {
    const PromptPanels *panels = work->panels;
    const Matrix matrix = {
        .panels = (const uint8_t *)panel,
        .outputs = outputs,
        .inputs = inputs,
        .bits = panels->bits,
        .width = MOST_WIDTH,
        .depth = inputs,
    };
    const Given given = {.numbers = x, .inputs = inputs, .padded = padded, .form = panels->form};
    work->ways->products[panels->form](&matrix, &given, rows, 0, out, stride);
}

/* Queries of one head, as products take them. */
static void begin_rows(const PromptPanels *panels, PromptRows *rows, int head, int begin, int count) {
    const Prompt *prompt = panels->prompt;
    const int size = prompt->size, bytes = number_bytes(panels->form);
    for (int r = 0; r < count; r++) {
        const int64_t at = head * prompt->query_strides[0] + (begin + r) * prompt->query_strides[1];
        char *to = rows->query + (int64_t)r * size * bytes;
        if (!prompt->is_bfloat16)
            memcpy(to, (const float *)prompt->query + at, sizeof(float) * (size_t)size);
        else if (panels->form == IN_HALVES)
            memcpy(to, (const uint16_t *)prompt->query + at, sizeof(uint16_t) * (size_t)size);
        else
            for (int i = 0; i < size; i++)
                ((uint32_t *)to)[i] = (uint32_t)((const uint16_t *)prompt->query)[at + i] << 16;
        rows->most[r] = -INFINITY;
        rows->total[r] = 0.0f;
    }
    memset(rows->sums, 0, sizeof(float) * (size_t)(count * size));
}

/* Scores of the keys at hand become weights, as products take them, of the row at position `own`. */
static void weigh_keys(const Single *work, PromptRows *rows, int r, int own, int first, int padded) {
    const Prompt *prompt = work->panels->prompt;
    const int end = own + 1 - first < padded ? own + 1 - first : padded;
    const int unseen = prompt->window && own + 1 - prompt->window > first ? own + 1 - prompt->window - first : 0;
    float *scores = rows->scores + r * KEYS_OF_PROMPT;
    char *to = rows->weights + (int64_t)r * KEYS_OF_PROMPT * number_bytes(work->panels->form);
    if (unseen < end)
        work->ways->softmax(rows, r, unseen, end, padded, prompt->size, prompt->scaling);
    else
        memset(scores, 0, sizeof(float) * (size_t)padded);
    if (work->panels->form == IN_HALVES)
        work->ways->halve(scores, (uint16_t *)to, padded);
    else
        memcpy(to, scores, sizeof(float) * (size_t)padded);
}

static void end_rows(const Prompt *prompt, const PromptRows *rows, int head, int begin, int count) {
    const int size = prompt->size;
    for (int r = 0; r < count; r++) {
        const int64_t at = ((int64_t)(begin + r) * prompt->heads + head) * size;
        const float scale = 1.0f / rows->total[r], *sums = rows->sums + r * size;
        for (int i = 0; i < size; i++) {
            if (prompt->is_bfloat16)
                ((uint16_t *)prompt->out)[at + i] = to_bfloat16(sums[i] * scale);
            else
                ((float *)prompt->out)[at + i] = sums[i] * scale;
        }
    }
}

INLINE int rows_of_prompt(const Prompt *prompt) { return (prompt->rows + ROWS_OF_PROMPT - 1) / ROWS_OF_PROMPT; }

/* Some rows of one head. What a row finds does not depend on the others. */
static void read_prompt(const Single *work, int piece) {
    const PromptPanels *panels = work->panels;
    const Prompt *prompt = panels->prompt;
    const int size = prompt->size, head = piece / rows_of_prompt(prompt), begin = piece % rows_of_prompt(prompt) * ROWS_OF_PROMPT;
    const int count = prompt->rows - begin < ROWS_OF_PROMPT ? prompt->rows - begin : ROWS_OF_PROMPT;
    const int position = prompt->count - prompt->rows + begin, shared = head / (prompt->heads / prompt->shared);
    const int64_t key_panel = 4 * (int64_t)MOST_WIDTH * size / panels->step;
    const int64_t value_panel = 4 * (int64_t)MOST_WIDTH * KEYS_OF_PROMPT / panels->step;
    const int unseen = prompt->window && position + 1 > prompt->window ? position + 1 - prompt->window : 0;
    _Alignas(64) PromptRows rows;
    begin_rows(panels, &rows, head, begin, count);
    for (int block = unseen / KEYS_OF_PROMPT; block * KEYS_OF_PROMPT < position + count; block++) {
        const int64_t number = (int64_t)shared * panels->blocks + block;
        const char *keys = panels->keys + number * panels->key_bytes, *values = panels->values + number * panels->value_bytes;
        const int first = block * KEYS_OF_PROMPT, left = position + count - first;
        const int padded = left < KEYS_OF_PROMPT ? (left + MOST_WIDTH - 1) / MOST_WIDTH * MOST_WIDTH : KEYS_OF_PROMPT;
        for (int j = 0; j < padded; j += MOST_WIDTH, keys += key_panel)
            multiply_prompt(work, keys, MOST_WIDTH, size, rows.query, size, count, rows.scores + j, KEYS_OF_PROMPT);
        for (int r = 0; r < count; r++) weigh_keys(work, &rows, r, position + r, first, padded);
        for (int i = 0; i < size; i += MOST_WIDTH, values += value_panel) {
            const int outputs = size - i < MOST_WIDTH ? size - i : MOST_WIDTH;
            multiply_prompt(work, values, outputs, padded, rows.weights, KEYS_OF_PROMPT, count, rows.found + i, size);
        }
        work->ways->add(rows.sums, rows.found, 1.0f, count * size);
    }
    end_rows(prompt, &rows, head, begin, count);
}

static void run_prompt(void *given) {
    Single *work = given;
    const Prompt *prompt = work->panels->prompt;
    take_singly(work, 0, prompt->shared * work->panels->blocks, pack_block);
    take_singly(work, 1, prompt->heads * rows_of_prompt(prompt), read_prompt);
}

/* Attention of a prompt: 0, or 1 where memory or this processor's instructions are missing. */
int specbench_prompt(const Prompt *prompt, Parallel parallel, int threads, int level) {
    if (level < 1 || level > specbench_level() || prompt->size > MOST_SIZE) return 1;
    const int past = prompt->count - prompt->rows, bits = prompt->is_bfloat16 ? 16 : 32, step = prompt->is_bfloat16 ? 2 : 1;
    PromptPanels panels = {
        .prompt = prompt,
        .form = form_of(bits, level),
        .bits = bits,
        .step = step,
        .blocks = (prompt->count + KEYS_OF_PROMPT - 1) / KEYS_OF_PROMPT,
        .first = prompt->window && past + 1 > prompt->window ? (past + 1 - prompt->window) / KEYS_OF_PROMPT : 0,
        .key_bytes = 4 * (int64_t)KEYS_OF_PROMPT * prompt->size / step,
        .value_bytes = 4 * (int64_t)KEYS_OF_PROMPT * ((prompt->size + MOST_WIDTH - 1) / MOST_WIDTH * MOST_WIDTH) / step,
    };
    const int64_t blocks = (int64_t)prompt->shared * panels.blocks;
    panels.keys = aligned_alloc(64, (size_t)(blocks * (panels.key_bytes + panels.value_bytes)));
    if (!panels.keys) return 1;
    panels.values = panels.keys + blocks * panels.key_bytes;
    Single work = {.panels = &panels, .ways = WAYS[level]};
    share_with(&work, parallel, threads, run_prompt);
    free(panels.keys);
    return 0;
}

/* Rows of a weight to panels, of which the last may be filled up with zeros. */
int specbench_pack(const Packing *packing, Parallel parallel, int threads, int level) {
    if (level < 1 || level > specbench_level()) return 1;
    const int pieces = (packing->rows + packing->width - 1) / packing->width;
    Single work = {.packing = packing, .ways = WAYS[level], .step = pack_panel, .pieces = pieces};
    share_with(&work, parallel, threads, run_step);
    return 0;
}

/* All panels of a weight in 12 bits to bfloat16. */
int specbench_unpack(const Matrix *matrix, void *out, Parallel parallel, int threads, int level) {
    if (level < 1 || level > specbench_level()) return 1;
    Single work = {.matrix = matrix, .out = out, .ways = WAYS[level], .step = unpack_panel, .pieces = panels_of(matrix)};
    share_with(&work, parallel, threads, run_step);
    return 0;
}

/* The recurrence of a short pass: 0, or 1 where sizes or instructions are not supported. */
int specbench_delta_rule(const DeltaRule *rule, Parallel parallel, int threads, int level) {
    if (level < 1 || level > specbench_level() || rule->keys > MOST_SIZE) return 1;
    Single work = {.rule = rule, .ways = WAYS[level], .step = recur_head, .pieces = rule->batch * rule->heads};
    share_with(&work, parallel, threads, run_step);
    return 0;
}

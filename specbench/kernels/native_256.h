/* Vectors of 256 bits, with VNNI (DOT) or without. Included by native.c for each such set of instructions. */

#define LANES 8
#define UNPACK unpack_any
#define UNPACKS_STEPS 0
#define VF __m256
#define VI __m256i
#define F_LOAD _mm256_loadu_ps
#define F_STORE _mm256_storeu_ps
#define F_SET _mm256_set1_ps
#define F_ADD _mm256_add_ps
#define F_SUB _mm256_sub_ps
#define F_MUL _mm256_mul_ps
#define F_DIV _mm256_div_ps
#define F_FMA _mm256_fmadd_ps
#define F_MAX _mm256_max_ps
#define F_MIN _mm256_min_ps
#define F_ABS(x) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x)
#define F_SUM sum_avx2
#define F_SUMS sums_avx2
#define F_LARGEST largest_avx2
#define F_TO_I _mm256_cvtps_epi32
#define F_POWER(i) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(i, _mm256_set1_epi32(127)), 23))
#define F_OF_BFLOAT16(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define F_OF_I _mm256_castsi256_ps
#define F_WHERE_FINITE(x, y) _mm256_and_ps(y, _mm256_cmp_ps(x, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ))
#define I_TO_F _mm256_cvtepi32_ps
#define I_SET _mm256_set1_epi32
#define I_LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define I_STORE(p, i) _mm256_storeu_si256((__m256i *)(p), i)
#define I_AND _mm256_and_si256
#define I_SHIFT4(v) _mm256_srli_epi16(v, 4)
#define I_SHIFT_UP16(v) _mm256_slli_epi32(v, 16)
#define I_STORE_BYTES store_bytes_avx2
#ifdef DOT
#define DOT_BYTES DOT
#define DOT_NIBBLES DOT
#define SUM_OF_GROUP(sums) (sums)
#define ZERO_OF_BYTES 128
#define TILE_BYTES 6
#else
#define DOT_BYTES dot_bytes_avx2
#define DOT_NIBBLES dot_nibbles_avx2
#define SUM_OF_GROUP(sums) _mm256_madd_epi16(sums, _mm256_set1_epi16(1))
#define ZERO_OF_BYTES 0
#define TILE_BYTES 2
#endif
#define TILE_NIBBLES 6
#define TILE_NUMBERS 3
#define ONLY_HALVES 0
#define TILE_WIDENED 2
#define HALVES_ALONE NULL
#define HALVE NULL
#include "native.h"
#undef DOT

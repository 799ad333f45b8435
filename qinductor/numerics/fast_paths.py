"""Shorter code for the common grids and modes: the rule's bits by fewer instructions.

Only for *regular* grids: every multiple of 2^q up to the first binades, with 2^q far from the
word's subnormal numbers, which also keeps the results clear of flush-to-zero modes.
"""

from __future__ import annotations

import enum

from .carrier import Word
from .rounding import Deep, Grid, Rounding

LOWEST = {32: 56, 64: 175}
"""Smallest c1 by the word's bits: of 32, q >= -94, so that subnormal inputs are below 2^-32·2^q."""


class Fast(enum.Enum):
    """Which shorter form a grid and a mode admit."""

    NO = "the rule as it stands"
    YES = "the shorter form"
    SATURATES = "the shorter form of a symmetric grid that saturates"


def is_regular(grid: Grid, word: Word) -> bool:
    """Whether the grid holds every multiple of its floor 2^q, and q is high enough."""
    low = grid.c1 - word.man < 1 or grid.c1 < LOWEST[word.bits]
    if low or grid.deep is not Deep.NO or grid.wrap is not None or grid.floor_odd != 1:
        return False
    return bool(grid.floor == (grid.c1 - word.man) << word.man)


def largest_kept(grid: Grid, word: Word) -> int:
    """Bits of the grid's next value past its end: what lies beyond may be cut to it."""
    largest = max(grid.limit)
    return int(largest + (1 << max(grid.c1 - (largest >> word.man), grid.d0)))


def fast_path(grid: Grid, word: Word, mode: Rounding) -> Fast:
    """The form that the kernel of an element format may take."""
    if not is_regular(grid, word):
        return Fast.NO
    beyond = largest_kept(grid, word)
    exponent = max(beyond >> word.man, grid.c1 - grid.d0)
    if mode is Rounding.STOCHASTIC:
        if word.bits != 32 or exponent > 2 * word.bias:
            return Fast.NO
    elif mode is Rounding.TIES_TO_EVEN and grid.d0 < word.man:
        # |x| must stay below the number that is added, and that number below infinity.
        if grid.d0 == 0 and beyond >> word.man >= grid.c1:
            return Fast.NO
        if exponent + grid.d0 > 2 * word.bias:
            return Fast.NO
    else:
        return Fast.NO
    saturates = grid.limit[0] == grid.limit[1] and grid.overflow == grid.limit
    return Fast.SATURATES if saturates else Fast.YES


_SETUP = """
const I largest = limit_p > limit_n ? limit_p : limit_n, last = c1 - (largest >> MAN);
const I cap = SATURATES ? largest : largest + ((I)1 << (last > d0 ? last : d0));
const I emin = (c1 - d0) << MAN, up = d0 << MAN;
"""


def setup(word: Word, saturates: bool) -> str:
    """The grid's numbers that both forms take: the largest magnitude kept, the lowest exponent."""
    return _SETUP.replace("MAN", str(word.man)).replace("SATURATES", str(saturates).lower())


def nearest_lines(word: Word, saturates: bool, symmetric: bool, signed_zero: bool) -> list[str]:
    """Nearest even by the processor's own addition: (|x| + C) − C, C = 2^(t + man).

    With t the exponent of the step at x, |x| < C, so the sum's last place is the step, and rounding
    it to nearest even is the rule: C is an even multiple of the step. The difference is exact.
    """
    lines = [
        f"const I a = bits & (I){word.magnitude}LL;",
        "const I f = a < cap ? a : cap;",
        f"const I e = f & (I){word.inf}LL;",
        "const I c = (e > emin ? e : emin) + up;",
        "const F big = __builtin_bit_cast(F, c);",
        "const I r = __builtin_bit_cast(I, (F)((__builtin_bit_cast(F, f) + big) - big));",
    ]
    q = "r"
    if not saturates:
        sides = ("limit_p", "overflow_p")
        if not symmetric:
            lines += [
                "const bool minus = bits < 0;",
                "const I limit = minus ? limit_n : limit_p;",
                "const I over = minus ? overflow_n : overflow_p;",
            ]
            sides = ("limit", "over")
        lines.append(f"const I q = r > {sides[0]} ? {sides[1]} : r;")
        q = "q"
    sign = "(bits & ((I)1 << (sizeof(I) * 8 - 1)))"
    lines.append(f"const I s = {sign if signed_zero else f'{q} == 0 ? (I)0 : {sign}'};")
    lines.append(f"const I y = a > (I){word.inf}LL ? bits : {q} | s;")
    return lines


_STOCHASTIC = r"""
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#define FUSED 1
static inline __m512i load16(const float* x) { return _mm512_loadu_si512(x); }
static inline __m512i load16(const int32_t* x) { return _mm512_loadu_si512(x); }
static inline __m512i load16(const int16_t* x) {
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16);
}
static inline __m512i load16(const uint16_t* x) {
  return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x)));
}
static inline void store16(int32_t* x, __m512i b) { _mm512_storeu_si512(x, b); }
static inline void store16(int16_t* x, __m512i b) {
  _mm256_storeu_si256((__m256i*)x, _mm512_cvtepi32_epi16(_mm512_srli_epi32(b, 16)));
}
static inline void store16(uint16_t* x, __m512i b) {
  _mm256_storeu_si256((__m256i*)x, _mm512_cvtps_ph(_mm512_castsi512_ps(b), 0));
}

// Whole groups of elements, their random bits made in registers beside the rounding.
static void fused_groups(const T* x, T* out, int64_t first, int64_t groups, const int64_t* p) {
  const I d0 = (I)p[0], c1 = (I)p[1];
  const I limit_p = (I)p[7], limit_n = (I)p[8];
  NEAREST_SETUP
  const __m512i largest_kept = _mm512_set1_epi32(cap), lowest = _mm512_set1_epi32(emin);
  // Bits of 2^t are the exponent field less man; of 2^-t, two biases less those.
  const __m512i man = _mm512_set1_epi32((23 - d0) << 23), bias2 = _mm512_set1_epi32(254 << 23);
  const __m512i keep = _mm512_set1_epi32((int32_t)(~0u << (32 - p[18])));
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), inf = _mm512_set1_epi32(0x7f800000);
  const __m512i top = _mm512_set1_epi32(1 << 31);
  const Keys keys((uint64_t)p[14]);
  const __m512 one = _mm512_set1_ps(1.0f), two32 = _mm512_set1_ps(4294967296.0f);
#define FLOAT _mm512_castsi512_ps
  for (int64_t g = 0; g < groups; ++g) {
    __m512i words[4];
    philox_words((uint64_t)(first + g) * 16, (uint32_t)p[16], (uint32_t)p[15], keys, words);
#pragma GCC unroll 16
    for (int w = 0; w < GROUP / 16; ++w) {
      const __m512i u = _mm512_and_si512(
          _mm512_slli_epi32(words[w * LANE / 32], 32 - LANE - w * LANE % 32), keep);
      const __m512i bits = load16(x + g * GROUP + 16 * w), a = _mm512_and_si512(bits, magnitude);
      const __m512i f = _mm512_min_epi32(a, largest_kept);
      const __m512i e = _mm512_max_epi32(_mm512_and_si512(f, inf), lowest);
      const __m512i step = _mm512_sub_epi32(e, man);
      // |x| in steps, its integer and its fraction: powers of two and a difference, all exact.
      const __m512 y = _mm512_mul_ps(FLOAT(f), FLOAT(_mm512_sub_epi32(bias2, step)));
      const __m512 k = _mm512_roundscale_ps(y, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
      const __m512i sum = _mm512_add_epi32(
          _mm512_cvttps_epu32(_mm512_mul_ps(_mm512_sub_ps(y, k), two32)), u);
      const __mmask16 away = _mm512_cmplt_epu32_mask(sum, u);
      __m512i r = _mm512_castps_si512(
          _mm512_mul_ps(_mm512_mask_add_ps(k, away, k, one), FLOAT(step)));
      if (!SATURATES) {
        const __mmask16 minus = SYMMETRIC ? 0 : _mm512_movepi32_mask(bits);
        const __m512i limit = _mm512_mask_set1_epi32(_mm512_set1_epi32(limit_p), minus, limit_n);
        const __m512i over = _mm512_mask_set1_epi32(_mm512_set1_epi32((I)p[9]), minus, (I)p[10]);
        r = _mm512_mask_mov_epi32(r, _mm512_cmpgt_epi32_mask(r, limit), over);
      }
      const __m512i sign = _mm512_and_si512(bits, top);
      r = SIGNED_ZERO ? _mm512_or_si512(r, sign)
                      : _mm512_mask_or_epi32(r, _mm512_test_epi32_mask(r, r), r, sign);
      store16(out + g * GROUP + 16 * w,
              _mm512_mask_mov_epi32(r, _mm512_cmpgt_epi32_mask(a, inf), bits));
    }
  }
#undef FLOAT
}
#endif
"""


def stochastic_source(word: Word, saturates: bool, symmetric: bool, signed_zero: bool) -> str:
    """Stochastic rounding of 32-bit words on AVX-512, without a buffer of random bits."""
    flags = {"SATURATES": saturates, "SYMMETRIC": symmetric, "SIGNED_ZERO": signed_zero}
    constants = "".join(f"constexpr bool {name} = {int(v)};\n" for name, v in flags.items())
    return constants + _STOCHASTIC.replace("NEAREST_SETUP", setup(word, saturates))

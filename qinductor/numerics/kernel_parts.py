"""C++ that all CPU kernels share: arguments, types, half-precision conversions, Philox."""

from __future__ import annotations

import torch

from .carrier import Carrier
from .random_bits import PHILOX_M, PHILOX_W, ROUNDS

GRID_FIELDS = (
    *("d0", "c1", "flip", "floor", "half_low", "half_high", "unit"),
    *("limit_p", "limit_n", "overflow_p", "overflow_n", "infinity_p", "infinity_n", "keep_sign"),
)
"""Order of a grid's numbers in a kernel's arguments."""

RANDOM_FIELDS = ("seed", "step", "site", "offset", "random_bits")

CHUNK = 2048
"""Elements whose random bits are made at once: they stay in the first-level cache."""

PRELUDE = r"""
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif
"""

_PHILOX = r"""
// Each round's pair of keys, in 64 bits, from which an instruction can broadcast them.
struct Keys {
  int64_t k[ROUNDS][2];
  explicit Keys(uint64_t seed) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int r = 0; r < ROUNDS; ++r) { k[r][0] = k0; k[r][1] = k1; k0 += W0; k1 += W1; }
  }
};

#if defined(__AVX512F__)
// One block on each of 16 lanes; words in registers.
static inline void philox_words(uint64_t block, uint32_t site, uint32_t step, const Keys& keys,
                                __m512i words[4]) {
  const uint32_t low = (uint32_t)block, high = (uint32_t)(block >> 32);
  // Even and odd lanes apart, each in the low half of 64 bits: vpmuludq reads that half only.
  const __m512i m0 = _mm512_set1_epi64(M0), m1 = _mm512_set1_epi64(M1);
  const __m512i iota = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
  __m512i a0 = _mm512_add_epi64(_mm512_set1_epi64(low), iota);
  __m512i b0 = _mm512_add_epi64(a0, _mm512_set1_epi64(1));
  __m512i a1 = _mm512_set1_epi64(high), b1 = a1;
  __m512i a2 = _mm512_set1_epi64(site), b2 = a2, a3 = _mm512_set1_epi64(step), b3 = a3;
#pragma GCC unroll 10
  for (int r = 0; r < ROUNDS; ++r) {
    const __m512i q0 = _mm512_set1_epi64(keys.k[r][0]), q1 = _mm512_set1_epi64(keys.k[r][1]);
    const __m512i pa0 = _mm512_mul_epu32(a0, m0), pa1 = _mm512_mul_epu32(a2, m1);
    const __m512i pb0 = _mm512_mul_epu32(b0, m0), pb1 = _mm512_mul_epu32(b2, m1);
    a0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(pa1, 32), a1, q0, 0x96);
    b0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(pb1, 32), b1, q0, 0x96);
    a2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(pa0, 32), a3, q1, 0x96);
    b2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(pb0, 32), b3, q1, 0x96);
    a1 = pa1; b1 = pb1; a3 = pa0; b3 = pb0;
  }
  const __mmask16 odd = 0xAAAA;
#define MERGE(i, a, b) \
  words[i] = _mm512_mask_blend_epi32(odd, a, _mm512_slli_epi64(b, 32))
  MERGE(0, a0, b0); MERGE(1, a1, b1); MERGE(2, a2, b2); MERGE(3, a3, b3);
#undef MERGE
}
#endif

// The same; out[word][lane].
static inline void philox16(uint64_t block, uint32_t site, uint32_t step, const Keys& keys,
                            uint32_t out[4][16]) {
#if defined(__AVX512F__)
  __m512i words[4];
  philox_words(block, site, step, keys, words);
  for (int i = 0; i < 4; ++i) _mm512_storeu_si512(out[i], words[i]);
#else
  const uint32_t low = (uint32_t)block, high = (uint32_t)(block >> 32);
#pragma omp simd
  for (int l = 0; l < 16; ++l) {
    uint32_t c0 = low + l, c1 = high, c2 = site, c3 = step;
    for (int r = 0; r < ROUNDS; ++r) {
      const uint64_t p0 = (uint64_t)c0 * M0, p1 = (uint64_t)c2 * M1;
      c0 = (uint32_t)(p1 >> 32) ^ c1 ^ (uint32_t)keys.k[r][0]; c1 = (uint32_t)p1;
      c2 = (uint32_t)(p0 >> 32) ^ c3 ^ (uint32_t)keys.k[r][1]; c3 = (uint32_t)p0;
    }
    out[0][l] = c0; out[1][l] = c1; out[2][l] = c2; out[3][l] = c3;
  }
#endif
}

// The left-aligned random bits of elements [from, to): u[i - from'], from' the group's start.
struct Random {
  Keys keys; uint32_t site, step, mask;
  uint32_t buffer[CHUNK + 2 * GROUP];
  int64_t begin = 0, end = 0;
  const int32_t* at(int64_t from, int64_t to, int64_t ahead) {
    if (from < begin || to > end) {
      const int64_t first = from / GROUP;
      const int64_t last = ((to > ahead ? to : ahead) + GROUP - 1) / GROUP;
      int64_t count = last - first;
      const int64_t most = (CHUNK + 2 * GROUP) / GROUP;
      if (count > most) count = most;
      begin = first * GROUP; end = begin + count * GROUP;
      for (int64_t g = 0; g < count; ++g) {
        uint32_t words[4][16];
        philox16((uint64_t)(first + g) * 16, site, step, keys, words);
        uint32_t* __restrict target = buffer + g * GROUP;
        const uint32_t keep = mask;
#pragma GCC unroll 16
        for (int w = 0; w < GROUP / 16; ++w) {
          const uint32_t* __restrict word = words[w * LANE / 32];
          const int up = 32 - LANE - w * LANE % 32;
#pragma omp simd
          for (int l = 0; l < 16; ++l) target[16 * w + l] = (word[l] << up) & keep;
        }
      }
    }
    return (const int32_t*)buffer + (from - begin);
  }
};
"""

RANDOM_START = (
    "Random random{Keys((uint64_t)p[14])}; random.step = (uint32_t)p[15]; "
    "random.site = (uint32_t)p[16]; random.mask = ~0u << (32 - p[18]);"
)

_HALF = r"""
static inline float half_to_float(uint16_t h) {
  uint32_t e = (h >> 10) & 31, m = h & 1023, bits;
  if (e == 0) { float f = (float)m * 5.9604644775390625e-8f; std::memcpy(&bits, &f, 4); }
  else bits = ((e == 31 ? 255 : e + 112) << 23) | (m << 13);
  bits |= (uint32_t)(h & 0x8000) << 16;
  float f; std::memcpy(&f, &bits, 4); return f;
}
// Bits of a float16 value (exactly representable) or of a NaN.
static inline uint16_t bits_to_half(int32_t bits) {
  const uint32_t a = bits & 0x7fffffff, s = (uint32_t)bits >> 16 & 0x8000;
  if (a > 0x7f800000) return s | 0x7c00 | (a >> 13 & 1023) | 0x200;
  if (a == 0x7f800000) return s | 0x7c00;
  if (a >= 0x38800000) return s | (a - 0x38000000) >> 13;
  const uint32_t e = a >> 23;
  if (e < 102) return s;
  return s | ((a & 0x7fffff) | 0x800000) >> (126 - e);
}
static inline void load_half(const uint16_t* x, int32_t* bits, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_si512(bits + i, _mm512_castps_si512(
        _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(x + i)))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps((float*)(bits + i), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
#endif
  for (; i < n; ++i) { float f = half_to_float(x[i]); std::memcpy(bits + i, &f, 4); }
}
static inline void store_half(const int32_t* bits, uint16_t* x, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i*)(x + i), _mm512_cvtps_ph(
        _mm512_castsi512_ps(_mm512_loadu_si512(bits + i)), 0));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(x + i), _mm256_cvtps_ph(_mm256_loadu_ps((float*)(bits + i)), 0));
#endif
  for (; i < n; ++i) x[i] = bits_to_half(bits[i]);
}
"""

TYPES = {
    torch.float32: ("int32_t", "int32_t", "float"),
    torch.float64: ("int64_t", "int64_t", "double"),
    torch.bfloat16: ("int32_t", "int16_t", "float"),
    torch.float16: ("int32_t", "uint16_t", "float"),
}


def head(carrier: Carrier, lane: int) -> str:
    """What a kernel for the carrier starts with; ``lane``: as in ``kernel_source``."""
    word, storage, real = TYPES[carrier.dtype]
    text = f"{PRELUDE}using I = {word}; using T = {storage}; using F = {real};\n"
    text += f"constexpr int64_t CHUNK = {CHUNK};\n"
    for source in sorted({"int64_t", word}):
        text += f"static inline I float_bits({source} k) "
        text += "{ return __builtin_bit_cast(I, (F)k); }\n"
    if carrier.dtype == torch.float16:
        text += _HALF
    return text + _philox(lane) if lane else text


def _philox(lane: int) -> str:
    text = f"constexpr int LANE = {lane}, GROUP = {16 * 128 // lane}, ROUNDS = {ROUNDS};\n"
    for prefix, pair in (("M", PHILOX_M), ("W", PHILOX_W)):
        text += "".join(f"constexpr uint32_t {prefix}{i} = {v}u;\n" for i, v in enumerate(pair))
    return text + _PHILOX


def random_source(lane: int) -> str:
    """C++ of ``run``, which writes the left-aligned random bits of n elements."""
    return f"""{PRELUDE}constexpr int64_t CHUNK = {CHUNK};
{_philox(lane)}
extern "C" void run(int32_t* out, int64_t n, const int64_t* p, int threads) {{
  const int64_t offset = p[17];
  const int64_t chunks = (offset % CHUNK + n + CHUNK - 1) / CHUNK, base = offset - offset % CHUNK;
#pragma omp parallel num_threads(threads) if(threads > 1)
  {{
    {RANDOM_START}
#pragma omp for schedule(static)
    for (int64_t c = 0; c < chunks; ++c) {{
      int64_t from = base + c * CHUNK, to = from + CHUNK;
      if (from < offset) from = offset;
      if (to > offset + n) to = offset + n;
      std::memcpy(out + (from - offset), random.at(from, to, to), (to - from) * 4);
    }}
  }}
}}
"""

"""C++ sources of the CPU kernels: the rounding rule, loads and stores, Philox, threads."""

from __future__ import annotations

from typing import Any

import torch

from .carrier import Carrier
from .expressions import CLanes
from .formats import FixedPoint, FloatingPoint, Posit
from .grids import block_exponent, scaled_grid
from .posits import posit_bits
from .random_bits import PHILOX_M, PHILOX_W, ROUNDS
from .rounding import Grid, Rounding, quantize_bits
from .scaled import MX, BlockFloatingPoint

GRID_FIELDS = (
    *("d0", "c1", "flip", "floor", "half_low", "half_high", "unit"),
    *("limit_p", "limit_n", "overflow_p", "overflow_n", "infinity_p", "infinity_n", "keep_sign"),
)
"""Order of a grid's numbers in a kernel's arguments."""

RANDOM_FIELDS = ("seed", "step", "site", "offset", "random_bits")

CHUNK = 2048
"""Elements whose random bits are made at once: they stay in the first-level cache."""

_PRELUDE = r"""
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif
"""

_PHILOX = r"""
// One block on each of 16 lanes; out[word][lane].
static inline void philox16(uint64_t block, uint32_t site, uint32_t step, uint64_t seed,
                            uint32_t out[4][16]) {
  const uint32_t low = (uint32_t)block, high = (uint32_t)(block >> 32);
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#if defined(__AVX512F__)
  // Even and odd lanes apart, each in the low half of 64 bits: vpmuludq reads that half only.
  const __m512i m0 = _mm512_set1_epi64(M0), m1 = _mm512_set1_epi64(M1);
  const __m512i iota = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
  __m512i a0 = _mm512_add_epi64(_mm512_set1_epi64(low), iota);
  __m512i b0 = _mm512_add_epi64(a0, _mm512_set1_epi64(1));
  __m512i a1 = _mm512_set1_epi64(high), b1 = a1;
  __m512i a2 = _mm512_set1_epi64(site), b2 = a2, a3 = _mm512_set1_epi64(step), b3 = a3;
#pragma GCC unroll 10
  for (int r = 0; r < ROUNDS; ++r) {
    const __m512i q0 = _mm512_set1_epi64(k0), q1 = _mm512_set1_epi64(k1);
    const __m512i pa0 = _mm512_mul_epu32(a0, m0), pa1 = _mm512_mul_epu32(a2, m1);
    const __m512i pb0 = _mm512_mul_epu32(b0, m0), pb1 = _mm512_mul_epu32(b2, m1);
    a0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(pa1, 32), a1, q0, 0x96);
    b0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(pb1, 32), b1, q0, 0x96);
    a2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(pa0, 32), a3, q1, 0x96);
    b2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(pb0, 32), b3, q1, 0x96);
    a1 = pa1; b1 = pb1; a3 = pa0; b3 = pb0;
    k0 += W0; k1 += W1;
  }
  const __mmask16 odd = 0xAAAA;
#define MERGE(i, a, b) \
  _mm512_storeu_si512(out[i], _mm512_mask_blend_epi32(odd, a, _mm512_slli_epi64(b, 32)))
  MERGE(0, a0, b0); MERGE(1, a1, b1); MERGE(2, a2, b2); MERGE(3, a3, b3);
#undef MERGE
#else
#pragma omp simd
  for (int l = 0; l < 16; ++l) {
    uint32_t c0 = low + l, c1 = high, c2 = site, c3 = step, q0 = k0, q1 = k1;
    for (int r = 0; r < ROUNDS; ++r) {
      const uint64_t p0 = (uint64_t)c0 * M0, p1 = (uint64_t)c2 * M1;
      c0 = (uint32_t)(p1 >> 32) ^ c1 ^ q0; c1 = (uint32_t)p1;
      c2 = (uint32_t)(p0 >> 32) ^ c3 ^ q1; c3 = (uint32_t)p0;
      q0 += W0; q1 += W1;
    }
    out[0][l] = c0; out[1][l] = c1; out[2][l] = c2; out[3][l] = c3;
  }
#endif
}

// The left-aligned random bits of elements [from, to): u[i - from'], from' the group's start.
struct Random {
  uint64_t seed; uint32_t site, step, mask;
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
        philox16((uint64_t)(first + g) * 16, site, step, seed, words);
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

_RANDOM_START = (
    "Random random; random.seed = (uint64_t)p[14]; random.step = (uint32_t)p[15]; "
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

_TYPES = {
    torch.float32: ("int32_t", "int32_t", "float"),
    torch.float64: ("int64_t", "int64_t", "double"),
    torch.bfloat16: ("int32_t", "int16_t", "float"),
    torch.float16: ("int32_t", "uint16_t", "float"),
}


def kernel_source(
    fmt: FloatingPoint | FixedPoint | Posit | MX | BlockFloatingPoint,
    grid: Grid | None,
    carrier: Carrier,
    mode: Rounding,
    lane: int,
) -> str:
    """C++ of ``run`` for elements, or for blocks.

    ``grid``: of a floating or fixed point format; its numbers are arguments, so formats share a
    kernel. ``lane``: bits of a block of random bits for an element (8, 16, 32), 0 without.
    """
    word, storage, real = _TYPES[carrier.dtype]
    head = f"using I = {word}; using T = {storage}; using F = {real};\n"
    head += f"constexpr int64_t CHUNK = {CHUNK};\n"
    for source in sorted({"int64_t", word}):
        head += f"static inline I float_bits({source} k) "
        head += "{ return __builtin_bit_cast(I, (F)k); }\n"
    if carrier.dtype == torch.float16:
        head += _HALF
    if lane:
        head += _philox(lane)
    if isinstance(fmt, MX | BlockFloatingPoint):
        return _PRELUDE + head + _block_kernel(fmt, carrier, mode, bool(lane))
    return _PRELUDE + head + _element_kernel(fmt, grid, carrier, mode, bool(lane))


def _philox(lane: int) -> str:
    text = f"constexpr int LANE = {lane}, GROUP = {16 * 128 // lane}, ROUNDS = {ROUNDS};\n"
    for prefix, pair in (("M", PHILOX_M), ("W", PHILOX_W)):
        text += "".join(f"constexpr uint32_t {prefix}{i} = {v}u;\n" for i, v in enumerate(pair))
    return text + _PHILOX


def random_source(lane: int) -> str:
    """C++ of ``run``, which writes the left-aligned random bits of n elements."""
    return f"""{_PRELUDE}constexpr int64_t CHUNK = {CHUNK};
{_philox(lane)}
extern "C" void run(int32_t* out, int64_t n, const int64_t* p, int threads) {{
  const int64_t offset = p[17];
  const int64_t chunks = (offset % CHUNK + n + CHUNK - 1) / CHUNK, base = offset - offset % CHUNK;
#pragma omp parallel num_threads(threads) if(threads > 1)
  {{
    {_RANDOM_START}
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


def _named_grid(m: CLanes, grid: Grid, mode: Rounding) -> Grid:
    """The grid with its numbers as variables; only its structure is fixed."""
    f: dict[str, Any] = {n: m.name(n) for n in GRID_FIELDS}
    # A shape with equal limits is symmetric in its overflow too.
    other = "p" if grid.limit[0] == grid.limit[1] else "n"
    overflow = (f["overflow_p"], f[f"overflow_{other}"])
    infinity = (f["infinity_p"], f[f"infinity_{other}"])
    numbers = {n: f[n] for n in GRID_FIELDS[:7]}
    return grid._replace(
        **numbers,
        limit=(f["limit_p"], f[f"limit_{other}"]),
        overflow=overflow,
        infinity=infinity if any(mode.inward) else overflow,
    )


def _loop(carrier: Carrier, lines: list[str], result: str, random: bool) -> str:
    """A function ``round_run(x, out, n, u, <grid>)``'s body: the rule over n elements."""
    u = ""
    if random:
        u = "const I u = " + ("u_[i];" if carrier.word.bits == 32 else "(int64_t)(uint32_t)u_[i];")
    load, store = {
        torch.float32: ("x[i]", f"out[i] = {result};"),
        torch.float64: ("x[i]", f"out[i] = {result};"),
        torch.bfloat16: ("(I)x[i] << 16", f"out[i] = (T)({result} >> 16);"),
        torch.float16: ("buffer[i]", f"buffer[i] = {result};"),
    }[carrier.dtype]
    body = "\n    ".join([f"const I bits = {load};", u, *lines, store])
    loop = f"#pragma omp simd\n  for (int64_t i = 0; i < n; ++i) {{\n    {body}\n  }}"
    if carrier.dtype != torch.float16:
        return loop
    return (
        "for (int64_t left = n; left > 0; ) {\n  const int64_t n = left < 512 ? left : 512;\n"
        "  int32_t buffer[512]; load_half(x, buffer, n);\n"
        f"  {loop}\n  store_half(buffer, out, n);\n"
        f"  x += n; out += n; {'u_ += n; ' if random else ''}left -= n;\n}}"
    )


def _element_kernel(
    fmt: FloatingPoint | FixedPoint | Posit | MX | BlockFloatingPoint,
    grid: Grid | None,
    carrier: Carrier,
    mode: Rounding,
    random: bool,
) -> str:
    m = CLanes(carrier.word)
    u = m.name("u") if random else None
    if isinstance(fmt, Posit):
        result = posit_bits(m, m.name("bits"), fmt, carrier, mode, u)
    else:
        assert grid is not None
        named = _named_grid(m, grid, mode)
        result = quantize_bits(m, m.name("bits"), named, mode, carrier.word, u)
    numbers = "".join(f"const I {n} = (I)p[{k}];\n" for k, n in enumerate(GRID_FIELDS))
    return f"""
static void round_run(const T* x, T* out, int64_t n, const int32_t* u_, const int64_t* p) {{
{numbers}{_loop(carrier, m.lines, result.text, random)}
}}
extern "C" void run(const T* x, T* out, int64_t n, const int64_t* p, int threads) {{
  const int64_t offset = {"p[17]" if random else "0"};
  const int64_t chunks = (offset % CHUNK + n + CHUNK - 1) / CHUNK, base = offset - offset % CHUNK;
#pragma omp parallel num_threads(threads) if(threads > 1)
  {{
    {_RANDOM_START if random else ""}
#pragma omp for schedule(static)
    for (int64_t c = 0; c < chunks; ++c) {{
      int64_t from = base + c * CHUNK, to = from + CHUNK;
      if (from < offset) from = offset;
      if (to > offset + n) to = offset + n;
      const int32_t* u = {"random.at(from, to, to)" if random else "nullptr"};
      round_run(x + (from - offset), out + (from - offset), to - from, u, p);
    }}
  }}
}}
"""


def _block_kernel(
    fmt: MX | BlockFloatingPoint, carrier: Carrier, mode: Rounding, random: bool
) -> str:
    """Rows of ``columns`` elements, each cut into blocks of ``run_length``."""
    word = carrier.word
    m = CLanes(word, "g")
    exponent = block_exponent(m, m.name("amax"), fmt, word)
    grid = scaled_grid(m, fmt, carrier, exponent)
    e = CLanes(word)
    names: dict[str, Any] = {
        n: e.name(getattr(grid, n).text) if not isinstance(getattr(grid, n), int) else
        getattr(grid, n)
        for n in ("d0", "c1", "flip", "floor", "half_low", "half_high", "unit")
    }  # fmt: skip
    limit = e.name(grid.limit[0].text)
    pair = (limit, limit)
    inner = grid._replace(**names, limit=pair, overflow=pair, infinity=pair)
    inner = inner._replace(infinity=inner.overflow)
    u = e.name("u") if random else None
    result = quantize_bits(e, e.name("bits"), inner, mode, word, u)
    magnitude = {
        torch.float32: "x[i]",
        torch.float64: "x[i]",
        torch.bfloat16: "(I)x[i] << 16",
        torch.float16: "(I)x[i]",
    }[carrier.dtype]
    half = carrier.dtype == torch.float16
    mask, inf = ("0x7fff", "0x7c00") if half else (f"{word.magnitude}LL", f"{word.inf}LL")
    widen = ""
    if half:
        widen = "{ const T h = (T)amax; load_half(&h, &amax, 1); }"
    setup = "\n  ".join(m.lines)
    random_at = "random.at(from, to, end)" if random else "nullptr"
    start = _RANDOM_START if random else ""
    return f"""
// N: the length where it is known, so that a short block is straight code.
template <int64_t N> static inline I largest(const T* x, int64_t length) {{
  const int64_t n = N ? N : length;
  I amax = 0;
#pragma omp simd reduction(max : amax)
  for (int64_t i = 0; i < n; ++i) {{
    const I a = ({magnitude}) & (I){mask};
    const I finite = a < (I){inf} ? a : 0;
    amax = amax > finite ? amax : finite;
  }}
  {widen}
  return amax;
}}
template <int64_t N> static inline void round_run(const T* x, T* out, int64_t length,
                                                  const int32_t* u_, I amax) {{
  const int64_t n = N ? N : length;
  {setup}
  {_loop(carrier, e.lines, result.text, random)}
}}
extern "C" void run(const T* x, T* out, int64_t rows, int64_t columns, int64_t length,
                    const int64_t* p, int threads) {{
  const int64_t each = (columns + length - 1) / length, blocks = rows * each;
  const int64_t offset = {"p[17]" if random else "0"}, end = offset + rows * columns;
  (void)end;
  if (blocks >= 4 * threads) {{
#pragma omp parallel num_threads(threads) if(threads > 1)
    {{
      {start}
#pragma omp for schedule(static)
      for (int64_t b = 0; b < blocks; ++b) {{
        const int64_t s = b / each * columns + b % each * length;
        const int64_t left = columns - b % each * length;
        const int64_t size = left < length ? left : length;
        if (size == 32 || size == 16) {{
          const int64_t from = offset + s, to = from + size;
          const int32_t* u = {random_at};
          (void)from; (void)to;
          if (size == 32) round_run<32>(x + s, out + s, 32, u, largest<32>(x + s, 32));
          else round_run<16>(x + s, out + s, 16, u, largest<16>(x + s, 16));
          continue;
        }}
        const I amax = largest<0>(x + s, size);
        for (int64_t done = 0; done < size; done += CHUNK) {{
          const int64_t n = size - done < CHUNK ? size - done : CHUNK;
          const int64_t from = offset + s + done, to = from + n;
          const int32_t* u = {random_at};
          (void)from; (void)to;
          round_run<0>(x + s + done, out + s + done, n, u, amax);
        }}
      }}
    }}
    return;
  }}
  // Few long blocks: all threads share each.
  for (int64_t b = 0; b < blocks; ++b) {{
    const int64_t s = b / each * columns + b % each * length;
    const int64_t left = columns - b % each * length;
    const int64_t size = left < length ? left : length, chunks = (size + CHUNK - 1) / CHUNK;
    I amax = 0;
#pragma omp parallel for num_threads(threads) if(threads > 1) reduction(max : amax)
    for (int64_t c = 0; c < chunks; ++c) {{
      const int64_t n = size - c * CHUNK < CHUNK ? size - c * CHUNK : CHUNK;
      const I a = largest<0>(x + s + c * CHUNK, n);
      amax = amax > a ? amax : a;
    }}
#pragma omp parallel num_threads(threads) if(threads > 1)
    {{
      {start}
#pragma omp for schedule(static)
      for (int64_t c = 0; c < chunks; ++c) {{
        const int64_t n = size - c * CHUNK < CHUNK ? size - c * CHUNK : CHUNK;
        const int64_t from = offset + s + c * CHUNK, to = from + n;
        const int32_t* u = {random_at};
        (void)from; (void)to;
        round_run<0>(x + s + c * CHUNK, out + s + c * CHUNK, n, u, amax);
      }}
    }}
  }}
}}
"""

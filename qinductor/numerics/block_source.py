"""C++ of the CPU kernels of formats whose blocks share a power of two.

Three layouts of blocks: runs of a row (and rows, and the whole tensor), runs of a column, and all
that has one index of a dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .carrier import Carrier
from .expressions import CLanes
from .fast_paths import LOWEST, nearest_lines
from .formats import FixedPoint
from .grids import block_exponent, scaled_grid
from .kernel_loops import loop
from .kernel_parts import RANDOM_START
from .rounding import Grid, Rounding, quantize_bits
from .scaled import MX, BlockFloatingPoint

WIDE = 128
"""Columns that are worked side by side."""


class _Rule(NamedTuple):
    """The printed rule: lines that depend on the block's amax, lines of an element, its result."""

    grid: Grid
    setup: list[str]
    lines: list[str]
    result: str


def _rule(
    fmt: MX | BlockFloatingPoint, carrier: Carrier, mode: Rounding, random: bool, amax: str
) -> _Rule:
    word = carrier.word
    m, e = CLanes(word, "g"), CLanes(word)
    exponent = block_exponent(m, m.name(amax), fmt, word)
    grid = scaled_grid(m, fmt, carrier, exponent)
    fields = ("d0", "c1", "flip", "floor", "half_low", "half_high", "unit")
    values = {n: getattr(grid, n) for n in fields}
    names: dict[str, Any] = {
        n: v if isinstance(v, int) else e.name(v.text) for n, v in values.items()
    }
    limit = e.name(grid.limit[0].text)
    pair = (limit, limit)
    inner = grid._replace(**names, limit=pair, overflow=pair, infinity=pair)
    inner = inner._replace(infinity=inner.overflow)
    u = e.name("u") if random else None
    result = quantize_bits(e, e.name("bits"), inner, mode, word, u)
    return _Rule(inner, m.lines, e.lines, result.text)


def _fast(fmt: MX | BlockFloatingPoint, carrier: Carrier, mode: Rounding, grid: Grid) -> str:
    """An early way out of round_run for blocks of ordinary size; see ``fast_paths``."""
    word, element = carrier.word, fmt.element
    wide = isinstance(element, FixedPoint) and grid.d0 == 0 and element.wl > word.man
    if mode is not Rounding.TIES_TO_EVEN or grid.d0 == word.man or wide:
        return ""
    lines = nearest_lines(word, True, True, grid.keep_sign == -1)
    return f"""
  const I field = {grid.c1.text} - {grid.d0}, cap = {grid.limit[0].text};
  const I highest = (cap >> {word.man}) > field ? (cap >> {word.man}) : field;
  if (field >= {LOWEST[word.bits] - grid.d0} && highest <= {2 * word.bias - grid.d0}) {{
    const I emin = field << {word.man}, up = (I){grid.d0} << {word.man};
    {loop(carrier, lines, "y", False)}
    return;
  }}"""


def block_kernel(
    fmt: MX | BlockFloatingPoint, carrier: Carrier, mode: Rounding, random: bool
) -> str:
    """C++ of ``run``, ``run_columns`` and ``run_segments``; the partition is their argument."""
    word = carrier.word
    one = _rule(fmt, carrier, mode, random, "amax")
    each = _rule(fmt, carrier, mode, random, "amax[i]")
    magnitude = {
        torch.float32: "x[i]",
        torch.float64: "x[i]",
        torch.bfloat16: "(I)x[i] << 16",
        torch.float16: "(I)x[i]",
    }[carrier.dtype]
    half = carrier.dtype == torch.float16
    mask, inf = ("0x7fff", "0x7c00") if half else (f"{word.magnitude}LL", f"{word.inf}LL")
    widen = "{ const T h = (T)amax; load_half(&h, &amax, 1); }" if half else ""
    setup = "\n  ".join(one.setup)
    return f"""
#include <vector>
constexpr int64_t WIDE = {WIDE};
#define MAGNITUDE(i) (({magnitude}) & (I){mask})
#define FINITE(i) (MAGNITUDE(i) < (I){inf} ? MAGNITUDE(i) : (I)0)
// N: the length where it is known, so that a short block is straight code.
template <int64_t N> static inline I largest(const T* x, int64_t length) {{
  const int64_t n = N ? N : length;
  I amax = 0;
#pragma omp simd reduction(max : amax)
  for (int64_t i = 0; i < n; ++i) {{
    const I finite = FINITE(i);
    amax = amax > finite ? amax : finite;
  }}
  {widen}
  return amax;
}}
template <int64_t N> static inline void round_run(const T* x, T* out, int64_t length,
                                                  const int32_t* u_, I amax) {{
  const int64_t n = N ? N : length;
  {setup}{_fast(fmt, carrier, mode, one.grid)}
  {loop(carrier, one.lines, one.result, random)}
}}
// Elements of different blocks: each has its amax.
static void round_row(const T* x, T* out, int64_t n, const int32_t* u_, const I* amax) {{
  {loop(carrier, [*each.setup, *each.lines], each.result, random, "amax += n;")}
}}
{_rows(random)}
{_columns(random, half)}
{_segments(random)}
"""


def _rows(random: bool) -> str:
    offset, start = ("p[17]", RANDOM_START) if random else ("0", "")
    random_at = "random.at(from, to, end)" if random else "nullptr"
    return f"""
extern "C" void run(const T* x, T* out, int64_t rows, int64_t columns, int64_t length,
                    const int64_t* p, int threads) {{
  const int64_t each = (columns + length - 1) / length, blocks = rows * each;
  const int64_t offset = {offset}, end = offset + rows * columns;
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


def _columns(random: bool, half: bool) -> str:
    """Blocks of ``length`` along the middle of (outer, n, inner)."""
    widen = "const T h = (T)amax[i]; load_half(&h, amax + i, 1);" if half else ""
    random_at = "random.at(at, at + w, at + w)" if random else "nullptr"
    return f"""
extern "C" void run_columns(const T* x, T* out, int64_t outer, int64_t n, int64_t inner,
                            int64_t length, const int64_t* p, int threads) {{
  const int64_t each = (n + length - 1) / length, wide = (inner + WIDE - 1) / WIDE;
#pragma omp parallel num_threads(threads) if(threads > 1)
  {{
    {RANDOM_START if random else ""}
#pragma omp for schedule(static)
    for (int64_t task = 0; task < outer * each * wide; ++task) {{
      const int64_t c = task % wide * WIDE, w = inner - c < WIDE ? inner - c : WIDE;
      const int64_t first = task / wide % each * length;
      const int64_t rows = n - first < length ? n - first : length;
      const int64_t start = (task / wide / each * n + first) * inner + c;
      I amax[WIDE] = {{}};
      for (int64_t r = 0; r < rows; ++r) {{
        const T* row = x + start + r * inner;
        for (int64_t i = 0; i < w; ++i) {{
          const T* x = row;
          const I finite = FINITE(i);
          amax[i] = amax[i] > finite ? amax[i] : finite;
        }}
      }}
      for (int64_t i = 0; i < w; ++i) {{ {widen} }}
      for (int64_t r = 0; r < rows; ++r) {{
        const int64_t s = start + r * inner, at = {"p[17] + s" if random else "s"};
        (void)at;
        round_row(x + s, out + s, w, {random_at}, amax);
      }}
    }}
  }}
}}"""


def _segments(random: bool) -> str:
    """One block for each index of the middle of (outer, n, inner)."""
    random_at = "random.at(at, at + w, at + w)" if random else "nullptr"
    return f"""
extern "C" void run_segments(const T* x, T* out, int64_t outer, int64_t n, int64_t inner,
                             const int64_t* p, int threads) {{
  std::vector<I> amax(n, 0);
#pragma omp parallel for num_threads(threads) if(threads > 1) schedule(static)
  for (int64_t d = 0; d < n; ++d)
    for (int64_t o = 0; o < outer; ++o) {{
      const I a = largest<0>(x + (o * n + d) * inner, inner);
      amax[d] = amax[d] > a ? amax[d] : a;
    }}
#pragma omp parallel num_threads(threads) if(threads > 1)
  {{
    {RANDOM_START if random else ""}
#pragma omp for schedule(static)
    for (int64_t segment = 0; segment < outer * n; ++segment)
      for (int64_t done = 0; done < inner; done += CHUNK) {{
        const int64_t w = inner - done < CHUNK ? inner - done : CHUNK;
        const int64_t s = segment * inner + done, at = {"p[17] + s" if random else "s"};
        (void)at;
        round_run<0>(x + s, out + s, w, {random_at}, amax[segment % n]);
      }}
  }}
}}"""

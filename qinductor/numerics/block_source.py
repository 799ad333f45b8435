"""C++ of the CPU kernels of formats whose blocks share a power of two."""

from __future__ import annotations

from typing import Any

import torch

from .carrier import Carrier
from .expressions import CLanes
from .grids import block_exponent, scaled_grid
from .kernel_loops import loop
from .kernel_parts import RANDOM_START
from .rounding import Rounding, quantize_bits
from .scaled import MX, BlockFloatingPoint


def block_kernel(
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
    start = RANDOM_START if random else ""
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
  {loop(carrier, e.lines, result.text, random)}
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

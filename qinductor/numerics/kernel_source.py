"""C++ of the CPU kernels of element formats; blocks are in ``block_source``."""

from __future__ import annotations

from typing import Any

from .block_source import block_kernel
from .carrier import Carrier
from .expressions import CLanes
from .fast_paths import Fast, nearest_lines, setup, stochastic_source
from .formats import FixedPoint, FloatingPoint, Posit
from .kernel_loops import loop
from .kernel_parts import GRID_FIELDS, RANDOM_START, head
from .posits import posit_bits
from .rounding import Grid, Rounding, quantize_bits
from .scaled import MX, BlockFloatingPoint


def kernel_source(
    fmt: FloatingPoint | FixedPoint | Posit | MX | BlockFloatingPoint,
    grid: Grid | None,
    carrier: Carrier,
    mode: Rounding,
    lane: int,
    fast: Fast = Fast.NO,
) -> str:
    """C++ of ``run`` for elements, or for blocks.

    ``grid``: of a floating or fixed point format; its numbers are arguments, so formats share a
    kernel. ``lane``: bits of a block of random bits for an element (8, 16, 32), 0 without.
    """
    start = head(carrier, lane)
    if isinstance(fmt, MX | BlockFloatingPoint):
        return start + block_kernel(fmt, carrier, mode, bool(lane))
    if isinstance(fmt, Posit):
        m = CLanes(carrier.word)
        u = m.name("u") if lane else None
        result = posit_bits(m, m.name("bits"), fmt, carrier, mode, u)
        return start + _element_kernel(carrier, m.lines, result.text, bool(lane))
    assert grid is not None
    symmetric = grid.limit[0] == grid.limit[1]
    shape = (fast is Fast.SATURATES, symmetric, grid.keep_sign == -1)
    if fast is not Fast.NO and mode is Rounding.TIES_TO_EVEN:
        lines = nearest_lines(carrier.word, *shape)
        return start + _element_kernel(carrier, lines, "y", False, setup(carrier.word, shape[0]))
    m = CLanes(carrier.word)
    named = _named_grid(m, grid, mode)
    u = m.name("u") if lane else None
    result = quantize_bits(m, m.name("bits"), named, mode, carrier.word, u)
    if fast is not Fast.NO:
        start += stochastic_source(carrier.word, *shape)
    return start + _element_kernel(carrier, m.lines, result.text, bool(lane))


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


def _element_kernel(
    carrier: Carrier, lines: list[str], result: str, random: bool, before: str = ""
) -> str:
    numbers = "".join(f"const I {n} = (I)p[{k}];\n" for k, n in enumerate(GRID_FIELDS))
    return f"""
static void round_run(const T* x, T* out, int64_t n, const int32_t* u_, const int64_t* p) {{
{numbers}{before}{loop(carrier, lines, result, random)}
}}
extern "C" void run(const T* x, T* out, int64_t n, const int64_t* p, int threads) {{
  const int64_t offset = {"p[17]" if random else "0"};
  const int64_t chunks = (offset % CHUNK + n + CHUNK - 1) / CHUNK, base = offset - offset % CHUNK;
#pragma omp parallel num_threads(threads) if(threads > 1)
  {{
    {RANDOM_START if random else ""}
#pragma omp for schedule(static)
    for (int64_t c = 0; c < chunks; ++c) {{
      int64_t from = base + c * CHUNK, to = from + CHUNK;
      if (from < offset) from = offset;
      if (to > offset + n) to = offset + n;
#if defined(FUSED)
      if (to - from == CHUNK) {{
        fused_groups(x + (from - offset), out + (from - offset), from / GROUP, CHUNK / GROUP, p);
        continue;
      }}
#endif
      const int32_t* u = {"random.at(from, to, to)" if random else "nullptr"};
      round_run(x + (from - offset), out + (from - offset), to - from, u, p);
    }}
  }}
}}
"""

"""Rounding to arbitrary grids, decided by the exact sign of a sum of float64 products.

Used by Table, and by NVFP4, whose scale is no power of two.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qinductor.errors import ConfigError

from .formats import Table
from .rounding import Rounding


def sign_of_sum(terms: list[Tensor]) -> Tensor:
    """Exact sign of a sum of float64 tensors (without overflow), as -1.0, 0.0 or 1.0.

    Source: Shewchuk, "Adaptive Precision Floating-Point Arithmetic" (1997), Grow-Expansion.
    """
    expansion: list[Tensor] = []
    for term in terms:
        carry, grown = term, []
        for component in expansion:
            total = carry + component
            virtual = total - carry
            grown.append((carry - (total - virtual)) + (component - virtual))
            carry = total
        expansion = [*grown, carry]
    sign = torch.zeros_like(terms[0])
    for component in expansion:
        sign = torch.where(component == 0, sign, torch.sign(component))
    return sign


def _products(a: Tensor, k: Tensor) -> list[Tensor]:
    """a·k as exact float64 terms; k holds integers of at most 33 bits."""
    high = (a.view(torch.int64) & -(1 << 27)).view(torch.float64)
    low = a - high
    k_high, k_low = torch.floor(k / 65536) * 65536, k % 65536
    return [low * k_low, high * k_low, low * k_high, high * k_high]


def goes_up(
    x: Tensor, inner: Tensor, outer: Tensor, even: Tensor, mode: Rounding, u: Tensor | None, r: int
) -> Tensor:
    """Whether x, from inner (included) to outer, moves to outer. All float64.

    ``even``: whether inner is even. ``u``: r-bit random integers, int64.
    """
    inexact = x != inner
    match mode:
        case Rounding.TIES_TO_EVEN | Rounding.TIES_TO_AWAY:
            side = sign_of_sum([2 * x, -inner, -outer]) * torch.sign(outer - inner)
            tie = ~even if mode is Rounding.TIES_TO_EVEN else torch.ones_like(even)
            return (side > 0) | ((side == 0) & tie)
        case Rounding.TOWARD_ZERO:
            return torch.zeros_like(inexact)
        case Rounding.UPWARD:
            return inexact & (outer > inner)
        case Rounding.DOWNWARD:
            return inexact & (outer < inner)
        case Rounding.TO_ODD:
            return inexact & even
        case Rounding.STOCHASTIC:
            # f >= (2^r − u)/2^r  ⇔  x·2^r − inner·u − outer·(2^r − u) is not on inner's side.
            assert u is not None
            k = u.to(torch.float64)
            rest = 2.0**r - k
            terms = [*_products(-inner, k), *_products(-outer, rest), x * 2.0**r]
            return inexact & (sign_of_sum(terms) * torch.sign(outer - inner) >= 0)


@functools.lru_cache(maxsize=64)
def _held(fmt: Table, dtype: torch.dtype) -> Tensor:
    grid = torch.tensor(fmt.grid, dtype=torch.float64)
    held = grid[grid.to(dtype).to(torch.float64) == grid]
    if not len(held):
        raise ConfigError(f"no value of the Table lies in a {dtype} tensor. Use a wider dtype.")
    return held


def table_quantize(
    x: Tensor, fmt: Table, mode: Rounding, u: Tensor | None = None, r: int = 32
) -> Tensor:
    """X rounded to the table's values that its dtype holds. NaN stays; infinities saturate."""
    grid = _held(fmt, x.dtype).to(x.device)
    wide = x.to(torch.float64)
    if len(grid) == 1:
        return torch.where(torch.isnan(wide), wide, grid[0]).to(x.dtype)
    inside = torch.clamp(torch.nan_to_num(wide, nan=0.0), grid[0], grid[-1])
    below = (torch.searchsorted(grid, inside, right=True) - 1).clamp(0, len(grid) - 2)
    negative = inside < 0
    # A value on the grid is its own inner neighbour, whatever its sign.
    below = torch.where(negative & (grid[below] == inside), (below - 1).clamp(min=0), below)
    inner = torch.where(negative, below + 1, below)
    outer = torch.where(negative, below, below + 1)
    up = goes_up(inside, grid[inner], grid[outer], inner % 2 == 0, mode, u, r)
    result = torch.where(inside == grid[outer], inside, grid[torch.where(up, outer, inner)])
    return torch.where(torch.isnan(wide), wide, result).to(x.dtype)

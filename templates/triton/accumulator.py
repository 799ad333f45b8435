"""Formats of a simulated accumulator, as the kernel of :mod:`.accumulate` takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ...numerics import FixedPoint, FloatingPoint, Rounding
from ...numerics.formats import Nans, Overflow

MODES = {
    Rounding.TIES_TO_EVEN: "even",
    Rounding.TIES_TO_AWAY: "away",
    Rounding.TOWARD_ZERO: "zero",
}
"""Modes that the kernel rounds in."""
MAX_PLACES = 50
"""Most bits of a significand or word: float64 sums that were rounded to odd carry no more."""
FP32 = FloatingPoint(8, 23)


def constants(prefix: str, fmt: object) -> dict[str, Any]:
    """Constants of ``round_to`` for one format, their names prefixed.

    Raises:
        ConfigError: a format that the kernel does not round to.
    """
    if isinstance(fmt, FixedPoint):
        reason = (
            f"wl={fmt.wl} is above {MAX_PLACES}"
            if fmt.wl > MAX_PLACES
            else "it wraps around" if fmt.overflow is not Overflow.SATURATE else None
        )  # fmt: skip
        floating, places, emin, overflow = False, fmt.fl, 0, "saturate"
    elif isinstance(fmt, FloatingPoint):
        reason = (
            f"man={fmt.man} is not between 1 and {MAX_PLACES}"
            if not 1 <= fmt.man <= MAX_PLACES
            else "it has no subnormals" if not fmt.subnormals
            else f"bias={fmt.bias} reaches beyond float64's normal numbers"
            if fmt.emin - fmt.man < -1022
            else None
        )  # fmt: skip
        floating, places, emin = True, fmt.man, fmt.emin
        overflow = "saturate" if fmt.saturate else "inf" if fmt.nans is Nans.IEEE else "nan"
    else:
        reason = "it is neither FloatingPoint nor FixedPoint"
    if reason is not None:
        raise ConfigError(
            f"{fmt} cannot be a simulated accumulator's format: {reason}. Valid: FloatingPoint "
            f"with subnormals and 1 to {MAX_PLACES} mantissa bits, and saturating FixedPoint of "
            f"at most {MAX_PLACES} bits."
        )
    assert isinstance(fmt, FixedPoint | FloatingPoint)
    values = (floating, places, emin, float(fmt.exact_min), float(fmt.exact_max), overflow)
    names = ("FLOATING", "PLACES", "EMIN", "LOW", "HIGH", "OVERFLOW")
    return {f"{prefix}_{name}": value for name, value in zip(names, values, strict=True)}


def accumulator_constants(
    acc: FloatingPoint | FixedPoint,
    prod: FloatingPoint | FixedPoint | None,
    chunk: int | None,
    outer: FloatingPoint | FixedPoint,
    rounding: Rounding,
) -> dict[str, Any]:
    """All constants of the kernel but its block.

    Raises:
        ConfigError: a format, mode or chunk that the kernel does not have.
    """
    if rounding not in MODES:
        raise ConfigError(
            f"rounding={rounding} is not simulated in an accumulator's kernel. Valid: "
            f"{', '.join(str(mode) for mode in MODES)}."
        )
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk={chunk} is not valid. Give a positive number of terms, or None.")
    return {
        "CHUNK": chunk or 0,
        "PROD": prod is not None,
        **constants("PROD", acc if prod is None else prod),
        **constants("ACC", acc),
        **constants("OUTER", outer),
        "MODE": MODES[rounding],
    }


def accumulated_matmul(
    a: Tensor,
    b: Tensor,
    acc: FloatingPoint | FixedPoint,
    *,
    prod: FloatingPoint | FixedPoint | None = None,
    chunk: int | None = None,
    outer: FloatingPoint | FixedPoint = FP32,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
) -> Tensor:
    """Product of a and the transpose of b with a simulated accumulator.

    Args:
        a: (M, K) float32, bfloat16 or float16, rows contiguous.
        b: (N, K) likewise.
        acc: format of the accumulator.
        prod: format that products are rounded to first; exact if None.
        chunk: number of terms after which the partial sum moves to an outer accumulator.
        outer: format of that one.
        rounding: a key of :data:`MODES`, of all three.

    Returns:
        float32 (M, N): the accumulator, rounded to float32 where its format is wider.

    Raises:
        ConfigError: a format, mode or chunk that the kernel does not have.
    """
    given = accumulator_constants(acc, prod, chunk, outer, rounding)
    import triton

    from .accumulate import accumulate_kernel

    (m, k), n = a.shape, b.shape[0]
    out = a.new_empty((m, n), dtype=torch.float32)
    block = 16
    accumulate_kernel[(triton.cdiv(m, block), triton.cdiv(n, block))](
        a, b, out, m, n, k, a.stride(0), b.stride(0), **given,
        BLOCK_M=block, BLOCK_N=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out

"""The rounding rule as @triton.jit functions, to be called inside other Triton kernels.

    q = triton_quantizer("E4M3", torch.float32)

    @triton.jit
    def kernel(...):
        y = q(x)                                              # deterministic modes
        y = s(x, random_bits(seed, step, site, index, 8))     # STOCHASTIC

Needs the package triton, and nothing to compile with until a kernel is launched.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from typing import TYPE_CHECKING, Any

import torch

from qinductor.errors import ConfigError

from .carrier import carrier_of
from .elements import Block, Element
from .format_base import Format
from .named import parse_format
from .reference import check_format
from .rounding import Rounding
from .triton_source import function_source

if TYPE_CHECKING:
    from .triton_random import random_bits as random_bits

__all__ = ["random_bits", "triton_quantizer"]


def __getattr__(name: str) -> Any:
    """``random_bits``, whose module imports triton."""
    if name == "random_bits":
        from .triton_random import random_bits

        return random_bits
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def triton_quantizer(
    fmt: Format | str, dtype: torch.dtype, rounding: Rounding = Rounding.TIES_TO_EVEN
) -> Any:
    """A @triton.jit function that rounds a tile: the bits of :func:`qinductor.numerics.quantize`.

    Args:
        fmt: floating or fixed point, posit, MX or block floating point, or QPyTorch's element
            formats; or a name. The last axis of an MX or block floating point tile is a block,
            whatever the format's own partition.
        dtype: of the tile: float16, bfloat16, float32 or float64.
        rounding: any mode of the format.

    Returns:
        f(x) → tile of x's shape and dtype; for STOCHASTIC f(x, u), u the tile's left-aligned
        random bits, int32, such as ``random_bits(seed, step, site, index, BITS)``.

    Raises:
        ConfigError: (a ValueError) the format has no rule in closed form (Table, NVFP4, Integer,
            QPyTorch's blocks), or does not go with the dtype or the mode.
    """
    fmt = parse_format(fmt) if isinstance(fmt, str) else fmt
    check_format(fmt, rounding, dtype)
    if not isinstance(fmt, Element | Block):
        raise ConfigError(
            f"{fmt} has no Triton function: its scale or grid is no power of two. Available: "
            "FloatingPoint, FixedPoint, Posit, MX, BlockFloatingPoint, and QPyTorch's elements."
        )
    return _jit(fmt, dtype, rounding)


@functools.cache
def _jit(fmt: Element | Block, dtype: torch.dtype, rounding: Rounding) -> Any:
    carrier = carrier_of(dtype)
    plain = function_source("quantize", fmt, carrier, rounding)
    # Triton tells functions apart by module and name.
    name = f"quantize_{hashlib.sha256(plain.encode()).hexdigest()[:16]}"
    source = function_source(name, fmt, carrier, rounding)
    filename = f"<qinductor {fmt} {rounding.name} {str(dtype)[6:]} {name}>"
    # Triton reads the function's text by its file name.
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    scope: dict[str, Any] = {"__name__": f"{__name__}.{name}"}
    exec(compile(source, filename, "exec"), scope)
    return scope[name]

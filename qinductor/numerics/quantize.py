"""quantize(): round a tensor to any format, in its own dtype; and what that did to it."""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from torch import Tensor

from qinductor.errors import ConfigError

from .carrier import carrier_of
from .execute import execute
from .formats import Format
from .named import NAMED, parse_format
from .op import fake_quantize, outside
from .random_bits import lane_width
from .reference import check_format
from .rounding import Rounding
from .sources import SOURCE_DIGEST

DEVICES = ("cpu", "cuda", "meta")
BACKWARD = ("identity", "mask")


class QuantizeStats(NamedTuple):
    """What quantizing did. Counts are of elements."""

    elements: int
    saturated: int
    """Finite inputs beyond the range (of their block)."""
    underflowed: int
    """Non-zero inputs that became zero."""
    nan: int
    """NaN in the input."""
    inf: int
    """Infinities in the input."""
    sqnr_db: float
    """10·log10(Σx² / Σ(x−q)²) over elements finite on both sides; inf where nothing changed."""


@overload
def quantize(
    x: Tensor,
    fmt: Format | str,
    rounding: Rounding = ...,
    *,
    seed: int | Tensor | None = ...,
    site: int = ...,
    step: int | Tensor = ...,
    random_bits: int = ...,
    index_offset: int = ...,
    backward: str = ...,
    out: Tensor | None = ...,
) -> Tensor: ...


@overload
def quantize(
    x: Tensor,
    fmt: Format | str,
    rounding: Rounding = ...,
    *,
    seed: int | Tensor | None = ...,
    site: int = ...,
    step: int | Tensor = ...,
    random_bits: int = ...,
    index_offset: int = ...,
    backward: str = ...,
    out: Tensor | None = ...,
    stats: bool,
) -> tuple[Tensor, QuantizeStats]: ...


def quantize(
    x: Tensor,
    fmt: Format | str,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    *,
    seed: int | Tensor | None = None,
    site: int = 0,
    step: int | Tensor = 0,
    random_bits: int = 32,
    index_offset: int = 0,
    backward: str = "identity",
    out: Tensor | None = None,
    stats: bool = False,
) -> Tensor | tuple[Tensor, QuantizeStats]:
    """Round every element to a value of *format ∩ dtype*.

    The exact value is rounded once, by integer arithmetic on its bits. NaN stays NaN; infinities
    and overflow follow the format; -0 stays -0 where the format has it, else becomes +0.
    Gradients pass straight through.

    Args:
        x: any shape and strides; float16, bfloat16, float32 or float64; cpu or cuda.
        fmt: a format, or its name ("E4M3").
        rounding: one of the seven modes.
        seed: for STOCHASTIC: int or 0-d int64 tensor; None draws one from torch's generator.
        site: which quantizer: 32 bits of the counter; see site_hash().
        step: which training step: an int or a 0-d int64 tensor, of which 32 bits are used.
        random_bits: 1 to 32 bits decide a stochastic rounding; 8 cost a quarter of 32.
        index_offset: index of the first element, for a tensor that is part of a larger one.
        backward: "identity", or "mask": zero where x lies outside the range.
        out: written and returned; x's shape, dtype and device, and x itself is allowed.
        stats: also return :class:`QuantizeStats`.

    Returns:
        A tensor with x's shape, dtype and strides, or (tensor, stats).

    Raises:
        ConfigError: (a ValueError) an argument is not valid; the message lists the valid ones.
    """
    if isinstance(fmt, str):
        # Names are looked up here: Dynamo traces a dict, and warns of a cached function.
        fmt = NAMED[fmt] if fmt in NAMED else parse_format(fmt)
    key, count = _check(x, fmt, rounding, seed, step, site, random_bits, index_offset, backward)
    if out is not None:
        _check_out(x, out)
    if _plain(x, out):
        q = execute(x, fmt, rounding, key, count, site, random_bits, index_offset, out)
    else:
        q = fake_quantize(
            x,
            key,
            count,
            fmt.key,
            rounding.name,
            site,
            random_bits,
            index_offset,
            backward == "mask",
            SOURCE_DIGEST,
        )
        if out is not None:
            q = out.copy_(q)
    return (q, statistics(x, q, fmt)) if stats else q


def quantize_(
    x: Tensor,
    fmt: Format | str,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    *,
    seed: int | Tensor | None = None,
    site: int = 0,
    step: int | Tensor = 0,
    random_bits: int = 32,
    index_offset: int = 0,
) -> Tensor:
    """:func:`quantize` in place. Returns x."""
    return quantize(
        x,
        fmt,
        rounding,
        seed=seed,
        site=site,
        step=step,
        random_bits=random_bits,
        index_offset=index_offset,
        out=x,
    )


def _plain(x: Tensor, out: Tensor | None) -> bool:
    """Whether the kernel may run here and now: nothing traces, differentiates or transforms."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or (out is not None and out.requires_grad)):
        return False
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return (
        not modes
        and torch._C._functorch.peek_interpreter_stack() is None
        and x.device.type != "meta"
    )


def _check(
    x: Tensor,
    fmt: object,
    rounding: object,
    seed: int | Tensor | None,
    step: int | Tensor,
    site: int,
    random_bits: int,
    index_offset: int,
    backward: str,
) -> tuple[Tensor | None, Tensor | None]:
    """Validate; seed and step as tensors, for STOCHASTIC."""
    if not isinstance(rounding, Rounding):
        names = ", ".join(f"Rounding.{m.name}" for m in Rounding)
        raise ConfigError(f"rounding={rounding!r} is not a rounding mode. Valid: {names}.")
    if not isinstance(fmt, Format):
        raise ConfigError(
            f"{fmt!r} is not a format. Valid: a FloatingPoint, FixedPoint, ... object or one of "
            f"{', '.join(NAMED)}."
        )
    carrier_of(x.dtype)
    check_format(fmt, rounding)
    if x.device.type not in DEVICES:
        raise ConfigError(
            f"quantize() runs on {', '.join(DEVICES)}, not on {x.device}. Move the tensor first."
        )
    if backward not in BACKWARD:
        raise ConfigError(f"backward={backward!r} is not valid. Valid: 'identity', 'mask'.")
    if rounding is not Rounding.STOCHASTIC:
        return None, None
    lane_width(random_bits)
    if index_offset < 0:
        raise ConfigError(f"index_offset={index_offset} must not be negative.")
    if not 0 <= site < 2**32:
        raise ConfigError(f"site={site} must be a 32-bit unsigned integer; see site_hash().")
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=x.device)
    return _scalar("seed", seed, x.device), _scalar("step", step, x.device)


def _scalar(name: str, value: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        if value.dtype != torch.int64 or value.dim():
            raise ConfigError(
                f"{name} must be an int or a 0-d int64 tensor, not a {value.dim()}-d "
                f"{value.dtype} tensor."
            )
        return value if value.device == device else value.to(device)
    # Unsigned 64-bit seeds are kept bit for bit.
    signed = value - 2**64 if value >= 2**63 else value
    if not -(2**63) <= signed < 2**63:
        raise ConfigError(f"{name}={value} must fit 64 bits.")
    return torch.full((), signed, dtype=torch.int64, device=device)


def _check_out(x: Tensor, out: Tensor) -> None:
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise ConfigError(
            f"out must be a {tuple(x.shape)} {x.dtype} tensor on {x.device}, not "
            f"{tuple(out.shape)} {out.dtype} on {out.device}."
        )


def statistics(x: Tensor, q: Tensor, fmt: Format) -> QuantizeStats:
    """Compare a tensor with its quantized form."""
    finite = torch.isfinite(x)
    both = finite & torch.isfinite(q)
    wide = x.to(torch.float64)
    signal = torch.where(both, wide, 0).square().sum()
    noise = torch.where(both, wide - q.to(torch.float64), 0).square().sum()
    sqnr = float("inf") if noise == 0 else float(10 * torch.log10(signal / noise))
    return QuantizeStats(
        elements=x.numel(),
        saturated=int((outside(x, fmt.key) & finite).sum()) if x.numel() else 0,
        underflowed=int(((x != 0) & (q == 0)).sum()),
        nan=int(torch.isnan(x).sum()),
        inf=int(torch.isinf(x).sum()),
        sqnr_db=sqnr,
    )

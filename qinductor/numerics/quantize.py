"""quantize(): round a tensor to any format, in its own dtype; and what that did to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, overload

import torch
from torch import Tensor

from .arguments import check_out, checked_draw
from .execute import execute
from .format_base import Format
from .named import NAMED, parse_format
from .op import fake_quantize, outside
from .random_bits import RandomOptions
from .rounding import Rounding
from .sources import SOURCE_DIGEST

if TYPE_CHECKING:
    from typing_extensions import Unpack


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


class QuantizeOptions(RandomOptions, total=False):
    """Keyword arguments of :func:`quantize` but ``stats``."""

    backward: str
    out: Tensor | None


@overload
def quantize(
    x: Tensor,
    fmt: Format | str,
    rounding: Rounding = ...,
    **options: Unpack[QuantizeOptions],
) -> Tensor: ...


@overload
def quantize(
    x: Tensor,
    fmt: Format | str,
    rounding: Rounding = ...,
    *,
    stats: bool,
    **options: Unpack[QuantizeOptions],
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
    draw = checked_draw(
        *(x, fmt, rounding, backward),
        seed=seed,
        site=site,
        step=step,
        random_bits=random_bits,
        index_offset=index_offset,
    )
    if out is not None:
        check_out(x, out)
    if _plain(x, out):
        q = execute(x, fmt, rounding, draw, out)
    else:
        q = fake_quantize(
            *(x, draw.seed, draw.step, fmt.key, rounding.name),
            *(draw.site, draw.random_bits, draw.index_offset),
            *(backward == "mask", SOURCE_DIGEST),
        )
        if out is not None:
            q = out.copy_(q)
    return (q, statistics(x, q, fmt)) if stats else q


def quantize_(
    x: Tensor,
    fmt: Format | str,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    **random: Unpack[RandomOptions],
) -> Tensor:
    """:func:`quantize` in place. Returns x."""
    return quantize(x, fmt, rounding, out=x, **random)


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

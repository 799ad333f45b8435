"""Running a quantizer now: the compiled kernel where there is one, else the aten form."""

from __future__ import annotations

import torch
from torch import Tensor

from . import native
from .formats import Format
from .random_bits import random_integers
from .reference import reference_quantize
from .rounding import Rounding


def random_input(
    x: Tensor,
    seed: Tensor | None,
    step: Tensor | None,
    site: int,
    random_bits: int,
    index_offset: int,
) -> Tensor:
    """The r-bit random integers of x's elements, int64 of x's shape."""
    zero = torch.zeros((), dtype=torch.int64, device=x.device)
    u = random_integers(
        x.numel(),
        random_bits,
        zero if seed is None else seed,
        zero if step is None else step,
        site=site,
        index_offset=index_offset,
    )
    return u.reshape(x.shape)


def execute(
    x: Tensor,
    fmt: Format,
    mode: Rounding,
    seed: Tensor | None,
    step: Tensor | None,
    site: int,
    random_bits: int,
    index_offset: int,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize x into ``out``, or into a new tensor with x's strides."""
    if out is None:
        out = torch.empty_like(x)
    if not x.numel():
        return out
    if native.quantize_into(x, out, fmt, mode, seed, step, site, random_bits, index_offset):
        return out
    u = None
    if mode is Rounding.STOCHASTIC:
        u = random_input(x, seed, step, site, random_bits, index_offset)
    return out.copy_(reference_quantize(x, fmt, mode, u, random_bits))

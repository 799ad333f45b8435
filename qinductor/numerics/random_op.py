"""The operator qinductor::random_bits: what a compiled stochastic quantizer reads.

A kernel of its own uses all four words of a Philox block; fused, each element would compute a
whole block (11 times the cost of a copy; four words used: 1.5 times).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from . import native
from .aten import left_aligned
from .carrier import WORD32
from .kernel_parts import random_source
from .random_bits import Draw, lane_width, random_integers


@torch.library.custom_op("qinductor::random_bits", mutates_args=())
def random_bits_op(
    seed: Tensor, step: Tensor, shape: Sequence[int], site: int, random_bits: int, offset: int
) -> Tensor:
    """Left-aligned random bits u·2^(32−r) of the elements of a tensor: int32 of ``shape``."""
    out = torch.empty(shape, dtype=torch.int32, device=seed.device)
    n = out.numel()
    if not n:
        return out
    if seed.device.type == "cpu":
        function = native.build(random_source(lane_width(random_bits)))
        if function is not None:
            draw = Draw(seed, step, site, random_bits, offset)
            numbers = (*(0,) * 14, *native.draw_numbers(draw))
            function(
                ctypes.c_void_p(out.data_ptr()),
                ctypes.c_int64(n),
                (ctypes.c_int64 * 19)(*numbers),
                ctypes.c_int(native.threads_for(n)),
            )
            return out
    u = random_integers(n, random_bits, seed, step, site=site, index_offset=offset)
    return left_aligned(u, random_bits, WORD32).reshape(tuple(shape))


@random_bits_op.register_fake
def _(
    seed: Tensor, step: Tensor, shape: Sequence[int], site: int, random_bits: int, offset: int
) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=seed.device)

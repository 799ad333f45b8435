"""The fp8 linear layer on a CUDA device: the GEMM's template with fp8 operands."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor import lowering as L
from torch._inductor.virtualized import V

from ...capability import Gpu
from .gemm import gemm
from .qlinear import contiguous, dequantized
from .tiles import Epilogue


def lower_fp8_linear(
    gpu: Gpu,
    x: Any,
    x_scale: Any,
    weight: Any,
    w_scale: Any,
    bias: Any,
    out_dtype: torch.dtype,
) -> Any:
    """Lower one call of ``qinductor::fp8_linear``; arguments as :mod:`qinductor.fp8` has them."""
    *lead, k = x.get_size()
    n, k = (V.graph.sizevars.guard_int(size) for size in (weight.get_size()[0], k))
    m = sympy.Mul(*lead)
    acc = gemm(contiguous(L.view(x, [m, k])), contiguous(weight), n, gpu, "fp8", Epilogue.LIGHT)
    y = L.to_dtype(dequantized(acc, x_scale, w_scale, bias, m), out_dtype)
    return L.view(y, [*lead, n])

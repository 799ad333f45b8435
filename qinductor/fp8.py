"""The operator ``qinductor::fp8_linear``: a linear layer on 8-bit floats with a scale a row.

    s   = sum_k x[m, k] * w[n, k]         float32, in any order; each product is exact
    y   = fl(fl(s * x_scale[m]) * w_scale[n])
    y   = fl(y + bias[n])
    out = y rounded to out_dtype

Unlike an int8 product its sum is rounded, and GPUs add 8-bit products in fewer bits than float32
has (Hopper: 13 behind the point, promoted every 32 to 128 terms). So implementations agree within
a bound, not bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ConfigError
from .ops import TAGS, register_refusal
from .ops import _lib as lib

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of codes: OCP E4M3 and E5M2, which GPUs multiply from sm_89 on."""
OUT = (torch.float32, torch.bfloat16, torch.float16)

lib.define(
    "fp8_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor w_scale, Tensor? bias=None, "
    "ScalarType out_dtype=float) -> Tensor",
    tags=TAGS,
)


def fp8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Linear layer on fp8 codes, as the module's docstring defines it.

    Args:
        x: float8_e4m3fn or float8_e5m2 (..., K).
        x_scale: float32 (), (1,) or (..., 1).
        weight: float8_e4m3fn or float8_e5m2 (N, K).
        w_scale: float32 (N,).
        bias: float32 (N,).
        out_dtype: float32, bfloat16 or float16.

    Returns:
        ``out_dtype`` (..., N).

    Raises:
        ConfigError: an argument is of another dtype or shape.
    """
    _check(x, x_scale, weight, w_scale, bias, out_dtype)
    rows = x.reshape(-1, x.shape[-1]).float()
    with torch.autocast(x.device.type, enabled=False):
        total = rows @ weight.float().t()
    per_row = x_scale.reshape(()) if x_scale.numel() == 1 else x_scale.reshape(-1, 1)
    y = total * per_row * w_scale
    if bias is not None:
        y = y + bias
    return y.to(out_dtype).reshape(*x.shape[:-1], weight.shape[0])


def _check(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    if x.dtype not in FP8 or weight.dtype not in FP8:
        raise ConfigError(
            f"fp8_linear takes {' or '.join(map(str, FP8))}, got {x.dtype} and {weight.dtype}. "
            "Convert both with Tensor.to() after dividing by their scales."
        )
    if x.dim() == 0 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ConfigError(
            f"weight has shape {tuple(weight.shape)}; for x of shape {tuple(x.shape)} it has to "
            f"be (N, K) with K = {x.shape[-1] if x.dim() else 'the last size of x'}."
        )
    rows = x.shape[:-1].numel()
    vectors = {"x_scale": (x_scale, (1, rows)), "w_scale": (w_scale, (weight.shape[0],))}
    if bias is not None:
        vectors["bias"] = (bias, (weight.shape[0],))
    for name, (tensor, counts) in vectors.items():
        if tensor.dtype is not torch.float32 or tensor.numel() not in counts:
            raise ConfigError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it has to be float32 "
                f"with {' or '.join(str(count) for count in sorted(set(counts)))} elements."
            )
    if out_dtype not in OUT:
        raise ConfigError(f"out_dtype={out_dtype} is not one of {', '.join(map(str, OUT))}.")


lib.impl("fp8_linear", fp8_linear, "CompositeExplicitAutograd")


def _fake_fp8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    _check(x, x_scale, weight, w_scale, bias, out_dtype)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


torch.library.register_fake("qinductor::fp8_linear", _fake_fp8_linear, lib=lib)
register_refusal("fp8_linear", (1, 3, 4))

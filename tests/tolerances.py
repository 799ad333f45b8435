"""Tolerances of the tests, each derived from the arithmetic it allows for."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding to nearest: half the distance from 1 to the next."""


def gamma(steps: int, dtype: torch.dtype = torch.float32) -> float:
    """Bound of the relative error of ``steps`` roundings in a row (Higham, 2002, lemma 3.1)."""
    product = steps * UNIT_ROUNDOFF[dtype]
    return product / (1 - product)


def float_linear_bound(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Bound of |float32 linear of dequantized operands - int8 linear|, (M, N).

    The float linear rounds both operands once, each product once, and K sums in any order, which
    includes the bias; the int8 linear rounds the exact sum, two multiplications and the bias.

    Args:
        x: (M, K) dequantized activation. weight: (N, K) dequantized weight. bias: (N,) or None.
    """
    k = x.shape[-1]
    magnitude = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        magnitude = magnitude + bias.double().abs()
    return (gamma(k + 4) + gamma(4)) * magnitude


def half_rounding_bound(product: Tensor, output: Tensor) -> Tensor:
    """Bound of |torchao's linear - ours| in bfloat16 or float16 for equal codes and scales.

    torchao rounds the product ``acc * x_scale`` to the model's dtype, then multiplies by the
    weight's scale and adds the bias in float32; both sides round the output, which they reach by
    at most four float32 roundings.

    Args:
        product: torchao's output before the bias. output: torchao's output, in the model's dtype.
    """
    half = UNIT_ROUNDOFF[output.dtype]
    inner = (half + 2 * gamma(4)) * product.double().abs() * (1 + half)
    # Rounding is monotonic: each of the two outputs is off by half a step of its own.
    return inner + half * (2 * output.double().abs() * (1 + half) + inner)


def one_step_bound(x_scale: Tensor, weight: Tensor) -> Tensor:
    """How far an output moves when every code of its row moves by one step, (M, N).

    Args:
        x_scale: (M, 1) or (). weight: (N, K) dequantized weight.
    """
    return x_scale.double() * weight.double().abs().sum(dim=1)


BF16_STEP = 2.0**-7
"""Distance of neighbouring bfloat16 values, relative to a power of two."""


def attention_bound(values: torch.Tensor) -> float:
    """Error of qinductor.attention against exact attention on the same bfloat16 inputs.

    Each probability is rounded to bfloat16, a relative error of at most half a step, 2**-8. The
    output is a weighted mean of the values, so it moves by at most 2**-8 max|v|. Float32 scores of
    size s are wrong by about D * 2**-24 * s, and exp turns that into a relative error; with the
    sums it stays below 2**-12 for the sizes tested.
    """
    return (BF16_STEP / 2 + 2.0**-12) * float(values.float().abs().max())


def layer_norm_bound(y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Bound of |float32 layer normalization - the exact one| of the same float32 rows, (M, N).

    A sum in 64 interleaved parts, added pairwise, rounds at most N / 64 + 6 times. The mean is
    wrong by that times mean|y|; in units of the standard deviation this shifts each normalized
    value, and enters the variance, whose square root halves its relative error, once more. The last
    multiplication and addition round the result itself.
    """
    steps = y.shape[-1] // 64 + 8
    wide = y.double()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    deviation = (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    normal = centred.abs() / deviation
    shift = gamma(steps) * wide.abs().mean(dim=-1, keepdim=True) / deviation
    error = shift + normal * (shift + gamma(steps + 6))
    magnitude = weight.double().abs()
    return magnitude * error + gamma(3) * (magnitude * normal + bias.double().abs())

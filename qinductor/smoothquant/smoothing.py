"""From statistics to numbers: smoothing factors and the scales of activations and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import ZERO_POINT_S8
from .config import ActivationRange, SmoothQuantConfig

TINY = torch.finfo(torch.float32).tiny
"""Smallest normal float32; a scale is never below it, so that its reciprocal is finite."""
FLOOR = 1e-4
"""Per-channel maxima are taken as at least this part of the largest one. A channel that calibration
never saw move would otherwise get a factor of 0, or one so large that its weights set the scale of
every row."""
MSE_STEPS = 80
"""Candidates for a clipping range: 1, 0.99, … of the full range, down to a fifth of it."""


@dataclass(frozen=True)
class ActivationScale:
    """Static scale of a tensor: float32 () and int32 (), in uint8 codes."""

    scale: Tensor
    zero_point: Tensor


def smoothing_factors(x_max: Tensor, w_max: Tensor, alpha: float) -> Tensor:
    """SmoothQuant's factor of each input channel: ``x_max**alpha / w_max**(1 - alpha)``.

    Args:
        x_max: largest magnitude of each channel of the input, float32 (K,).
        w_max: largest magnitude of each column over all weights that read it, float32 (K,).
        alpha: 0 … 1.

    Returns:
        float32 (K,), positive and finite. All ones if input or weights are all zero.
    """
    if not bool(x_max.max() > 0) or not bool(w_max.max() > 0):
        return torch.ones_like(x_max)
    x = x_max.double().clamp_min(FLOOR * float(x_max.max()))
    w = w_max.double().clamp_min(FLOOR * float(w_max.max()))
    factors = (x**alpha / w ** (1 - alpha)).float()
    return factors.clamp(1e-20, 1e20)


def powers_of_two(factors: Tensor) -> Tensor:
    """Round factors to powers of two: dividing a bfloat16 or float16 parameter by them is exact."""
    return torch.exp2(torch.round(torch.log2(factors)))


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize float (N, K) to int8 codes and float32 scales (N,), symmetric per row.

    ``scale = amax / 127``, ``code = clamp(RNE(w * fl32(1 / scale)), -127, 127)``; a row of zeros
    has codes 0.
    """
    weight = weight.float()
    scale = (weight.abs().amax(dim=1) / 127).clamp_min(TINY)
    codes = torch.round(weight * torch.reciprocal(scale)[:, None]).clamp_(-127, 127)
    return codes.to(torch.int8), scale


def static_scale(
    config: SmoothQuantConfig, low: Tensor, high: Tensor, factors: Tensor, rows: Tensor | None
) -> ActivationScale:
    """Scale and zero point of an activation divided by its smoothing factors.

    Args:
        config: range rule and symmetry.
        low: smallest value of each channel before smoothing, float32 (K,).
        high: largest value of each channel, likewise.
        factors: smoothing factors, float32 (K,).
        rows: sample of unsmoothed rows (n, K); needed by the percentile and MSE rules.
    """
    lo, hi = float((low / factors).min()), float((high / factors).max())
    if config.range_rule is not ActivationRange.MINMAX:
        assert rows is not None
        smoothed = (rows / factors).flatten()
        if config.range_rule is ActivationRange.PERCENTILE:
            lo, hi = _percentile_range(smoothed, config)
        else:
            lo, hi = _mse_range(smoothed, lo, hi, config.symmetric)
    return affine_scale(lo, hi, config.symmetric)


def affine_scale(lo: float, hi: float, symmetric: bool) -> ActivationScale:
    """Scale of the range ``lo`` … ``hi``, widened to hold 0, which always has a code of its own."""
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    if symmetric:
        step = torch.tensor(max(-lo, hi) / 127, dtype=torch.float32).clamp_min(TINY)
        return ActivationScale(step, torch.tensor(ZERO_POINT_S8, dtype=torch.int32))
    step = torch.tensor((hi - lo) / 255, dtype=torch.float32).clamp_min(TINY)
    zero = torch.round(torch.tensor(-lo) / step).clamp(0, 255)
    return ActivationScale(step, zero.to(torch.int32))


def _percentile_range(values: Tensor, config: SmoothQuantConfig) -> tuple[float, float]:
    """Quantiles by sorting: torch.quantile refuses more than 2**24 values."""
    share = config.percentile / 100
    ordered = (values.abs() if config.symmetric else values).sort().values
    last = ordered.numel() - 1
    hi = float(ordered[round(share * last)])
    return (-hi, hi) if config.symmetric else (float(ordered[round((1 - share) * last)]), hi)


def _mse_range(values: Tensor, lo: float, hi: float, symmetric: bool) -> tuple[float, float]:
    best, best_error = 1.0, float("inf")
    for step in range(MSE_STEPS + 1):
        shrink = 1 - step / 100
        chosen = affine_scale(lo * shrink, hi * shrink, symmetric)
        zero = chosen.zero_point
        codes = torch.ops.qinductor.quantize(values, chosen.scale.reciprocal(), zero).float()
        error = float((((codes - zero) * chosen.scale) - values).square().mean())
        if error < best_error:
            best, best_error = shrink, error
    return lo * best, hi * best

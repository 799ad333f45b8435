"""Operators that only the passes write: several int8 linears in one, and an int8 linear by rows.

    qlinear_merged   one input, several weights: the outputs of all of them side by side
    qlinear_rows     an int8 linear whose epilogue needs a whole row: layer normalization, and the
                     quantizer of the next layer, with a fixed scale or one a token

Their eager bodies, written with the operators of :mod:`qinductor.ops`, say what they mean.
Everything but the normalization is bit-equal to them in every template; the normalization sums in
an order of its own (see ``templates/cpu/int8_rows.h``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import ConfigError
from .ops import (
    FLOATS,
    TAGS,
    _check_qlinear,
    _check_tensor,
    _has_shape,
    qlinear,
    quantize,
    quantize_per_token,
)

QUANTIZERS = ("none", "fixed", "per_token")
"""What :func:`qlinear_rows` does with a finished row; the C++ enum of the same names."""

_lib = torch.library.Library("qinductor", "FRAGMENT")
_lib.define(
    "qlinear_merged(Tensor x, Tensor x_scale, Tensor x_zero_point, Tensor[] packed, "
    "Tensor[] w_scale, Tensor[] w_sum, Tensor[] bias, ScalarType out_dtype=float) -> Tensor",
    tags=TAGS,
)
_lib.define(
    "qlinear_rows(Tensor x, Tensor x_scale, Tensor x_zero_point, Tensor packed, Tensor w_scale, "
    "Tensor w_sum, Tensor? bias, Tensor? residual, str activation, Tensor? norm_weight, "
    "Tensor? norm_bias, float eps, bool keeps, str quantizer, Tensor? out_inverse_scale, "
    "Tensor? out_zero_point, Tensor? multiplier, float divisor, float min_scale) -> Tensor[]",
    tags=TAGS,
)


def qlinear_merged(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: list[Tensor],
    w_scale: list[Tensor],
    w_sum: list[Tensor],
    bias: list[Tensor],
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Apply several int8 linears of equal shape to one input.

    Args:
        x: as in :func:`qinductor.ops.qlinear`.
        x_scale: likewise.
        x_zero_point: likewise.
        packed: likewise, one a weight, all of one N.
        w_scale: likewise.
        w_sum: likewise.
        bias: one a weight, or none at all.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        ``out_dtype`` (..., number of weights * N): the outputs side by side, in order.
    """
    _check_merged(x, x_scale, x_zero_point, packed, w_scale, w_sum, bias, out_dtype)
    biases: list[Tensor] | list[None] = bias or [None] * len(packed)
    return torch.cat(
        [
            qlinear(x, x_scale, x_zero_point, *weight, out_dtype=out_dtype)
            for weight in zip(packed, w_scale, w_sum, biases, strict=True)
        ],
        dim=-1,
    )


def _check_merged(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: list[Tensor],
    w_scale: list[Tensor],
    w_sum: list[Tensor],
    bias: list[Tensor],
    out_dtype: torch.dtype,
) -> None:
    widths = [scale.shape[0] for scale in w_scale]
    if any(width != widths[0] for width in widths) or len(bias) not in (0, len(packed)):
        raise ConfigError(
            f"merged linears have {widths} outputs and {len(bias)} of {len(packed)} biases; they "
            "need one number of outputs, and all or no biases."
        )
    biases: list[Tensor] | list[None] = bias or [None] * len(packed)
    for weight in zip(packed, w_scale, w_sum, biases, strict=True):
        _check_qlinear(x, x_scale, x_zero_point, *weight, None, "none", out_dtype, None, None)


def qlinear_rows(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    w_sum: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    keeps: bool,
    quantizer: str,
    out_inverse_scale: Tensor | None,
    out_zero_point: Tensor | None,
    multiplier: Tensor | None,
    divisor: float,
    min_scale: float,
) -> list[Tensor]:
    """Int8 linear, then layer normalization, then a quantizer.

    Args:
        x: as in :func:`qinductor.ops.qlinear`, as are the next eight.
        x_scale: see there.
        x_zero_point: see there.
        packed: see there.
        w_scale: see there.
        w_sum: see there.
        bias: see there.
        residual: see there.
        activation: see there.
        norm_weight: float (N,); None leaves the normalization out.
        norm_bias: float (N,), with ``norm_weight``.
        eps: added to the variance.
        keeps: return the float32 rows as well.
        quantizer: one of :data:`QUANTIZERS`.
        out_inverse_scale: as in :func:`qinductor.ops.quantize`, for ``fixed``.
        out_zero_point: likewise.
        multiplier: as in :func:`qinductor.ops.quantize_per_token`, for ``per_token``.
        divisor: likewise.
        min_scale: likewise.

    Returns:
        What was asked for, in this order: float32 rows (..., N) if ``keeps``; uint8 codes (..., N)
        unless the quantizer is ``none``; float32 scales (..., 1) if it is ``per_token``.
    """
    _check_qlinear(
        x, x_scale, x_zero_point, packed, w_scale, w_sum, bias, residual, activation,
        torch.float32, None, None,
    )  # fmt: skip
    _check_rows(w_scale, norm_weight, norm_bias, quantizer, multiplier)
    y = qlinear(x, x_scale, x_zero_point, packed, w_scale, w_sum, bias, residual, activation)
    if norm_weight is not None and norm_bias is not None:
        y = F.layer_norm(y, y.shape[-1:], norm_weight.float(), norm_bias.float(), eps)
    outputs = [y] if keeps else []
    if quantizer == "fixed":
        assert out_inverse_scale is not None and out_zero_point is not None
        outputs.append(quantize(y, out_inverse_scale, out_zero_point))
    elif quantizer == "per_token":
        outputs.extend(quantize_per_token(y, multiplier, divisor, min_scale))
    return outputs


def _check_rows(
    w_scale: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    quantizer: str,
    multiplier: Tensor | None,
) -> None:
    if quantizer not in QUANTIZERS:
        raise ConfigError(f"unknown quantizer {quantizer!r}. Valid: {', '.join(QUANTIZERS)}.")
    if (norm_weight is None) != (norm_bias is None):
        raise ConfigError("norm_weight and norm_bias are needed together.")
    n = w_scale.shape[0]
    for name, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if tensor is not None:
            _check_tensor(name, tensor, FLOATS, _has_shape(tensor, (n,)), f"({n},)")
    if norm_weight is not None and norm_bias is not None and norm_weight.dtype != norm_bias.dtype:
        raise ConfigError(
            f"norm_weight is {norm_weight.dtype} and norm_bias {norm_bias.dtype}; give both one "
            "dtype."
        )
    if multiplier is not None:
        fits = _has_shape(multiplier, (n,))
        _check_tensor("multiplier", multiplier, (torch.float32,), fits, f"({n},)")


_lib.impl("qlinear_merged", qlinear_merged, "CompositeExplicitAutograd")
_lib.impl("qlinear_rows", qlinear_rows, "CompositeExplicitAutograd")


def _merged_fake(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: list[Tensor],
    w_scale: list[Tensor],
    w_sum: list[Tensor],
    bias: list[Tensor],
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    _check_merged(x, x_scale, x_zero_point, packed, w_scale, w_sum, bias, out_dtype)
    return x.new_empty((*x.shape[:-1], w_scale[0].shape[0] * len(packed)), dtype=out_dtype)


def _rows_fake(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    w_sum: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    keeps: bool,
    quantizer: str,
    out_inverse_scale: Tensor | None,
    out_zero_point: Tensor | None,
    multiplier: Tensor | None,
    divisor: float,
    min_scale: float,
) -> list[Tensor]:
    _check_qlinear(
        x, x_scale, x_zero_point, packed, w_scale, w_sum, bias, residual, activation,
        torch.float32, None, None,
    )  # fmt: skip
    _check_rows(w_scale, norm_weight, norm_bias, quantizer, multiplier)
    shape = (*x.shape[:-1], w_scale.shape[0])
    outputs = [x.new_empty(shape, dtype=torch.float32)] if keeps else []
    if quantizer != "none":
        outputs.append(x.new_empty(shape, dtype=torch.uint8))
    if quantizer == "per_token":
        outputs.append(x.new_empty((*shape[:-1], 1), dtype=torch.float32))
    return outputs


torch.library.register_fake("qinductor::qlinear_merged", _merged_fake, lib=_lib)
torch.library.register_fake("qinductor::qlinear_rows", _rows_fake, lib=_lib)

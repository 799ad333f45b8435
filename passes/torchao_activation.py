"""Recognize how torchao quantizes the activation of an int8 linear; add our quantizer for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ops import ZERO_POINT_S8
from . import chain
from .base import is_call, value
from .chain import CONVERT, Builder, aten


@dataclass(frozen=True)
class Codes:
    """Quantized activation: the signed codes, and whether the product reads them shifted by 128."""

    signed: fx.Node
    shifted: bool


@dataclass(frozen=True)
class PerTensor:
    """``round(x * inverse_scale) + zero_point`` with one scale for the tensor."""

    x: fx.Node
    inverse_scale: fx.Node
    zero_point: fx.Node | None


@dataclass(frozen=True)
class PerToken:
    """``round(t / scale)``, ``scale = max(amax|t| / divisor, eps)``, for ``t = x * multiplier``."""

    x: fx.Node
    multiplier: fx.Node | None
    scale: fx.Node
    divisor: float
    min_scale: float


def match_codes(operand: Any, k: int) -> Codes | None:
    """Find the signed codes, before any view, that the product reads."""
    node = chain.unview_rows(operand, k)
    shifted = is_call(node, CONVERT) and node.args[1] is torch.uint8
    if shifted:
        pair = chain.operands(chain.unview_rows(node.args[0], k), aten.add.Tensor)
        if pair is None or pair[1] != ZERO_POINT_S8 or not is_call(pair[0], CONVERT):
            return None
        if pair[0].args[1] is not torch.int32:
            return None
        node = chain.unview_rows(pair[0].args[0], k)
    if not chain.is_tensor(node) or value(node).dtype is not torch.int8:
        return None
    shape = value(node).shape
    return Codes(node, shifted) if shape and chain.true(shape[-1] == k) else None


def match_quantizer(codes: fx.Node) -> PerTensor | PerToken | str:
    """Find what computes the codes; a string says why it is not one of our quantizers."""
    if not is_call(codes, CONVERT):
        return f"codes come from {codes.target}"
    high: Any = codes.args[0]
    low: Any = high.args[0] if is_call(high, aten.clamp_max.default) else None
    if not is_call(low, aten.clamp_min.default):
        return "its codes are not clamped to a range"
    if (low.args[1], high.args[1]) != (-128, 127):
        return f"its range is [{low.args[1]}, {high.args[1]}], not [-128, 127]"
    zero_point = None
    rounded = low.args[0]
    if pair := chain.operands(rounded, aten.add.Tensor):
        rounded, zero_point = pair if is_call(pair[0], aten.round.default) else pair[::-1]
    if not is_call(rounded, aten.round.default):
        return "its codes are not rounded to nearest"
    pair = chain.operands(rounded.args[0], aten.mul.Tensor)
    if pair is None or not all(chain.is_tensor(a) for a in pair):
        return "x is not multiplied by the reciprocal of a scale"
    x, inverse = pair
    if value(inverse).dtype is not torch.float32:
        return f"its scale is {value(inverse).dtype}, not float32"
    if value(x).dtype not in chain.FLOAT_DTYPES:
        return f"x is {value(x).dtype}"
    if zero_point is not None and not chain.is_tensor(zero_point):
        return "its zero point is not a tensor"
    if zero_point is not None and not chain.has_one_element(zero_point):
        return "it has one zero point a token"
    if chain.has_one_element(inverse):
        return PerTensor(x, inverse, None if zero_point is None else chain.unview(zero_point))
    if zero_point is not None:
        return f"its static scale has the shape {tuple(value(inverse).shape)}, not one element"
    return _match_per_token(x, inverse)


def _match_per_token(t: fx.Node, inverse: fx.Node) -> PerToken | str:
    """Match the reciprocal of a symmetric scale for each row of ``t``."""
    no = "its scale is not that of a symmetric row"
    scale = _reciprocal_of(inverse)
    clamped = chain.unconvert(scale)
    if scale is None or not is_call(clamped, aten.clamp_min.default):
        return no
    quotient = chain.unconvert(clamped.args[0])
    if not is_call(quotient, aten.div.Tensor) or not isinstance(quotient.args[1], (int, float)):
        return no
    if not _is_abs_max(quotient.args[0], t):
        return no
    x, multiplier = t, None
    pair = chain.operands(t, aten.mul.Tensor)
    if pair is not None and chain.is_tensor(pair[0]):
        # The operator multiplies in float32. torchao rounds a bfloat16 product: it stays outside.
        vector, full = pair[1], value(t).dtype is torch.float32
        if full and chain.is_vector(vector, value(t).shape[-1]):
            x, multiplier = pair[0], vector
    return PerToken(x, multiplier, scale, float(quotient.args[1]), float(clamped.args[1]))


def _reciprocal_of(node: Any) -> fx.Node | None:
    """Match s for 1 / s, spelled reciprocal(s) or reciprocal(s) * 1.0."""
    pair = chain.operands(node, aten.mul.Tensor)
    if pair is not None and pair[1] == 1:
        node = pair[0]
    return node.args[0] if is_call(node, aten.reciprocal.default) else None


def _is_abs_max(node: Any, t: fx.Node) -> bool:
    """True for maximum(-minimum(amin t, 0), maximum(amax t, 0)) over the last dimension."""
    pair = chain.operands(node, aten.maximum.default)
    if pair is None:
        return False
    negated, high = pair if is_call(pair[0], aten.neg.default) else pair[::-1]
    if not is_call(negated, aten.neg.default):
        return False
    return _is_row_extreme(
        negated.args[0], t, aten.minimum.default, aten.amin.default
    ) and _is_row_extreme(high, t, aten.maximum.default, aten.amax.default)


def _is_row_extreme(node: Any, t: fx.Node, bound: Any, reduction: Any) -> bool:
    pair = chain.operands(node, bound)
    if pair is None:
        return False
    reduced, zero = pair if is_call(pair[0], reduction) else pair[::-1]
    if not is_call(reduced, reduction) or not is_call(zero, aten.full.default):
        return False
    last = value(t).dim() - 1
    source, dims, *keep = reduced.args
    return (
        source is t
        and zero.args[1] == 0
        and [d % (last + 1) for d in dims] == [last]
        and bool(keep and keep[0])
    )


def emit_codes(
    builder: Builder, signed: fx.Node, quantizer: PerTensor | PerToken | None, x_scale: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Add the quantizer; return its uint8 codes and the scale of the product's rows."""
    before = signed.next
    if isinstance(quantizer, PerToken):
        both = builder.call(
            before, signed, chain.PER_TOKEN,
            quantizer.x, quantizer.multiplier, quantizer.divisor, quantizer.min_scale,
        )  # fmt: skip
        codes, scale = (builder.item(both, i) for i in (0, 1))
        return codes, scale
    if isinstance(quantizer, PerTensor):
        inverse = builder.call(before, signed, aten.reshape.default, quantizer.inverse_scale, [1])
        zero_point = (
            builder.constant(ZERO_POINT_S8, torch.int32)
            if quantizer.zero_point is None
            else builder.zero_point_plus_128(quantizer.zero_point)
        )
        codes = builder.call(before, signed, chain.QUANTIZE, quantizer.x, inverse, zero_point)
    else:
        codes = builder.as_uint8(before, signed)
    return codes, x_scale

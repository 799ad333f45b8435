"""Recognize the int8 linears of a model that PT2E quantized.

A PT2E model keeps ``torch.ops.quantized_decomposed`` operators. They reach Inductor as they are:

    quantize_per_tensor(x, s, z, 0, 255, uint8) → dequantize_per_tensor(…)   or int8, or per token
    dequantize_per_channel(w, w_scale, w_zero_point, 0, -128, 127, int8) → permute
    mm or addmm

The chain becomes ``quantize`` and ``qlinear``. Codes are equal to the model's; the product is
exact, where the model adds K rounded float products.

A weight's zero points are an input of the graph, whose values nobody knows while compiling. The
operator that packs the weight looks at them once, and raises where one is not zero.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

# Importing it defines the operators torch.ops.quantized_decomposed.
from torch.ao.quantization.fx import _decomposed  # noqa: F401

from ..capability import Capability
from ..ops import ZERO_POINT_S8
from . import chain
from .base import PassLog, argument, is_call, value
from .chain import CONVERT, VIEWS, Builder, aten

PT2E = torch.ops.quantized_decomposed
MATMULS = (aten.mm.default, aten.addmm.default)
DEQUANTIZE_TENSOR = (PT2E.dequantize_per_tensor.default, PT2E.dequantize_per_tensor.tensor)
DEQUANTIZE_WEIGHT = (PT2E.dequantize_per_channel.default, *DEQUANTIZE_TENSOR)
QUANTIZE_OF = {
    PT2E.dequantize_per_tensor.default: PT2E.quantize_per_tensor.default,
    PT2E.dequantize_per_tensor.tensor: PT2E.quantize_per_tensor.tensor,
}
FULL_RANGE = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
PER_TOKEN_FLOOR = 1e-5
"""Lower bound of a row's magnitude in ``quantized_decomposed.choose_qparams_per_token``."""


@dataclass(frozen=True)
class _Linear:
    """Operands of a product whose weight is a dequantized int8 tensor."""

    activation: fx.Node
    weight: fx.Node
    dequantize: fx.Node
    bias: fx.Node | None


class Pt2eChain:
    """PT2E's dequantize → linear → quantize + qlinear."""

    name = "pt2e_chain"
    optional = True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        builder = Builder(graph)
        for node in list(graph.nodes):
            linear = _match_linear(node) if is_call(node, *MATMULS) else None
            if linear is not None:
                reason = self._rewrite(builder, node, linear, log)
                if reason is not None:
                    log.add(self.name, node, "refused", f"PT2E int8 linear: {reason}")
        graph.eliminate_dead_code()

    def _rewrite(self, builder: Builder, mm: fx.Node, linear: _Linear, log: PassLog) -> str | None:
        """Rewrite one linear; return why not where it is not possible."""
        weight = chain.stored_weight(linear.weight)
        reason = chain.reason_against_weight(weight) or _reason_against_scale(linear.dequantize)
        if reason is not None:
            return reason
        assert weight is not None
        n, k = value(weight).shape
        if linear.bias is not None and not chain.is_vector(linear.bias, n):
            return f"the bias has the shape {tuple(value(linear.bias).shape)}, not ({n},)"
        out_dtype = value(mm).dtype
        if out_dtype not in chain.FLOAT_DTYPES:
            return f"the output is {out_dtype}"
        source = _dequantized(linear.activation, k)
        if source is None:
            return "the activation is not quantized (a weight-only linear)"
        activation = _emit_activation(builder, source, log, self.name, mm)
        if isinstance(activation, str):
            return activation

        x, x_scale, zero_point = activation
        w_scale, w_zero_point = _emit_weight_scale(builder, linear.dequantize, n)
        packed, w_sum = builder.packed(weight, w_zero_point)
        new = builder.call(
            mm, mm, chain.QLINEAR,
            x, x_scale, zero_point, packed, w_scale, w_sum, linear.bias, None, "none", out_dtype,
        )  # fmt: skip
        _replace_rows(builder, mm, new)
        log.add(self.name, mm, "fused", f"PT2E int8 linear; {chain.PACKED_NOTE}")
        return None


def _match_linear(node: fx.Node) -> _Linear | None:
    """Find the operands of a product with a dequantized weight; None for a float product."""
    *bias, activation, transposed = node.args
    weight = chain.unconvert(chain.untransposed(chain.unconvert(transposed)))
    if not is_call(weight, *DEQUANTIZE_WEIGHT):
        return None
    if any(node.kwargs.get(scalar, 1) != 1 for scalar in ("alpha", "beta")):
        return None
    assert isinstance(activation, fx.Node)
    return _Linear(
        activation, weight.args[0], weight, bias[0] if bias and chain.is_tensor(bias[0]) else None
    )


# ---------------------------------------------------------------- the weight


def _reason_against_scale(dequantize: fx.Node) -> str | None:
    """Why the weight's scale or zero point does not fit; None if it does."""
    per_channel = is_call(dequantize, PT2E.dequantize_per_channel.default)
    if per_channel and argument(dequantize, "axis") != 0:
        return f"the weight's scale runs along axis {argument(dequantize, 'axis')}, not along N"
    bounds = (argument(dequantize, "quant_min"), argument(dequantize, "quant_max"))
    if bounds not in ((-128, 127), (-127, 127)):
        return f"the weight's range is [{bounds[0]}, {bounds[1]}], not 8 bits"
    zero_point = None if per_channel else argument(dequantize, "zero_point")
    if isinstance(zero_point, int) and zero_point != 0:
        return f"the weight has the zero point {zero_point}, not 0"
    point, _ = _weight_zero_point(dequantize)
    if point is not None and point.op not in ("placeholder", "get_attr"):
        return "the weight's zero point is computed in the graph: it may not be 0"
    return None


def _weight_zero_point(dequantize: fx.Node) -> tuple[fx.Node | None, Any]:
    """Zero point of the weight where it is a tensor not known to be 0; and the scale."""
    if is_call(dequantize, PT2E.dequantize_per_channel.default):
        scale, zero_point = (argument(dequantize, a) for a in ("scales", "zero_points"))
    else:
        scale, zero_point = (argument(dequantize, a) for a in ("scale", "zero_point"))
    known = not isinstance(zero_point, fx.Node) or (
        is_call(zero_point, aten.full.default) and zero_point.args[1] == 0
    )
    return None if known else zero_point, scale


def _emit_weight_scale(
    builder: Builder, dequantize: fx.Node, n: int
) -> tuple[fx.Node, fx.Node | None]:
    """The weight's scale as float32 (N,), and its zero points where they are to be looked at."""
    zero_point, scale = _weight_zero_point(dequantize)
    if not isinstance(scale, fx.Node):
        return builder.constant(scale, torch.float32, (n,)), zero_point
    return builder.weight_scale(builder.after(scale), scale, n), zero_point


# ---------------------------------------------------------------- the activation


def _dequantized(activation: fx.Node, k: int) -> fx.Node | None:
    """The dequantize node behind views (of whole rows) and conversions of an activation."""
    node = activation
    while True:
        node = chain.unview_rows(node, k)
        if not is_call(node, CONVERT):
            break
        node = node.args[0]
    found = is_call(node, *DEQUANTIZE_TENSOR, PT2E.dequantize_per_token.default)
    return node if found else None


def _emit_activation(
    builder: Builder, source: fx.Node, log: PassLog, rule: str, site: fx.Node
) -> tuple[fx.Node, fx.Node, fx.Node] | str:
    """Codes as uint8, their scale and their zero point; a string says why that is not possible."""
    codes = source.args[0]
    if not chain.is_tensor(codes) or value(codes).dtype not in FULL_RANGE:
        return "the activation's codes are neither uint8 nor int8"
    if is_call(source, PT2E.dequantize_per_token.default):
        return _emit_per_token(builder, source, codes)
    signed = value(codes).dtype is torch.int8
    scale, zero_point, inverse = _emit_scale(builder, source, signed)
    reason = _reason_against_quantizer(codes, source)
    if reason is None:
        x = codes.args[0]
        new = builder.call(codes, codes, chain.QUANTIZE, x, inverse, zero_point)
        return new, scale, zero_point
    log.add(rule, site, "refused", f"PT2E's quantizer stays as it is: {reason}")
    return (builder.as_uint8(codes.next, codes) if signed else codes), scale, zero_point


def _emit_scale(
    builder: Builder, source: fx.Node, signed: bool
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Scale, zero point of the uint8 codes, and reciprocal of the scale.

    The model divides in float64 and rounds to float32, which for a float32 scale is float32's own
    reciprocal: 53 bits are more than twice 24, and then rounding twice is rounding once.
    """
    scale, zero_point = (argument(source, a) for a in ("scale", "zero_point"))
    shift = ZERO_POINT_S8 if signed else 0
    if not isinstance(scale, fx.Node):
        return (
            builder.constant(scale, torch.float32),
            builder.constant(zero_point + shift, torch.int32),
            builder.constant(1.0 / scale, torch.float32),
        )
    at = builder.after(zero_point if scale < zero_point else scale)
    one = builder.call(at, at, aten.reshape.default, scale, [1])
    inverse = builder.call(at, at, aten.reciprocal.default, one)
    point = builder.call(at, at, aten.reshape.default, zero_point, [1])
    point = builder.call(at, at, CONVERT, point, torch.int32)
    if shift:
        point = builder.call(at, at, aten.add.Tensor, point, shift)
    return (
        builder.call(at, at, CONVERT, one, torch.float32),
        point,
        builder.call(at, at, CONVERT, inverse, torch.float32),
    )


def _reason_against_quantizer(codes: fx.Node, source: fx.Node) -> str | None:
    """Why the node of the codes is not our ``quantize``; None if it is."""
    assert source.target in QUANTIZE_OF
    if not is_call(codes, QUANTIZE_OF[source.target]):
        return f"codes come from {codes.target}"
    for name in ("scale", "zero_point"):
        if argument(codes, name) != argument(source, name):
            return f"it quantizes with another {name} than it dequantizes with"
    bounds = (argument(codes, "quant_min"), argument(codes, "quant_max"))
    if bounds != FULL_RANGE[value(codes).dtype]:
        return f"its range is [{bounds[0]}, {bounds[1]}], not 8 bits"
    if value(codes.args[0]).dtype not in chain.FLOAT_DTYPES:
        return f"x is {value(codes.args[0]).dtype}"
    return None


def _emit_per_token(
    builder: Builder, source: fx.Node, codes: fx.Node
) -> tuple[fx.Node, fx.Node, fx.Node] | str:
    """Rewrite quantize_per_token with scales of choose_qparams_per_token, which is symmetric."""
    scales, zero_points = (argument(source, a) for a in ("scales", "zero_points"))
    chosen: Any = scales.args[0] if is_call(scales, operator.getitem) else None
    if not is_call(chosen, PT2E.choose_qparams_per_token.default):
        return "its scales per token are not those of a symmetric row"
    if not (
        is_call(zero_points, operator.getitem)
        and (scales.args[1], zero_points.args) == (0, (chosen, 1))
        and is_call(codes, PT2E.quantize_per_token.default)
        and codes.args[:3] == (chosen.args[0], scales, zero_points)
    ):
        return "it does not quantize per token with the scales it dequantizes with"
    bounds = (argument(codes, "quant_min"), argument(codes, "quant_max"))
    if value(codes).dtype is not torch.int8 or bounds != FULL_RANGE[torch.int8]:
        return f"its range is [{bounds[0]}, {bounds[1]}] of {value(codes).dtype}, not 8 bits"
    x = chosen.args[0]
    if value(x).dtype is not torch.float32:
        return f"its scales per token are {value(x).dtype}"
    floor = torch.tensor(PER_TOKEN_FLOOR) / 127
    both = builder.call(codes, codes, chain.PER_TOKEN, x, None, 127.0, float(floor))
    new, scale = (builder.item(both, i) for i in (0, 1))
    return new, scale, builder.constant(ZERO_POINT_S8, torch.int32)


# ---------------------------------------------------------------- the output


def _replace_rows(builder: Builder, mm: fx.Node, new: fx.Node) -> None:
    """Put ``new`` (..., N) in the place of the product, and of the view that restores its shape."""
    for reader in list(mm.users):
        if is_call(reader, *VIEWS) and chain.equal_shapes(reader, new):
            reader.replace_all_uses_with(new)
    if any(not (is_call(r, *VIEWS) and not r.users) for r in mm.users):
        builder.replace(mm, new)

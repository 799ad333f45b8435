"""Recognize the int8 linears of a model that torchao converted.

torchao's ``Int8Tensor`` (static and dynamic activations, with and without SmoothQuant) decomposes,
per linear, into a few dozen aten nodes around one ``aten._int_mm``:

    t    = x * act_pre_scale                                          SmoothQuant only
    s    = max(max(-min(amin t, 0), max(amax t, 0)) / 127.5, eps)     dynamic; static: an input
    code = convert(clamp(round(t * (1 / s)) + zero_point, -128, 127), int8)
    acc  = _int_mm(code, w.T)                                         with AMX, or without VNNI
    acc  = _int_mm(uint8(int32(code) + 128), w.T) - 128 * w.sum(1)    with VNNI alone
    y    = (float(acc) * s [- zero_point * s * w.sum(1)]) * w_scale + bias

The chain becomes ``quantize`` (or ``quantize_per_token``) and ``qlinear``. For float32 models each
of its steps is one of theirs: codes and accumulators are equal to torchao's, and without the
correction in brackets so are the outputs. (torchao rounds the correction, which ``qlinear`` adds as
an exact integer.) For bfloat16 models torchao rounds the dynamic scale and the product ``acc * s``
to bfloat16; neither is rounded here.

Whatever of the chain is not recognized stays as it is. Then the codes come from torchao's own
nodes, or the output passes through them; the matrix product is int8 all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..capability import Capability
from ..ops import ZERO_POINT_S8
from . import chain
from .base import PassLog, is_call, value
from .chain import CONVERT, HALF_DTYPES, VIEWS, Builder, aten
from .torchao_activation import PerTensor, PerToken, emit_codes, match_codes, match_quantizer

INT_MM = aten._int_mm.default
_NOTE = (
    f"{chain.PACKED_NOTE}: convert with qinductor.from_torchao(model) to hold it once, and to "
    "fold the smoothing factor away"
)


@dataclass(frozen=True)
class _Tail:
    """What follows the product, as far as it was recognized; ``end`` is its last node."""

    end: fx.Node
    x_scale: fx.Node
    zero_point: fx.Node | None = None
    w_scale: fx.Node | None = None
    bias: fx.Node | None = None
    out_dtype: torch.dtype = torch.float32
    sizes: Any = None


_HOW = {
    PerTensor: "one scale for the tensor",
    PerToken: "one scale a token",
    type(None): "quantized by torchao's own nodes",
}


class TorchaoChain:
    """torchao's decomposed int8 linear → quantize + qlinear."""

    name = "torchao_chain"
    optional = True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        """See the class."""
        builder = Builder(graph)
        for node in list(graph.nodes):
            if not is_call(node, INT_MM):
                continue
            reason = self._rewrite(builder, node, log)
            if reason is not None:
                log.add(self.name, node, "refused", f"torchao int8 linear: {reason}")
        graph.eliminate_dead_code()

    def _rewrite(self, builder: Builder, mm: fx.Node, log: PassLog) -> str | None:
        """Rewrite one chain; return why not where it is not possible."""
        weight = chain.stored_weight(chain.untransposed(mm.args[1]))
        reason = chain.reason_against_weight(weight)
        if reason is not None:
            return reason
        assert weight is not None
        n, k = value(weight).shape
        codes = match_codes(mm.args[0], k)
        if codes is None:
            return "the activation is not signed int8, nor such codes shifted by 128 into uint8"
        tail = _match_tail(mm, codes.shifted, weight, n)
        if isinstance(tail, str):
            return tail

        found = match_quantizer(codes.signed)
        if isinstance(found, PerToken) and chain.unview(tail.x_scale) is not found.scale:
            found = "the product is not multiplied by the scale it divided by"
        if isinstance(found, str):
            log.add(self.name, mm, "refused", f"torchao's quantizer stays as it is: {found}")
        quantizer = None if isinstance(found, str) else found
        known = quantizer.zero_point if isinstance(quantizer, PerTensor) else None
        if tail.zero_point not in (None, known):
            return "the zero point of the output is not that of the activation"

        before = tail.end
        x, x_scale = emit_codes(builder, codes.signed, quantizer, tail.x_scale)
        zero_point = (
            builder.constant(ZERO_POINT_S8, torch.int32)
            if tail.zero_point is None
            else builder.zero_point_plus_128(tail.zero_point)
        )
        packed, w_sum = builder.packed(weight)
        w_scale = (
            builder.constant(1.0, torch.float32, (n,))
            if tail.w_scale is None
            else builder.weight_scale(before, tail.w_scale, n)
        )
        new = builder.call(
            before, mm, chain.QLINEAR,
            x, x_scale, zero_point, packed, w_scale, w_sum, tail.bias, None, "none", tail.out_dtype,
        )  # fmt: skip
        builder.replace(tail.end, new, tail.sizes)
        _reuse_sums(builder, weight, w_sum)
        rest = "" if tail.w_scale is not None else "; scale of the weight stays outside"
        log.add(
            self.name, mm, "fused", f"torchao int8 linear, {_HOW[type(quantizer)]}{rest}; {_NOTE}"
        )
        return None


# ---------------------------------------------------------------- the output


def _match_tail(mm: fx.Node, shifted: bool, weight: fx.Node, n: int) -> _Tail | str:
    """Follow the product through its dequantization; a string says why that is not possible."""
    acc = mm
    if shifted:
        reader = chain.only_reader(mm)
        pair = chain.operands(reader, aten.sub.Tensor)
        if pair is None or pair[0] is not mm or not _is_compensation(pair[1], weight):
            return "128 times the sum of the weight is not subtracted from the shifted product"
        assert reader is not None
        acc = reader
    floats = chain.only_reader(acc)
    if floats is None or not is_call(floats, CONVERT) or floats.args[1] is not torch.float32:
        return "the int32 product has a reader other than its conversion to float32"
    scaled = chain.only_reader(floats)
    x_scale = None if scaled is None else chain.other_operand(scaled, aten.mul.Tensor, floats)
    if scaled is None or x_scale is None:
        return "the product is not multiplied by the scale of the activation"
    shape = value(x_scale).shape
    one_a_row = len(shape) == 2 and chain.true(shape[1] == 1)
    if value(x_scale).dtype is not torch.float32 or not (
        one_a_row or chain.has_one_element(x_scale)
    ):
        return f"the scale of the activation is {value(x_scale).dtype} of shape {tuple(shape)}"
    return _follow(_Tail(scaled, x_scale), weight, n)


def _follow(tail: _Tail, weight: fx.Node, n: int) -> _Tail:
    """Extend a tail over correction, weight scale, bias, views and the final conversion.

    Each node but the last must have no reader outside the tail. Where the weight's scale is missing
    the tail ends before it, and before a rounding to bfloat16.
    """
    first, node = tail, tail.end
    zero_point = w_scale = bias = sizes = None
    done = tail
    while True:
        reader = chain.only_reader(node)
        if reader is None:
            break
        if is_call(reader, *VIEWS) and chain.true(value(reader).shape[-1] == n):
            sizes = reader.args[1]
        elif is_call(reader, CONVERT) and reader.args[1] in HALF_DTYPES and w_scale is None:
            pass  # torchao rounds acc * s to the model's dtype; the product keeps float32
        elif is_call(reader, CONVERT) and reader.args[1] in HALF_DTYPES:
            return _Tail(reader, tail.x_scale, zero_point, w_scale, bias, reader.args[1], sizes)
        elif w_scale is None and zero_point is None and is_call(reader, aten.sub.Tensor):
            zero_point = _corrected_zero_point(reader, node, tail.x_scale, weight)
            if zero_point is None:
                break
        elif w_scale is None and (scale := _vector_operand(reader, aten.mul.Tensor, node, n)):
            w_scale = scale
        elif w_scale is not None and bias is None:
            bias = _vector_operand(reader, aten.add.Tensor, node, n)
            if bias is None:
                break
        else:
            break
        node = reader
        if w_scale is not None and value(node).dtype is torch.float32:
            done = _Tail(node, tail.x_scale, zero_point, w_scale, bias, torch.float32, sizes)
    return done if done is not tail else first


def _vector_operand(reader: fx.Node, target: Any, node: fx.Node, n: int) -> fx.Node | None:
    """What ``reader`` combines ``node`` with, if that is a float vector over the columns.

    A weight's scale may have one element; a bias may not, nor is it needed.
    """
    other = chain.other_operand(reader, target, node)
    if other is None or value(other).dtype not in chain.FLOAT_DTYPES:
        return None
    if chain.is_vector(other, n):
        return other
    single = target is aten.mul.Tensor and value(other).dim() <= 1
    return other if single and chain.has_one_element(other) else None


def _is_compensation(node: Any, weight: fx.Node) -> bool:
    """True for 128 * weight.sum over K, as int32."""
    pair = chain.operands(node, aten.mul.Tensor)
    if pair is None or pair[1] != ZERO_POINT_S8 or not is_call(pair[0], aten.sum.dim_IntList):
        return False
    source, dims, *_ = pair[0].args
    if value(pair[0]).dtype is not torch.int32:
        return False
    return list(dims) == [0] and chain.stored_weight(chain.untransposed(source)) is weight


def _corrected_zero_point(
    sub: fx.Node, node: fx.Node, x_scale: fx.Node, weight: fx.Node
) -> fx.Node | None:
    """The one zero point z of ``node - (z * x_scale) * weight.sum(-1)``, or None."""
    pair = chain.operands(sub, aten.sub.Tensor)
    if pair is None or pair[0] is not node:
        return None
    product = chain.operands(chain.unconvert(pair[1]), aten.mul.Tensor)
    if product is None:
        return None
    sums = chain.unconvert(product[1])
    inner = chain.operands(product[0], aten.mul.Tensor)
    if inner is None or not is_call(sums, aten.sum.dim_IntList):
        return None
    if chain.stored_weight(sums.args[0]) is not weight or list(sums.args[1]) not in ([-1], [1]):
        return None
    if chain.unview(inner[1]) is not chain.unview(x_scale):
        return None
    zero_point = chain.unconvert(inner[0])
    if not chain.is_tensor(zero_point) or not chain.has_one_element(zero_point):
        return None
    found: fx.Node = zero_point
    return found


def _reuse_sums(builder: Builder, weight: fx.Node, w_sum: fx.Node) -> None:
    """Let a correction that stays in the graph read the remembered sums: its own read all of w."""
    for node in list(weight.users):
        if is_call(node, aten.sum.dim_IntList) and list(node.args[1]) in ([-1], [1]):
            if len(node.args) > 2:
                continue
            wide = builder.call(node, node, CONVERT, w_sum, value(node).dtype)
            node.replace_all_uses_with(wide)
